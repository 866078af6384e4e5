"""AttentionLayout: how the mesh splits the rows, tokens and heads of queries."""

import dataclasses

from jax.sharding import PartitionSpec

from spmd_tasks.sharding import SplitDims, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import current_sharding_scope, even_spec, num_parts, spec_axes

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayout:
  """The mesh axes, of more than one device, that split queries, and into how many parts.

  Attributes:
    rows, tokens, heads: the axes that split B, T and H.
    num_rows, num_tokens, num_heads: the numbers of parts.
  """

  rows: Axes = ()
  tokens: Axes = ()
  heads: Axes = ()
  num_rows: int = 1
  num_tokens: int = 1
  num_heads: int = 1


def attention_layout(split_dims: SplitDims, num_rows: int) -> AttentionLayout:
  """Returns how the current mesh and axis rules split queries of these split dims; nothing outside of a scope."""
  scope = current_sharding_scope()
  if scope is None or split_dims is None:
    return AttentionLayout()
  sizes = scope.mesh.shape
  spec = split_dims_to_partition_spec(split_dims, scope.mesh.axis_names, scope.axis_rules)
  first, *others = spec_axes(spec, 4)
  (even,) = spec_axes(even_spec(PartitionSpec(first), (num_rows,), sizes), 1)
  rows, tokens, heads, _ = (tuple(axis for axis in axes if sizes[axis] > 1) for axes in (even, *others))
  return AttentionLayout(
    rows=rows,
    tokens=tokens,
    heads=heads,
    num_rows=num_parts(rows, sizes),
    num_tokens=num_parts(tokens, sizes),
    num_heads=num_parts(heads, sizes),
  )
