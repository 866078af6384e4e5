"""Reads, writes and lists objects in stores, gs:// and s3://.

    check_store('gs://bucket/job')               # a UserError if a package, the credentials or the bucket is missing
    create(path, data)                           # False if the object exists; true for one of several concurrent calls
    sizes_below(path)                            # every object below, from one listing
    ts.KvStore.open(kvstore_spec(path))          # TensorStore's own driver, for arrays

Other operations use `etils.epath` over fsspec (gcsfs, s3fs), which writes whole objects, so an object is never half
written. These two clients are used because etils supports them, and because their `create` is a conditional write:
x-goog-if-generation-match: 0, and If-None-Match: *. TensorStore's S3 driver reads before it writes, so two concurrent
calls could both succeed. Listings are never cached, as other jobs write to the same place.

Credentials come from the clouds' default settings. For emulators set AWS_ENDPOINT_URL, or STORAGE_EMULATOR_HOST (gcsfs)
and TENSORSTORE_GCS_HTTP_URL with GOOGLE_AUTH_TOKEN_FOR_TESTING (TensorStore).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
import contextlib
import errno
import fnmatch
import functools
import logging
import os
import re
import secrets
from typing import Any

from spmd_tasks import hub
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require

_PACKAGES = {'gs': 'gcsfs', 's3': 's3fs'}
_LOGIN = {
  'gs': 'gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=FILE',
  's3': 'aws configure, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY',
}
_CREATE_BUCKET = {'gs': 'gcloud storage buckets create gs://{}', 's3': 'aws s3 mb s3://{}'}
_LIBRARIES = ('gcsfs', 's3fs', 'fsspec', 'botocore', 'aiobotocore', 'aiohttp', 'google', 'requests')
_NO_CREDENTIALS = re.compile('credentials|UNAUTHENTICATED|InvalidAccessKeyId|SignatureDoesNotMatch|401', re.IGNORECASE)
_NO_RIGHT = re.compile('forbidden|denied|does not have storage|403', re.IGNORECASE)
_NO_BUCKET = re.compile('bucket does not exist|NoSuchBucket', re.IGNORECASE)


def split_url(path: str | os.PathLike[str]) -> tuple[str, str, str]:
  """Returns the scheme, bucket and key of a URL."""
  scheme, _, rest = os.fspath(path).partition('://')
  bucket, _, key = rest.partition('/')
  return scheme, bucket, key


def check_store(url: str | os.PathLike[str]) -> None:
  """Raises a UserError if the store of a URL cannot be used; checks each bucket once."""
  scheme, bucket, _ = split_url(url)
  if scheme == 'hf':
    raise UserError(f'{os.fspath(url)} can only be read: give a path on gs://, s3:// or a disk.')
  if scheme not in _PACKAGES:
    raise UserError(
      f'{os.fspath(url)!r} is a URL of an unknown kind: give gs:// or s3://, or the path of a mounted or copied folder.'
    )
  if not bucket:
    raise UserError(f'{os.fspath(url)!r} has no bucket: give {scheme}://BUCKET/PATH.')
  _check_bucket(scheme, bucket)


@functools.cache
def _check_bucket(scheme: str, bucket: str) -> None:
  require('stores', _PACKAGES[scheme], wants=f'{scheme}://')
  if scheme == 'gs' and 'STORAGE_EMULATOR_HOST' in os.environ and 'TENSORSTORE_GCS_HTTP_URL' not in os.environ:
    raise UserError(
      'STORAGE_EMULATOR_HOST is set, which TensorStore does not read: also set TENSORSTORE_GCS_HTTP_URL to the same '
      'URL, and GOOGLE_AUTH_TOKEN_FOR_TESTING to any text.'
    )
  try:
    try:
      _file_system(scheme).info(bucket)
    except FileNotFoundError:  # also raised if this user may not read the bucket's metadata
      _file_system(scheme).ls(bucket)
  except Exception as error:
    if (problem := describe_store_error(error, f'{scheme}://{bucket}')) is None:
      raise
    raise UserError(f'{scheme}://{bucket} cannot be used: {problem[0]}; {problem[1]}.') from error


def describe_store_error(error: BaseException, url: str | os.PathLike[str]) -> tuple[str, str] | None:
  """Returns the reason and the remedy of a store's error, as two phrases; None for any other error."""
  text = ' '.join(str(error).split())[:300] or type(error).__name__
  is_native = isinstance(error, ValueError) and re.match('[A-Z_]+: |Invalid endpoint', text)  # of TensorStore, botocore
  if not (isinstance(error, OSError) or is_native or type(error).__module__.partition('.')[0] in _LIBRARIES):
    return None
  scheme, bucket, _ = split_url(url)
  if _NO_BUCKET.search(text) or (isinstance(error, FileNotFoundError) and bucket == os.path.basename(os.fspath(url))):
    return 'there is no such bucket', _CREATE_BUCKET[scheme].format(bucket)
  if _NO_RIGHT.search(text) or isinstance(error, PermissionError):
    return text, f'give this user the right to list, read and write there, or log in as another ({_LOGIN[scheme]})'
  if _NO_CREDENTIALS.search(text):
    return text, f'log in: {_LOGIN[scheme]}'
  return text, 'check the network and the store'


