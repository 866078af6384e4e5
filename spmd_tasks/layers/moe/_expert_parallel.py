"""Expert parallelism: classifies each mesh axis (exchange, sum, gather, FSDP) and defines how tokens reach experts.

Shapes: B batch, T sequence, D model, F ffn, n tokens of this device, k choices per token, R rows; E all experts in
`ExpertLayout`, but the experts of one device in `Exchange` and `Dispatch`; X devices of the exchange.

The axis rules alone decide. A mesh axis that splits

  tokens and experts   is an exchange axis: tokens reach experts on other devices by a `Dispatch`, or the weights of
                       these experts are gathered;
  experts only         is a sum axis: all its devices have the same tokens, each computes its own experts, and the
                       results are summed;
  tokens and F         is a gather axis: every device gathers the tokens of all and computes a part of F; the partial
                       results are summed and scattered (MegaBlocks' hidden sharding, for fewer experts than devices);
  F only               is a sum axis too: tensor parallelism;
  tokens only          is data parallelism: experts are replicated (T5X's second data axis). If the axis also splits D
                       of the weights, the weights are gathered for the computation (FSDP).

Device i of the exchange holds the experts with ids i * E to (i + 1) * E - 1; the id X * E means 'not routed'. A
`Dispatch` is one strategy for moving tokens between these devices (_dispatches.py).
"""

from collections.abc import Mapping
import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import Ratios
from spmd_tasks.layers.moe._experts import Axes, ExpertWeights
from spmd_tasks.sharding import SplitDims, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import ShardingScope, num_parts, spec_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLayout:
  """The mesh axes that split each dim, without axes of size 1.

  Attributes:
    batch, seq: axes of B and T of the tokens.
    expert, hidden: axes of E and F of the weights.
    up_embed, down_embed: axes of D of `up` (and `gate`) and of `down` that split tokens too (FSDP).
    stored: further axes of E, the fastest, which split tokens too; the weights are gathered along them.
  """

  batch: Axes
  seq: Axes
  expert: Axes
  hidden: Axes
  up_embed: Axes
  down_embed: Axes
  stored: Axes = ()

  def with_experts_gathered(self) -> 'ExpertLayout':
    """Returns the layout without exchange axes: weights are gathered along them. A UserError if that is impossible."""
    apart, exchange = tuple(axis for axis in self.expert if axis not in self.tokens), self.exchange
    if apart + exchange != self.expert:
      raise UserError(
        f"dispatch='gather' needs the mesh axes that split only experts before the axes that also split tokens, but "
        f'experts are split over {self.expert}, of which {exchange} also split tokens: reorder these axes.'
      )
    return dataclasses.replace(self, expert=apart, stored=exchange)

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
    """Axes that split experts or F but no tokens: their devices compute partial results for the same tokens."""
    return tuple(axis for axis in self.expert + self.hidden if axis not in self.tokens)

  @property
  def all_axes(self) -> Axes:
    """Axes that split tokens, experts or F."""
    return self.tokens + self.summed


def expert_layout(
  scope: ShardingScope, weights: ExpertWeights, activation_split_dims: SplitDims, tokens: tuple[int, ...]
) -> ExpertLayout:
  """Returns the layout that the scope's mesh and axis rules give to experts and to activations [B, T, D].

  An axis that does not divide B or T of `tokens`, a shape, does not split it. Raises a UserError if `up` and `down` are
  split differently in E or F.
  """

  def in_use(spec: PartitionSpec) -> list[Axes]:
    return [tuple(axis for axis in axes if scope.mesh.shape[axis] > 1) for axes in spec_axes(spec, 3)]

  def axes_of(split_dims: SplitDims) -> list[Axes]:
    return in_use(split_dims_to_partition_spec(split_dims, scope.mesh.axis_names, scope.axis_rules))

  batch, seq, _ = in_use(scope.activation_spec((activation_split_dims or ())[:2], tokens, is_even=True))
  expert, up_embed, hidden = axes_of(weights.up_split_dims)
  down_expert, down_hidden, down_embed = axes_of(weights.down_split_dims)
  if (expert, hidden) != (down_expert, down_hidden):
    raise UserError(
      f'up_split_dims={weights.up_split_dims} split experts over {expert} and their hidden layer over {hidden}, but '
      f'down_split_dims={weights.down_split_dims} split them over {down_expert} and {down_hidden}: give both the same.'
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
  """Keeps the assignments to experts of this device's exchange and renumbers these experts from 0.

  Runs on each device, inside a `shard_map`. Devices along an axis that splits experts but no tokens have the same
  tokens; each of these devices keeps the assignments to its own experts.

  Args:
    expert_ids, gates: int32 [..., k] in [0, E], where E means 'not routed', and float32 [..., k].
    num_experts: E, a multiple of the number of parts that experts are split into.
    layout, axis_sizes: of the mesh.

  Returns:
    expert_ids and gates, renumbered; the number of experts in the exchange means 'not routed', with gate 0.
  """
  if layout.exchange == layout.expert:
    return expert_ids, gates
  experts_per_device = num_experts // num_parts(layout.expert, axis_sizes)
  part, expert = jnp.divmod(expert_ids, experts_per_device)
  is_here, exchange_index, stride = expert_ids < num_experts, jnp.zeros_like(part), 1
  for axis in reversed(layout.expert):  # the first axis varies slowest
    part, coordinate = jnp.divmod(part, axis_sizes[axis])
    if axis in layout.exchange:
      exchange_index += coordinate * stride
      stride *= axis_sizes[axis]
    else:
      is_here &= coordinate == jax.lax.axis_index(axis)
  unrouted = stride * experts_per_device
  expert_ids = jnp.where(is_here, exchange_index * experts_per_device + expert, unrouted)
  return expert_ids, jnp.where(is_here, gates, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
  """The devices along the exchange axes: they hold different tokens and different experts.

  Attributes:
    axes: the exchange axes, the slowest first.
    num_devices: X.
    capacity_factor: the rows in buffers of fixed size, as a multiple of the rows under balanced routing; None makes
      room for the worst case.
    all_axes: all mesh axes that split tokens, experts or F, the exchange axes included.
  """

  axes: Axes
  num_devices: int
  capacity_factor: float | None
  all_axes: Axes


class Dispatch(Protocol):
  """Moves tokens to experts on other devices and the results back. Runs on every device, inside a `shard_map`."""

  def __call__(
    self, x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: ExpertWeights, exchange: Exchange
  ) -> tuple[jax.Array, Ratios]:
    """Returns (y [n, D], statistics): for each token of this device the sum of its experts' outputs by their gates.

    The statistics are the same on all devices; they include `fraction_dropped` if assignments can be dropped.

    Args:
      x: [n, D].
      expert_ids: int32 [n, k] in [0, X * E]. The id X * E means 'not routed'; the other ids of a token are distinct.
      gates: float32 [n, k], 0 for an assignment that is not routed.
      experts: the experts of this device.
      exchange: the devices that exchange tokens.
    """
