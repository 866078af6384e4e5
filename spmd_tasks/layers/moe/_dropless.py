"""Dropless: applies to each token every expert that it chose, however uneven the choices (MegaBlocks).

Shapes: B batch, T sequence, D model, F ffn, E experts, k choices per token.

`apply_experts` does the work: inside `jax.shard_map` each device computes with the experts that it holds, and the
chosen dispatch moves tokens between devices. _expert_parallel.py explains the meaning of each mesh axis.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import Ratios, current_layer_scope
from spmd_tasks.layers.moe._dispatches import in_passes, padded_all_to_all, ring
from spmd_tasks.layers.moe._expert_parallel import Dispatch, Exchange, ExpertLayout, expert_layout, select_assignments
from spmd_tasks.layers.moe._experts import Axes, ExpertWeights
from spmd_tasks.layers.moe._router import RouterOutput
from spmd_tasks.sharding import SplitDims, padding
from spmd_tasks.sharding.specs import ShardingScope, current_sharding_scope, num_parts

# The ways to bring together tokens and experts of different devices. None: the experts' weights move to the tokens.
DISPATCHES: dict[str, Dispatch | None] = {'ring': ring, 'padded_all_to_all': padded_all_to_all, 'gather': None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropless:
  """Sorts the tokens' choices by expert and applies each expert to exactly the rows that chose it.

  Fields:
    dispatch: a name in DISPATCHES: how tokens reach experts on other devices. With 'gather' each device gathers all
      experts of a layer, and no token moves: good for many tokens per device.
    capacity_factor: the size of an all-to-all's buffers, as a multiple of the rows under balanced routing. None makes
      room for the worst case.
    overflow: what happens to rows that do not fit: 'drop' drops them and counts them in `fraction_dropped`; 'passes'
      computes them in as many further passes as the routing needs.
    backend: of the grouped matmuls, see `grouped_matmul`; None for the best on this platform.
    activation_split_dims: of x and of the result.
  """

  dispatch: str = 'ring'
  capacity_factor: float | None = None
  overflow: Literal['drop', 'passes'] = 'drop'
  backend: str | None = None
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __post_init__(self):
    if self.dispatch not in DISPATCHES:
      raise UserError(f'dispatch {self.dispatch!r} is unknown: choose one of {list(DISPATCHES)}.')
    if self.capacity_factor is not None:
      if self.dispatch != 'padded_all_to_all':
        raise UserError(
          f'capacity_factor={self.capacity_factor} has no effect with dispatch={self.dispatch!r}, which has no buffers '
          'to bound: set it to None, or use an all-to-all.'
        )
      if not self.capacity_factor > 0:
        raise UserError(f'capacity_factor={self.capacity_factor} must be positive, or None for the worst case.')
    if self.overflow not in ('drop', 'passes'):
      raise UserError(f"overflow={self.overflow!r} is unknown: choose 'drop' or 'passes'.")
    if self.overflow == 'passes' and self.capacity_factor is None:
      raise UserError(
        "overflow='passes' with capacity_factor=None has no effect, because buffers for the worst case never overflow: "
        'set capacity_factor, such as 1.25.'
      )

  def __call__(
    self, x: jax.Array, routing: RouterOutput, weights: ExpertWeights, *, train: bool
  ) -> tuple[jax.Array, Ratios]:
    """Returns (y [B, T, D] in x's dtype, statistics) for x [B, T, D].

    The statistics are `fraction_dropped`, and the capacity of an all-to-all. Raises a UserError if experts choose.
    """
    del train
    if routing.expert_ids is None or routing.gates is None:
      raise UserError(
        'Dropless needs a router in which tokens choose, but with this router experts choose: use CapacityGather.'
      )
    expert_ids, gates, is_work = routing.expert_ids, routing.gates, current_layer_scope().part.is_work
    if is_work is not True:  # nothing is routed in a bubble of a pipeline: groups without rows cost no work
      expert_ids = jnp.where(is_work, expert_ids, weights.num_experts)
      gates = jnp.where(is_work, gates, 0.0)
    dispatch = DISPATCHES[self.dispatch]
    y, statistics = apply_experts(
      x.astype(weights.up.dtype),
      expert_ids,
      gates,
      weights.replace(backend=self.backend),
      activation_split_dims=self.activation_split_dims,
      dispatch=functools.partial(in_passes, dispatch) if dispatch and self.overflow == 'passes' else dispatch,
      capacity_factor=self.capacity_factor,
    )
    return y.astype(x.dtype), {'fraction_dropped': (jnp.float32(0), jnp.float32(1)), **statistics}


def apply_experts(
  x: jax.Array,
  expert_ids: jax.Array,
  gates: jax.Array,
  experts: ExpertWeights,
  *,
  activation_split_dims: SplitDims,
  dispatch: Dispatch | None,
  capacity_factor: float | None,
) -> tuple[jax.Array, Ratios]:
  """Returns (y [B, T, D], statistics): the sum of the experts' outputs by their gates, and the dispatch's statistics.

  Inside a `sharding_scope` every device computes with its own experts. Outside, this device holds all experts and all
  tokens. D, E and F are padded here if the mesh does not divide them. Padding experts receive no token.

  Args:
    x: [B, T, D].
    expert_ids: int32 [B, T, k] in [0, E]. The id E means 'not routed'.
    gates: float32 [B, T, k], 0 for an assignment that is not routed.
    experts: all E.
    activation_split_dims: of x.
    dispatch: moves tokens to experts on other devices; None gathers the weights of these experts instead.
    capacity_factor: see Exchange.

  Raises a UserError: the layout is impossible (see `expert_layout`), or an enclosing `shard_map` has made an axis
  manual that splits tokens or experts.
  """
  scope = current_sharding_scope()
  layout = None if scope is None else expert_layout(scope, experts, activation_split_dims, x.shape)
  if scope is None or layout is None or not layout.all_axes:
    return experts.apply_to_tokens(x, expert_ids, gates), {}
  if dispatch is None:
    layout = layout.with_experts_gathered()
  axis_sizes = scope.mesh.shape
  tokens_spec = PartitionSpec(layout.batch, layout.seq, None)
  weight_specs = experts.specs(layout.expert + layout.stored, layout.hidden, layout.up_embed, layout.down_embed)
  exchange = Exchange(
    axes=layout.exchange,
    num_devices=num_parts(layout.exchange, axis_sizes),
    capacity_factor=capacity_factor,
    all_axes=layout.all_axes,
  )

  weights = padding.pad_evenly(experts, weight_specs, axis_sizes)
  unrouted, num_experts = experts.num_experts, weights.num_experts
  # After the padding of E, the padded number of experts is the id that means 'not routed'.
  expert_ids = jnp.where(expert_ids == unrouted, num_experts, expert_ids)

  def apply_on_device(x, expert_ids, gates, weights):
    shape = x.shape
    tokens = tuple(array.reshape(-1, array.shape[-1]) for array in (x, expert_ids, gates))
    if layout.gathered:
      tokens = tuple(jax.lax.all_gather(array, layout.gathered, tiled=True) for array in tokens)
    x, expert_ids, gates = tokens
    expert_ids, gates = select_assignments(
      expert_ids, gates, num_experts=num_experts, layout=layout, axis_sizes=axis_sizes
    )
    local_experts = _weights_of_device(weights, layout, shape[-1])
    local_experts = local_experts.replace(balanced_load=min(1.0, local_experts.num_experts / unrouted))
    if dispatch is not None and layout.exchange:
      y, statistics = dispatch(x, expert_ids, gates, local_experts, exchange)
    else:
      y, statistics = local_experts.apply_to_tokens(x, expert_ids, gates), {}
    # Partial results are summed per token, not per row, which sends k times less.
    if layout.gathered:
      y = jax.lax.psum_scatter(y, layout.gathered, tiled=True)
    if layout.summed:
      y = _sum_parts(layout.summed, num_parts(layout.summed, axis_sizes), y)
    return y.reshape(shape), statistics

  if layout.up_embed or layout.down_embed or layout.stored:
    apply_on_device = jax.checkpoint(apply_on_device, policy=_save_all_but_gathered_weights, prevent_cse=False)
  mesh, axis_names = _mesh_and_free_axes(scope, layout, x)
  return jax.shard_map(
    apply_on_device,
    mesh=mesh,
    axis_names=axis_names,
    in_specs=(tokens_spec, tokens_spec, tokens_spec, weight_specs),
    out_specs=(tokens_spec, PartitionSpec()),
    check_vma=False,  # kernels and loops of the grouped matmuls do not track varying axes
  )(x, expert_ids, gates, weights)


def _weights_of_device(weights: ExpertWeights, layout: ExpertLayout, model_dim: int) -> ExpertWeights:
  """Returns the weights that a device computes with: its experts and its part of F, with all of D.

  D is gathered inside the `shard_map`, so that the gradients are reduce-scattered. Then E is gathered over
  `layout.stored`: whole experts are contiguous, so that the larger of the two gathers needs no copy. The results for
  the parts of F are summed; only the first part adds `down_bias`.
  """

  def gather(weight: jax.Array, axes: Axes = (), dim: int = 0) -> jax.Array:
    if axes:
      weight = jax.lax.all_gather(weight, axes, axis=dim, tiled=True)
      weight = jax.lax.slice_in_dim(weight, 0, model_dim, axis=dim)
    return jax.lax.all_gather(weight, layout.stored, axis=0, tiled=True) if layout.stored else weight

  def keep_once(bias: jax.Array) -> jax.Array:
    return jnp.where(jax.lax.axis_index(layout.hidden) == 0, bias, 0) if layout.hidden else bias

  return weights.map(
    up=lambda weight: gather(weight, layout.up_embed, 1),
    down=lambda weight: gather(weight, layout.down_embed, 2),
    up_bias=gather,
    down_bias=lambda bias: keep_once(gather(bias)),
  )


def _save_all_but_gathered_weights(primitive: Any, *operands: Any, **_: Any) -> bool:
  """Checkpoint policy of FSDP: the backward pass gathers the weights again, instead of saving them for all layers.

  Weights have three dims, the tokens here two; a slice removes the weights' padding.
  """
  is_weight = primitive.name == 'all_gather' and operands[0].ndim == 3
  return not is_weight and primitive.name != 'slice'


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_parts(axes: Axes, num_devices: int, y: jax.Array) -> jax.Array:
  """Sums partial results over `axes` of `num_devices` devices.

  All devices return the same result, so `shard_map` gives each 1 / num_devices of its gradient. psum's own rule would
  sum these shares by a second all-reduce; multiplying by num_devices gives the same without communication.
  """
  del num_devices
  return jax.lax.psum(y, axes)


_sum_parts.defvjp(
  lambda axes, num_devices, y: (_sum_parts(axes, num_devices, y), None),
  lambda axes, num_devices, _, d_sum: (d_sum * num_devices,),
)


def _mesh_and_free_axes(scope: ShardingScope, layout: ExpertLayout, x: jax.Array) -> tuple[Any, frozenset[str]]:
  """Returns the scope's `free_mesh`. Raises a UserError if this layer cannot run inside the enclosing `shard_map`."""
  mesh, free = scope.free_mesh()
  manual = set(scope.mesh.axis_names) - free
  taken = sorted(manual.intersection(layout.all_axes))
  if taken:
    raise UserError(
      f'mesh axes {taken} split tokens or experts, but an enclosing shard_map has made them manual: leave them out of '
      'its axis_names.'
    )
  if manual and jax.typeof(x).mat.varying:
    raise UserError(
      f'an enclosing shard_map over {sorted(manual)} checks varying axes, which this layer does not support: give that '
      'shard_map check_vma=False.'
    )
  return mesh, free
