"""Downloads models and data from the Hugging Face hub by URL.

    local_folder('hf://org/name')                          # a model's files, except weights in other formats
    local_folder('hf://org/name@v1/adapter')               # a folder in it, at a branch, tag or commit
    local_copies('hf://datasets/org/name/data/*.jsonl')

The hub's client downloads files into its cache (HF_HOME), with its token (`hf auth login`, or HF_TOKEN). If the hub
cannot be reached, or with HF_HUB_OFFLINE=1, files are read from the cache.
"""

import glob
import os
import re

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require

_URL = re.compile(r'hf://(datasets/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?')
_OTHER_WEIGHTS = ('*.bin', '*.pt', '*.pth', '*.h5', '*.msgpack', '*.onnx', '*.gguf', '*.ot', 'original/*', 'onnx/*')


def local_folder(url: str) -> str:
  """Downloads a repository, or a folder or file in it; returns the local path. Raises a UserError."""
  path = os.path.join(*_fetch(url)).rstrip('/')
  if not os.path.exists(path):
    raise UserError(f'there is nothing at {url}: correct the URL.')
  return path


def local_copies(url: str) -> list[str]:
  """Downloads a file, the files that match a pattern, or all files below a folder; returns the local paths."""
  root, name = _fetch(url)
  pattern = os.path.join(glob.escape(root), name)
  paths = glob.glob(os.path.join(pattern, '**') if os.path.isdir(pattern) else pattern, recursive=True)
  return sorted(path for path in paths if os.path.isfile(path))


def _fetch(url: str) -> tuple[str, str]:
  """Downloads the files of a URL; returns the local folder of the repository, and the path in it."""
  parts = _URL.fullmatch(url.rstrip('/'))
  if parts is None:
    raise UserError(f'{url!r} must be hf://ORG/NAME or hf://datasets/ORG/NAME, optionally with @REVISION and /PATH.')
  require('huggingface', 'huggingface_hub', wants=url)
  from huggingface_hub import errors, snapshot_download

  kind, repository, revision, name = parts.groups('')
  try:
    root = snapshot_download(
      repository,
      repo_type='dataset' if kind else 'model',
      revision=revision or None,
      # In the client's patterns * also matches /, so it has no **/, which in glob may match no folder.
      allow_patterns=[name, f'{name}/*', name.replace('**/', '')] if name else None,
      ignore_patterns=None if kind or name else [*_OTHER_WEIGHTS],
      endpoint=os.environ.get('HF_ENDPOINT'),
    )
  except Exception as error:
    text = ' '.join(str(error).split())[:300] or type(error).__name__
    page = f'{os.environ.get("HF_ENDPOINT", "https://huggingface.co")}/{kind}{repository}'
    if isinstance(error, errors.GatedRepoError):
      text, remedy = 'it is gated', f'accept its terms at {page}, and log in: hf auth login, or HF_TOKEN'
    elif isinstance(error, errors.RepositoryNotFoundError):
      text = 'it does not exist, or is private'
      remedy = 'correct the name, or log in: hf auth login, or HF_TOKEN'
    elif isinstance(error, errors.RevisionNotFoundError):
      text, remedy = f'it has no branch, tag or commit {revision!r}', 'correct the revision after the @'
    elif isinstance(error, errors.LocalEntryNotFoundError):
      text = f'{page} cannot be reached, and the files are not cached on this host'
      remedy = 'check the network and HF_ENDPOINT, or download the folder elsewhere and give its path'
    else:
      remedy = 'check the name, the network and the disk'
    raise UserError(f'{url} cannot be read: {text}; {remedy}.') from error
  return root, name
