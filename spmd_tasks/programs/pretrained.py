"""Weights from a folder in Hugging Face's format, which `init_from = hf:FOLDER` names.

state = state_from_folder(model, folder, seed)      # a new training state, at step 0
variables = variables_from_folder(model, folder)    # for eval, decode and serve, where nothing was trained yet
weights = frozen_from_folder(model, folder)         # what a checkpoint of trained weights leaves out

An experiment whose `adapter` names a folder of `peft` takes the weights of its low-rank adapters from that.
"""

import json
import math
import os
from pathlib import Path
import sys
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from spmd_tasks.decoding.weight_storage import WeightStorage
from spmd_tasks.distributed import is_primary
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment
from spmd_tasks.files import absolute_path, read_text
from spmd_tasks.layers import ADAPTER_TAG
from spmd_tasks.learning import FROZEN_TAG, fill_in
from spmd_tasks.runtime import Part, PartitionedModel, TrainState, Variables, flat_specs, whole_state
from spmd_tasks.sharding import padding
from spmd_tasks.tuning.adapted_weights import adapters_of
from spmd_tasks.tuning.base_digest import check_base_of_folder
from spmd_tasks.tuning.merging import with_magnitudes

_PREFIX = 'hf:'


def pretrained_folder(experiment: Experiment) -> str | None:
  """Returns the folder that `init_from` or the experiment itself names; None if it starts from something else."""
  origin = experiment.init_from
  if origin is None and (own := experiment.pretrained):
    return str(absolute_path(own))
  if origin is None or not origin.startswith(_PREFIX):
    return None
  if experiment.init_from_step is not None:
    raise UserError(f'init_from_step = {experiment.init_from_step} has no meaning for {origin}: leave it out.')
  return str(absolute_path(origin.removeprefix(_PREFIX)))


def is_model_folder(path: os.PathLike | str) -> bool:
  """Returns whether a directory has the config.json of a model in Hugging Face's format, of whatever family."""
  try:
    return isinstance(json.loads(read_text(Path(path) / 'config.json'))['model_type'], str)
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return False


def base_folder(model: PartitionedModel, experiment: Experiment) -> str | None:
  """Returns the folder with the frozen weights of a job, which its checkpoints leave out; None if they have all."""
  return pretrained_folder(experiment) if model.has_frozen_weights else None


def saved_part(model: PartitionedModel, experiment: Experiment) -> Part:
  """Returns which part of a job's state its checkpoints have."""
  return whole_state if base_folder(model, experiment) is None else model.trained_part


def adapter_folder(experiment: Experiment) -> str | None:
  """Returns the folder of `peft` that the experiment's adapters start from; None if they are drawn."""
  return str(absolute_path(experiment.adapter)) if experiment.adapter else None


def state_from_folder(model: PartitionedModel, folder: str, seed: int, adapter: str | None = None) -> TrainState:
  """Returns a padded training state at step 0 with the weights of a folder, and with those of an adapter's folder.

  Without an adapter's folder, adapters are drawn.

  Raises:
    UserError: the folder cannot be read, or its model is not that of the task.
  """
  weights = _read(model, folder)
  lacks_magnitudes, is_given = _lacks_magnitudes(model, folder, adapter), adapter is not None
  if adapter is not None:
    weights = fill_in(weights, _read_adapter(model, folder, adapter))

  def adopt(drawn: Any, given: Any) -> Any:
    def true(leaf: Any, shape: Any) -> Any:
      return None if leaf is None else padding.unpad(leaf, shape)

    adopted = fill_in(jax.tree.map(true, given, model.abstract_state.weights, is_leaf=_is_none), drawn)
    return with_magnitudes(model, adopted, only_missing=is_given) if lacks_magnitudes else adopted

  return model.init_with(seed, adopt, weights, donate=True)


