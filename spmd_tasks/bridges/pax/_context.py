"""Sets up the context in which Praxis' functions are called (generator, mode, mesh), and casts variables."""

from collections.abc import Iterator
import contextlib
import traceback
from typing import Any

import jax
import jax.numpy as jnp
from praxis import base_layer

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import current_sharding_scope

_STAYS_FLOAT32 = base_layer.WeightHParamsCollection.DISALLOW_BFLOAT16_CONVERSION


@contextlib.contextmanager
def praxis_context(prng_impl: str, *, do_eval: bool | None = None) -> Iterator[None]:
  """Enters the context in which a Praxis layer is initialized or applied, or a function of Paxml is called.

  `maybe_shard` finds the mesh of the step in it.

  Args:
    prng_impl: the generator of the keys that are passed in.
    do_eval: the layers' mode; None where the function sets it by itself, as those of `paxml.trainer_lib` do.

  Raises:
    UserError: a layer splits an activation along an axis that the model's mesh does not have.
  """
  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.default_prng_impl(prng_impl))
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

  Args:
    variables: a tree of arrays by collection.
    weight_hparams: their WeightHParams, of these collections at least; some declare that they stay float32.
    dtype: the model's `fprop_dtype`.
  """

  def cast(hparams: base_layer.WeightHParams, x: jax.Array) -> jax.Array:
    return x if _STAYS_FLOAT32 in (hparams.collections or ()) else cast_floats(x, dtype)

  return {name: jax.tree.map(cast, weight_hparams[name], tree) for name, tree in variables.items()}


def cast_floats(tree: Any, dtype: Any) -> Any:
  """Returns the tree with its float32 arrays cast to the dtype."""
  return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, tree)
