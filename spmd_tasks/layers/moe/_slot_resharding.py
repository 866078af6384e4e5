"""Moves slots from the devices that hold their tokens to the devices that hold their experts, and back.

Shapes: B batch, T sequence, D model, F ffn; G groups of S tokens, E experts, C slots per expert and group.

Sharding constraints describe every move, and the partitioner derives the collectives (GShard: Lepikhin et al., 2020).
The partitioner derives good collectives (all-to-alls) for a constraint that moves one mesh axis from one dim to
another, if the axis divides both dims. For several axes at once, or an uneven dim, the partitioner gathers whole arrays
on every device instead. Therefore G and E are padded, G is written as one dim per mesh axis, and each axis moves in one
step.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe._expert_parallel import Axes, expert_layout
from spmd_tasks.layers.moe._experts import ExpertWeights, batched_ffn
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.specs import current_sharding_scope


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotResharding:
  """The mesh axes that split tokens and experts, and their sizes. Without any axes, one device holds everything.

  Attributes:
    tokens: axes that split the tokens, and hence the groups.
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
    """Returns E rounded up so that every device has equally many experts."""
    return _round_up(num_experts, self._num_parts(self.expert))

  def group_tokens(self, x: jax.Array, group_size: int, fill_value: float = 0) -> jax.Array:
    """Returns [G, S, N] for x [B, T, N], padding B with `fill_value` so that every device has equally many groups."""
    batch_size, length, _ = x.shape
    rows_per_group = math.lcm(group_size, length) // length
    num_rows = _round_up(batch_size, rows_per_group * self._num_parts(self.tokens))
    x = jnp.pad(x, ((0, num_rows - batch_size), (0, 0), (0, 0)), constant_values=fill_value)
    return self._split_groups(x.reshape(-1, group_size, x.shape[-1]))

  def ungroup_tokens(self, x: jax.Array, batch_size: int, length: int) -> jax.Array:
    """Returns [B, T, N] for x [G, S, N], without the padding."""
    return self._split_groups(x).reshape(-1, length, x.shape[-1])[:batch_size]

  def _split_groups(self, x: jax.Array) -> jax.Array:
    """Constrains `x` [G, ...] to the sharding of the tokens."""
    return constrain(x, (self.tokens, *[None] * (x.ndim - 1)))

  def apply_experts(self, rows: jax.Array, weights: ExpertWeights) -> jax.Array:
    """Moves rows to their experts, applies the experts' networks, and moves the results back.

    Args:
      rows: [G, E, C, D], with G and E padded.
      weights: with E not padded.

    Returns:
      [G, E, C, D].
    """
    num_groups, num_experts, capacity, model_dim = rows.shape
    sizes = dict(self.axis_sizes)
    # [E, the size of each axis that splits tokens, the groups of one device, C, D]
    rows = self._split_groups(rows)
    by_axis = [num_experts, *[sizes[axis] for axis in self.tokens], -1]
    rows = rows.swapaxes(0, 1).reshape(*by_axis, capacity, model_dim)
    steps = self._steps()
    for split_dims in steps:
      rows = constrain(rows, split_dims)
    hidden_split_dims, padded = (*steps[-1][:-1], self.hidden), self._pad_weights(weights)
    factors = self._dropout_factors(weights, num_groups, padded.up.shape)
    if factors is not None:
      factors = constrain(factors.reshape(*by_axis, 1, factors.shape[-1]), hidden_split_dims)
    rows = batched_ffn(rows, padded, hidden_split_dims=hidden_split_dims, factors=factors)
    for split_dims in reversed(steps):
      rows = constrain(rows, split_dims)
    return self._split_groups(rows.reshape(num_experts, num_groups, capacity, model_dim).swapaxes(0, 1))

  def _steps(self) -> list[tuple[Axes | str | None, ...]]:
    """Returns the rows' split dims after each step, from the sharding of the tokens to the sharding of the experts."""
    held = list(self.tokens)

    def layout(expert: Axes) -> tuple[Axes | str | None, ...]:
      return (expert, *[axis if axis in held else None for axis in self.tokens], None, None, None)

    steps = [layout(())]
    for i, axis in enumerate(self.expert):
      if axis in held:
        held.remove(axis)
      steps.append(layout(self.expert[: i + 1]))
    for axis in self.hidden:
      if axis in held:
        held.remove(axis)
        steps.append(layout(self.expert))
    return steps

  def _dropout_factors(self, weights: ExpertWeights, num_groups: int, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns [E, G, F], E and F as in `shape` [E, D, F]: the same numbers on any mesh; None for no dropout."""
    if weights.dropout_key is None:
      return None
    num_experts, _, hidden_dim = weights.up.shape
    kept = jax.random.bernoulli(weights.dropout_key, 1 - weights.dropout_rate, (num_groups, num_experts, hidden_dim))
    padding = ((0, 0), (0, shape[0] - num_experts), (0, shape[2] - hidden_dim))
    return jnp.pad(kept / (1 - weights.dropout_rate), padding).swapaxes(0, 1)

  def _pad_weights(self, weights: ExpertWeights) -> ExpertWeights:
    num_experts, _, hidden_dim = weights.up.shape
    more_experts = self.padded_num_experts(num_experts) - num_experts
    more_hidden = _round_up(hidden_dim, self._num_parts(self.hidden)) - hidden_dim
    experts, hidden, whole = (0, more_experts), (0, more_hidden), (0, 0)
    return weights.map(
      up=lambda x: jnp.pad(x, (experts, whole, hidden)),
      down=lambda x: jnp.pad(x, (experts, hidden, whole)),
      up_bias=lambda x: jnp.pad(x, (experts, hidden)),
      down_bias=lambda x: jnp.pad(x, (experts, whole)),
    )


def slot_resharding(
  weights: ExpertWeights, activation_split_dims: SplitDims, tokens: tuple[int, ...]
) -> SlotResharding:
  """Returns the SlotResharding for the current sharding scope; arguments as those of `expert_layout`."""
  scope = current_sharding_scope()
  if scope is None:
    return SlotResharding()
  layout = expert_layout(scope, weights, activation_split_dims, tokens)
  axes = dict.fromkeys((*layout.tokens, *layout.expert, *layout.hidden))
  return SlotResharding(
    tokens=layout.tokens,
    expert=layout.expert,
    hidden=layout.hidden,
    axis_sizes=tuple((axis, scope.mesh.shape[axis]) for axis in axes),
  )


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
