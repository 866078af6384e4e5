"""export_folder: writes a model as a folder in Hugging Face's format, which `transformers` loads.

    export_folder(Path('out'), model, weights, origin=folder)    # weights: name -> LazyArray, as checkpoints have them

One tensor is in memory at a time. The folder appears under its name when it is complete.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import os
from pathlib import Path
import shutil
from typing import Any

import numpy as np

from spmd_tasks.bridges._lazy_arrays import LazyArray
from spmd_tasks.bridges._rules import RuleTable
from spmd_tasks.bridges.huggingface._config_keys import INERT, Values
from spmd_tasks.bridges.huggingface._decoder import Decoder
from spmd_tasks.bridges.huggingface._describe import describe_model, layer_places
from spmd_tasks.bridges.huggingface._families import FAMILIES, Family
from spmd_tasks.bridges.huggingface._folder import CONFIG_FILE, Folder
from spmd_tasks.bridges.huggingface._safetensors import MAX_SHARD_BYTES, dtype_of, write_tensors
from spmd_tasks.errors import UserError

_COPIED = (
  *('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'tokenizer.model'),
  *('vocab.json', 'merges.txt', 'vocab.txt', 'generation_config.json', 'chat_template.jinja', 'chat_template.json'),
  'additional_chat_templates',
)


def export_folder(
  target: Path,
  model: Any,
  weights: Mapping[str, LazyArray],
  *,
  origin: Folder | None = None,
  tokenizer_file: Path | None = None,
  settings: Mapping[str, Any] = {},
  dtype: str | None = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  is_writer: bool = True,
  on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> str:
  """Writes a folder; returns its architecture.

  Args:
    target: of the folder; nothing is there yet.
    model: a LanguageModel.
    weights: its weights by name, as checkpoints have them.
    origin: the folder that the model began from: its family, the settings that do not change the model, its tokenizer,
      generation config and chat template are taken over.
    tokenizer_file: a tokenizer.json, where there is no origin.
    settings: keys of config.json that do not change the model, such as `eos_token_id`.
    dtype: of the tensors; None: of those of the origin, or float32.
    max_shard_bytes: of one safetensors file.
    is_writer: whether this process writes; reading the weights may need all processes.
    on_tensor: called after each tensor with the numbers of written and of all tensors.

  Raises:
    UserError: no family has this model, or there is something at the target.
  """
  if is_writer and target.exists():
    raise UserError(f'{target} exists: name a folder that does not, or move it away.')
  decoder = describe_model(model)
  family, keys = _family_of(decoder, origin)
  tensors = _tensors(model, weights, decoder, family, origin, dtype)
  config = _config(family, keys, origin, settings, tensors)
  partial = target.parent / f'.{target.name}.partial'
  if is_writer:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_text(partial / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + '\n')
    copied = [] if origin is None else [origin.path / name for name in _COPIED]
    for path in [*copied, *([] if tokenizer_file is None else [tokenizer_file])]:
      if path.is_dir():
        shutil.copytree(path, partial / path.name)
      elif path.exists():
        shutil.copyfile(path, partial / path.name)
  writing = write_tensors(partial, tensors, is_writer=is_writer, max_shard_bytes=max_shard_bytes)
  for done, _ in enumerate(writing, 1):
    on_tensor(done, len(tensors))
  if is_writer:
    os.replace(partial, target)
    _sync(target.parent)
  return family.architecture


def _family_of(decoder: Decoder, origin: Folder | None) -> tuple[Family, Values]:
  """Returns the family that has the Decoder, and its keys of config.json: the origin's if possible."""
  if origin is not None:
    return origin.family, origin.family.write(decoder)
  reasons = []
  for family in FAMILIES.values():
    try:
      return family, family.write(decoder)
    except UserError as error:
      reasons.append(f'{family.architecture}: {error}')
  raise UserError('no family of Hugging Face has this model:\n  ' + '\n  '.join(reasons))


def _tensors(
  model: Any,
  weights: Mapping[str, LazyArray],
  decoder: Decoder,
  family: Family,
  origin: Folder | None,
  dtype: str | None,
) -> dict[str, LazyArray]:
  table = RuleTable(
    rules=family.rules(decoder, layer_places(model.stack)), source='the folder', target='the model'
  ).inverse()
  names = [slot.name for rule in table.rules for slot in rule.target]
  if dtype is not None:
    dtypes = dict.fromkeys(names, dtype_of(dtype))
  elif origin is not None:
    dtypes = {name: dtype_of(origin.stored_dtype(name)) for name in names}
  else:
    dtypes = dict.fromkeys(names, np.dtype('float32'))
  made = table.convert_lazily(weights, {name: _Typed(dtypes[name]) for name in names})
  table.check(weights, made)  # of the weights, each is used exactly once
  return made if origin is None else made | origin.tensors_aside


@dataclasses.dataclass(frozen=True)
class _Typed:
  dtype: np.dtype


def _config(
  family: Family,
  keys: Values,
  origin: Folder | None,
  settings: Mapping[str, Any],
  tensors: Mapping[str, LazyArray],
) -> Values:
  if origin is None:  # without these keys, transformers would take tokens of the family's own vocabulary
    settings = {'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None, **settings}
  kept = {} if origin is None else {key: value for key, value in origin.config.items() if key in INERT}
  for key in ('auto_map', 'torch_dtype'):
    kept.pop(key, None)
  model_type = next(name for name, each in FAMILIES.items() if each is family)
  largest = max(tensors.values(), key=lambda tensor: np.prod(tensor.shape))
  return {
    **settings,
    **kept,
    **keys,
    'architectures': [family.architecture],
    'model_type': model_type,
    'dtype': largest.dtype.name,
  }


def _write_text(path: Path, text: str) -> None:
  with path.open('w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def _sync(directory: Path) -> None:
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
