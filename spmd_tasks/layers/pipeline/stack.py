"""PipelinedStack: a TransformerStack whose layers are split over the stages of a pipeline.

The axis rules decide which mesh axis holds the stages: the axis of `layers`.

  mesh_axis_names = ('replica', 'stage', 'data', 'mdl')
  axis_rules = stage_axis_rules(DEFAULT_AXIS_RULES)  # `layers` and `batch` over `stage`

On a mesh without such an axis, the layers run in sequence, with the same weights.

Shapes: B batch, T sequence, D model, L layers, P stages, M microbatches, V repeats, N layers of one stage in a repeat.
"""

from collections.abc import Callable
from typing import Any

from absl import logging
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import (
  SmallMicrobatchError,
  WithSublayers,
  layer_scope,
  num_blocks,
  run_layer,
  values_per_layer,
)
from spmd_tasks.layers.pipeline.loop import Stage, StageWeights, run_loop, run_one_forward_one_backward
from spmd_tasks.layers.pipeline.microbatches import Microbatch, check_microbatches_divide, merge_rows, split_rows
from spmd_tasks.layers.pipeline.schedule import SCHEDULES, Schedule, ScheduleName
from spmd_tasks.layers.transformer import remat_policy, scan_layers
from spmd_tasks.sharding import padding
from spmd_tasks.sharding.axis_rules import stage_axis, without_axis
from spmd_tasks.sharding.specs import ShardingScope, current_sharding_scope
from spmd_tasks.sharding.weights import STACK_DIM, WeightBox, refuse_plain_weights, unbox_weights

_RUN: dict[str, Callable[..., tuple[jax.Array, Any]]] = {
  'gpipe': run_loop,
  'circular': run_loop,
  'one_forward_one_backward': run_one_forward_one_backward,
}


