"""Signs the configs of this user's jobs, so that later commands can tell them from a stranger's.

    signed(config, job_log_dir)              # the config with `signature`, the content of config.json
    why_unsigned(config, job_log_dir)        # '' if this user's key signed this config for this directory

The signature is an HMAC-SHA256 of the config and the resolved path of the directory. It is no longer valid once the
config is edited, or the directory copied, moved or archived. The key is 32 random bytes in
$XDG_CONFIG_HOME/spmd_tasks/key (by default ~/.config/spmd_tasks/key), created when a job is first signed. Only this
user may read it. Without a usable key a job runs, but is not signed.
"""

from collections.abc import Mapping
import contextlib
import errno
import functools
import hashlib
import hmac
import json
import os
from pathlib import Path
import secrets
import stat
import tempfile
from typing import Any

from absl import logging
from etils import epath

from spmd_tasks.files import is_remote

SIGNATURE = 'signature'
_KEY_BYTES = 32


class KeyProblemError(Exception):
  """There is no usable key; the message is a sentence without a full stop."""


def signed(config: Mapping[str, Any], job_log_dir: epath.PathLike) -> dict[str, Any]:
  """Returns the config with its signature; warns once and leaves it unsigned if this user has no usable key."""
  unsigned = {name: value for name, value in config.items() if name != SIGNATURE}
  try:
    return unsigned | {SIGNATURE: _digest(_key(create=True), 'config', _resolved(job_log_dir), unsigned)}
  except KeyProblemError as problem:
    _warn_once(f'{problem}: jobs are not signed, and later commands need --experiment_path for modules of your own.')
    return unsigned


def why_unsigned(config: Mapping[str, Any], job_log_dir: epath.PathLike) -> str:
  """Returns why a config does not count as written by this user for this directory, or ''."""
  unsigned = {name: value for name, value in config.items() if name != SIGNATURE}
  if SIGNATURE not in config:
    return 'it is not signed'
  try:
    expected = _digest(_key(create=False), 'config', _resolved(job_log_dir), unsigned)
  except KeyProblemError as problem:
    return str(problem)
  if not hmac.compare_digest(expected.encode(), str(config[SIGNATURE]).encode(errors='replace')):
    return 'it was copied, moved or edited, or another user or machine signed it'
  return ''


def secret_name(purpose: str, directory: epath.PathLike) -> str:
  """Returns a file name that cannot be guessed without this user's key. Raises a KeyProblemError."""
  return _digest(_key(create=True), purpose, _resolved(directory), {})[:32]


def key_file() -> Path:
  """Returns the path of this user's key. Raises a KeyProblemError if there is no configuration directory."""
  directory = os.environ.get('XDG_CONFIG_HOME', '')
  if not os.path.isabs(directory):  # XDG's specification ignores relative paths
    directory = os.path.join(os.path.expanduser('~'), '.config')
  if not os.path.isabs(directory):
    raise KeyProblemError('there is no home directory for a key: set HOME or XDG_CONFIG_HOME')
  return Path(directory) / 'spmd_tasks' / 'key'


def why_writable_by_others(path: Path) -> str:
  """Returns why other users could change a file or directory, or ''. Raises an OSError if it does not exist.

  As for ssh's files, it and all its parents must belong to this user or root and be writable by nobody else.
  """
  resolved = path.resolve(strict=True)
  for part in (resolved, *resolved.parents):
    status = part.stat()
    if status.st_uid not in (os.geteuid(), 0):
      return f'{part} belongs to another user'
    is_shared = part != resolved and status.st_mode & stat.S_ISVTX  # such as /tmp, where others cannot replace it
    if status.st_mode & 0o022 and not is_shared:
      return f'others may write to {part}: chmod go-w {part}'
  return ''


def _key(*, create: bool) -> bytes:
  path = key_file()
  try:
    if create and not os.path.lexists(path):
      _create_key(path)
    return _read_key(path)
  except OSError as error:
    if isinstance(error, FileNotFoundError) and not create:
      raise KeyProblemError(f'this user has no key to check the signature with, {path}') from None
    verb = 'created' if create else 'read'
    raise KeyProblemError(f'the key {path} cannot be {verb} ({error.strerror or error})') from None


def _read_key(path: Path) -> bytes:
  """Reads the key. Raises a KeyProblemError if others could know or choose it."""
  remedy = f'delete {path}, and the next job creates a new one'
  try:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
  except OSError as error:
    if error.errno == errno.ELOOP:
      raise KeyProblemError(f'the key {path} is a link: {remedy}') from None
    raise
  try:
    status, parent_status = os.fstat(descriptor), path.parent.stat()
    if not stat.S_ISREG(status.st_mode):
      raise KeyProblemError(f'the key {path} is not a file: {remedy}')
    if status.st_uid != os.geteuid() or parent_status.st_uid != os.geteuid():
      raise KeyProblemError(f'the key {path} or its directory belongs to another user: set XDG_CONFIG_HOME')
    if status.st_mode & 0o077:
      raise KeyProblemError(f'other users may read or write the key {path}: {remedy}')
    if parent_status.st_mode & 0o022:
      raise KeyProblemError(f'other users may replace the key {path}: chmod 700 {path.parent}, and {remedy}')
    key = os.read(descriptor, _KEY_BYTES + 1)
  finally:
    os.close(descriptor)
  if len(key) != _KEY_BYTES:
    raise KeyProblemError(f'the key {path} is damaged: {remedy}')
  return key


def _create_key(path: Path) -> None:
  """Creates a key atomically; keeps one that another process has just created."""
  path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
  descriptor, partial = tempfile.mkstemp(prefix='.key_', dir=path.parent)  # readable by this user only
  try:
    with open(descriptor, 'wb') as file:
      file.write(secrets.token_bytes(_KEY_BYTES))
      file.flush()
      os.fsync(descriptor)
    try:
      os.link(partial, path)
    except FileExistsError:
      pass
    except OSError:  # a file system without hard links
      if not os.path.lexists(path):
        os.rename(partial, path)
  finally:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(partial)


def _digest(key: bytes, purpose: str, place: str, content: Mapping[str, Any]) -> str:
  message = json.dumps([purpose, place, content], sort_keys=True, separators=(',', ':'))
  return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()


def _resolved(directory: epath.PathLike) -> str:
  """Returns the path without links; returns URLs unchanged."""
  return os.fspath(directory).rstrip('/') if is_remote(directory) else os.path.realpath(directory)


@functools.cache
def _warn_once(sentence: str) -> None:
  logging.warning('%s', sentence)
