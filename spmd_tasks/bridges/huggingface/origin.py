"""FolderOrigin: the weights of a folder in Hugging Face's format, which `init_from = hf:FOLDER` names.

    FolderOrigin(path='models/llama')                                 # what Experiment.origin() returns
    state = state_from_folder(model, open_folder(folder), seed)       # a new training state, at step 0
    variables = variables_from_folder(model, open_folder(folder))     # for eval, decode and serve

Low-rank adapters start from a folder of `peft`, or are drawn.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import math
import os
from pathlib import Path
import sys
from typing import Any

from absl import logging
from etils import epath
from flax import traverse_util
import jax
import jax.numpy as jnp
from tqdm import tqdm

from spmd_tasks.adapters.adapted_weights import adapters_of
from spmd_tasks.adapters.merging import with_magnitudes
from spmd_tasks.bridges.huggingface._folder import Folder, open_folder
from spmd_tasks.bridges.huggingface._peft import open_adapter
from spmd_tasks.bridges.huggingface._special_keys import NEXTN_KEY
from spmd_tasks.bridges.huggingface.adapter_stacks import AdapterSource, stacked_adapters
from spmd_tasks.bridges.huggingface.base_digest import check_base, check_base_of_folder, describe_base
from spmd_tasks.checkpoints.checkpointer import Restored
from spmd_tasks.decoding.weight_storage import WeightStorage
from spmd_tasks.distributed import is_primary
from spmd_tasks.errors import UserError
from spmd_tasks.files import read_text
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.learning.frozen_weights import FROZEN_TAG, fill_in
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.runtime.dequantized import dequantized_specs
from spmd_tasks.runtime.origin import Base
from spmd_tasks.runtime.task import Variables
from spmd_tasks.sharding import padding
from spmd_tasks.store_files import local_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderOrigin(Base):
  """The weights of a folder, and of adapters beside them.

  Attributes:
    path: of the folder, absolute.
    accept_config_keys: keys of its config.json that are unknown here and do not change what the model computes.
    adapter: a folder of `peft` that the adapters of the model start from; None: they are drawn.
    sources: adapters that requests choose by name; opened where they are needed.
  """

  path: str
  accept_config_keys: tuple[str, ...] = ()
  adapter: str | None = None
  sources: Callable[[], Mapping[str, AdapterSource]] = dict

  def open(self) -> Folder:
    """Reads the config.json of the folder."""
    return open_folder(self.path, accept_config_keys=self.accept_config_keys)

  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Returns the state of a new job at step 0."""
    state = state_from_folder(model, self.open(), seed, self.adapter)
    return state, 0, f'starting from the weights of {self.path}'

  def variables(self, model: PartitionedModel, storage: WeightStorage | None = None) -> Variables:
    """Returns the padded variables, with adapters to choose from if there are any."""
    if sources := self.sources():
      folder = self.open()
      held = _read(model, folder, storage)
      return {'params': fill_in(held, stacked_adapters(model, folder, sources))}
    return variables_from_folder(model, self.open(), storage, self.adapter)

  def frozen(self, model: PartitionedModel, storage: WeightStorage | None = None) -> Any:
    """Returns the padded frozen weights, with None for those that are trained."""
    return _read(model, self.open(), storage, only_frozen=True)

  def identity(self) -> Mapping[str, str]:
    """Returns the folder with its digest."""
    return describe_base(self.path)

  def check(self, restored: Restored, checkpoints: epath.Path) -> None:
    """Raises a CheckpointError if the checkpoint belongs to a folder with another digest."""
    check_base(restored, self.identity(), checkpoints)


def open_origin(place: str, step: int | None) -> FolderOrigin:
  """Returns the origin that `init_from = hf:PLACE` or `hf:PLACE?accept_config_keys=KEY,KEY` names.

  Raises a UserError: there is a step, or another setting.
  """
  if step is not None:
    raise UserError(f'init_from_step = {step} has no meaning for hf:{place}: leave it out.')
  folder, _, setting = place.partition('?')
  name, _, keys = setting.partition('=')
  if setting and (name != 'accept_config_keys' or not keys):
    raise UserError(f'init_from = hf:{place} has {setting!r}, but a folder has one setting, accept_config_keys=KEY.')
  path = str(local_folder(f'hf:{folder}' if folder.startswith('//') else folder))
  return FolderOrigin(path=path, accept_config_keys=tuple(keys.split(',')) if keys else ())


