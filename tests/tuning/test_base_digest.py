"""The digest of a job's base is kept in the job's directory, and the files are hashed again only if one has changed."""

import json
import os
import shutil
import time

from etils import epath
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.tuning import base_digest


@pytest.fixture
def folder(tmp_path):
  folder = tmp_path / 'model'
  folder.mkdir()
  (folder / 'config.json').write_text('{}')
  for shard in range(3):
    (folder / f'model-{shard}.safetensors').write_bytes(bytes([shard]) * 100)
  return folder


@pytest.fixture
def job(tmp_path):
  (tmp_path / 'job').mkdir()
  return epath.Path(tmp_path / 'job')


@pytest.fixture
def hashed(monkeypatch):
  """The names of the files that were hashed, as by a new process each time that `hashed` is called."""
  names = []
  own = base_digest.hashlib.file_digest

  def file_digest(file, name):
    names.append(os.path.basename(file.name))
    return own(file, name)

  monkeypatch.setattr(base_digest.hashlib, 'file_digest', file_digest)

  def hashed(function, *arguments):
    names.clear()
    base_digest._hash_files.cache_clear()
    return function(*arguments), len(names)

  return hashed


def start(folder, job):
  return base_digest.start_digest(str(folder), job)()['sha256']


def test_a_started_job_keeps_the_digest_and_the_next_start_hashes_nothing(folder, job, hashed):
  digest, num_hashed = hashed(start, folder, job)
  assert num_hashed == 4
  assert json.loads((job / 'base_digest.json').read_text())['sha256'] == digest
  assert hashed(start, folder, job) == (digest, 0)
  assert hashed(base_digest.describe_base, str(folder), job) == ({'folder': str(folder), 'sha256': digest}, 0)
  assert hashed(base_digest.folder_digest, str(folder)) == (digest, 4)  # of a program without the job's directory


@pytest.mark.parametrize('change', ['content', 'content at the same time and size', 'a file more', 'another folder'])
def test_what_has_changed_is_hashed_again(change, folder, job, hashed, tmp_path):
  before, _ = hashed(start, folder, job)
  file = folder / 'model-1.safetensors'
  if change == 'another folder':
    folder = shutil.copytree(folder, tmp_path / 'other')
  elif change == 'a file more':
    (folder / 'model-3.safetensors').write_bytes(b'3')
  else:
    time.sleep(0.02)  # the file system's clock ticks every few milliseconds
    state = file.stat()
    file.write_bytes(b'x' * 100)
    if 'same time' in change:
      os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
  after, num_hashed = hashed(start, folder, job)
  assert num_hashed == 4 + (change == 'a file more')
  assert (after == before) == (change == 'another folder')
  assert hashed(start, folder, job) == (after, 0)


def test_a_file_that_changes_while_it_is_hashed_is_an_error(folder, job, hashed, monkeypatch):
  own = base_digest.hashlib.file_digest

  def file_digest(file, name):
    (folder / 'config.json').write_text('{"now": 1}')
    return own(file, name)

  monkeypatch.setattr(base_digest.hashlib, 'file_digest', file_digest)
  with pytest.raises(UserError, match='has changed while it was read: start again'):
    hashed(start, folder, job)
  assert not (job / 'base_digest.json').exists()


@pytest.mark.parametrize('begin', ['restore', 'start'])
def test_an_error_of_process_0_is_raised_where_all_processes_wait(begin, folder, job, hashed, monkeypatch):
  """They would wait for process 0 without end if it raised before."""
  (folder / 'model-2.safetensors').unlink()
  (folder / 'model-2.safetensors').symlink_to(folder / 'gone')
  decided = []

  def decide(look, name, *, limit_s):
    decided.append(name)
    return look()

  monkeypatch.setattr(base_digest, 'primary_decides', decide)
  with pytest.raises(FileNotFoundError, match='model-2'):
    hashed(base_digest.describe_base if begin == 'restore' else start, folder, job)
  assert decided == ['base_digest']
