"""Converts Praxis' declarations of variables (WeightHParams) to our boxes and WeightSpecs, and calls Praxis on them.

with praxis_context(do_eval=True):
  model.apply(cast_variables(variables, weight_hparams, model.fprop_dtype), ...)
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

PRNG_IMPL = 'rbg'  # Paxml's generator of random keys
_STAYS_FLOAT32 = base_layer.WeightHParamsCollection.DISALLOW_BFLOAT16_CONVERSION
_UNDECAYED = base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION


def box_variables(variables: Any, weight_hparams: Any, mesh_axis_names: Sequence[str] | None) -> dict[str, Any]:
  """Puts each variable in a WeightBox with the split dims and collections of its WeightHParams.

  Both are trees by collection. Indices in split dims count along `mesh_axis_names`; None: nothing is split.
  """

  def box(path: Any, hparams: base_layer.WeightHParams, value: Any) -> WeightBox:
    split_dims: Iterable[Any] = ()
    if mesh_axis_names is not None and hparams.tensor_split_dims_mapping is not None:
      name = jax.tree_util.keystr(path, simple=True, separator='.')
      split_dims = partition_of(hparams.full_split_dims_mapping, mesh_axis_names, f'the split dims of {name}')
    tags = tuple(hparams.collections or ())
    tags += ('no_decay',) if _UNDECAYED in tags else ()
    # Not stacked: checkpoints keep Pax' own layout of repeats and stages.
    return WeightBox(value=value, split_dims=filled_split_dims(split_dims, value.ndim), tags=tags, stacked=0)

  return dict(jax.tree_util.tree_map_with_path(box, weight_hparams, variables))


def partition_of(split_dims: Sequence[Any], mesh_axis_names: Sequence[str], what: str) -> PartitionSpec:
  """Returns the PartitionSpec of Pax' split dims; `what` is what they are in an error.

  Raises a UserError if they name an axis that the mesh does not have.
  """
  if isinstance(split_dims, str) or not hasattr(split_dims, '__iter__'):
    raise UserError(f'{what}, {split_dims!r}, must be a list with one entry per dim: a mesh axis, several, or None.')
  for entry in split_dims:
    for axis in entry if isinstance(entry, list | tuple) else (entry,):
      known = mesh_axis_names if isinstance(axis, str) else range(-1, len(mesh_axis_names))
      if axis is not None and axis not in known:
        raise UserError(
          f'{what}, {tuple(split_dims)}, have the mesh axis {axis!r}, but task.model.mesh_axis_names are '
          f'{list(mesh_axis_names)}: correct one of the two.'
        )
  return base_layer.to_partition_spec(split_dims, mesh_axis_names)


def remove_split_dims(model: Any) -> None:
  """Takes all split dims and meshes out of the config of a model and its layers."""
  for config, _ in pax_fiddle.daglish.iterate(model):
    if isinstance(config, pax_fiddle.Config) and issubclass(config.cls, base_layer.BaseLayer):
      for name in ('weight_split_dims_mapping', 'activation_split_dims_mapping'):
        mapping = getattr(config, name, None)
        for field in mapping.__arguments__ if isinstance(mapping, pax_fiddle.Config) else ():
          setattr(mapping, field, None)
      config.ici_mesh_shape = config.dcn_mesh_shape = config.mesh_axis_names = None


def spec_of_partition(leaf: jax.ShapeDtypeStruct, partition: PartitionSpec) -> WeightSpec:
  """Returns the WeightSpec of a leaf whose PartitionSpec is known."""
  return WeightSpec(shape=leaf.shape, init=None, split_dims=filled_split_dims(partition, leaf.ndim), dtype=leaf.dtype)


def filled_split_dims(entries: Iterable[Any], ndim: int) -> tuple[SplitDim, ...]:
  """Returns one entry per dim: those of a spec that may be shorter, then None."""
  given = [None if entry == () else entry for entry in entries]
  return (*given, *[None] * (ndim - len(given)))


@contextlib.contextmanager
def praxis_context(*, do_eval: bool | None = None) -> Iterator[None]:
  """Enters the context in which a Praxis layer is initialized or applied, or a function of Paxml is called.

  `maybe_shard` finds the mesh of the step in it; a layer that splits an activation along an axis that the model's mesh
  does not have raises a UserError. `do_eval` is the layers' mode; functions of `paxml.trainer_lib` set it themselves.
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
      _refuse_unknown_axis(error)
      raise


def _refuse_unknown_axis(error: AssertionError) -> None:
  """Raises a UserError for an axis about which Praxis only asserts that the mesh has it."""
  frames = list(traceback.walk_tb(error.__traceback__))
  found = frames[-1][0].f_locals
  if frames[-1][0].f_code.co_name == '_parse_split_dims' and {'s_i', 'dims_mapping', 'mesh_axis_names'} <= found.keys():
    raise UserError(
      f'a layer splits dims as {tuple(found["dims_mapping"])}, but {found["s_i"]!r} is none of '
      f'task.model.mesh_axis_names, {list(found["mesh_axis_names"])}: correct its activation_split_dims_mapping.'
    ) from error


def cast_variables(variables: Any, weight_hparams: Any, dtype: Any) -> dict[str, Any]:
  """Returns variables as Paxml hands them to a model that computes in `dtype`: float32 ones cast to it.

  Both trees are by collection; some WeightHParams declare that they stay float32.
  """

  def cast(hparams: base_layer.WeightHParams, x: jax.Array) -> jax.Array:
    return x if _STAYS_FLOAT32 in (hparams.collections or ()) else cast_floats(x, dtype)

  return {name: jax.tree.map(cast, weight_hparams[name], tree) for name, tree in variables.items()}


def cast_floats(tree: Any, dtype: Any) -> Any:
  """Returns the tree with its float32 arrays cast to the dtype."""
  return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, tree)