def recognize(directory: os.PathLike | str) -> tuple[str, list[str]] | None:
  """Returns the experiment and its overrides for a directory that is a model's folder; None for any other."""
  try:
    if not isinstance(json.loads(read_text(Path(directory) / 'config.json'))['model_type'], str):
      return None
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return None
  return 'hf.Model', [f'model={directory}']


def state_from_folder(model: PartitionedModel, folder: Folder, seed: int, adapter: str | None = None) -> TrainState:
  """Returns a padded training state at step 0 with the weights of a folder, and of an adapter's; else those are drawn.

  Raises a UserError if the folder cannot be read, or its model is not that of the task.
  """
  weights, lacks_magnitudes = _read_both(model, folder, adapter)

  def true(leaf: Any, shape: Any) -> Any:
    return None if leaf is None else padding.unpad(leaf, shape)

  def adopt(drawn: Any, given: Any) -> Any:
    unpadded = jax.tree.map(true, given, model.abstract_state.weights, is_leaf=lambda leaf: leaf is None)
    adopted = fill_in(unpadded, drawn)
    return with_magnitudes(model, adopted, only_missing=adapter is not None) if lacks_magnitudes else adopted

  return model.init_with(seed, adopt, weights, donate=True)


def variables_from_folder(
  model: PartitionedModel, folder: Folder, storage: WeightStorage | None = None, adapter: str | None = None
) -> Variables:
  """Returns the padded variables with the weights of a folder. Raises a UserError as `state_from_folder`.

  Without an adapter's folder, adapters are zero, so that the model computes what its base does. With a storage, each
  weight is converted as soon as it is read.
  """
  if others := sorted(model.abstract_state.non_trainable):
    raise UserError(f'the model has variables beside its weights, {others}, which no folder has.')
  weights, lacks_magnitudes = _read_both(model, folder, adapter, storage)
  flat = traverse_util.flatten_dict(weights, sep='/')
  padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  flat |= {
    name: jnp.zeros(padded[name].shape, padded[name].dtype, device=padded[name].sharding)
    for name, leaf in flat.items()
    if leaf is None
  }
  weights = traverse_util.unflatten_dict(flat, sep='/')
  return {'params': with_magnitudes(model, weights, only_missing=True) if lacks_magnitudes else weights}


def _read_both(
  model: PartitionedModel, folder: Folder, adapter: str | None, storage: WeightStorage | None = None
) -> tuple[Any, bool]:
  """Returns the weights of a folder and of an adapter's, and whether DoRA's magnitudes of some layers are in neither.

  They are then the lengths of the base's columns: of numbers, and not of what a storage holds of them.
  """
  opened = None if adapter is None else open_adapter(adapter)
  has_dora = any(each.use_dora for each in adapters_of(model.task.model).values())
  lacks_magnitudes = has_dora and (opened is None or opened.lacks_layers(folder))
  weights = _read(model, folder, None if lacks_magnitudes else storage)
  if opened is not None:
    check_base_of_folder(opened, str(folder.path))
    weights = fill_in(weights, opened.read_weights(model, folder))
  return weights, lacks_magnitudes


def _read(
  model: PartitionedModel, folder: Folder, storage: WeightStorage | None = None, *, only_frozen: bool = False
) -> Any:
  if folder.num_missing_nextn_heads:
    text = '%s has num_nextn_predict_layers = %s, but no tensors of %d of these heads: the model is without them.'
    logging.warning(text, folder.path, folder.config[NEXTN_KEY], folder.num_missing_nextn_heads)
  specs = dequantized_specs(model.weight_specs)
  left_out = {name for name, spec in specs.items() if ADAPTER_TAG in spec.tags}
  if only_frozen:
    left_out |= {name for name, spec in specs.items() if FROZEN_TAG not in spec.tags}
  # The largest first, while memory is free: to store a stack as separate layers takes its memory twice.
  names = sorted(specs.keys() - left_out, key=lambda name: (-math.prod(specs[name].shape), name))
  storage = storage or WeightStorage(model, None)  # as in training, where frozen kernels may be in int8
  is_shown = is_primary() and sys.stderr.isatty()
  bar = tqdm(names, unit=' weights', desc=f'Reading {folder.path.name}', file=sys.stderr, disable=not is_shown)
  return folder.read_weights(model, names=bar, dtypes=storage.dtypes, store=storage.store_one)