@contextlib.contextmanager
def _os_errors(path: str | os.PathLike[str]) -> Iterator[None]:
  """Turns errors of a store's client into OSErrors with an errno."""
  try:
    yield
  except FileNotFoundError as error:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)) from error
  except FileExistsError:
    raise
  except Exception as error:
    if (problem := describe_store_error(error, path)) is None:
      raise
    raise OSError(errno.EREMOTEIO, f'{problem[0]} ({problem[1]})', os.fspath(path)) from error


def create(path: str | os.PathLike[str], data: bytes) -> bool:
  """Writes an object and returns True, or returns False if it exists. One of several concurrent calls returns True.

  `data` must be unique to the caller, such as by a random token. If the response to the write is lost, the caller
  recognizes its own object by it.
  """
  try:
    with _os_errors(path):
      _file_system(split_url(path)[0]).pipe_file(os.fspath(path), data, mode='create')
  except FileExistsError:
    return read(path) == data
  return True


def write(path: str | os.PathLike[str], data: bytes) -> None:
  """Writes or replaces an object atomically."""
  with _os_errors(path):
    _file_system(split_url(path)[0]).pipe_file(os.fspath(path), data)


def read(path: str | os.PathLike[str], num_bytes: int | None = None) -> bytes:
  """Reads an object, or its first bytes, in one request. Raises FileNotFoundError."""
  with _os_errors(path):
    return _file_system(split_url(path)[0]).cat_file(os.fspath(path), start=num_bytes and 0, end=num_bytes)


def exists(path: str | os.PathLike[str]) -> bool:
  """Returns whether there is a nonempty object of exactly this name."""
  try:
    return bool(read(path, 1))
  except FileNotFoundError:
    return False


def remove(urls: list[str]) -> None:
  """Deletes objects; ignores missing ones."""
  for url in urls:
    with _os_errors(url), contextlib.suppress(FileNotFoundError):
      _file_system(split_url(url)[0]).rm_file(url)


def glob_below(path: str | os.PathLike[str], pattern: str) -> list[str]:
  """Returns the URLs below a directory that match a pattern, sorted; makes one listing per part of the pattern."""
  first, _, rest = pattern.partition('/')
  scheme, _, key = os.fspath(path).partition('://')
  try:
    with _os_errors(path):
      keys = _file_system(scheme).ls(key, detail=False)
  except FileNotFoundError:
    return []
  names = sorted({child.rstrip('/').rpartition('/')[2] for child in keys})
  urls = [f'{os.fspath(path)}/{name}' for name in names if fnmatch.fnmatchcase(name, first)]
  return [below for url in urls for below in glob_below(url, rest)] if rest else urls


def upload(directory: str | os.PathLike[str], url: str | os.PathLike[str]) -> None:
  """Uploads all files below a local directory; config.json last, as readers look for it."""
  names = [
    os.path.relpath(os.path.join(root, name), directory) for root, _, files in os.walk(directory) for name in files
  ]
  with _os_errors(url):
    for name in sorted(names, key=lambda name: (name == 'config.json', name)):
      _file_system(split_url(url)[0]).put_file(os.path.join(directory, name), f'{os.fspath(url)}/{name}')


