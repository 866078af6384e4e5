"""Weights from a folder in Hugging Face's format, which `init_from = hf:FOLDER` names.

state = state_from_folder(model, folder, seed)      # a new training state, at step 0
variables = variables_from_folder(model, folder)    # for eval, decode and serve, where nothing was trained yet
"""

import json
import math
import os
from pathlib import Path
import sys
from typing import Any

from flax import traverse_util
import jax
import numpy as np
from tqdm import tqdm

from spmd_tasks.decoding import WeightStorage
from spmd_tasks.distributed import is_primary
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment
from spmd_tasks.files import absolute_path
from spmd_tasks.runtime import PartitionedModel, TrainState, Variables
from spmd_tasks.sharding import padding

_PREFIX = 'hf:'


def pretrained_folder(experiment: Experiment) -> str | None:
  """Returns the folder that `init_from` or the experiment itself names; None if it starts from something else."""
  origin = experiment.init_from
  if origin is None and (own := getattr(experiment, 'pretrained', None)):
    return str(absolute_path(own))
  if origin is None or not origin.startswith(_PREFIX):
    return None
  if experiment.init_from_step is not None:
    raise UserError(f'init_from_step = {experiment.init_from_step} has no meaning for {origin}: leave it out.')
  return str(absolute_path(origin.removeprefix(_PREFIX)))


def is_model_folder(path: os.PathLike | str) -> bool:
  """Returns whether a directory has the config.json of a model in Hugging Face's format, of whatever family."""
  try:
    return isinstance(json.loads((Path(path) / 'config.json').read_text(encoding='utf-8'))['model_type'], str)
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return False


def state_from_folder(model: PartitionedModel, folder: str, seed: int) -> TrainState:
  """Returns a padded training state at step 0 with the weights of a folder.

  Raises:
    UserError: the folder cannot be read, or its model is not that of the task.
  """
  abstract = model.abstract_state.weights
  weights = _read(model, folder)
  return model.init_with(seed, lambda drawn, given: padding.unpad(given, abstract), weights, donate=True)


def variables_from_folder(model: PartitionedModel, folder: str, storage: WeightStorage | None = None) -> Variables:
  """Returns the padded variables with the weights of a folder. Raises a UserError as `state_from_folder`.

  With a storage, each weight is held as that holds it from the moment when it is read.
  """
  if others := sorted(model.abstract_state.non_trainable):
    raise UserError(f'the model has variables beside its weights, {others}, which no folder has.')
  return {'params': _read(model, folder, storage)}


def _read(model: PartitionedModel, folder: str, storage: WeightStorage | None = None) -> Any:
  from spmd_tasks.bridges.huggingface import open_folder  # most jobs begin without a folder

  opened = open_folder(folder)
  leaves = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  num_local = len(jax.local_devices())
  dtypes = {} if storage is None else storage.dtypes
  total = sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(dtypes.get(name, leaf.dtype)).itemsize * num_local
    for name, leaf in leaves.items()
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
    if storage is None:
      return opened.read_weights(model, on_weight=bar.update)
    return opened.read_weights(model, dtypes=storage.dtypes, store=storage.store_one, on_weight=bar.update)
