"""Stacks of different layers: BlockGroup alternates blocks, StackSequence runs stacks one after another.

Shapes: B batch, T sequence, D model, L layers, E experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import Statistics, WithSublayers, num_blocks, run_layer
from spmd_tasks.layers.transformer import Aux


def _own_context(layers: Sequence[nn.Module], context: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
  """Yields the context of each of several blocks or stacks, with its own part of `layer_inputs` [blocks, ...]."""
  layer_inputs, first = context.get('layer_inputs'), 0
  for layer in layers:
    last = first + num_blocks(layer)
    yield context if layer_inputs is None else {**context, 'layer_inputs': layer_inputs[first:last]}
    first = last


class BlockGroup(WithSublayers, kw_only=True):
  """Runs several blocks in sequence as one block, for stacks of alternating layers.

      TransformerStack(block=BlockGroup(blocks=(dense_block, moe_block)), num_layers=12)

  has 24 layers, every second one a mixture of experts (GShard, GLaM). Weights under `block_0`, `block_1`, ...

  Fields:
    blocks: templates: block(x, segment_ids, segment_pos, train=...) -> (x, aux).
  """

  blocks: tuple[nn.Module, ...]

  @property
  def num_blocks(self) -> int:
    return sum(map(num_blocks, self.blocks))

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    train: bool = False,
    **context: Any,
  ) -> tuple[jax.Array, Aux]:
    """Returns ([B, T, D], aux); each statistic is stacked over the blocks that report it, [n, ...]."""
    parts: dict[str, list[Statistics]] = {}
    for i, (template, own) in enumerate(zip(self.blocks, _own_context(self.blocks, context), strict=True)):
      block = template.copy(name=f'block_{i}')
      text = {'segment_ids': segment_ids, 'segment_pos': segment_pos, **own}
      x, aux = run_layer('block', block, x, **text, train=train)
      for name, statistics in aux.items():
        parts.setdefault(name, []).append(statistics)
    return x, {name: jax.tree.map(lambda *leaves: jnp.stack(leaves), *same) for name, same in parts.items()}


class StackSequence(WithSublayers, kw_only=True):
  """Runs stacks in sequence, for models whose layers are not all alike. Weights under `stack_0`, `stack_1`, ...

      StackSequence(stacks=(
        TransformerStack(block=dense_block, num_layers=1),        # DeepSeek: the first layers are dense
        PipelinedStack(block=moe_block, num_layers=26, ...),      # and the others are mixtures of experts
      ))

  It is called as a TransformerStack is, and each stack compiles one block, whatever its depth. Gemma 3's 26 layers, of
  which every sixth attends to the whole text, are 4 groups of 6 (`BlockGroup`) and 2 more.

  On a mesh with pipeline stages, a PipelinedStack among the stacks is pipelined. The layers of other stacks run on all
  stages at once, each on its part of the batch; their weights are sharded over the stages and gathered layer by layer,
  so keep these stacks short. KV caches of the stacks may have different lengths, as with attention windows.

  Fields:
    stacks: stack(x, segment_ids, segment_pos, train=...) -> x or (x, {name: [L] or [L, E]}).
  """

  stacks: tuple[nn.Module, ...]

  def __post_init__(self):
    if not self.stacks:
      raise UserError('stacks=() of a StackSequence is a model without layers: give at least one stack.')
    super().__post_init__()

  @property
  def num_blocks(self) -> int:
    return sum(map(num_blocks, self.stacks))

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    train: bool = False,
    **context: Any,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns ([B, T, D], {name of a statistic: [L] or [L, E]}); L counts the layers that report it, in order."""
    parts: dict[str, list[jax.Array]] = {}
    for i, (stack, own) in enumerate(zip(self.stacks, _own_context(self.stacks, context), strict=True)):
      text = {'segment_ids': segment_ids, 'segment_pos': segment_pos, **own}
      x, aux = run_layer('stack', stack.copy(name=f'stack_{i}'), x, **text, train=train)
      for name, value in aux.items():
        parts.setdefault(name, []).append(value)
    for name, values in parts.items():
      if len(lengths := {value.shape[1:] for value in values}) > 1:
        raise UserError(
          f'the stacks of a StackSequence report {name!r} as vectors of the lengths '
          f'{sorted(shape[0] for shape in lengths)}: give all mixtures the same number of experts.'
        )
    return x, {name: jnp.concatenate(values) for name, values in parts.items()}
