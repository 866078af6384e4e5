"""Expert parallelism: the frame in which each device computes with the experts that it holds.

Shapes: B batch, T sequence, D model, F ffn, E experts, k choices per token.

`expert_layout` says what the mesh axes mean. Inside the frame (`jax.shard_map`) everything is one device's own.
Gradients are those of the whole: what is replicated over an axis gets the sum of its devices' gradients.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe.exchange import Axes, Dispatch, Exchange
from spmd_tasks.layers.moe.expert_layout import ExpertLayout, expert_layout, select_assignments
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.local_experts import LocalExperts
from spmd_tasks.sharding import padding
from spmd_tasks.sharding.specs import SplitDims, current_sharding_scope, num_parts


def apply_experts(
  x: jax.Array,
  expert_ids: jax.Array,
  gates: jax.Array,
  experts: LocalExperts,
  *,
  activation_split_dims: SplitDims,
  dispatch: Dispatch,
  capacity_factor: float | None,
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
  """Returns (y [B, T, D], statistics): the sum of the experts' results by their gates, and what the dispatch reports.

  Outside a `sharding_scope` this device holds all experts and all tokens.

  B, T, D, E and F that the mesh does not divide are padded here. Padding experts receive no token, padding tokens go
  nowhere.

  Args:
    x: [B, T, D].
    expert_ids: int32 [B, T, k] in [0, E]; E is nowhere.
    gates: float32 [B, T, k], 0 for nowhere.
    experts: all E.
    activation_split_dims: of x.
    dispatch: how tokens meet experts of other devices.
    capacity_factor: see Exchange.

  Raises:
    UserError: the layout is impossible (see `expert_layout`), the dispatch does not run on this platform, or a
      `shard_map` around this has made an axis manual that splits tokens or experts.
  """
  scope = current_sharding_scope()
  layout = None if scope is None else expert_layout(scope, experts.weights, activation_split_dims)
  if scope is None or layout is None or not layout.all_axes:
    return experts.apply_to_tokens(x, expert_ids, gates), {}
  axis_sizes = scope.mesh.shape
  tokens_spec = PartitionSpec(layout.batch, layout.seq, None)
  weight_specs = _map_weights(
    experts.weights,
    lambda _: PartitionSpec(layout.expert, layout.up_embed, layout.hidden),
    lambda _: PartitionSpec(layout.expert, layout.hidden, layout.down_embed),
  )
  exchange = Exchange(
    axes=layout.exchange,
    num_devices=num_parts(layout.exchange, axis_sizes),
    platform=scope.mesh.devices.flat[0].platform if isinstance(scope.mesh, Mesh) else None,
    capacity_factor=capacity_factor,
    all_axes=layout.all_axes,
  )

  def pad(array: jax.Array, spec: PartitionSpec, value: int = 0) -> jax.Array:
    shape = padding.padded_shape(array.shape, spec, axis_sizes)
    if shape == array.shape:
      return array
    return jnp.pad(array, [(0, new - old) for old, new in zip(array.shape, shape)], constant_values=value)

  weights = jax.tree.map(pad, experts.weights, weight_specs)
  nowhere, num_experts = experts.num_experts, weights.up.shape[0]
  expert_ids = jnp.where(expert_ids == nowhere, num_experts, expert_ids)

  def apply_on_device(x, expert_ids, gates, weights):
    shape = x.shape
    tokens = tuple(array.reshape(-1, array.shape[-1]) for array in (x, expert_ids, gates))
    if layout.gathered:
      tokens = tuple(jax.lax.all_gather(array, layout.gathered, tiled=True) for array in tokens)
    x, expert_ids, gates = tokens
    expert_ids, gates = select_assignments(
      expert_ids, gates, num_experts=num_experts, layout=layout, axis_sizes=axis_sizes
    )
    local_experts = experts.replace(weights=_gather_embed(weights, layout, shape[-1]))
    if layout.exchange:
      y, statistics = dispatch(x, expert_ids, gates, local_experts, exchange)
    else:
      y, statistics = local_experts.apply_to_tokens(x, expert_ids, gates), {}
    # Partial results are summed per token, not per row: k times less to send.
    if layout.gathered:
      y = jax.lax.psum_scatter(y, layout.gathered, tiled=True)
    if layout.summed:
      y = _sum_parts(layout.summed, num_parts(layout.summed, axis_sizes), y)
    return y.reshape(shape), statistics

  if layout.up_embed or layout.down_embed:
    apply_on_device = jax.checkpoint(apply_on_device, policy=_keep_all_but_gathered_weights, prevent_cse=False)
  mesh, axis_names = _mesh_and_free_axes(scope.mesh, layout, x)
  y, statistics = jax.shard_map(
    apply_on_device,
    mesh=mesh,
    axis_names=axis_names,
    in_specs=(tokens_spec, tokens_spec, tokens_spec, weight_specs),
    out_specs=(tokens_spec, PartitionSpec()),
    check_vma=False,  # kernels and loops of the grouped matmuls know nothing of it
  )(pad(x, tokens_spec), pad(expert_ids, tokens_spec, num_experts), pad(gates, tokens_spec), weights)
  return jax.lax.slice(y, (0, 0, 0), x.shape), statistics


def _map_weights(
  weights: ExpertWeights, map_up: Callable[[jax.Array], Any], map_down: Callable[[jax.Array], Any]
) -> Any:
  """The weights with `up` and `gate` mapped by one function and `down` by the other."""
  gate = None if weights.gate is None else map_up(weights.gate)
  return weights.replace(up=map_up(weights.up), down=map_down(weights.down), gate=gate)


def _gather_embed(weights: ExpertWeights, layout: ExpertLayout, model_dim: int) -> ExpertWeights:
  """The weights with all of D. Gathered here and not at the border, so that gradients are reduce-scattered."""

  def gather(weight: jax.Array, axes: Axes, dim: int) -> jax.Array:
    if not axes:
      return weight
    weight = jax.lax.all_gather(weight, axes, axis=dim, tiled=True)
    return jax.lax.slice_in_dim(weight, 0, model_dim, axis=dim)

  return _map_weights(
    weights,
    lambda weight: gather(weight, layout.up_embed, 1),
    lambda weight: gather(weight, layout.down_embed, 2),
  )


def _keep_all_but_gathered_weights(primitive: Any, *_: Any, **params: Any) -> bool:
  """A checkpoint policy: weights are gathered again in the backward pass. Kept for all layers, they would not be FSDP.

  Tokens are gathered along dim 0, weights never; a slice removes the weights' padding.
  """
  is_weight = primitive.name == 'all_gather' and params['all_gather_dimension'] > 0
  return not is_weight and primitive.name != 'slice'


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_parts(axes: Axes, num_devices: int, y: jax.Array) -> jax.Array:
  """The sum of partial results over `axes` of `num_devices` devices.

  Of a result that all of them return, each is given a num_devices-th of the gradient. psum's own rule would sum these
  shares, and wait for a second all-reduce of what is known everywhere.
  """
  del num_devices
  return jax.lax.psum(y, axes)


def _sum_parts_forward(axes, num_devices, y):
  return _sum_parts(axes, num_devices, y), None


def _sum_parts_backward(axes, num_devices, _, d_sum):
  del axes
  return (d_sum * num_devices,)


_sum_parts.defvjp(_sum_parts_forward, _sum_parts_backward)


def _mesh_and_free_axes(mesh: Mesh, layout: ExpertLayout, x: jax.Array) -> tuple[Any, set[str]]:
  """The mesh for a `shard_map` at this place, and its axes that no `shard_map` around it has made manual."""
  context = jax.sharding.get_abstract_mesh()
  manual = {name for name, kind in zip(context.axis_names, context.axis_types) if kind == AxisType.Manual}
  taken = sorted(manual.intersection(layout.all_axes))
  if taken:
    raise UserError(
      f'mesh axes {taken} split tokens or experts, but a shard_map around this layer has made them manual: leave them '
      'out of its axis_names.'
    )
  if manual and jax.typeof(x).mat.varying:
    raise UserError(
      f'a shard_map over {sorted(manual)} around this layer tracks what varies over which axis, but this layer does '
      'not, and gradients would not fit: give that shard_map check_vma=False.'
    )
  return (context if manual else mesh), set(mesh.axis_names) - manual
