"""Converts Praxis's WeightHParams to WeightBoxes and WeightSpecs, and enters the context that Praxis layers need:

    with praxis_context(do_eval=True):
      model.apply(cast_variables(variables, weight_hparams, model.fprop_dtype), ...)

Weights are in trees by collection, such as `params`.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import traceback
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from praxis import base_layer, pax_fiddle

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.specs import SplitDim, current_sharding_scope
from spmd_tasks.sharding.weights import WeightBox

PRNG_IMPL = 'rbg'  # Paxml's PRNG implementation
_STAYS_FLOAT32 = base_layer.WeightHParamsCollection.DISALLOW_BFLOAT16_CONVERSION
_UNDECAYED = base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION


def box_variables(variables: Any, weight_hparams: Any, mesh_axis_names: Sequence[str] | None) -> dict[str, Any]:
  """Puts each variable in a WeightBox with the split dims and collections of its WeightHParams.

  Args:
    variables: trees of arrays by collection.
    weight_hparams: trees of WeightHParams by collection.
    mesh_axis_names: the axes to which indices in split dims refer; None to shard nothing.
  """

  def box(path: Any, hparams: base_layer.WeightHParams, value: Any) -> WeightBox:
    split_dims: Iterable[Any] = ()
    if mesh_axis_names is not None and hparams.tensor_split_dims_mapping is not None:
      name = jax.tree_util.keystr(path, simple=True, separator='.')
      split_dims = partition_spec(hparams.full_split_dims_mapping, mesh_axis_names, f'tensor_split_dims of {name}')
    tags = tuple(hparams.collections or ())
    tags += ('no_decay',) if _UNDECAYED in tags else ()
    # Not stacked: checkpoints keep Pax's layout of repeats and stages.
    return WeightBox(value=value, split_dims=padded_split_dims(split_dims, value.ndim), tags=tags, stacked=0)

  return dict(jax.tree_util.tree_map_with_path(box, weight_hparams, variables))


def partition_spec(split_dims: Sequence[Any], mesh_axis_names: Sequence[str], setting: str) -> PartitionSpec:
  """Returns the PartitionSpec of Pax's split dims; `setting` is their name in errors.

  Raises a UserError if they name an axis that the mesh does not have.
  """
  if isinstance(split_dims, str) or not hasattr(split_dims, '__iter__'):
    raise UserError(f'{setting} = {split_dims!r} must be a list with a mesh axis, several, or None for each dim.')
  for entry in split_dims:
    for axis in entry if isinstance(entry, list | tuple) else (entry,):
      axes = mesh_axis_names if isinstance(axis, str) else range(-1, len(mesh_axis_names))
      if axis is not None and axis not in axes:
        raise UserError(
          f'{setting} = {tuple(split_dims)} has the mesh axis {axis!r}, but task.model.mesh_axis_names is '
          f'{list(mesh_axis_names)}: correct one of them.'
        )
  return base_layer.to_partition_spec(split_dims, mesh_axis_names)


def remove_split_dims(model: Any) -> None:
  """Removes all split dims and meshes from the configs of a model and its layers."""
  for config, _ in pax_fiddle.daglish.iterate(model):
    if isinstance(config, pax_fiddle.Config) and issubclass(config.cls, base_layer.BaseLayer):
      for name in ('weight_split_dims_mapping', 'activation_split_dims_mapping'):
        mapping = getattr(config, name, None)
        for field in mapping.__arguments__ if isinstance(mapping, pax_fiddle.Config) else ():
          setattr(mapping, field, None)
      config.ici_mesh_shape = config.dcn_mesh_shape = config.mesh_axis_names = None


def weight_spec(leaf: jax.ShapeDtypeStruct, partition: PartitionSpec) -> WeightSpec:
  """Returns the WeightSpec of a leaf with this PartitionSpec."""
  return WeightSpec(shape=leaf.shape, init=None, split_dims=padded_split_dims(partition, leaf.ndim), dtype=leaf.dtype)


def padded_split_dims(entries: Iterable[Any], ndim: int) -> tuple[SplitDim, ...]:
  """Returns the entries of a PartitionSpec, padded with None to `ndim`."""
  split_dims = [None if entry == () else entry for entry in entries]
  return (*split_dims, *[None] * (ndim - len(split_dims)))


@contextlib.contextmanager
def praxis_context(*, do_eval: bool | None = None) -> Iterator[None]:
  """Enters the context in which Praxis layers and functions of Paxml are called.

  It sets the mesh of the step for `maybe_shard`, and raises a UserError if a layer shards an activation over an axis
  that the model's mesh does not have.

  Args:
    do_eval: the mode of the layers; None for functions of `paxml.trainer_lib`, which set it.
  """
  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.default_prng_impl(PRNG_IMPL))
    if do_eval is not None:
      hparams = base_layer.JaxContext.HParams(do_eval=do_eval)
      stack.enter_context(base_layer.JaxContext.new_context(hparams=hparams))
    scope = current_sharding_scope()
    if scope is not None and isinstance(scope.mesh, jax.sharding.Mesh):
      stack.enter_context(scope.mesh)
    try:
      yield
    except AssertionError as error:
      _raise_unknown_axis(error)
      raise


def _raise_unknown_axis(error: AssertionError) -> None:
  """Raises a UserError if the error is Praxis's bare assertion that the mesh has an axis."""
  frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
  variables = frame.f_locals
  if frame.f_code.co_name == '_parse_split_dims' and {'s_i', 'dims_mapping', 'mesh_axis_names'} <= variables.keys():
    raise UserError(
      f'a layer has activation_split_dims_mapping = {tuple(variables["dims_mapping"])}, but {variables["s_i"]!r} is '
      f'not in task.model.mesh_axis_names = {list(variables["mesh_axis_names"])}: correct one of them.'
    ) from error


def cast_variables(variables: Any, weight_hparams: Any, dtype: Any) -> dict[str, Any]:
  """Casts float32 variables to the dtype of the computation as Paxml does, unless their WeightHParams forbid it."""

  def cast(hparams: base_layer.WeightHParams, x: jax.Array) -> jax.Array:
    return x if _STAYS_FLOAT32 in (hparams.collections or ()) else cast_floats(x, dtype)

  return {name: jax.tree.map(cast, weight_hparams[name], tree) for name, tree in variables.items()}


def cast_floats(tree: Any, dtype: Any) -> Any:
  """Casts the float32 arrays of a tree to the dtype."""
  return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, tree)
