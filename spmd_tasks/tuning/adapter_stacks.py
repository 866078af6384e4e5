"""Reads several low-rank adapters of one base, from folders or jobs, and stacks them on the mesh.

    sources = open_sources(adapters, folder)        # {'french': AdapterSource(...), 'legal': AdapterSource(...)}
    weights = stacked_adapters(model, folder, held, sources)

The model has room for all of them beside each kernel (adapter_choices.py). Ranks are filled up with zeros, and each
adapter's scale is multiplied into its B. A kernel that an adapter does not adapt has zeros. DoRA becomes one factor per
column, computed from the kernel in the form in which it is stored.

Shapes: L layers, N adapters with the base as number 0, I and O the dims of a kernel, R rank.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import functools
from typing import Any

from etils import epath
from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.programs.saved_steps import SavedSteps
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.weight_numbers import flat_specs
from spmd_tasks.sharding.weights import is_quantized
from spmd_tasks.tuning.adapted_weights import AdapterNames, adapters_of
from spmd_tasks.tuning.adapters import LowRankAdapter, column_lengths
from spmd_tasks.tuning.base_digest import check_base, check_base_of_folder, describe_base

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


def stacked_adapters(model: PartitionedModel, folder: str, held: Any, sources: Mapping[str, AdapterSource]) -> Any:
  """Returns the padded stacked adapters, a tree like all weights with None for those of the base.

  Args:
    model: of a task whose model has the adapters of all sources as AdapterChoices.
    folder: of the base.
    held: the padded weights of the base, as they are stored.
    sources: by name.

  Raises:
    UserError: an adapter is of another model, has numbers that are not finite, or belongs to another base.
    CheckpointError: a job has no checkpoint that can be read.
  """
  canonical = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
  specs = flat_specs(model.weight_specs)
  places = {name: AdapterNames(kernel=name) for name in adapters_of(model.task.model)}
  made: dict[str, np.ndarray] = {}
  for names in places.values():
    made |= {part: np.zeros(canonical[part].shape, np.float32) for part in (names.a, names.b)}
    if names.scale in canonical:
      made[names.scale] = np.zeros(canonical[names.scale].shape, np.float32)  # the magnitudes; 0: not by DoRA
  for number, (choice, source) in enumerate(sources.items(), 1):
    shapes: dict[str, tuple[int, ...]] = {}
    for kernel, adapter in source.adapters.items():
      shapes |= _shapes_alone(made, places[kernel], adapter, _num_layer_dims(specs[kernel]))
    arrays = _read(source, shapes, folder, model.mesh)
    if amiss := sorted(name for name, array in arrays.items() if not np.isfinite(array).all()):
      raise UserError(f'the adapter {choice!r} in {source.path} has numbers in {amiss[0]} that are not finite.')
    for kernel, adapter in source.adapters.items():
      names, own = places[kernel], (slice(None),) * _num_layer_dims(specs[kernel]) + (number,)
      made[names.a][(*own, ..., slice(adapter.rank))] = arrays[names.a]
      made[names.b][(*own, slice(adapter.rank))] = arrays[names.b] * adapter.scale
      if adapter.use_dora:
        made[names.scale][own] = arrays[names.magnitude]
  return _place(model, made, places, traverse_util.flatten_dict(held, sep='/'))


def _num_layer_dims(spec: Any) -> int:
  """Returns the number of dims of a weight in a checkpoint that count layers."""
  return int(spec.stacked > 0)


def _shapes_alone(
  stacked: Mapping[str, np.ndarray], names: AdapterNames, adapter: LowRankAdapter, dim: int
) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of one adapter's own weights in a checkpoint, of stacks that count adapters in the dim `dim`."""
  a, b = (stacked[part].shape for part in (names.a, names.b))
  shapes = {names.a: (*a[:dim], *a[dim + 1 : -1], adapter.rank), names.b: (*b[:dim], adapter.rank, *b[dim + 2 :])}
  return shapes | ({names.magnitude: (*b[:dim], *b[dim + 2 :])} if adapter.use_dora else {})


