"""FolderOrigin: initializes a model from a Hugging Face folder, as with `init_from = hf:FOLDER`.

    FolderOrigin(path='models/llama')                                 # what Experiment.origin() returns
    state = state_from_folder(model, open_folder(folder), seed)       # a new training state, at step 0
    variables = variables_from_folder(model, open_folder(folder))     # for eval, decode and serve

Low-rank adapters start from a folder of `peft`, or from their initializers.
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
  """The weights of a folder, and of adapters.

  Attributes:
    path: the absolute path of the folder.
    accept_config_keys: unknown keys of its config.json to ignore; see `open_folder`.
    adapter: a folder of `peft` from which the model's adapters start; None for their initializers.
    sources: returns the adapters that requests choose by name.
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
      weights = _read_base(model, folder, storage)
      return {'params': fill_in(weights, stacked_adapters(model, folder, sources))}
    return variables_from_folder(model, self.open(), storage, self.adapter)

  def frozen(self, model: PartitionedModel, storage: WeightStorage | None = None) -> Any:
    """Returns the padded frozen weights, with None for trained weights."""
    return _read_base(model, self.open(), storage, only_frozen=True)

  def identity(self) -> Mapping[str, str]:
    """Returns the folder and its digest."""
    return describe_base(self.path)

  def check(self, restored: Restored, checkpoints: epath.Path) -> None:
    """Raises a CheckpointError if the checkpoint was trained from a folder with another digest."""
    check_base(restored, self.identity(), checkpoints)


def open_origin(place: str, step: int | None) -> FolderOrigin:
  """Returns the origin of `init_from = hf:PLACE` or `hf:PLACE?accept_config_keys=KEY,KEY`.

  Raises a UserError if a step or another setting is given.
  """
  if step is not None:
    raise UserError(f'init_from_step = {step} does not apply to init_from = hf:{place}: leave it out.')
  folder, _, setting = place.partition('?')
  name, _, keys = setting.partition('=')
  if setting and (name != 'accept_config_keys' or not keys):
    raise UserError(f'init_from = hf:{place} has {setting!r}, but the only setting is accept_config_keys=KEY,KEY.')
  path = str(local_folder(f'hf:{folder}' if folder.startswith('//') else folder))
  return FolderOrigin(path=path, accept_config_keys=tuple(keys.split(',')) if keys else ())


def recognize(directory: os.PathLike | str) -> tuple[str, list[str]] | None:
  """Returns the experiment and its overrides for a directory that is a model folder, or else None."""
  try:
    if not isinstance(json.loads(read_text(Path(directory) / 'config.json'))['model_type'], str):
      return None
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return None
  return 'hf.Model', [f'model={directory}']


def state_from_folder(model: PartitionedModel, folder: Folder, seed: int, adapter: str | None = None) -> TrainState:
  """Returns a padded training state at step 0 with the weights of a folder.

  Adapters have the weights of the folder `adapter`, or initial values if it is None.

  Raises a UserError if the folder cannot be read, or its model differs from the task's.
  """
  weights, lacks_magnitudes = _read_base_and_adapter(model, folder, adapter)

  def unpad(leaf: Any, shape: Any) -> Any:
    return None if leaf is None else padding.unpad(leaf, shape)

  def replace_weights(initial: Any, read: Any) -> Any:
    unpadded = jax.tree.map(unpad, read, model.abstract_state.weights, is_leaf=lambda leaf: leaf is None)
    replaced = fill_in(unpadded, initial)
    return with_magnitudes(model, replaced, only_missing=adapter is not None) if lacks_magnitudes else replaced

  return model.init_with(seed, replace_weights, weights, donate=True)


def variables_from_folder(
  model: PartitionedModel, folder: Folder, storage: WeightStorage | None = None, adapter: str | None = None
) -> Variables:
  """Returns the padded variables with the weights of a folder. Raises a UserError like `state_from_folder`.

  Without `adapter`, adapters are zero, so that the model computes what its base does. With `storage`, each weight is
  converted as soon as it is read.
  """
  if collections := sorted(model.abstract_state.non_trainable):
    raise UserError(
      f'the model has the variable collections {collections}, but a folder has only weights: start from a checkpoint.'
    )
  weights, lacks_magnitudes = _read_base_and_adapter(model, folder, adapter, storage)
  flat = traverse_util.flatten_dict(weights, sep='/')
  padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  flat |= {
    name: jnp.zeros(padded[name].shape, padded[name].dtype, device=padded[name].sharding)
    for name, leaf in flat.items()
    if leaf is None
  }
  weights = traverse_util.unflatten_dict(flat, sep='/')
  return {'params': with_magnitudes(model, weights, only_missing=True) if lacks_magnitudes else weights}


def _read_base_and_adapter(
  model: PartitionedModel, folder: Folder, adapter: str | None, storage: WeightStorage | None = None
) -> tuple[Any, bool]:
  """Returns the weights of a folder and its adapter, and whether some layers lack DoRA's magnitudes.

  Missing magnitudes are the norms of the base's columns, so the weights are then read without `storage`.
  """
  adapter_folder = None if adapter is None else open_adapter(adapter)
  has_dora = any(settings.use_dora for settings in adapters_of(model.task.model).values())
  lacks_magnitudes = has_dora and (adapter_folder is None or adapter_folder.lacks_layers(folder))
  weights = _read_base(model, folder, None if lacks_magnitudes else storage)
  if adapter_folder is not None:
    check_base_of_folder(adapter_folder, str(folder.path))
    weights = fill_in(weights, adapter_folder.read_weights(model, folder))
  return weights, lacks_magnitudes


def _read_base(
  model: PartitionedModel, folder: Folder, storage: WeightStorage | None = None, *, only_frozen: bool = False
) -> Any:
  if folder.num_missing_nextn_heads:
    assert folder.family.nextn is not None
    key, text = folder.family.nextn.key, '%s has %s = %s, but no tensors of %d of these heads: they are left out.'
    logging.warning(text, folder.path, key, folder.config[key], folder.num_missing_nextn_heads)
  specs = dequantized_specs(model.weight_specs)
  left_out = {name for name, spec in specs.items() if ADAPTER_TAG in spec.tags}
  if only_frozen:
    left_out |= {name for name, spec in specs.items() if FROZEN_TAG not in spec.tags}
  # Largest first, while memory is free: storing a stack as separate layers takes its memory twice.
  names = sorted(specs.keys() - left_out, key=lambda name: (-math.prod(specs[name].shape), name))
  storage = storage or WeightStorage(model, None)  # as in training, with frozen kernels possibly in int8
  is_shown = is_primary() and sys.stderr.isatty()
  bar = tqdm(names, unit=' weights', desc=f'Reading {folder.path.name}', file=sys.stderr, disable=not is_shown)
  return folder.read_weights(model, names=bar, dtypes=storage.dtypes, store=storage.store_one)
