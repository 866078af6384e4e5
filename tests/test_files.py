"""Files of a job are written atomically; a StorageError names the file, the reason and the remedy."""

import datetime
import errno
import os
import re
import resource
import socket
from types import SimpleNamespace

from etils import epath
import pytest

from spmd_tasks import exit_codes, files, stores
from spmd_tasks.errors import UserError, user_error_code


def test_a_file_is_replaced_atomically_and_no_temporary_file_remains(tmp_path):
  path = epath.Path(tmp_path) / 'file'
  files.write_durably(path, 'old')
  files.write_durably(path, 'new é')
  files.append(path, b'!\n')
  assert files.read_text(path) == 'new é!\n'
  assert os.listdir(tmp_path) == ['file']


def make_socket(path) -> None:
  with socket.socket(socket.AF_UNIX) as sock:
    sock.bind(os.fspath(path))


@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir, make_socket])
@pytest.mark.parametrize(
  'use',
  [
    files.read_bytes,
    lambda path: files.append(path, b'x'),
    lambda path: files.write_durably(path.parent / path.name.removeprefix('.').removesuffix('.partial'), 'x'),
  ],
)
def test_something_else_in_place_of_a_file_is_refused_at_once_and_kept(tmp_path, monkeypatch, make, use):
  """A plain open of a FIFO would wait forever for its other end."""
  monkeypatch.chdir(tmp_path)  # the path of a socket must be short
  path = epath.Path('.file.partial')
  make(path)
  in_its_place = pytest.raises(files.StorageError, match=r'\.file\.partial cannot be used: .*move away what is in its')
  with in_its_place, files.storage_errors(path):
    use(path)
  assert os.path.exists(path)
  assert not os.path.isfile(path)


REASONS = {
  errno.EROFS: 'Read-only file system.*make the file system writable',
  errno.EACCES: 'Permission denied.*the right to read and write',
}


def sentence_of(error: Exception, path: os.PathLike | str) -> str:
  with pytest.raises(files.StorageError) as caught, files.storage_errors(path):
    raise error
  assert user_error_code(caught.value) == exit_codes.FAILED
  assert str(caught.value).endswith('and start the same command again.')
  return str(caught.value)


@pytest.mark.parametrize('code', REASONS)
def test_a_storage_error_has_its_reason_and_remedy(code):
  assert re.match(f'/a/b cannot be used: {REASONS[code]}', sentence_of(OSError(code, os.strerror(code)), '/a/b'))


def test_the_errno_in_a_message_of_native_code_is_recognized():
  error = RuntimeError('save failed')
  error.__cause__ = ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']")
  assert sentence_of(error, '/a').startswith('/a cannot be used: No space left on device')


@pytest.mark.parametrize(
  'free_blocks, free_inodes, expected',
  [
    (90, 2, r'\(2 of 1,000 inodes free\)\..*: remove files there \(df -i '),
    (1, 900, r'\(1\.0 of 100 MB free\)\..*: free space there'),
    (0, 0, r'\(0\.0 of 100 MB free\)\..*: free space there'),
  ],
)
def test_a_full_disk_lacks_inodes_or_space(tmp_path, monkeypatch, free_blocks, free_inodes, expected):
  disk = os.statvfs_result((4096, 10**6, 100, free_blocks, free_blocks, 1000, free_inodes, free_inodes, 0, 255))
  monkeypatch.setattr(os, 'statvfs', lambda path: disk)
  assert re.search(expected, sentence_of(OSError(errno.ENOSPC, 'No space left on device'), tmp_path / 'a' / 'b'))


def test_a_failed_write_keeps_the_old_file_and_leaves_no_partial_one(tmp_path):
  path = epath.Path(tmp_path) / 'file'
  files.write_durably(path, 'old')
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a full disk, but without the rights to mount one
  try:
    with pytest.raises(files.StorageError, match=r'File too large.*ulimit -f'), files.storage_errors(path):
      files.write_durably(path, 'x' * 101)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert files.read_text(path) == 'old'
  assert os.listdir(tmp_path) == ['file']


def test_a_directory_may_have_special_characters_of_patterns_in_its_name(tmp_path):
  for name in ('run[1]', 'run1'):
    (tmp_path / name / 'eval' / 'valid').mkdir(parents=True)
  directory = epath.Path(tmp_path / 'run[1]')
  assert files.glob_below(directory, 'eval/*') == [directory / 'eval' / 'valid']


@pytest.mark.parametrize('url', ['file:///tmp/x', 'HTTP://h/x', 'gs:/bucket/x', 's3:bucket'])
def test_a_url_of_another_kind_is_refused_but_a_colon_is_not(url):
  with pytest.raises(UserError, match='unknown kind: give gs://'):
    files.absolute_path(url)
  assert files.absolute_path('a:b/c').name == 'c'