def variables_from_folder(
  model: PartitionedModel, folder: str, storage: WeightStorage | None = None, adapter: str | None = None
) -> Variables:
  """Returns the padded variables with the weights of a folder. Raises a UserError as `state_from_folder`.

  Without an adapter's folder, adapters are zero, so that the model computes what its base does. With a storage, each
  weight is converted as soon as it is read.
  """
  if others := sorted(model.abstract_state.non_trainable):
    raise UserError(f'the model has variables beside its weights, {others}, which no folder has.')
  lacks_magnitudes = _lacks_magnitudes(model, folder, adapter)  # of numbers, not of what is stored of them
  weights = _read(model, folder, None if lacks_magnitudes else storage)
  if adapter is not None:
    weights = fill_in(weights, _read_adapter(model, folder, adapter))
  flat = traverse_util.flatten_dict(weights, sep='/')
  padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  flat = {name: _zeros(padded[name]) if leaf is None else leaf for name, leaf in flat.items()}
  weights = traverse_util.unflatten_dict(flat, sep='/')
  return {'params': with_magnitudes(model, weights, only_missing=True) if lacks_magnitudes else weights}


def base_from_folder(model: PartitionedModel, folder: str, storage: WeightStorage | None = None) -> Any:
  """Returns the padded weights of a folder, a tree like all weights with None for those of adapters."""
  return _read(model, folder, storage)


def frozen_from_folder(model: PartitionedModel, folder: str, storage: WeightStorage | None = None) -> Any:
  """Returns the padded frozen weights, a tree like all weights with None for those that are trained."""
  return _read(model, folder, storage, only_frozen=True)


def _lacks_magnitudes(model: PartitionedModel, folder: str, adapter: str | None) -> bool:
  """Whether some layers' DoRA magnitudes are in no folder; they are then the lengths of the base's columns."""
  if not any(each.use_dora for each in adapters_of(model.task.model).values()):
    return False
  from spmd_tasks.bridges.huggingface import open_adapter, open_folder

  return adapter is None or open_adapter(adapter).lacks_layers(open_folder(folder))


def _is_none(leaf: Any) -> bool:
  return leaf is None


def _zeros(padded: jax.ShapeDtypeStruct) -> jax.Array:
  return jax.jit(lambda: jnp.zeros(padded.shape, padded.dtype), out_shardings=padded.sharding)()


def _read_adapter(model: PartitionedModel, folder: str, adapter: str) -> Any:
  from spmd_tasks.bridges.huggingface import open_adapter, open_folder

  opened = open_adapter(adapter)
  check_base_of_folder(opened, folder)
  return opened.read_weights(model, open_folder(folder))


def _read(
  model: PartitionedModel, folder: str, storage: WeightStorage | None = None, *, only_frozen: bool = False
) -> Any:
  from spmd_tasks.bridges.huggingface import open_folder  # most jobs begin without a folder

  opened = open_folder(folder)
  specs = flat_specs(model.weight_specs)
  left_out = {name for name, spec in specs.items() if ADAPTER_TAG in spec.tags}
  if only_frozen:
    left_out |= {name for name, spec in specs.items() if FROZEN_TAG not in spec.tags}
  leaves = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  leaves = {name: leaf for name, leaf in leaves.items() if name not in left_out}
  num_local = len(jax.local_devices())
  storage = storage or WeightStorage(model, None)  # as in training, where frozen kernels may be in int8
  dtypes = storage.dtypes
  total = sum(
    math.prod(part.sharding.shard_shape(part.shape)) * np.dtype(dtypes.get(name, part.dtype)).itemsize * num_local
    for name, leaf in leaves.items()
    for part in jax.tree.leaves(leaf)
  )
  bar = tqdm(
    total=total,
    unit='B',
    unit_scale=True,
    desc=f'Reading {opened.path.name}',
    file=sys.stderr,
    disable=not is_primary() or not sys.stderr.isatty(),
  )
  with bar:
    return opened.read_weights(
      model, names=leaves, dtypes=storage.dtypes, store=storage.store_one, on_weight=bar.update
    )
