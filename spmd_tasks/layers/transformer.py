"""Transformer block and stack.

Shapes: B batch, T sequence, D model, L layers.

A block's sublayers are Linen modules given as fields, so that a config replaces them by replacing a field. They are
called so:

    attention(x, segment_ids, segment_pos, train=...) -> [B, T, D]
    ffn(x, segment_ids, train=...) -> ([B, T, D], aux)
    norm(x) -> [B, T, D]

`aux` maps names to Statistics of the tokens; the stack turns them into numbers, one per layer: `name -> [L]`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention.kv_cache import CACHE, NEW_CACHE
from spmd_tasks.layers.remat import remat_policy
from spmd_tasks.layers.statistics import Statistics, values_per_layer
from spmd_tasks.layers.sublayers import WithSublayers
from spmd_tasks.sharding.specs import SplitDims, constrain
from spmd_tasks.sharding.weights import STACK_DIM

Aux = Mapping[str, Statistics]


class TransformerBlock(WithSublayers, kw_only=True):
  """Pre-norm block: x + attention(norm(x)), then x + ffn(norm(x)) (Xiong et al., 2020).

  Weights under `attention`, `attention_norm`, `ffn`, `ffn_norm`. The residual stream keeps the dtype that it
  enters with (the embedding's), whatever the sublayers compute in.

  Fields:
    attention, ffn: the sublayers.
    norm: template of both norms.
    dropout_rate: of each sublayer's output, in training; needs the rng `dropout`.
    activation_split_dims: of the residual stream.
  """

  attention: nn.Module
  ffn: nn.Module
  norm: nn.Module
  dropout_rate: float = 0.0
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    train: bool = False,
  ) -> tuple[jax.Array, Aux]:
    """Returns ([B, T, D], aux of the ffn) for x [B, T, D]; segment_ids and segment_pos are int32 [B, T] or None."""
    dropout = nn.Dropout(rate=self.dropout_rate, deterministic=not train)
    normed = self.norm.copy(name='attention_norm')(x)
    y = dropout(self.attention(normed, segment_ids, segment_pos, train=train))
    x = constrain(x + y.astype(x.dtype), self.activation_split_dims)
    normed = self.norm.copy(name='ffn_norm')(x)
    y, aux = self.ffn(normed, segment_ids, train=train)
    return constrain(x + dropout(y).astype(x.dtype), self.activation_split_dims), aux


class TransformerStack(WithSublayers, kw_only=True):
  """`num_layers` blocks of one shape, each with weights of its own, stacked: every weight is [L, ...] under `layers`.

  With `scan=True` one compiled block runs L times, so that trace and compile time do not grow with depth. With
  `scan=False` the loop is unrolled in the compiled program, which gives XLA each layer on its own to schedule and takes
  longer to compile. The weights are the same tree of the same shapes either way, because both are one `nn.scan` that
  differs in its unroll factor only: a checkpoint does not know which of them wrote it.

  Fields:
    block: template of the layers: block(x, segment_ids, segment_pos, train=...) -> (x, aux).
    num_layers: L.
    scan: a loop in the compiled program, or L copies of its body.
    remat_policy: a name in REMAT_POLICIES, what each layer keeps for its backward pass.
  """

  block: nn.Module
  num_layers: int
  scan: bool = True
  remat_policy: str = 'none'

  def __post_init__(self):
    if self.num_layers < 1:
      raise UserError(f'num_layers={self.num_layers} must be at least 1.')
    remat_policy(self.remat_policy)
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
    """Returns ([B, T, D], {name of a statistic: [L], or [L, E] where it is a vector})."""
    layers = scan_layers(num_layers=self.num_layers, scan=self.scan, remat_policy_name=self.remat_policy, train=train)
    x, aux = layers(self.block.copy(name='layers'), x, segment_ids, segment_pos)
    return x, values_per_layer(aux)


def scan_layers(*, num_layers: int, scan: bool, remat_policy_name: str, train: bool) -> Callable[..., Any]:
  """The lifted function (block, x, segment_ids, segment_pos) -> (x, aux [L, ...]) that runs L layers of the block."""

  def layer(block, x, segment_ids, segment_pos):
    return block(x, segment_ids, segment_pos, train=train)

  policy = remat_policy(remat_policy_name)
  if policy is not None:
    # Inside a loop XLA cannot merge the recomputation with the forward pass, and the barrier that prevents it only
    # costs.
    layer = nn.remat(layer, policy=policy, prevent_cse=not scan)
  return nn.scan(
    layer,
    variable_axes={'params': 0, 'intermediates': 0, CACHE: 0, NEW_CACHE: 0},
    split_rngs={'params': True, 'dropout': True},
    in_axes=(nn.broadcast, nn.broadcast),
    length=num_layers,
    unroll=1 if scan else num_layers,
    metadata_params={STACK_DIM: 'layers'},
  )
