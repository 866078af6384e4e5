"""BlockGroup: several different blocks as one, for stacks whose layers alternate.

    TransformerStack(block=BlockGroup(blocks=(dense_block, moe_block)), num_layers=12)

has 24 layers, every second one a mixture of experts (GShard, GLaM, T5X's `moe_layer` every other).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.statistics import Statistics
from spmd_tasks.layers.sublayers import WithSublayers
from spmd_tasks.layers.transformer import Aux


class BlockGroup(WithSublayers, kw_only=True):
  """Blocks in sequence, called as one block. Weights under `block_0`, `block_1`, ...

  Fields:
    blocks: templates: block(x, segment_ids, segment_pos, train=...) -> (x, aux).
  """

  blocks: tuple[nn.Module, ...]

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> tuple[jax.Array, Aux]:
    """Returns ([B, T, D], aux): each of the statistics stacked over the blocks that give it, [n, ...]."""
    parts: dict[str, list[Statistics]] = {}
    for i, template in enumerate(self.blocks):
      x, aux = template.copy(name=f'block_{i}')(x, segment_ids, segment_pos, train=train)
      for name, statistics in aux.items():
        parts.setdefault(name, []).append(statistics)
    return x, {name: jax.tree.map(lambda *leaves: jnp.stack(leaves), *same) for name, same in parts.items()}
