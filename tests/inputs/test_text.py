"""Text files in blocks: nothing is lost, cuts are between characters, and splits are the same on all machines."""

import os

import pytest

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import StdlibText, TextFiles
from tests.inputs.batches import documents

CONTENT = {
  'a.txt': 'one line\n' * 40,
  'b.txt': 'é漢🙂' * 60,
  'sub/c.txt': 'no newline at the end',
  'sub/empty.txt': '',
  'd.txt': '\n' * 50,
}


@pytest.fixture
def directory(tmp_path):
  for name, text in CONTENT.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding='utf-8')
  return tmp_path


@pytest.mark.parametrize('block_bytes', [16, 17, 64, 1 << 16])
def test_blocks_together_are_the_files(directory, block_bytes):
  source = TextFiles(pattern=f'{directory}/**/*.txt', block_bytes=block_bytes).open()
  assert documents(source) == [CONTENT[name] for name in ('a.txt', 'b.txt', 'd.txt', 'sub/c.txt')]


def test_splits_are_disjoint_and_complete_and_depend_on_the_relative_path(tmp_path):
  for root in ('here', 'there'):
    (tmp_path / root).mkdir()
    for i in range(60):
      (tmp_path / root / f'{i:02}.txt').write_text(f'{i}')

  def split(root, name):
    return documents(TextFiles(pattern=f'{tmp_path / root}/*.txt', split=name, valid_fraction=0.3).open())

  train, valid = split('here', 'train'), split('here', 'valid')
  assert sorted(train + valid) == sorted(split('here', 'all'))
  assert 8 <= len(valid) <= 28
  assert (train, valid) == (split('there', 'train'), split('there', 'valid'))


def test_the_fingerprint_depends_on_names_sizes_and_settings_but_not_the_root(directory, tmp_path_factory):
  def fingerprint(root, **settings):
    return TextFiles(pattern=f'{root}/**/*.txt', **settings).open().fingerprint()

  original = fingerprint(directory)
  moved = tmp_path_factory.mktemp('moved') / 'root'
  os.rename(directory, moved)
  assert fingerprint(moved) == original
  assert fingerprint(moved, block_bytes=100) != original
  assert fingerprint(moved, split='train', valid_fraction=0.5) != original
  (moved / 'a.txt').write_text('longer than before' * 50)
  assert fingerprint(moved) != original


def test_stdlib_text_is_the_source_of_this_python():
  train, valid = StdlibText().open(), StdlibText(split='valid').open()
  names = [source.block_name(i) for source in (train, valid) for i in range(len(source))]
  files = {name.rsplit(' bytes ')[0] for name in names}
  assert len(files) > 300
  assert not {'test', 'site-packages', '__pycache__'} & {part for file in files for part in file.split(os.sep)}
  assert 0.01 < len(valid) / (len(train) + len(valid)) < 0.15
  assert any(text.lstrip().startswith(('"""', '#', 'r"""')) for text, _ in train[0].documents + train[1].documents)
  in_valid = {valid.block_name(i).rsplit(' bytes ')[0] for i in range(len(valid))}
  assert not in_valid & {train.block_name(i).rsplit(' bytes ')[0] for i in range(len(train))}
  assert train.fingerprint() == StdlibText().open().fingerprint() != valid.fingerprint()


@pytest.mark.parametrize(
  'pattern, message',
  [
    ('nothing/*.txt', r"no text file matches 'nothing/\*\.txt'"),
    ('{}/sub/empty.txt', 'have no text'),
    ('{}/su*', r'no text file matches .*DIRECTORY/\*'),
  ],
)
def test_patterns_without_text_are_refused(directory, pattern, message):
  with pytest.raises(ValueError, match=message):
    TextFiles(pattern=pattern.format(directory)).open()


def test_an_unreadable_file_is_refused_when_the_source_is_opened(tmp_path, monkeypatch):
  (tmp_path / 'a.txt').write_text('secret')
  monkeypatch.setattr(os, 'access', lambda path, mode: False)  # root may read all files
  with pytest.raises(UserError, match=r'a\.txt is not readable: change its permissions'):
    TextFiles(pattern=str(tmp_path / '*.txt')).open()
  with pytest.raises(UserError, match=f'^{tmp_path} is not readable: change its permissions'):
    TextFiles(pattern=str(tmp_path / 'absent/*.txt')).open()


def test_the_error_names_a_file_that_is_not_utf8_and_the_byte(directory):
  (directory / 'a.txt').write_bytes(b'good line\n' * 5 + b'caf\xe9 au lait\n')
  source = TextFiles(pattern=f'{directory}/a.txt').open()
  with pytest.raises(ValueError, match=r'a\.txt is not UTF-8 text: byte 53 '):
    source[0]


@pytest.mark.parametrize('size', [0, 100, 359])
@pytest.mark.parametrize('block_bytes', [32, 1 << 16])
def test_the_error_names_a_file_that_is_truncated_while_it_is_read(directory, size, block_bytes):
  path = directory / 'a.txt'
  source = TextFiles(pattern=str(path), block_bytes=block_bytes).open()
  os.truncate(path, size)
  for block in range(len(source)):  # no block reads other text instead
    with pytest.raises(JobError, match=rf'{path} ends at byte {size}, before byte 360.*had 360 bytes.*same file back'):
      source[block]


def test_bytes_appended_while_a_file_is_read_change_no_block(directory):
  source = TextFiles(pattern=f'{directory}/**/*.txt', block_bytes=17).open()
  before = [source[i] for i in range(len(source))]
  for name in CONTENT:
    with (directory / name).open('a') as file:
      file.write('appended')
  assert [source[i] for i in range(len(source))] == before
