"""Says what is wrong with the storage, and what to do about it; imported when something is."""

import errno
import os
import re

from etils import epath

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
  """Returns the reason and the remedy, as two phrases, of an error of the storage; None for any other error.

  Args:
    error: an OSError, or what a native library raised because of one.
    path: where it happened.
  """
  if '://' in os.fspath(path) and _system_error(error) is None:
    from spmd_tasks.stores import describe_store_error

    return describe_store_error(error, path)
  found = _system_error(error)
  if found is None or (found[0] not in _REMEDIES and not isinstance(error, OSError)):
    return None
  code, reason = found
  if code == errno.ENOSPC and _has_no_inodes(epath.Path(path)):
    return f'{reason} for another file (inodes)', f'remove files there (df -i {os.fspath(path)})'
  return reason, _REMEDIES.get(code, 'check the path and the storage')


def _system_error(error: BaseException | None) -> tuple[int, str] | None:
  """Returns errno and text of an error, or of its first cause that has them; native code puts them into messages."""
  while error is not None:
    if isinstance(error, OSError) and error.errno is not None:
      return error.errno, error.strerror or os.strerror(error.errno)
    if found := _NATIVE_ERROR.search(str(error)):
      return int(found[1]), os.strerror(int(found[1]))
    error = error.__cause__ or error.__context__
  return None


def _has_no_inodes(path: epath.Path) -> bool:
  if '://' in os.fspath(path):
    return False
  while not path.exists() and path != path.parent:
    path = path.parent
  try:
    system = os.statvfs(path)
  except OSError:
    return False
  return system.f_files > 0 and system.f_favail == 0
