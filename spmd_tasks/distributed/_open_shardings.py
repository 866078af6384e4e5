"""Programs for fake devices without sharding constraints that constrain nothing.

Where some axes of a mesh are manual, as in a stage of a pipeline, JAX lowers every operation with a constraint of its
result after it, in which every dim may be split as the compiler likes (its source says that such constraints bloat the
program). A pipeline's train step has 1,400 of them beside 7,000 operations, which XLA reads, propagates and removes.
"""

from typing import Any

_LOWER = 'lower_with_sharding_in_types'


def leave_out_open_shardings() -> None:
  """Leaves them out of every program for CPUs alone that is lowered from now on; other programs keep theirs.

  There is no public way to do so. Where JAX has no such function any more, nothing changes.
  """
  try:
    from jax._src.interpreters import mlir  # jax.extend.mlir has the function, but not what calls it

    lower = getattr(mlir, _LOWER)
  except (ImportError, AttributeError):
    return
  if not getattr(lower, 'leaves_out_open_shardings', False):
    setattr(mlir, _LOWER, _LeavingOut(lower))


class _LeavingOut:
  """JAX's function `(context, operation, abstract value of its result) -> operation with its constraint`."""

  leaves_out_open_shardings = True

  def __init__(self, lower: Any):
    self._lower = lower

  def __call__(self, context: Any, operation: Any, aval: Any) -> Any:
    is_for_cpu = tuple(context.module_context.platforms) == ('cpu',)
    return operation if is_for_cpu and _is_open(aval.sharding) else self._lower(context, operation, aval)


def _is_open(sharding: Any) -> bool:
  """Whether no dim is split by name and no axis of the mesh is explicit, so that the compiler decides everything."""
  mesh, spec = sharding.mesh, sharding.spec
  is_plain = all(axes is None for axes in spec) and not spec.unreduced and not spec.reduced
  return is_plain and not mesh.explicit_axes
