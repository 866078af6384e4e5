"""Files of a job are written whole, and where that cannot be, one sentence names the file, the reason and the remedy."""

import errno
import os
import resource
import socket

from etils import epath
import pytest

from spmd_tasks import exit_codes, files
from spmd_tasks.errors import user_error_code


def test_a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path):
  path = epath.Path(tmp_path) / 'file'
  files.write_durably(path, 'old')
  files.write_durably(path, 'new é')
  files.append(path, b'!\n')
  assert files.read_text(path) == 'new é!\n'
  assert os.listdir(tmp_path) == ['file']


def make_socket(path) -> None:
  with socket.socket(socket.AF_UNIX) as sock:
    sock.bind(os.fspath(path))


@pytest.mark.timeout(20)
@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir, make_socket])
@pytest.mark.parametrize(
  'use',
  [
    files.read_bytes,
    lambda path: files.append(path, b'x'),
    lambda path: files.write_durably(path.parent / path.name.removeprefix('.').removesuffix('.partial'), 'x'),
  ],
)
def test_what_is_no_file_is_refused_at_once_and_stays(tmp_path, monkeypatch, make, use):
  """A plain open of a FIFO would wait for ever for its other end."""
  monkeypatch.chdir(tmp_path)  # the path of a socket must be short
  path = epath.Path('.file.partial')
  make(path)
  with pytest.raises(files.StorageError, match=r'\.file\.partial cannot be used: .*move away what is in its place'):
    with files.storage_errors(path):
      use(path)
  assert os.path.exists(path) and not os.path.isfile(path)


REASONS = {
  errno.ENOSPC: 'No space left on device.*free space',
  errno.EDQUOT: 'Disk quota exceeded.*quota',
  errno.EROFS: 'Read-only file system.*make the file system writable',
  errno.EACCES: 'Permission denied.*the right to read and write',
  errno.EIO: 'Input/output error.*check the storage',
  errno.ESTALE: 'Stale file handle.*mount the storage again',
  errno.EBADMSG: 'Bad message.*check the path and the storage',
}


@pytest.mark.parametrize('code', REASONS)
def test_an_error_of_the_storage_is_a_sentence(code):
  with pytest.raises(files.StorageError, match=rf'^/a/b cannot be used: {REASONS[code]}') as caught:
    with files.storage_errors('/a/b'):
      raise OSError(code, os.strerror(code))
  assert user_error_code(caught.value) == exit_codes.FAILED
  assert str(caught.value).endswith('and start the same command again.')


def test_the_cause_of_an_error_is_looked_for_also_in_the_words_of_native_code():
  with pytest.raises(files.StorageError, match='/a cannot be used: No space left on device'):
    with files.storage_errors('/a'):
      try:
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 320 bytes: No space left on device [os_error_code='28']")
      except ValueError as error:
        raise RuntimeError('save failed') from error


def test_an_error_that_is_not_of_the_storage_stays_as_it_is():
  with pytest.raises(ValueError, match='^x$'), files.storage_errors('/a'):
    raise ValueError('x')


def test_a_file_without_inodes_left_is_told_from_one_without_space(tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'statvfs', lambda path: os.statvfs_result((1, 1, 9, 9, 9, 100, 0, 0, 0, 255)))
  with pytest.raises(files.StorageError, match=rf'inodes.*remove files there \(df -i {tmp_path}'):
    with files.storage_errors(tmp_path / 'a' / 'b'):
      raise OSError(errno.ENOSPC, 'No space left on device')


def test_a_write_that_fails_leaves_the_old_file_and_no_part_of_the_new_one(tmp_path):
  path = epath.Path(tmp_path) / 'file'
  files.write_durably(path, 'old')
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a full disk, but without the rights to mount one
  try:
    with pytest.raises(files.StorageError, match='File too large.*ulimit -f'), files.storage_errors(path):
      files.write_durably(path, 'x' * 101)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert files.read_text(path) == 'old'
  assert os.listdir(tmp_path) == ['file']