def sizes_below(path: str | os.PathLike[str]) -> dict[str, int]:
  """Returns the size of every object below a directory, by its name there."""
  key = f'{os.fspath(path).partition("://")[2].rstrip("/")}/'
  with _os_errors(path):
    objects = _file_system(split_url(path)[0]).find(key, detail=True)
  return {name.removeprefix(key): int(info['size']) for name, info in objects.items() if not name.endswith('/')}


def modified_s(path: str | os.PathLike[str]) -> float:
  """Returns the time of an object's last write, in seconds since the epoch. Raises FileNotFoundError."""
  with _os_errors(path):
    return _file_system(split_url(path)[0]).modified(os.fspath(path)).timestamp()


def local_copies(url: str) -> list[str]:
  """Downloads a file, the files that match a pattern, or all files below a directory; returns the local paths.

  A copy has the modification time of its object, and is reused while time and size are equal.
  """
  if url.startswith('hf://'):
    return hub.local_copies(url)
  check_store(url)
  scheme, _, key = url.rstrip('/').partition('://')
  file_system = _file_system(scheme)
  objects = file_system.glob(key, detail=True) if re.search('[*?[]', key) else file_system.find(key, detail=True)

  def download(name: str, info: dict[str, Any]) -> str:
    path, modified = local_path(f'{scheme}://{name}'), (info.get('mtime') or info['LastModified']).timestamp()
    with contextlib.suppress(FileNotFoundError):
      if (os.path.getsize(path), os.path.getmtime(path)) == (info['size'], modified):
        return path
    partial = f'{path}.{secrets.token_hex(4)}.partial'
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file_system.get_file(name, partial)
    os.utime(partial, (modified, modified))
    os.replace(partial, path)
    return path

  files = {name: info for name, info in objects.items() if info['type'] == 'file' and not name.endswith('/')}
  for name in files:
    if '..' in name.split('/'):  # its copy would overwrite another local file
      raise UserError(f'{scheme}://{name} has .. in its name, which could overwrite other local files: rename it.')
  with ThreadPoolExecutor(8) as pool:
    return list(pool.map(download, files, files.values()))


def local_path(url: str) -> str:
  """Returns the path of the local copy of a file or directory."""
  cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return os.path.expanduser(os.path.join(cache, 'spmd_tasks', *url.rstrip('/').split('://')))


@functools.cache  # so that a folder does not change during a process
def local_folder(url: str) -> str:
  """Downloads a directory or file (see `local_copies`); returns the local path."""
  if url.startswith('hf://'):
    return hub.local_folder(url)
  copies = set(local_copies(url))
  if not copies:
    raise UserError(f'there is nothing at {url}: correct the URL.')
  path = local_path(url)
  for directory, _, names in os.walk(path):
    for stale in {os.path.join(directory, name) for name in names} - copies:
      if not stale.endswith('.partial'):
        os.unlink(stale)
  return path


def kvstore_spec(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns TensorStore's KvStore spec of a directory, in a store or on a disk."""
  if '://' not in os.fspath(path):
    return {'driver': 'file', 'path': f'{os.fspath(path)}/'}
  scheme, bucket, key = split_url(path)
  spec: dict[str, Any] = {'driver': {'gs': 'gcs'}.get(scheme, scheme), 'bucket': bucket, 'path': f'{key}/'}
  if scheme == 's3':
    if endpoint := os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL'):
      spec |= {'endpoint': endpoint, 'aws_region': 'us-east-1'}
    if region := os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION'):
      spec['aws_region'] = region
    if 'AWS_ACCESS_KEY_ID' in os.environ:
      spec['aws_credentials'] = {'type': 'environment'}  # otherwise the driver searches, and prints its failures
  return spec


@functools.cache
def _file_system(scheme: str) -> Any:
  """Returns fsspec's client; fsspec shares it with epath, as the arguments are equal."""
  import fsspec

  logging.getLogger('gcsfs').addFilter(lambda record: not record.exc_info)  # gcsfs raises these errors as well
  client = fsspec.filesystem('gcs', finalize_on_close=True) if scheme == 'gs' else fsspec.filesystem(scheme)
  client.dircache.use_listings_cache = False
  return client
