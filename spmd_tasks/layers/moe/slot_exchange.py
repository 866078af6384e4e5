"""SlotExchange: the slots of tokens split over some mesh axes, computed by experts split over others.

Shapes: B batch, T sequence, D model, F ffn; G groups of S tokens, E experts, C slots per expert and group.

Everything is said to the partitioner by sharding constraints (GShard), and it makes the collectives. It makes good ones
of constraints that move one mesh axis at a time between dims that this axis divides. Given more at once, or an uneven
dim, it gathers whole arrays on every device instead. So G and E are padded, G is written as one dim per mesh axis, and
the axes take one step each.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.batched_ffn import batched_ffn
from spmd_tasks.layers.moe.expert_layout import expert_layout
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.sharding.specs import SplitDims, constrain, current_sharding_scope

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotExchange:
  """Which mesh axes split what, and into how many parts each; without any, everything is on one device.

  Attributes:
    tokens: axes that split the tokens, hence the groups.
    expert, hidden: axes that split E and F.
    axis_sizes: name and size of every axis above.
  """

  tokens: Axes = ()
  expert: Axes = ()
  hidden: Axes = ()
  axis_sizes: tuple[tuple[str, int], ...] = ()

  def _num_parts(self, axes: Axes) -> int:
    sizes = dict(self.axis_sizes)
    return math.prod(sizes[axis] for axis in axes)

  def padded_num_experts(self, num_experts: int) -> int:
    """E rounded up so that every device has equally many experts."""
    return _round_up(num_experts, self._num_parts(self.expert))

  def group_tokens(self, x: jax.Array, group_size: int, fill_value: float = 0) -> jax.Array:
    """[G, S, N] for x [B, T, N], B padded with `fill_value` so that every device has equally many whole groups."""
    batch_size, length, _ = x.shape
    rows_per_group = math.lcm(group_size, length) // length
    num_rows = _round_up(batch_size, rows_per_group * self._num_parts(self.tokens))
    x = jnp.pad(x, ((0, num_rows - batch_size), (0, 0), (0, 0)), constant_values=fill_value)
    return self._split_groups(x.reshape(-1, group_size, x.shape[-1]))

  def ungroup_tokens(self, x: jax.Array, batch_size: int, length: int) -> jax.Array:
    """[B, T, N] for x [G, S, N], without the padding."""
    return self._split_groups(x).reshape(-1, length, x.shape[-1])[:batch_size]

  def _split_groups(self, x: jax.Array) -> jax.Array:
    """`x` [G, ...], split as the tokens are."""
    return constrain(x, (self.tokens, *[None] * (x.ndim - 1)))

  def apply_experts(self, rows: jax.Array, weights: ExpertWeights) -> jax.Array:
    """[G, E, C, D]: rows [G, E, C, D] through the experts' networks.

    Args:
      rows: G and E padded.
      weights: E not padded.
    """
    num_groups, num_experts, capacity, model_dim = rows.shape
    sizes = dict(self.axis_sizes)
    # [E, an axis' size for each axis of the tokens, the groups of one device, C, D]
    rows = self._split_groups(rows)
    rows = rows.swapaxes(0, 1).reshape(num_experts, *[sizes[axis] for axis in self.tokens], -1, capacity, model_dim)
    layouts = self._layouts()
    for split_dims in layouts:
      rows = constrain(rows, split_dims)
    hidden_split_dims = (*layouts[-1][:-1], self.hidden)
    rows = batched_ffn(rows, self._pad_weights(weights), hidden_split_dims=hidden_split_dims)
    for split_dims in reversed(layouts):
      rows = constrain(rows, split_dims)
    return self._split_groups(rows.reshape(num_experts, num_groups, capacity, model_dim).swapaxes(0, 1))

  def _layouts(self) -> list[tuple[Axes | str | None, ...]]:
    """The split dims of the rows, step by step from where tokens are to where experts are."""
    held = list(self.tokens)

    def layout(expert: Axes) -> tuple[Axes | str | None, ...]:
      return (expert, *[axis if axis in held else None for axis in self.tokens], None, None, None)

    layouts = [layout(())]
    for i, axis in enumerate(self.expert):
      if axis in held:
        held.remove(axis)
      layouts.append(layout(self.expert[: i + 1]))
    for axis in self.hidden:
      if axis in held:
        held.remove(axis)
        layouts.append(layout(self.expert))
    return layouts

  def _pad_weights(self, weights: ExpertWeights) -> ExpertWeights:
    num_experts, _, hidden_dim = weights.up.shape
    more_experts = self.padded_num_experts(num_experts) - num_experts
    more_hidden = _round_up(hidden_dim, self._num_parts(self.hidden)) - hidden_dim
    up_padding = ((0, more_experts), (0, 0), (0, more_hidden))
    return dataclasses.replace(
      weights,
      up=jnp.pad(weights.up, up_padding),
      down=jnp.pad(weights.down, ((0, more_experts), (0, more_hidden), (0, 0))),
      gate=None if weights.gate is None else jnp.pad(weights.gate, up_padding),
    )


def slot_exchange(weights: ExpertWeights, activation_split_dims: SplitDims) -> SlotExchange:
  """The SlotExchange of the sharding scope, given how it splits the weights and activations [B, T, D]."""
  scope = current_sharding_scope()
  if scope is None:
    return SlotExchange()
  layout = expert_layout(scope, weights, activation_split_dims)
  axes = dict.fromkeys((*layout.tokens, *layout.expert, *layout.hidden))
  return SlotExchange(
    tokens=layout.tokens,
    expert=layout.expert,
    hidden=layout.hidden,
    axis_sizes=tuple((axis, scope.mesh.shape[axis]) for axis in axes),
  )


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
