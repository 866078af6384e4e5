"""Expert parallelism: the frame in which each device computes with the experts that it holds.

Shapes: B batch, T sequence, n tokens of one device, k choices per token, D model, F ffn, E experts.

Who holds what follows from the axis rules alone. A mesh axis is, by what it splits:

    tokens and experts   an axis of the exchange: tokens go to the devices that hold their experts
    experts only         devices see the same tokens, each computes for its own experts, and the results are summed
    tokens and F         tokens are gathered over it, and the partial results are summed and scattered (MegaBlocks'
                         hidden sharding, for fewer experts than devices)
    F only               tensor parallelism: partial results are summed
    tokens only          data parallelism: experts are replicated over it (T5X's second data axis). Where it splits D of
                         the weights too, they are gathered for the computation (FSDP)

Inside the frame everything is one device's own (`jax.shard_map`), and gradients are those of the whole: of what is
replicated over an axis they are summed over it.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.local_experts import LocalExperts
from spmd_tasks.sharding import padding
from spmd_tasks.sharding.specs import (
  ShardingScope,
  SplitDims,
  spec_axes,
  split_dims_to_partition_spec,
)

Axes = tuple[str, ...]
# dispatch(x [n, D], expert_ids [n, k], gates [n, k], experts, exchange axes) -> y [n, D].
Dispatch = Callable[[jax.Array, jax.Array, jax.Array, LocalExperts, Axes], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLayout:
  """Over which mesh axes each dim is split, axes of one device left out.

  Attributes:
    batch, seq: of the tokens.
    expert, hidden: of E and F of the weights.
    up_embed, down_embed: of D of `up` (and `gate`) and of `down`, as far as these axes split the tokens too.
  """

  batch: Axes
  seq: Axes
  expert: Axes
  hidden: Axes
  up_embed: Axes
  down_embed: Axes

  @property
  def tokens(self) -> Axes:
    return self.batch + self.seq

  @property
  def exchange(self) -> Axes:
    """Where tokens meet experts of other devices."""
    return tuple(axis for axis in self.expert if axis in self.tokens)

  @property
  def gathered(self) -> Axes:
    """Where each device computes a part of F for the tokens of all."""
    return tuple(axis for axis in self.hidden if axis in self.tokens)

  @property
  def summed(self) -> Axes:
    """Where devices compute parts of the results of the same tokens."""
    return tuple(axis for axis in self.expert + self.hidden if axis not in self.tokens)

  @property
  def active(self) -> Axes:
    return self.tokens + self.summed


def expert_layout(scope: ShardingScope, weights: ExpertWeights, activation_split_dims: SplitDims) -> ExpertLayout:
  """The layout that `scope` gives to the experts' weights and to activations [B, T, D].

  Raises:
    ValueError: `up` and `down` are split differently in E or F, or an axis splits E or F and is manual already.
  """

  def axes_of(split_dims: SplitDims) -> list[Axes]:
    spec = split_dims_to_partition_spec(split_dims, scope.mesh.axis_names, scope.axis_rules)
    return [tuple(axis for axis in axes if scope.mesh.shape[axis] > 1) for axes in spec_axes(spec, 3)]

  batch, seq, _ = axes_of(activation_split_dims)
  expert, up_embed, hidden = axes_of(weights.up_split_dims)
  down_expert, down_hidden, down_embed = axes_of(weights.down_split_dims)
  if (expert, hidden) != (down_expert, down_hidden):
    raise ValueError(
      f'experts are split over {expert} and their hidden dim over {hidden} by up_split_dims {weights.up_split_dims}, '
      f'but over {down_expert} and {down_hidden} by down_split_dims {weights.down_split_dims}: give both the same.'
    )
  tokens = batch + seq
  return ExpertLayout(
    batch=batch,
    seq=seq,
    expert=expert,
    hidden=hidden,
    up_embed=tuple(axis for axis in up_embed if axis in tokens),
    down_embed=tuple(axis for axis in down_embed if axis in tokens),
  )


def apply_experts(
  x: jax.Array,
  expert_ids: jax.Array,
  gates: jax.Array,
  experts: LocalExperts,
  *,
  scope: ShardingScope,
  activation_split_dims: SplitDims,
  dispatch: Dispatch,
) -> jax.Array:
  """[B, T, D], the sum of the chosen experts' results by their gates, each expert computed where it is held.

  B, T, D, E and F need not divide the mesh; they are padded on entry. Padding experts receive no token, and padding
  tokens go nowhere.

  Args:
    x: [B, T, D].
    expert_ids: int32 [B, T, k] in [0, E]; E is nowhere.
    gates: float32 [B, T, k].
    experts: all E.
    scope: the mesh and the axis rules.
    activation_split_dims: of x.
    dispatch: how tokens reach experts on other devices.
  """
  layout = expert_layout(scope, experts.weights, activation_split_dims)
  if not layout.expert and not layout.hidden and not layout.tokens:
    return apply_to_batch(x, expert_ids, gates, experts.apply_to_tokens)
  axis_sizes, num_experts = scope.mesh.shape, experts.num_experts
  tokens_spec = PartitionSpec(layout.batch, layout.seq, None)
  up_spec = PartitionSpec(layout.expert, layout.up_embed, layout.hidden)
  down_spec = PartitionSpec(layout.expert, layout.hidden, layout.down_embed)
  weights_spec = dataclasses.replace(
    experts.weights, up=up_spec, down=down_spec, gate=None if experts.weights.gate is None else up_spec
  )

  def pad(array: jax.Array, spec: PartitionSpec, value: int = 0) -> jax.Array:
    shape = padding.padded_shape(array.shape, spec, axis_sizes)
    return jnp.pad(array, [(0, new - old) for old, new in zip(array.shape, shape)], constant_values=value)

  weights = jax.tree.map(pad, experts.weights, weights_spec)
  num_padded = weights.up.shape[0]
  expert_ids = pad(jnp.where(expert_ids == num_experts, num_padded, expert_ids), tokens_spec, num_padded)
  model_dim = x.shape[-1]

  def apply_on_device(x, expert_ids, gates, weights):
    x, expert_ids, gates, weights = _vary_over((x, expert_ids, gates, weights), layout.active)
    weights = _gather_embed(weights, layout, model_dim)
    if layout.gathered:
      x, expert_ids, gates = (
        jax.lax.all_gather(array, layout.gathered, tiled=True) for array in (x, expert_ids, gates)
      )
    expert_ids, gates = _select(expert_ids, gates, num_padded, layout, axis_sizes)
    local = experts.replace(weights=weights)
    if layout.exchange:
      y = apply_to_batch(x, expert_ids, gates, lambda x, ids, gates: dispatch(x, ids, gates, local, layout.exchange))
    else:
      y = apply_to_batch(x, expert_ids, gates, local.apply_to_tokens)
    if layout.gathered:
      y = jax.lax.psum_scatter(y, layout.gathered, tiled=True)
    return jax.lax.psum(y, layout.summed) if layout.summed else y

  mesh, axis_names = _mesh_here(scope.mesh, layout)
  y = jax.shard_map(
    apply_on_device,
    mesh=mesh,
    axis_names=axis_names,
    in_specs=(tokens_spec, tokens_spec, tokens_spec, weights_spec),
    out_specs=tokens_spec,
  )(pad(x, tokens_spec), expert_ids, pad(gates, tokens_spec), weights)
  return jax.lax.slice(y, (0, 0, 0), x.shape)


def apply_to_batch(x: jax.Array, expert_ids: jax.Array, gates: jax.Array, apply: Any) -> jax.Array:
  """`apply`, a function of flat tokens, on x [B, T, D], expert_ids and gates [B, T, k]."""
  flat = (array.reshape(-1, array.shape[-1]) for array in (x, expert_ids, gates))
  return apply(*flat).reshape(x.shape)


def _mesh_here(mesh: Mesh, layout: ExpertLayout) -> tuple[Any, set[str]]:
  """The mesh to hand to shard_map, and its axes that no shard_map around this one has made manual."""
  context = jax.sharding.get_abstract_mesh()
  manual = {name for name, kind in zip(context.axis_names, context.axis_types) if kind == AxisType.Manual}
  if manual.intersection(layout.active):
    raise ValueError(
      f'experts or tokens are split over {sorted(manual.intersection(layout.active))}, which a shard_map around this '
      'layer has made manual: leave these axes to the layer (shard_map has axis_names=).'
    )
  return (context if manual else mesh), set(mesh.axis_names) - manual


def _vary_over(tree: Any, axes: Axes) -> Any:
  """Marks every array as varying over `axes`: the gradient of what was replicated over one is summed over it."""

  def vary(array):
    missing = tuple(axis for axis in axes if axis not in jax.typeof(array).mat.varying)
    return jax.lax.pcast(array, missing, to='varying') if missing else array

  return jax.tree.map(vary, tree)


def _gather_embed(weights: ExpertWeights, layout: ExpertLayout, model_dim: int) -> ExpertWeights:
  """The weights with all of D. Gathered here rather than at the border, so that gradients are reduce-scattered."""

  def gather(weight, axes, dim):
    if not axes:
      return weight
    weight = jax.lax.all_gather(weight, axes, axis=dim, tiled=True)
    return jax.lax.slice_in_dim(weight, 0, model_dim, axis=dim)

  return dataclasses.replace(
    weights,
    up=gather(weights.up, layout.up_embed, 1),
    down=gather(weights.down, layout.down_embed, 2),
    gate=None if weights.gate is None else gather(weights.gate, layout.up_embed, 1),
  )


def _select(
  expert_ids: jax.Array, gates: jax.Array, num_experts: int, layout: ExpertLayout, axis_sizes: Any
) -> tuple[jax.Array, jax.Array]:
  """Of all assignments those to experts held here or along the exchange, and expert ids counted among these only.

  The experts are split over `layout.expert` in that order, the first axis outermost.
  """
  if all(axis in layout.exchange for axis in layout.expert):
    return expert_ids, gates
  experts_per_device = num_experts // math.prod(axis_sizes[axis] for axis in layout.expert)
  block, expert_in_block = jnp.divmod(expert_ids, experts_per_device)
  is_here, exchange_index, stride = expert_ids < num_experts, jnp.zeros_like(block), 1
  for axis in reversed(layout.expert):
    block, coordinate = jnp.divmod(block, axis_sizes[axis])
    if axis in layout.exchange:
      exchange_index += coordinate * stride
      stride *= axis_sizes[axis]
    else:
      is_here &= coordinate == jax.lax.axis_index(axis)
  expert_ids = jnp.where(is_here, exchange_index * experts_per_device + expert_in_block, stride * experts_per_device)
  return expert_ids, jnp.where(is_here, gates, 0.0)
