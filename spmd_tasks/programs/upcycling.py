"""Initializes a new job with the weights of another job's checkpoint: copies them, or repeats them as experts.

Shapes: L layers, D model, F ffn, E experts.

A dense feed-forward network becomes E equal experts (Komatsuzaki et al., "Sparse Upcycling", arXiv 2212.05055):

    .../ffn/up/kernel [L, D, F]  ->  .../ffn/experts/up [L, E, D, F], E times
                                 ->  .../ffn/shared_expert/up/kernel [L, D, F], by copy

and likewise `gate` and `down`. Layer g * n + i of a plain stack becomes layer g of `block_i` in a stack of BlockGroups
of n blocks, so that every n-th layer of a dense model can become a mixture. Weights of the same name are copied, so
that the same model can be trained further on other data. Routers and low-rank adapters are newly initialized.
Any other weight without a source is an error, and so is any weight of the source that the new model does not use.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import re
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.checkpoints.manifest import LeafEntry
from spmd_tasks.checkpoints.verifying import describe_mismatches
from spmd_tasks.errors import UserError
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.sharding import evenly_divided_spec

_BLOCK = re.compile(r'(.*/layers/)block_(\d+)/(.*)')
_EXPERTS = re.compile(r'(.*/)?experts/(up|gate|down)')
_SHARED = re.compile(r'(.*/)?shared_expert/(.*)')
_is_drawn = re.compile(r'(.*/)?(router/|(\w+_)?lora_[ab]$)').match
_is_ffn_bias = re.compile(r'(.*/)?(up|gate|down)/bias$').match


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightOrigin:
  """The origin of a weight of the new model: the source's weight, and how it is repeated."""

  name: str  # of the source's weight
  shape: tuple[int, ...]  # that it must have
  layers: tuple[int, int] | None = None  # of its dim 0, those that are taken: (first, stride); None: all
  expert_dim: int | None = None  # the new dim along which it is repeated; None: a plain copy
  num_experts: int = 1  # how often

  def take(self, weight: jax.Array) -> jax.Array:
    """Makes the new weight from the source's."""
    if self.layers is not None:
      first, stride = self.layers
      weight = weight[first::stride]
    if self.expert_dim is None:
      return weight
    shape = (*weight.shape[: self.expert_dim], self.num_experts, *weight.shape[self.expert_dim :])
    return jnp.broadcast_to(jnp.expand_dims(weight, self.expert_dim), shape)

  def source_spec(self, spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns an even PartitionSpec for the source's weight, given the new weight's `spec`."""
    if self.expert_dim is None:
      return evenly_divided_spec(self.shape, spec, axis_sizes)
    # With a single expert: the axes that split the experts do not divide that, and move to another dim.
    single = (*self.shape[: self.expert_dim], 1, *self.shape[self.expert_dim :])
    entries = list(evenly_divided_spec(single, spec, axis_sizes))
    del entries[self.expert_dim]
    return PartitionSpec(*entries)


def find_origins(source: Sequence[LeafEntry], target: Mapping[str, tuple[int, ...]]) -> dict[str, WeightOrigin]:
  """Finds the origin of every weight of `target` (name -> shape), except in routers and low-rank adapters.

  Raises a UserError: the source lacks a weight, has it in another shape, or has a weight without use; all are named.
  """
  saved = {leaf.name: leaf for leaf in source}
  origins, problems = {}, []
  for name, shape in target.items():
    origin = _origin_of(name, shape, saved, target)
    if origin.name in saved:
      origins[name] = origin
      if saved[origin.name].shape != origin.shape:
        problems.append(
          f'{name} {list(shape)} needs {origin.name} {list(origin.shape)}, but the checkpoint has '
          f'{list(saved[origin.name].shape)}'
        )
    elif not _is_drawn(name):
      problems.append(f'{name} {list(shape)} needs {origin.name} {list(origin.shape)}, which the checkpoint lacks')
  used = {origin.name for origin in origins.values()}
  for leaf in source:
    if leaf.name not in used:
      why = ': experts have no biases' if _is_ffn_bias(leaf.name) else ''
      problems.append(f'the experiment has no use for {leaf.name} {list(leaf.shape)} of the checkpoint{why}')
  if problems:
    raise UserError(
      f'the experiment cannot start from the weights of that checkpoint:\n{describe_mismatches(problems)}\nGive it the '
      'layers and sizes of the job that it starts from (config.json in that directory), or train that job again.'
    )
  return origins


def initialize_from(
  model: PartitionedModel, checkpointer: Checkpointer, seed: int, step: int | None = None
) -> tuple[TrainState, int]:
  """Makes a state at step 0 with another job's weights; optimizer state, averages and routers are new, by `seed`.

  Returns:
    (padded state, the checkpoint's step). Each device reads, repeats and stores only its own part of every array.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the weights do not fit; see `find_origins`.
  """
  source = checkpointer.saved_leaves(step, subtree='weights')
  target = traverse_util.flatten_dict(model.canonical_state.weights, sep='/')
  origins = find_origins(source, {name: leaf.shape for name, leaf in target.items()})
  shardings = {
    origin.name: NamedSharding(model.mesh, origin.source_spec(target[name].sharding.spec, model.mesh.shape))
    for name, origin in origins.items()
  }
  abstract = {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[leaf.name]) for leaf in source}
  restored = checkpointer.restore_weights(traverse_util.unflatten_dict(abstract, sep='/'), step)

  def adopt(fresh: Any, weights: Any) -> Any:
    new = traverse_util.flatten_dict(fresh, sep='/')
    source = traverse_util.flatten_dict(weights, sep='/')
    for name, origin in origins.items():
      new[name] = origin.take(source[origin.name]).reshape(new[name].shape).astype(new[name].dtype)
    return traverse_util.unflatten_dict(new, sep='/')

  return model.init_with(seed, adopt, restored.state), restored.step


def _origin_of(name: str, shape: tuple[int, ...], saved: Collection[str], target: Collection[str]) -> WeightOrigin:
  """Returns the weight's origin by its name, whether or not the source has that weight."""
  if name in saved:
    return WeightOrigin(name=name, shape=shape)
  layers = None
  if block := _BLOCK.fullmatch(name):
    stack, index, rest = block.groups()
    num_blocks = len({other[2] for other in map(_BLOCK.fullmatch, target) if other and other[1] == stack})
    name, layers, shape = stack + rest, (int(index), num_blocks), (shape[0] * num_blocks, *shape[1:])
  if experts := _EXPERTS.fullmatch(name):
    ffn, kernel = experts.groups(default='')
    *stacked, num_experts, num_inputs, num_outputs = shape
    return WeightOrigin(
      name=f'{ffn}{kernel}/kernel',
      shape=(*stacked, num_inputs, num_outputs),
      layers=layers,
      expert_dim=len(stacked),
      num_experts=num_experts,
    )
  if shared := _SHARED.fullmatch(name):
    name = ''.join(shared.groups(default=''))
  return WeightOrigin(name=name, shape=shape, layers=layers)
