"""Digests the folder of a base model, and checks that adapters belong to it.

    base = describe_base(folder)                  # {'folder': ..., 'sha256': ...}
    check_base(restored, base, checkpoints)       # a checkpoint of adapters belongs to one base

The digest is a SHA-256 over config.json and, for each safetensors file, the header (names, shapes, dtypes) and the
first bytes of every tensor. So it does not read all weights, yet differs if any tensor was trained further.
"""

from collections.abc import Mapping
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from spmd_tasks.bridges.huggingface._peft import AdapterFolder
from spmd_tasks.checkpoints.checkpointer import Restored
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import UserError

_LIMIT_S = 3600
_BYTES_PER_TENSOR = 4096


def describe_base(folder: str) -> Mapping[str, str]:
  """Returns the folder of a base model and its digest, as saved in checkpoints of adapters.

  Raises:
    UserError: a file is not a safetensors file.
  """
  return {'folder': folder, 'sha256': folder_digest(folder)}


def folder_digest(folder: str) -> str:
  """Returns the digest of a folder in hexadecimal; see the top of the file."""
  digest = hashlib.sha256()
  for path in sorted([*Path(folder).glob('config.json'), *Path(folder).glob('*.safetensors')]):
    digest.update(f'{path.name} {path.stat().st_size}\n'.encode())
    with open(path, 'rb') as file:
      if path.suffix == '.json':
        digest.update(file.read())
        continue
      header = file.read(int.from_bytes(file.read(8), 'little'))
      digest.update(header)
      first = file.tell()
      try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != '__metadata__'}
        offsets = sorted(entry['data_offsets'] for entry in entries.values())
      except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{path} is not a complete safetensors file ({error}): download it again.') from error
      for begin, end in offsets:
        file.seek(first + begin)
        digest.update(file.read(min(_BYTES_PER_TENSOR, end - begin)))
  return digest.hexdigest()


def check_base(restored: Restored, base: Mapping[str, str], checkpoints: os.PathLike | str) -> None:
  """Raises a CheckpointError if a checkpoint belongs to another base model."""
  if mismatch := _describe_mismatch(restored.base or {}, base):
    raise CheckpointError(f'the checkpoint of step {restored.step} in {checkpoints} {mismatch}')


def check_base_of_folder(adapter: AdapterFolder, folder: str) -> None:
  """Raises a UserError if the base.json of a `peft` folder names another base model; all processes must call it.

  Folders without base.json, which `peft` itself writes, are accepted.
  """
  saved = primary_decides(adapter.base, 'base_of_adapter', limit_s=_LIMIT_S)
  if saved is not None and (mismatch := _describe_mismatch(saved, describe_base(folder))):
    raise UserError(f'{adapter.path} {mismatch}')


def _describe_mismatch(saved: Mapping[str, Any], base: Mapping[str, str]) -> str:
  """Returns the end of an error message if adapters of the base `saved` do not belong to `base`, or else ''."""
  if saved.get('sha256') == base['sha256']:
    return ''
  return (
    f'has adapters of the base {saved.get("folder")} with the digest {str(saved.get("sha256"))[:12]}, but '
    f'{base["folder"]} has {base["sha256"][:12]}: use the folder on which the adapters were trained, unchanged.'
  )
