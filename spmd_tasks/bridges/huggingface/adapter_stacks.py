"""Stacks several low-rank adapters of one model, so that each request can choose one by name.

    spmd-tasks --exp hf.Model --set model=FOLDER --mode serve --set 'adapters={"french": "peft/fr", "law": "runs/lora"}'

An adapter is a folder of `peft`, or the directory of a job that trained adapters of the same folder. `open_sources`
reads their settings, `add_choices` adds weights for all of them to each kernel (adapters/choices.py), and
`stacked_adapters` reads and stacks them on the mesh. Ranks are padded with zeros, and each adapter's scale is
multiplied into its B. An adapter is zero for kernels that it does not adapt.

Shapes: L layers, N adapters (number 0 is the base), I and O the dims of a kernel, R rank.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import re
from typing import Any

from etils import epath
import fiddle as fdl
from flax import traverse_util
import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.adapters import LowRankAdapter, add_adapters
from spmd_tasks.adapters.adapted_weights import AdapterNames, adaptable_weights, adapters_of
from spmd_tasks.adapters.choices import AdapterChoices
from spmd_tasks.bridges.huggingface._folder import Folder
from spmd_tasks.bridges.huggingface._peft import open_adapter
from spmd_tasks.bridges.huggingface.base_digest import check_base, check_base_of_folder, describe_base
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.errors import UserError
from spmd_tasks.learning.evaluation_weights import names_evaluation_weights
from spmd_tasks.programs.job_directory import CheckpointRecord
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.dequantized import dequantized_specs
from spmd_tasks.store_files import place_to_read

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSource:
  """The files and the settings of an adapter.

  Attributes:
    path: a folder of `peft`, or the directory of a job that trained low-rank adapters.
    is_job: whether it is the directory of a job.
    adapters: name of an adapted weight -> settings.
    is_averaged: whether the job evaluates its averaged weights (`task.eval_with_ema`).
  """

  path: str
  is_job: bool
  adapters: Mapping[str, LowRankAdapter]
  is_averaged: bool = False


def open_sources(adapters: Mapping[str, str], folder: Folder) -> dict[str, AdapterSource]:
  """Reads the settings of each adapter.

  Args:
    adapters: name -> a folder of `peft`, or the directory of a job.
    folder: the folder of the base.

  Raises:
    UserError: a name is invalid, or a path has no supported adapter.
  """
  sources = {}
  for name, path in adapters.items():
    if not _NAME.fullmatch(name):
      raise UserError(
        f'adapters has the name {name!r}, which must be at most 100 letters, digits and . _ : / -, and start with a '
        'letter or digit.'
      )
    place = place_to_read(path)
    if (place / 'adapter_config.json').exists():
      sources[name] = AdapterSource(path=str(place), is_job=False, adapters=open_adapter(place).adapters(folder))
    elif (place / 'config.json').exists():
      sources[name] = _source_of_job(place, folder)
    else:
      raise UserError(
        f'adapters has {name!r} in {place}, which has neither an adapter_config.json of `peft` nor the config.json of '
        'a job: correct the path.'
      )
    if any(adapter.use_dora for adapter in sources[name].adapters.values()):
      raise UserError(
        f'the adapter {name!r} in {place} has use_dora, which adapters chosen by name do not support: serve it alone, '
        'or merge it (--mode export --format hf).'
      )
  return sources


def add_choices(model: fdl.Config, sources: Mapping[str, AdapterSource]) -> None:
  """Adds the adapters of all sources to the kernels of a model's config.

  Raises:
    UserError: a source adapts a kernel that the model does not have.
  """
  known = adaptable_weights(model)
  for name, source in sources.items():
    for kernel in source.adapters:
      if kernel not in known:
        raise UserError(f'the adapter {name!r} in {source.path} adapts {kernel}, which this model does not have.')
  for kernel in sorted({kernel for source in sources.values() for kernel in source.adapters}):
    ranks = [source.adapters[kernel].rank for source in sources.values() if kernel in source.adapters]
    choice = AdapterChoices(rank=max(ranks), choices=tuple(sources))
    add_adapters(model, [f'^{re.escape(kernel)}$'], choice, setting='adapters')


def _source_of_job(directory: epath.Path, folder: Folder) -> AdapterSource:
  saved = read_saved_config(directory / 'config.json')
  # The folder may have moved since; `_read_job` compares digests.
  overrides = [f'model={folder.path}'] if 'model' in saved['config'] else []
  try:
    task = from_json(saved, overrides).parts['task']
  except UserError as error:  # for example, the user's own experiment class cannot be imported from config.json
    raise UserError(
      f'the job in {directory} cannot be read: {error} Export its adapters (--mode export --format peft), and serve '
      'that folder.'
    ) from error
  adapters = {name: fdl.build(config) for name, config in adapters_of(task.model).items()}
  low_rank = {
    name: dataclasses.replace(adapter, names=())
    for name, adapter in adapters.items()
    if isinstance(adapter, LowRankAdapter)
  }
  if not low_rank:
    raise UserError(f'the job in {directory} has no low-rank adapters: serve it alone (--job_log_dir {directory}).')
  return AdapterSource(path=str(directory), is_job=True, adapters=low_rank, is_averaged=task.eval_with_ema)


def stacked_adapters(model: PartitionedModel, folder: Folder, sources: Mapping[str, AdapterSource]) -> Any:
  """Returns the padded stacked adapters, as a tree like all weights with None for the base's.

  Args:
    model: the partitioned model, which has AdapterChoices of all sources.
    folder: the folder of the base.
    sources: name -> source.

  Raises:
    UserError: an adapter does not fit the model, belongs to another base, or has values that are not finite.
    CheckpointError: a job has no readable checkpoint.
  """
  canonical = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
  specs = dequantized_specs(model.weight_specs)
  weight_names = {kernel: AdapterNames(kernel=kernel) for kernel in adapters_of(model.task.model)}
  stacks: dict[str, np.ndarray] = {}
  for names in weight_names.values():
    stacks |= {part: np.zeros(canonical[part].shape, np.float32) for part in (names.a, names.b)}
  for number, (choice, source) in enumerate(sources.items(), 1):
    shapes: dict[str, tuple[int, ...]] = {}
    for kernel, adapter in source.adapters.items():  # without N, which follows L
      names, dim = weight_names[kernel], int(specs[kernel].stacked > 0)
      (*a, _), b = (stacks[part].shape[:dim] + stacks[part].shape[dim + 1 :] for part in (names.a, names.b))
      shapes |= {names.a: (*a, adapter.rank), names.b: (*b[:dim], adapter.rank, *b[dim + 1 :])}
    arrays = _read_source(source, shapes, folder, model.mesh)
    if nonfinite := sorted(name for name, array in arrays.items() if not np.isfinite(array).all()):
      raise UserError(f'the adapter {choice!r} in {source.path} has values in {nonfinite[0]} that are not finite.')
    for kernel, adapter in source.adapters.items():
      names, index = weight_names[kernel], (slice(None),) * int(specs[kernel].stacked > 0) + (number,)
      stacks[names.a][(*index, ..., slice(adapter.rank))] = arrays[names.a]
      stacks[names.b][(*index, slice(adapter.rank))] = arrays[names.b] * adapter.scale
  return _place_on_mesh(model, stacks)


def _read_source(
  source: AdapterSource, shapes: Mapping[str, tuple[int, ...]], folder: Folder, mesh: Any
) -> dict[str, np.ndarray]:
  if source.is_job:
    return _read_job(source, shapes, str(folder.path), NamedSharding(mesh, PartitionSpec()))
  adapter = open_adapter(source.path)
  check_base_of_folder(adapter, str(folder.path))
  return adapter.read_arrays(shapes, folder)


def _read_job(
  source: AdapterSource, shapes: Mapping[str, tuple[int, ...]], folder: str, replicated: NamedSharding
) -> dict[str, np.ndarray]:
  """Reads the evaluation weights of a job's newest checkpoint, which must be adapters of these shapes."""
  path, subtree = source.path, 'learner/ema_weights' if source.is_averaged else 'weights'
  with contextlib.closing(CheckpointRecord(epath.Path(path)).open_checkpoints(read_only=True)) as checkpointer:
    saved = {leaf.name: tuple(leaf.shape) for leaf in checkpointer.saved_leaves(subtree=subtree)}
    state = checkpointer.saved_leaves(subtree='learner/opt_state')
    if not source.is_averaged and names_evaluation_weights(leaf.name for leaf in state):
      raise UserError(
        f'the job in {path} evaluates other weights than it trains (schedule_free, lookahead or sam): merge them '
        '(--mode export --format hf), and serve that folder.'
      )
    if others := sorted(saved.keys() - shapes.keys()):
      raise UserError(
        f'the job in {path} also trained {others[0]}, which is not an adapter: merge it (--mode export --format hf), '
        'and serve that folder.'
      )
    if different := sorted(name for name, shape in shapes.items() if saved.get(name) != shape):
      name = different[0]
      raise UserError(
        f'the job in {path} has {name} {list(saved.get(name, ()))}, but this model has {list(shapes[name])}: use '
        'adapters of this model.'
      )
    abstract = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=replicated) for name, shape in shapes.items()}
    restored = checkpointer.restore_weights(traverse_util.unflatten_dict(abstract, sep='/'), subtree=subtree)
    check_base(restored, describe_base(folder), checkpointer.path)
  return {name: np.asarray(leaf) for name, leaf in traverse_util.flatten_dict(restored.state, sep='/').items()}


def _place_on_mesh(model: PartitionedModel, arrays: Mapping[str, np.ndarray]) -> Any:
  """Pads and shards stacks, which are in the checkpoint layout."""
  true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')
  padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  weights: dict[str, Any] = dict.fromkeys(padded)
  for name, array in arrays.items():
    array, target = array.reshape(true[name].shape), padded[name]
    array = np.pad(array, [(0, padded - size) for size, padded in zip(array.shape, target.shape, strict=True)])
    weights[name] = jax.make_array_from_callback(target.shape, target.sharding, array.__getitem__)
  return traverse_util.unflatten_dict(weights, sep='/')