class PipelinedStack(WithSublayers, kw_only=True):
  """`num_layers` blocks of one shape over P stages; has the call signature and the weights of TransformerStack.

  Weights under `layers` are [L, ...]; in a circular pipeline they are [V, L / V, ...], and stage p holds part p of each
  repeat. Checkpoints store [L, ...] in both cases. If P does not divide the layers, identity layers fill up the stages;
  checkpoints do not contain these.

  Microbatches are runs of consecutive rows. Loss, gradients and the layers' statistics are those of the whole batch,
  whatever M. Outside of training, a batch that M does not fit is cut into fewer microbatches. Dropout masks differ from
  those of TransformerStack: each layer and microbatch has its own, the same for every schedule and mesh. Variables that
  blocks `sow` are discarded.

  Fields:
    block: template of the layers: block(x, segment_ids, segment_pos, train=...) -> (x, aux).
    num_layers: L.
    num_microbatches: M, a multiple of P. A larger M gives a shorter bubble and smaller matmuls.
    schedule: 'gpipe'; 'circular', for a shorter bubble; or 'one_forward_one_backward', which keeps one activation per
      microbatch and runs each layer forward twice.
    num_repeats: V, how often a microbatch passes all stages of a circular pipeline; 1 for the other schedules.
    remat_policy: a name in REMAT_POLICIES: which values each layer keeps for its backward pass.
  """

  block: nn.Module
  num_layers: int
  num_microbatches: int
  schedule: ScheduleName = 'gpipe'
  num_repeats: int = 1
  remat_policy: str = 'elementwise'

  def __post_init__(self):
    for name in ('num_layers', 'num_microbatches', 'num_repeats'):
      if getattr(self, name) < 1:
        raise UserError(f'{name}={getattr(self, name)} must be at least 1.')
    if self.schedule not in SCHEDULES:
      raise UserError(f'schedule {self.schedule!r} is unknown: choose one of {list(SCHEDULES)}.')
    if self.schedule != 'circular' and self.num_repeats > 1:
      raise UserError(f"num_repeats={self.num_repeats} needs schedule 'circular': set it to 1 for {self.schedule!r}.")
    if self.num_layers % self.num_repeats:
      raise UserError(
        f'num_layers={self.num_layers} must be a multiple of num_repeats={self.num_repeats}: change one of them.'
      )
    remat_policy(self.remat_policy)
    super().__post_init__()

  @property
  def num_blocks(self) -> int:
    return self.num_layers * num_blocks(self.block)

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns ([B, T, D], {name of a statistic: [L], or [L, E] for a vector}).

    In training, raises a UserError if M does not divide B or P does not divide M, and a SmallMicrobatchError if a layer
    needs more rows at once than a microbatch has.
    """
    scope = current_sharding_scope()
    axis = None if scope is None else stage_axis(scope.mesh.axis_names, scope.axis_rules)
    if scope is None or axis is None or scope.mesh.shape[axis] == 1:
      return self._in_sequence(x, segment_ids, segment_pos, train)
    with layer_scope(shared_kv=None):
      schedules = self._schedules(scope.mesh.shape[axis], x.shape[0], is_strict=train or self.is_initializing())
      if self.is_initializing():
        layers = _map_layers(num_layers=self.num_layers, train=train)
        return self._in_sequence(x, segment_ids, segment_pos, train, layers)
      for schedule in schedules:
        try:
          return self._pipelined(scope, axis, schedule, Microbatch(x, segment_ids, segment_pos), train)
        except SmallMicrobatchError:
          if train:
            raise
      logging.info('A batch of %d rows is not pipelined over %d stages.', x.shape[0], scope.mesh.shape[axis])
      return self._in_sequence(x, segment_ids, segment_pos, train)

  def _schedules(self, num_stages: int, batch_size: int, is_strict: bool) -> list[Schedule]:
    """Returns the schedule; if not `is_strict`, those of all M that fit, from the largest."""
    counts = [self.num_microbatches]
    if not is_strict:
      counts = [m for m in range(self.num_microbatches, 0, -1) if batch_size % m == 0 and m % num_stages == 0]
    schedules = [Schedule(num_stages=num_stages, num_microbatches=m, num_repeats=self.num_repeats) for m in counts]
    if is_strict:
      check_microbatches_divide(batch_size, self.num_microbatches)
    return schedules

  def _in_sequence(self, x, segment_ids, segment_pos, train, layers=None):
    layers = layers or scan_layers(
      num_layers=self.num_layers, scan=True, remat_policy_name=self.remat_policy, train=train
    )
    if self.num_repeats > 1:
      layers = nn.map_variables(
        layers,
        'params',
        trans_in_fn=_merge_stacked,
        trans_out_fn=lambda weights: _split_stacked(weights, self.num_repeats),
        init=self.is_initializing(),
      )
    x, aux = layers(self.block.copy(name='layers'), x, {'segment_ids': segment_ids, 'segment_pos': segment_pos})
    return x, values_per_layer(aux)

  def _pipelined(self, scope: ShardingScope, axis: str, schedule: Schedule, batch: Microbatch, train: bool):
    if others := sorted(set(self.variables) - {'params'}):
      raise UserError(
        f'a pipelined block has variables besides its weights, {others}: declare them as weights, or use a '
        'TransformerStack.'
      )
    stage = Stage(
      block=self.block.clone(parent=None),
      path=(*self.path, 'layers'),
      remat_policy=self.remat_policy,
      train=train,
      axis=axis,
      axis_rules=without_axis(axis, scope.axis_rules),
      num_microbatches=schedule.num_microbatches,
      layers_per_repeat=self.num_layers // self.num_repeats,
      num_repeats=self.num_repeats,
    )
    microbatches = split_rows(batch, schedule.num_microbatches, scope, axis)
    layers_dim = int(self.num_repeats > 1)
    layers_spec = PartitionSpec(*[None] * layers_dim, axis)
    run = _RUN[self.schedule]

    def run_stage(weights: StageWeights, microbatches: Microbatch) -> tuple[jax.Array, Any]:
      if layers_dim:
        weights = weights._replace(layers=jax.tree.map(lambda w: jnp.swapaxes(w, 0, 1), weights.layers))
      return run(stage, schedule, weights, microbatches)

    weights = unbox_weights(self.variables['params']['layers'])  # int8 kernels stay int8 until a layer reads them
    # Identity layers that fill up the stages have weights of zeros.
    weights = jax.tree.map(lambda w: padding.pad_evenly(w, layers_spec, scope.mesh.shape), weights)
    rng = self.make_rng('dropout') if train and self.has_rng('dropout') else None
    # check_vma tracks which arrays are equal on all stages. Every array with a gradient belongs to one stage, and
    # layers that contain a shard_map, as experts do, require it off in the enclosing one.
    run_on_stages = jax.shard_map(
      run_stage,
      mesh=scope.mesh,
      axis_names={axis},
      check_vma=False,
      in_specs=(StageWeights(layers_spec, PartitionSpec()), PartitionSpec(axis)),
      out_specs=(PartitionSpec(axis), PartitionSpec(None, axis)),
    )
    x, aux = run_on_stages(StageWeights(weights, rng), microbatches)

    def by_layer(a):  # [V, P N, ...] to [L, ...]
      return a[:, : stage.layers_per_repeat].reshape(-1, *a.shape[2:])

    return merge_rows(x, scope, axis), values_per_layer(jax.tree.map(by_layer, aux))


def _map_layers(*, num_layers: int, train: bool) -> Callable[..., Any]:
  """Returns what `scan_layers` returns, for init only: all layers draw their weights at once, from the same x.

  The numbers are the same. XLA does not split a loop over devices: with a loop, each stage would draw all weights.
  """

  def layer(block, x, inputs):
    # nn.scan traces a layer twice, and the second trace continues the random numbers of the first: so does this one.
    outer = block.scope
    # There are no variables yet, unless init is traced again.
    variables = {name: dict(outer.variables()[name]) for name in outer.variables()}
    first = flax.core.Scope(variables, rngs=outer.rngs, mutable=True, path=outer.path, flags=outer.flags)
    first.rng_counters = outer.rng_counters
    for module in (block.copy(parent=first), block):
      _, aux = run_layer('block', module, x, **inputs, train=train)
    refuse_plain_weights(block.variables.get('params', {}))
    return x, aux

  return nn.vmap(
    layer,
    variable_axes={True: 0},
    split_rngs={'params': True, 'dropout': True},
    in_axes=None,
    out_axes=(None, 0),
    axis_size=num_layers,
    metadata_params={STACK_DIM: 'layers'},
  )


def _split_stacked(boxed_weights: Any, num_groups: int) -> Any:
  """Reshapes stacked weights [L, ...] to [num_groups, L / num_groups, ...]; the second dim keeps the split dim of L."""

  def split(box: WeightBox) -> WeightBox:
    value = box.value.reshape(num_groups, -1, *box.value.shape[1:])
    return box.replace(value=value, split_dims=(None, *box.split_dims), stacked=box.stacked + 1)

  return jax.tree.map(split, boxed_weights, is_leaf=lambda x: isinstance(x, WeightBox))


def _merge_stacked(weights: Any) -> Any:
  """Reverses `_split_stacked`, for weights with or without boxes."""

  def merge(leaf: Any) -> Any:
    if isinstance(leaf, WeightBox):
      return leaf.replace(value=merge(leaf.value), split_dims=leaf.split_dims[1:], stacked=leaf.stacked - 1)
    return leaf.reshape(-1, *leaf.shape[2:])

  return jax.tree.map(merge, weights, is_leaf=lambda x: isinstance(x, WeightBox))
