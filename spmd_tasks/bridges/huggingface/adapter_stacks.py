"""Several low-rank adapters beside the model of a folder, which requests choose by name: `adapters` of an experiment.

    spmd-tasks --exp hf.Model --set model=FOLDER --mode serve --set 'adapters={"french": "peft/fr", "law": "runs/lora"}'

An adapter is a folder of `peft`, or the directory of a job that trains adapters of the same folder. `open_sources`
finds out what each is, `add_choices` makes room for all of them beside each kernel (adapters/choices.py), and
`stacked_adapters` reads and stacks them on the mesh. Ranks are filled up with zeros, and each adapter's scale is
multiplied into its B. A kernel that an adapter does not adapt has zeros.

Shapes: L layers, N adapters with the base as number 0, I and O the dims of a kernel, R rank.
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
from spmd_tasks.programs.job_directory import SavedSteps
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.dequantized import dequantized_specs
from spmd_tasks.store_files import place_to_read

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}')
_Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSource:
  """The place that an adapter is read from, and its settings.

  Fields:
    path: a folder of `peft`, or the directory of a job that trains low-rank adapters.
    is_job: which of the two.
    adapters: its settings, by the names of the weights that it adapts.
    is_averaged: whether the job evaluates and serves its averaged weights (`task.eval_with_ema`).
  """

  path: str
  is_job: bool
  adapters: Mapping[str, LowRankAdapter]
  is_averaged: bool = False


def open_sources(adapters: Mapping[str, str], folder: Folder) -> dict[str, AdapterSource]:
  """Finds out what each adapter is, by name.

  Args:
    adapters: name -> a folder of `peft`, or the directory of a job.
    folder: of the base.

  Raises:
    UserError: a name or a place cannot be used.
  """
  sources = {}
  for name, path in adapters.items():
    if not _NAME.fullmatch(name):
      raise UserError(f'adapters has the name {name!r}: use letters, digits and . _ : / - only, at most 100.')
    place = place_to_read(path)
    if (place / 'adapter_config.json').exists():
      sources[name] = AdapterSource(path=str(place), is_job=False, adapters=open_adapter(place).adapters(folder))
    elif (place / 'config.json').exists():
      sources[name] = _source_of_job(place, folder)
    else:
      raise UserError(
        f'adapters has {name!r} in {place}, where there is neither an adapter_config.json of peft nor the config.json '
        'of a job: correct the path.'
      )
    if any(adapter.use_dora for adapter in sources[name].adapters.values()):
      raise UserError(
        f'the adapter {name!r} in {place} scales the columns of kernels (use_dora), which adapters beside others '
        'cannot do: serve it alone, or merge it (--mode export --format hf).'
      )
  return sources


def add_choices(model: fdl.Config, sources: Mapping[str, AdapterSource]) -> None:
  """Makes room beside each kernel of a model's config for the adapters of all sources.

  Raises:
    UserError: a source adapts what the model does not have.
  """
  known = adaptable_weights(model)
  for name, source in sources.items():
    for kernel in source.adapters:
      if kernel not in known:
        raise UserError(f'the adapter {name!r} in {source.path} adapts {kernel}, which this model does not have.')
  for kernel in sorted({kernel for source in sources.values() for kernel in source.adapters}):
    own = [source.adapters[kernel] for source in sources.values() if kernel in source.adapters]
    choice = AdapterChoices(rank=max(adapter.rank for adapter in own), choices=tuple(sources))
    add_adapters(model, [f'^{re.escape(kernel)}$'], choice, setting='adapters')


def _source_of_job(directory: epath.Path, folder: Folder) -> AdapterSource:
  saved = read_saved_config(directory / 'config.json')
  # The digest of the folder says whether it is the same; its path need not be.
  overrides = [f'model={folder.path}'] if 'model' in saved['config'] else []
  try:
    task = from_json(saved, overrides).parts['task']
  except UserError as error:  # as where the job's experiment is a class of the user's own, which a file cannot import
    raise UserError(
      f'the job in {directory} cannot be read: {error} A folder of peft needs no experiment: --mode export '
      '--format peft.'
    ) from error
  built = {name: fdl.build(each) for name, each in adapters_of(task.model).items()}
  found = {
    name: dataclasses.replace(each, names=()) for name, each in built.items() if isinstance(each, LowRankAdapter)
  }
  if not found:
    raise UserError(f'the job in {directory} has no low-rank adapters: serve it alone (--job_log_dir {directory}).')
  return AdapterSource(path=str(directory), is_job=True, adapters=found, is_averaged=task.eval_with_ema)


def stacked_adapters(model: PartitionedModel, folder: Folder, sources: Mapping[str, AdapterSource]) -> Any:
  """Returns the padded stacked adapters, a tree like all weights with None for those of the base.

  Args:
    model: of a task whose model has the adapters of all sources as AdapterChoices.
    folder: of the base.
    sources: by name.

  Raises:
    UserError: an adapter is of another model, has numbers that are not finite, or belongs to another base.
    CheckpointError: a job has no checkpoint that can be read.
  """
  canonical = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
  specs = dequantized_specs(model.weight_specs)
  places = {name: AdapterNames(kernel=name) for name in adapters_of(model.task.model)}
  made: dict[str, np.ndarray] = {}
  for names in places.values():
    made |= {part: np.zeros(canonical[part].shape, np.float32) for part in (names.a, names.b)}
  for number, (choice, source) in enumerate(sources.items(), 1):
    shapes: dict[str, tuple[int, ...]] = {}
    for kernel, adapter in source.adapters.items():  # without the dim that counts adapters, behind that of layers
      names, dim = places[kernel], int(specs[kernel].stacked > 0)
      (*a, _), b = (made[part].shape[:dim] + made[part].shape[dim + 1 :] for part in (names.a, names.b))
      shapes |= {names.a: (*a, adapter.rank), names.b: (*b[:dim], adapter.rank, *b[dim + 1 :])}
    arrays = _read(source, shapes, folder, model.mesh)
    if amiss := sorted(name for name, array in arrays.items() if not np.isfinite(array).all()):
      raise UserError(f'the adapter {choice!r} in {source.path} has numbers in {amiss[0]} that are not finite.')
    for kernel, adapter in source.adapters.items():
      names, own = places[kernel], (slice(None),) * int(specs[kernel].stacked > 0) + (number,)
      made[names.a][(*own, ..., slice(adapter.rank))] = arrays[names.a]
      made[names.b][(*own, slice(adapter.rank))] = arrays[names.b] * adapter.scale
  return _place(model, made)


def _read(source: AdapterSource, shapes: _Shapes, folder: Folder, mesh: Any) -> dict[str, np.ndarray]:
  if source.is_job:
    return _read_job(source, shapes, str(folder.path), NamedSharding(mesh, PartitionSpec()))
  adapter = open_adapter(source.path)
  check_base_of_folder(adapter, str(folder.path))
  return adapter.read_arrays(shapes, folder)


def _read_job(source: AdapterSource, shapes: _Shapes, folder: str, everywhere: NamedSharding) -> dict[str, np.ndarray]:
  """Reads the newest checkpoint of a job, which has these weights and no others: those that the job serves alone."""
  path, subtree = source.path, 'learner/ema_weights' if source.is_averaged else 'weights'
  with contextlib.closing(SavedSteps(epath.Path(path)).open_checkpoints(read_only=True)) as checkpointer:
    saved = {leaf.name: tuple(leaf.shape) for leaf in checkpointer.saved_leaves(subtree=subtree)}
    state = checkpointer.saved_leaves(subtree='learner/opt_state')
    if not source.is_averaged and names_evaluation_weights(leaf.name for leaf in state):
      raise UserError(
        f'the job in {path} trained other weights than those to evaluate with (schedule_free, lookahead or sam): merge '
        'it (--mode export --format hf), and serve that folder.'
      )
    if others := sorted(saved.keys() - shapes.keys()):
      raise UserError(
        f'the job in {path} has trained {others[0]}, which is no adapter: merge it (--mode export --format hf), and '
        'serve that folder.'
      )
    if different := sorted(name for name, shape in shapes.items() if saved.get(name) != shape):
      name = different[0]
      raise UserError(
        f'the job in {path} has {name} as {list(saved.get(name, ()))} and not as {list(shapes[name])}: it is of '
        'another model.'
      )
    wanted = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=everywhere) for name, shape in shapes.items()}
    restored = checkpointer.restore_weights(traverse_util.unflatten_dict(wanted, sep='/'), subtree=subtree)
    check_base(restored, describe_base(folder), checkpointer.path)
  return {name: np.asarray(leaf) for name, leaf in traverse_util.flatten_dict(restored.state, sep='/').items()}


def _place(model: PartitionedModel, arrays: Mapping[str, np.ndarray]) -> Any:
  """Puts stacks in the layout of checkpoints onto the mesh."""
  true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')
  padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  weights: dict[str, Any] = dict.fromkeys(padded)
  for name, array in arrays.items():
    array, target = array.reshape(true[name].shape), padded[name]
    array = np.pad(array, [(0, size - own) for own, size in zip(array.shape, target.shape, strict=True)])
    weights[name] = jax.make_array_from_callback(target.shape, target.sharding, array.__getitem__)
  return traverse_util.unflatten_dict(weights, sep='/')
