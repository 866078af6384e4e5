"""Reads models and data of Hugging Face's hub, which a URL names as one in a store (stores.py) is named.

    local_folder('hf://org/name')                          # a model's files, but for weights in other formats
    local_folder('hf://org/name@v1/adapter')               # a folder of it, at a branch, tag or commit
    local_copies('hf://datasets/org/name/data/*.jsonl')

The hub's own client fetches files into its cache (HF_HOME), by its own token (`hf auth login`, or HF_TOKEN). Where the
hub cannot be reached, or with HF_HUB_OFFLINE=1, what is in the cache is read.
"""

import glob
import os
import re

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require

_URL = re.compile(r'hf://(datasets/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?')
_OTHER_WEIGHTS = ('*.bin', '*.pt', '*.pth', '*.h5', '*.msgpack', '*.onnx', '*.gguf', '*.ot', 'original/*', 'onnx/*')


def local_folder(url: str) -> str:
  """Returns the path on this disk of what a URL names: a repository, or a folder or file of it. Raises a UserError."""
  path = os.path.join(*_fetch(url)).rstrip('/')
  if not os.path.exists(path):
    raise UserError(f'there is nothing at {url}: correct the URL.')
  return path


def local_copies(url: str) -> list[str]:
  """Returns the paths on this disk of the files that a URL names: by a pattern, a file, or all below a folder."""
  root, name = _fetch(url)
  path = os.path.join(glob.escape(root), name)
  found = glob.glob(os.path.join(path, '**') if os.path.isdir(path) else path, recursive=True)
  return sorted(each for each in found if os.path.isfile(each))


def _fetch(url: str) -> tuple[str, str]:
  """Fetches what a URL names; returns the folder of the repository on this disk, and the rest of the URL."""
  parts = _URL.fullmatch(url.rstrip('/'))
  if parts is None:
    raise UserError(f'{url!r} must be hf://ORG/NAME or hf://datasets/ORG/NAME, then perhaps @REVISION and /PATH.')
  require('huggingface', 'huggingface_hub', wants=url)
  from huggingface_hub import errors, snapshot_download

  kind, repository, revision, name = parts.groups('')
  try:
    root = snapshot_download(
      repository,
      repo_type='dataset' if kind else 'model',
      revision=revision or None,
      # Of the client's patterns * is any text, also with /; **/ of glob may be no folder.
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
      text, remedy = 'there is none, or it is private', 'correct the name, or log in: hf auth login, or HF_TOKEN'
    elif isinstance(error, errors.RevisionNotFoundError):
      text, remedy = f'it has no branch, tag or commit {revision!r}', 'correct what follows the @'
    elif isinstance(error, errors.LocalEntryNotFoundError):
      text = f'{page} cannot be reached, and the files are not in the cache of this host'
      remedy = 'check the network and HF_ENDPOINT, or download the folder elsewhere and give its path'
    else:
      remedy = 'check the name, the network and the disk'
    raise UserError(f'{url} cannot be read: {text}; {remedy}.') from error
  return root, name