def _read(source: AdapterSource, shapes: _Shapes, folder: str, mesh: Any) -> dict[str, np.ndarray]:
  if source.is_job:
    return _read_job(source, shapes, folder, NamedSharding(mesh, PartitionSpec()))
  from spmd_tasks.bridges.huggingface import open_adapter, open_folder

  adapter = open_adapter(source.path)
  check_base_of_folder(adapter, folder)
  return adapter.read_arrays(shapes, open_folder(folder))


def _read_job(source: AdapterSource, shapes: _Shapes, folder: str, everywhere: NamedSharding) -> dict[str, np.ndarray]:
  """Reads the newest checkpoint of a job, which has these weights and no others: those that the job serves alone."""
  path, subtree = source.path, 'learner/ema_weights' if source.is_averaged else 'weights'
  with contextlib.closing(SavedSteps(epath.Path(path)).open_checkpoints(read_only=True)) as checkpointer:
    saved = {leaf.name: tuple(leaf.shape) for leaf in checkpointer.saved_leaves(subtree=subtree)}
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
    check_base(restored, describe_base(folder, checkpointer.path.parent), checkpointer.path)
  return {name: np.asarray(leaf) for name, leaf in traverse_util.flatten_dict(restored.state, sep='/').items()}


def _place(
  model: PartitionedModel,
  arrays: Mapping[str, np.ndarray],
  places: Mapping[str, AdapterNames],
  held: Mapping[str, Any],
) -> Any:
  """Puts stacks in the layout of checkpoints onto the mesh, and makes factors of DoRA's magnitudes."""
  true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')
  padded = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  specs = flat_specs(model.weight_specs)
  weights: dict[str, Any] = dict.fromkeys(padded)
  for name, array in arrays.items():
    array, target = array.reshape(true[name].shape), padded[name]
    array = np.pad(array, [(0, size - own) for own, size in zip(array.shape, target.shape, strict=True)])
    weights[name] = jax.make_array_from_callback(target.shape, target.sharding, array.__getitem__)
  for kernel, names in places.items():
    if names.scale in arrays:
      num_stacked, shape = specs[kernel].stacked, specs[kernel].shape
      factors = functools.partial(_column_factors, shape=tuple(shape), num_stacked=num_stacked)
      weights[names.scale] = jax.jit(factors, out_shardings=padded[names.scale].sharding)(
        held[kernel], weights[names.a], weights[names.b], weights[names.scale]
      )
  return traverse_util.unflatten_dict(weights, sep='/')


def _column_factors(
  kernel: Any, a: jax.Array, b: jax.Array, magnitudes: jax.Array, *, shape: tuple[int, ...], num_stacked: int
) -> jax.Array:
  """Returns magnitudes / lengths of the adapted kernel's columns, [L..., N, O...]; 1 where the magnitude is 0.

  All arrays may be padded, A and B otherwise than the kernel.

  Args:
    kernel: [L..., I..., O...], or in int8 with its scales.
    a: [L..., N, I..., R].
    b: [L..., N, R, O...].
    magnitudes: [L..., N, O...].
    shape: of the kernel without padding.
    num_stacked: how many dims count layers. One layer at a time has its kernel in float32.
  """
  if num_stacked:
    of_layer = functools.partial(_column_factors, shape=shape[1:], num_stacked=num_stacked - 1)
    return jax.lax.map(lambda layer: of_layer(*layer), (kernel, a, b, magnitudes))
  kernel = (kernel.unbox() if is_quantized(kernel) else kernel).astype(jnp.float32)
  kernel, num_inputs = kernel[tuple(map(slice, shape))], a.ndim - 2
  inputs, outputs = shape[:num_inputs], shape[num_inputs:]

  def factors(adapter: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    a, b, magnitudes = adapter
    product = jnp.tensordot(a[tuple(map(slice, inputs))], b[(slice(None), *map(slice, outputs))], axes=1)
    lengths, magnitudes = column_lengths(kernel + product, num_inputs), magnitudes[tuple(map(slice, outputs))]
    is_known = (magnitudes != 0) & (lengths > 0)
    return jnp.where(is_known, magnitudes / jnp.where(is_known, lengths, 1.0), 1.0)

  made = jax.lax.map(factors, (a, b, magnitudes))
  widths = [(0, size - own) for size, own in zip(magnitudes.shape, made.shape, strict=True)]
  return jnp.pad(made, widths, constant_values=1.0)
