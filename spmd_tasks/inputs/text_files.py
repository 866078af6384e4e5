"""TextFiles: text files that a user names by glob patterns, and what all sources of named files need."""

from collections.abc import Sequence
import dataclasses
import glob
import os

from spmd_tasks.errors import UserError
from spmd_tasks.files import is_remote
from spmd_tasks.inputs.text import DEFAULT_BLOCK_BYTES, OpenTextFiles, changed_file, file_fingerprint, in_split


def expand_globs(patterns: str | Sequence[str], kind: str) -> list[str]:
  """The files that glob patterns match, sorted.

  Raises:
    UserError: a pattern matches nothing.
  """
  patterns = [patterns] if isinstance(patterns, str) else list(patterns)
  if not patterns:
    raise UserError(f'no {kind} files are named: give a path or a glob pattern.')
  files = set()
  for pattern in patterns:
    pattern = os.path.expanduser(pattern)
    if is_remote(pattern):
      from spmd_tasks.stores import local_copies

      found = local_copies(pattern)
    else:
      # A file whose own name has the characters of a pattern is meant itself.
      found = [path for path in (glob.glob(pattern, recursive=True) or [pattern]) if os.path.isfile(path)]
    if not found:
      raise UserError(
        f'no {kind} file matches {pattern!r} (current directory {os.getcwd()}): correct the path or the pattern.'
      )
    files.update(found)
  return sorted(files)


def common_root(paths: Sequence[str]) -> str:
  """The directory that all files lie in."""
  return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])


def refuse_changed_size(path: str, size: int) -> None:
  """Raises a JobError if a file does not have the `size` that it had when its source was opened."""
  if (now := os.path.getsize(path)) != size:
    raise changed_file(path, size, f'has {now} bytes')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
  """UTF-8 text files, one document each: a glob pattern (`**` for any directories), or several.

  `split` 'train' and 'valid' divide the files by a hash of their path below the common directory: about
  `valid_fraction` of them are 'valid'.
  """

  pattern: str | tuple[str, ...]
  split: str = 'all'
  valid_fraction: float = 0.05
  block_bytes: int = DEFAULT_BLOCK_BYTES

  def open(self) -> OpenTextFiles:
    paths = expand_globs(self.pattern, 'text')
    root = common_root(paths)
    chosen = [p for p in paths if in_split(os.path.relpath(p, root), self.split, self.valid_fraction)]
    source = OpenTextFiles(chosen, self.block_bytes, file_fingerprint(root, chosen, 'text', self.block_bytes))
    if len(source) == 0:
      raise UserError(
        f'the {len(paths)} files of {self.pattern!r} have no text in split {self.split!r} (valid_fraction '
        f'{self.valid_fraction}): name more files, or set valid_fraction nearer to 0.5, or split to "all".'
      )
    return source
