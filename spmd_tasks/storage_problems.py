"""Describes errors of the storage and their remedies."""

import contextlib
import errno
import os
import re

from etils import epath

from spmd_tasks.stores import describe_store_error

_REMEDIES = {
  errno.ENOSPC: 'free space there',
  errno.EDQUOT: 'free space there, or have the quota raised',
  errno.EFBIG: 'raise the limit of file sizes (ulimit -f)',
  errno.EROFS: 'make the file system writable',
  errno.EIO: 'check the storage (dmesg, the file server)',
  errno.EREMOTEIO: 'check the network, the credentials and the store',
  errno.EMFILE: 'raise the limit of open files (ulimit -n)',
  errno.ENFILE: 'raise the limit of open files',
  errno.ENAMETOOLONG: 'choose a shorter path',
  errno.ELOOP: 'put a file or directory in place of the symbolic link',
  errno.ENOENT: 'bring the directory back',
  **dict.fromkeys((errno.EACCES, errno.EPERM), 'give this user the right to read and write there'),
  **dict.fromkeys((errno.ESTALE, errno.ENODEV, errno.ENOTCONN), 'mount the storage again'),
  **dict.fromkeys(
    (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENXIO, errno.EINVAL), 'move away what is in its place'
  ),
}
_NATIVE_ERROR = re.compile(r"os_error_code='(\d+)'")


def describe_storage_error(error: BaseException, path: epath.PathLike) -> tuple[str, str] | None:
  """Returns the reason and the remedy of a storage error, as two phrases; None for any other error.

  Args:
    error: an OSError, or what a native library raised because of one.
    path: where it happened.
  """
  system_error, is_store = _system_error(error), '://' in os.fspath(path)
  if system_error is None and is_store:
    return describe_store_error(error, path)
  if system_error is None or (system_error[0] not in _REMEDIES and not isinstance(error, OSError)):
    return None
  code, reason = system_error
  if code == errno.ENOSPC and not is_store:
    with contextlib.suppress(OSError):
      return _describe_full_disk(reason, epath.Path(path))
  return reason, _REMEDIES.get(code, 'check the path and the storage')


def _system_error(error: BaseException | None) -> tuple[int, str] | None:
  """Returns errno and text of an error, or of its first cause that has them; native code puts them into messages."""
  while error is not None:
    if isinstance(error, OSError) and error.errno is not None:
      return error.errno, error.strerror or os.strerror(error.errno)
    if match := _NATIVE_ERROR.search(str(error)):
      return int(match[1]), os.strerror(int(match[1]))
    error = error.__cause__ or error.__context__
  return None


def _describe_full_disk(reason: str, path: epath.Path) -> tuple[str, str]:
  """Says whether bytes or inodes are missing. Few of them may be free again, as the failed write has been undone."""
  while not path.exists() and path != path.parent:
    path = path.parent
  disk = os.statvfs(path)
  if disk.f_favail * disk.f_blocks < disk.f_bavail * disk.f_files:  # a smaller part of the inodes is free
    free = f'{disk.f_favail:,} of {disk.f_files:,} inodes free'
    return f'{reason} ({free})', f'remove files there (df -i {os.fspath(path)})'
  free = f'{disk.f_bavail * disk.f_frsize / 1e6:,.1f} of {disk.f_blocks * disk.f_frsize / 1e6:,.0f} MB free'
  return f'{reason} ({free})', _REMEDIES[errno.ENOSPC]