def test_a_file_in_a_private_directory_is_not_missing_and_an_unknown_home_is_refused(tmp_path):
  assert files.is_missing(epath.Path(tmp_path / 'none'))
  (tmp_path / 'loop').symlink_to('loop')  # as a directory without the right to enter, which root has
  assert not files.is_missing(epath.Path(tmp_path / 'loop'))
  with pytest.raises(UserError, match='~nobody_has_this_name/job: there is no such home directory'):
    files.absolute_path('~nobody_has_this_name/job')
  assert files.absolute_path('./~x').parts[-2:] == (os.path.basename(os.getcwd()), '~x')


def test_a_deleted_current_directory_is_reported(tmp_path, monkeypatch):
  (tmp_path / 'gone').mkdir()
  monkeypatch.chdir(tmp_path / 'gone')
  (tmp_path / 'gone').rmdir()
  with pytest.raises(files.StorageError, match='the current directory cannot be used'):
    files.absolute_path('runs/x')


def test_an_object_whose_name_leaves_its_folder_is_not_downloaded(tmp_path, monkeypatch):
  """A stranger's bucket may have `models/../../../key`, which would replace a file of the user's."""
  name = 'bucket/models/../../../key'
  store = SimpleNamespace(
    find=lambda key, detail: {name: {'type': 'file', 'size': 1, 'mtime': datetime.datetime.now()}},
    get_file=lambda name, path: pytest.fail(f'{name} was copied to {path}'),
  )
  monkeypatch.setattr(stores, '_file_system', lambda scheme: store)
  monkeypatch.setattr(stores, 'check_store', lambda url: None)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  with pytest.raises(UserError, match=r'gs://bucket/models/../../../key has .*rename it'):
    stores.local_copies('gs://bucket/models')
  assert not list(tmp_path.iterdir())


# --- links ---


def test_nothing_is_written_through_a_link(tmp_path):
  victim = tmp_path / 'victim'
  victim.write_text('precious')
  directory = epath.Path(tmp_path / 'job')
  directory.mkdir()
  for name in ('metrics.jsonl', 'job.lock', '.config.json.partial'):
    os.symlink(victim, directory / name)
  for write in (files.append, lambda path, _: files.open_descriptor(path, os.O_RDWR | os.O_CREAT)):
    for name in ('metrics.jsonl', 'job.lock'):
      with (
        pytest.raises(files.StorageError, match=r'symbolic link.*put a file'),
        files.storage_errors(directory / name),
      ):
        write(directory / name, b'x')
  files.write_durably(directory / 'config.json', 'own')
  files.write_durably(directory / 'metrics.jsonl', 'own')
  assert victim.read_text() == 'precious'
  assert {name: (directory / name).read_text() for name in ('config.json', 'metrics.jsonl')} == {
    'config.json': 'own',
    'metrics.jsonl': 'own',
  }


def test_nothing_is_written_below_a_link_out_of_the_job(tmp_path, monkeypatch):
  monkeypatch.setattr(files, '_job_directory', None)
  directory, elsewhere = tmp_path / 'job', tmp_path / 'elsewhere'
  (directory / 'own').mkdir(parents=True)
  elsewhere.mkdir()
  (tmp_path / 'link').symlink_to(directory)
  for name in ('eval', 'checkpoints', 'own/deep'):
    (directory / name).symlink_to(elsewhere)
  (directory / 'inside').symlink_to(directory / 'own')
  job = epath.Path(tmp_path / 'link')
  files.stay_inside(job)
  writes = {
    'append': lambda path: files.append(path, b'x'),
    'write': lambda path: files.write_durably(path, b'x'),
    'make': files.make_directory,
  }
  for write in writes.values():
    for name in ('eval/valid', 'own/deep/x'):
      with pytest.raises(files.StorageError, match='leads out of'), files.storage_errors(job / name):
        write(job / name)
  assert os.listdir(elsewhere) == []
  for name in ('metrics.jsonl', 'inside/x', 'checkpoints/x'):  # job_log_dir and its checkpoints may be links
    files.append(job / name, b'x')
  assert os.listdir(elsewhere) == ['x']


def test_the_other_hard_link_of_a_file_is_not_changed(tmp_path):
  original, copy = tmp_path / 'original', epath.Path(tmp_path / 'copy')
  original.write_bytes(b'one\n')
  os.link(original, copy)
  partial = tmp_path / '.replaced.partial'
  os.link(original, partial)
  files.append(copy, b'two\n')
  files.append(copy, b'three\n')
  files.write_durably(tmp_path / 'replaced', 'new')
  assert (original.read_bytes(), copy.read_bytes()) == (b'one\n', b'one\ntwo\nthree\n')
