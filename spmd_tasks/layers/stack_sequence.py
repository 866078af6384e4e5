"""StackSequence: several stacks of layers, one after another, where a model's depth is no repetition of one block.

    StackSequence(stacks=(
      TransformerStack(block=dense_block, num_layers=1),        # DeepSeek: the first layers are dense
      PipelinedStack(block=moe_block, num_layers=26, ...),      # and the others mixtures of experts
    ))

Gemma 3's 26 layers, of which every sixth sees the whole text, are 4 groups of 6 (`BlockGroup`) and 2 more; the last
layers of a Qwen 2 with a window are a second stack. Each stack compiles one block, whatever its depth.

Shapes: B batch, T sequence, D model, L layers, E experts.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import WithSublayers, run_stack


class StackSequence(WithSublayers, kw_only=True):
  """Stacks in sequence, with the call signature of one TransformerStack. Weights under `stack_0`, `stack_1`, ...

  On a mesh with pipeline stages, a PipelinedStack among the stacks is pipelined. The layers of the others run on all
  stages at once, each stage with its share of the batch, and their weights are split over the stages and gathered layer
  by layer; keep these stacks short. KV caches of the stacks may have different lengths, as with windows.

  Fields:
    stacks: stack(x, segment_ids, segment_pos, train=...) -> x or (x, {name: [L] or [L, E]}).
  """

  stacks: tuple[nn.Module, ...]

  def __post_init__(self):
    if not self.stacks:
      raise UserError('stacks is empty: give a StackSequence at least one stack of layers.')
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns ([B, T, D], {name of a statistic: [L], or [L, E]}), L counting the layers that report it, in order.

    Raises:
      UserError: stacks report vectors of different lengths under one name.
    """
    parts: dict[str, list[jax.Array]] = {}
    for i, stack in enumerate(self.stacks):
      x, aux = run_stack(stack.copy(name=f'stack_{i}'), x, segment_ids, segment_pos, train=train)
      for name, values in aux.items():
        parts.setdefault(name, []).append(values)
    for name, values in parts.items():
      if len(lengths := {value.shape[1:] for value in values}) > 1:
        raise UserError(
          f'the stacks of a StackSequence report {name!r} as vectors of different lengths, '
          f'{sorted(shape[0] for shape in lengths)}: give all mixtures the same number of experts.'
        )
    return x, {name: jnp.concatenate(values) for name, values in parts.items()}
