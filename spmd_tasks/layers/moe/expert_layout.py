"""ExpertLayout: over which mesh axes tokens and experts are split, and what each axis is by that.

Shapes: B batch, T sequence, D model, F ffn, E experts, n tokens, k choices per token.

Axis rules alone decide. A mesh axis that splits

    tokens and experts   is an axis of the exchange: tokens meet experts of other devices;
    experts only         has the same tokens on all its devices: each computes for its own experts, results are summed;
    tokens and F         gathers the tokens of its devices, each of which computes a part of F; partial results are
                         summed and scattered (MegaBlocks' hidden sharding, for fewer experts than devices);
    F only               is tensor parallelism: partial results are summed;
    tokens only          is data parallelism: experts are replicated over it (T5X's second data axis). Where it splits D
                         of the weights too, they are gathered for the computation (FSDP).
"""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe.exchange import Axes
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.sharding.specs import (
  ShardingScope,
  SplitDims,
  num_parts,
  spec_axes,
  split_dims_to_partition_spec,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLayout:
  """The mesh axes of each dim, without axes of one device.

  Attributes:
    batch, seq: of B and T of the tokens.
    expert, hidden: of E and F of the weights.
    up_embed, down_embed: of D of `up` (and `gate`) and of `down`, as far as they split tokens too.
  """

  batch: Axes
  seq: Axes
  expert: Axes
  hidden: Axes
  up_embed: Axes
  down_embed: Axes

  @property
  def tokens(self) -> Axes:
    """Axes that split the tokens."""
    return self.batch + self.seq

  @property
  def exchange(self) -> Axes:
    """Axes that split tokens and experts."""
    return tuple(axis for axis in self.expert if axis in self.tokens)

  @property
  def gathered(self) -> Axes:
    """Axes that split tokens and F."""
    return tuple(axis for axis in self.hidden if axis in self.tokens)

  @property
  def summed(self) -> Axes:
    """Axes whose devices compute parts of the results for the same tokens."""
    return tuple(axis for axis in self.expert + self.hidden if axis not in self.tokens)

  @property
  def all_axes(self) -> Axes:
    """Axes over which anything differs."""
    return self.tokens + self.summed


def expert_layout(scope: ShardingScope, weights: ExpertWeights, activation_split_dims: SplitDims) -> ExpertLayout:
  """The layout that the scope's mesh and axis rules give to experts and to activations [B, T, D].

  Raises:
    UserError: `up` and `down` are split differently in E or F.
  """

  def axes_of(split_dims: SplitDims) -> list[Axes]:
    spec = split_dims_to_partition_spec(split_dims, scope.mesh.axis_names, scope.axis_rules)
    return [tuple(axis for axis in axes if scope.mesh.shape[axis] > 1) for axes in spec_axes(spec, 3)]

  batch, seq, _ = axes_of(activation_split_dims)
  expert, up_embed, hidden = axes_of(weights.up_split_dims)
  down_expert, down_hidden, down_embed = axes_of(weights.down_split_dims)
  if (expert, hidden) != (down_expert, down_hidden):
    raise UserError(
      f'up_split_dims={weights.up_split_dims} split experts over {expert} and their hidden layer over {hidden}, but '
      f'down_split_dims={weights.down_split_dims} over {down_expert} and {down_hidden}: they must be the same.'
    )
  return ExpertLayout(
    batch=batch,
    seq=seq,
    expert=expert,
    hidden=hidden,
    up_embed=tuple(axis for axis in up_embed if axis in batch + seq),
    down_embed=tuple(axis for axis in down_embed if axis in batch + seq),
  )


def select_assignments(
  expert_ids: jax.Array, gates: jax.Array, *, num_experts: int, layout: ExpertLayout, axis_sizes: Mapping[str, int]
) -> tuple[jax.Array, jax.Array]:
  """The assignments to experts of this device's exchange, and ids that count these experts only.

  Runs on a device, inside a `shard_map`. Devices that differ in an axis that splits experts but no tokens have the same
  tokens: each leaves to the others what is theirs.

  Args:
    expert_ids: int32 [..., k] in [0, E].
    gates: float32 [..., k].
    num_experts: E, a multiple of the parts that experts are split into.
    layout: the axes.
    axis_sizes: of the mesh.

  Returns:
    expert_ids, int32 [..., k] in [0, the number of experts along the exchange], the last being nowhere; gates, 0 for
    nowhere.
  """
  if layout.exchange == layout.expert:
    return expert_ids, gates
  experts_per_device = num_experts // num_parts(layout.expert, axis_sizes)
  part, expert = jnp.divmod(expert_ids, experts_per_device)
  is_here, exchange_index, stride = expert_ids < num_experts, jnp.zeros_like(part), 1
  for axis in reversed(layout.expert):  # the first axis is the slowest
    part, coordinate = jnp.divmod(part, axis_sizes[axis])
    if axis in layout.exchange:
      exchange_index += coordinate * stride
      stride *= axis_sizes[axis]
    else:
      is_here &= coordinate == jax.lax.axis_index(axis)
  expert_ids = jnp.where(is_here, exchange_index * experts_per_device + expert, stride * experts_per_device)
  return expert_ids, jnp.where(is_here, gates, 0.0)
