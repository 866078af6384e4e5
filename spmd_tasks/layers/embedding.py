"""TokenEmbedding: embeds token ids, and computes the logits from the same table or from a kernel of its own.

Shapes: B batch, T sequence, V vocab, D model.
"""

from collections.abc import Mapping
import math
from typing import TYPE_CHECKING, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import FanInNormal, current_layer_scope, declare_weight, float32_product, soft_cap
from spmd_tasks.layers.linear import adapted, adapter_of
from spmd_tasks.layers.products import multiply_gathered
from spmd_tasks.layers.softmax_head import SoftmaxHead
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.weights import Initializer

if TYPE_CHECKING:
  from spmd_tasks.layers.adapter import AdaptedKernel


class TokenEmbedding(nn.Module, kw_only=True):
  """Token embedding: `embedding(ids)` looks up rows, `embedding.attend(x)` returns float32 logits over the vocabulary.

  Weights: `table` [V, D]; with `tied=False` also `softmax_kernel` [D, V], with `use_bias` also `softmax_bias` [V].

  Fields:
    vocab_size, embed_dim: V and D.
    tied: whether the logits are x . table^T (Press and Wolf, 2017) or use the separate `softmax_kernel`.
    scale_sqrt_depth: whether looked-up rows are multiplied by sqrt(D). They then enter the residual stream with unit
      variance, while the table's variance of 1/D suits the tied logits (Vaswani et al., 2017; Pax's name).
    scale_logits: whether x is divided by sqrt(D) before the logits, which suits a table of unit variance (T5: Raffel et
      al., 2020).
    embedding_multiplier, logits_multiplier: factors of looked-up rows and of logits, before their cap (Granite,
      Cohere).
    use_bias: whether the logits have a bias.
    logits_cap: bounds the logits, see `soft_cap`; None for no bound.
    dtype: of the looked-up rows and of the operands of the logits' matmul. Logits are accumulated in float32.
    table_init, softmax_init: initializers of the weights; None means normal with variance 1/D.
    table_split_dims, softmax_split_dims: of the weights.
    lookup_split_dims: of the table during the lookup. The fully sharded dim is all-gathered first, so that the rows
      come out sharded on batch; otherwise XLA gathers the rows of all devices and slices them again.
    activation_split_dims, logits_split_dims: of the embeddings and of the logits.
    adapters: the adapter of `softmax_kernel`; a tied embedding has none.
  """

  vocab_size: int
  embed_dim: int
  tied: bool = True
  scale_sqrt_depth: bool = True
  scale_logits: bool = False
  embedding_multiplier: float = 1.0
  logits_multiplier: float = 1.0
  use_bias: bool = False
  logits_cap: float | None = None
  dtype: Any = 'float32'
  table_init: Initializer | None = None
  softmax_init: Initializer | None = None
  table_split_dims: SplitDims = ('vocab', 'embed')
  softmax_split_dims: SplitDims = ('embed', 'vocab')
  lookup_split_dims: SplitDims = ('vocab', 'act_embed')
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')
  logits_split_dims: SplitDims = ('batch', 'seq', 'act_vocab')
  adapters: tuple[Any, ...] = ()

  @staticmethod
  def adaptable(layer: Any) -> Mapping[str, str]:
    """Returns the projections that can have adapters; see adapter.py."""
    return {} if layer.tied else {'softmax_kernel': 'softmax_kernel'}

  def setup(self):
    if self.embed_dim < 1 or self.vocab_size < 1:
      raise UserError(f'embed_dim={self.embed_dim} and vocab_size={self.vocab_size} must be at least 1.')
    if self.logits_cap is not None and not 0 < self.logits_cap < float('inf'):
      raise UserError(f'logits_cap={self.logits_cap} must be positive, or None for no bound.')
    table_init = self.table_init or jax.nn.initializers.normal(1.0 / math.sqrt(self.embed_dim))
    shape = (self.vocab_size, self.embed_dim)
    # num_input_dims=0: no matrix to optimizers. Muon's authors leave embeddings and the output head to AdamW.
    self.table = declare_weight(
      self, 'table', shape=shape, init=table_init, split_dims=self.table_split_dims, num_input_dims=0
    )
    self.softmax_bias: jax.Array | None = None
    if self.use_bias:
      split_dims, zeros = self.softmax_split_dims and self.softmax_split_dims[1:], jax.nn.initializers.zeros
      self.softmax_bias = declare_weight(
        self, 'softmax_bias', shape=shape[:1], init=zeros, split_dims=split_dims, tags=('no_decay',)
      )
    self.adapted: AdaptedKernel | None = None
    if not self.tied:
      split_dims, init = self.softmax_split_dims, self.softmax_init or FanInNormal()
      self.softmax_kernel = declare_weight(
        self, 'softmax_kernel', shape=shape[::-1], init=init, split_dims=split_dims, num_input_dims=0
      )
      self.adapted = adapted(
        adapter_of(self.adapters, 'softmax_kernel'),
        module=self,
        value=self.softmax_kernel,
        prefix='softmax_kernel_',
        split_dims=split_dims,
        dtype=self.dtype,
        token_split_dims=self.logits_split_dims and self.logits_split_dims[:2],
      )

  def __call__(self, ids: jax.Array) -> jax.Array:
    """Returns [B, T, D] for ids [B, T]. An id outside [0, V) gives a row of NaNs, never another token's row."""
    ids = jnp.where(ids < 0, self.vocab_size, ids)  # `take` counts negative indices from the end, as numpy does

    def look_up(ids: jax.Array, table: jax.Array) -> jax.Array:
      # Rows are cast after the lookup so that the table's gradient is summed over repeated tokens in float32.
      return jnp.take(table.astype('float32'), ids, axis=0, mode='fill', fill_value=jnp.nan).astype(self.dtype)

    if current_layer_scope().scatters_gradients and self.activation_split_dims is not None:
      token_split_dims = self.activation_split_dims[:2]
      x = multiply_gathered(look_up, ids, self.table, self.dtype, self.table_split_dims, token_split_dims)
    else:
      x = look_up(ids, constrain(self.table, self.lookup_split_dims))
    if self.scale_sqrt_depth:
      x = x * jnp.asarray(math.sqrt(self.embed_dim), self.dtype)
    if self.embedding_multiplier != 1.0:
      x = x * self.embedding_multiplier
    return constrain(x, self.activation_split_dims)

  def attend(self, x: jax.Array) -> jax.Array:
    """Returns logits, float32 [B, T, V], for x [B, T, D]."""
    kernel, split_dims, token_split_dims = self._kernel(), self._kernel_split_dims(), None
    if self.logits_split_dims is not None and x.size >= kernel.size:  # see multiply_kernel
      token_split_dims = self.logits_split_dims[:2]
    multiply, x = float32_product('BTD,VD->BTV' if self.tied else 'BTD,DV->BTV'), x.astype(self.dtype)
    logits = multiply_gathered(multiply, x, kernel, self.dtype, split_dims, token_split_dims)
    if self.adapted is not None:
      logits = self.adapted.outputs(x, logits)
    if self.scale_logits:
      logits = logits / math.sqrt(self.embed_dim)
    if self.softmax_bias is not None:
      logits = logits + self.softmax_bias[None, None, :]
    if self.logits_multiplier != 1.0:
      logits = logits * self.logits_multiplier
    return constrain(soft_cap(logits, self.logits_cap), self.logits_split_dims)

  def softmax_head(self, x: jax.Array, *, num_chunks: int | Literal['auto'] = 'auto') -> SoftmaxHead | None:
    """Returns what computes losses from x [B, T, D] without whole logits, in `num_chunks` chunks of a device's tokens.

    Returns None if the logits are not this class's: the softmax kernel has an adapter, or a subclass has its `attend`.
    """
    if self.adapted is not None or type(self).attend is not TokenEmbedding.attend:
      return None
    return SoftmaxHead(
      x=x,
      kernel=self._kernel(),
      bias=None if self.softmax_bias is None else self.softmax_bias * self.logits_multiplier,
      is_table=self.tied,
      dtype=self.dtype,
      divisor=(math.sqrt(self.embed_dim) if self.scale_logits else 1.0) / self.logits_multiplier,
      cap=self.logits_cap,
      num_chunks=num_chunks,
      split_dims=self._kernel_split_dims(),
      logits_split_dims=self.logits_split_dims,
    )

  def _kernel(self) -> jax.Array:
    return self.table if self.tied else self.softmax_kernel

  def _kernel_split_dims(self) -> SplitDims:
    return self.table_split_dims if self.tied else self.softmax_split_dims
