"""The digest of a job's base: tells the folder that a job's frozen weights are from, from any other.

    base = describe_base(folder)                  # {'folder': ..., 'sha256': ...}
    check_base(restored, base, checkpoints)       # a checkpoint of adapters belongs to one base

It is a SHA-256 over config.json and, of each safetensors file, the header (names, shapes, dtypes) and the first bytes
of every tensor. So it costs no pass over the weights, and a folder with one tensor trained further has another one.
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
  """Returns what a checkpoint of trained weights says about the folder with the others.

  Raises:
    UserError: a file is no safetensors file.
  """
  return {'folder': folder, 'sha256': folder_digest(folder)}


def folder_digest(folder: str) -> str:
  """Returns the SHA-256 of a folder in Hugging Face's format, in hexadecimal; see `describe_base`."""
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
        tensors = {name: each for name, each in json.loads(header).items() if name != '__metadata__'}
        places = sorted(each['data_offsets'] for each in tensors.values())
      except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{path} is no safetensors file, or damaged: {error}.') from error
      for begin, end in places:
        file.seek(first + begin)
        digest.update(file.read(min(_BYTES_PER_TENSOR, end - begin)))
  return digest.hexdigest()


def check_base(restored: Restored, base: Mapping[str, str], checkpoints: os.PathLike | str) -> None:
  """Raises a CheckpointError if a checkpoint belongs to another base than that of the job."""
  if said := _another_base(restored.base or {}, base):
    raise CheckpointError(f'the checkpoint of step {restored.step} in {checkpoints} {said}')


def check_base_of_folder(adapter: AdapterFolder, folder: str) -> None:
  """Raises a UserError if a folder of `peft` says that it belongs to another base; all processes call it.

  One without base.json, as `peft` writes them, belongs to any base that it fits.
  """
  saved = primary_decides(adapter.base, 'base_of_adapter', limit_s=_LIMIT_S)
  if saved is not None and (said := _another_base(saved, describe_base(folder))):
    raise UserError(f'{adapter.path} {said}')


def _another_base(saved: Mapping[str, Any], base: Mapping[str, str]) -> str:
  """Returns the rest of the sentence about adapters that belong to another base than this; '' if they do not."""
  if saved.get('sha256') == base['sha256']:
    return ''
  return (
    f'has adapters of the base {saved.get("folder")} with the digest {str(saved.get("sha256"))[:12]}, but '
    f'{base["folder"]} has {base["sha256"][:12]}: give the folder that they were trained on, unchanged.'
  )
