"""Feed-forward sublayers of a transformer block: plain and gated.

Both map x [B, T, D] -> ([B, T, D], {}); a mixture of experts returns the Statistics of its routing in the dict.

Shapes: B batch, T sequence, D model, F ffn.
"""

from collections.abc import Callable
import math
import statistics
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import constant
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import Statistics, declare_weight, dropout
from spmd_tasks.layers.linear import kernels, project
from spmd_tasks.sharding import SplitDims

# The `checkpoint_name` of the pre-activations of hidden layers, for remat policies.
PRE_ACTIVATIONS_NAME = 'pre_activations'

# 'gelu' is the tanh approximation (GPT-2, T5, JAX's default); 'gelu_exact' uses erf (BERT).
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gelu': lambda x: jax.nn.gelu(x, approximate=True),
  'gelu_exact': lambda x: jax.nn.gelu(x, approximate=False),
  'relu': jax.nn.relu,
  'silu': jax.nn.silu,
  'swish': jax.nn.silu,  # T5X's name
  'squared_relu': lambda x: jnp.square(jax.nn.relu(x)),  # Primer (So et al., 2021)
  'sigmoid': jax.nn.sigmoid,
  'tanh': jnp.tanh,
  'linear': lambda x: x,
}


def _clamped_swiglu(up: jax.Array, gate: jax.Array) -> jax.Array:
  """gpt-oss (2025): (up + 1) * gate * sigmoid(1.702 gate), with gate at most 7 and up within +-7."""
  gate = jnp.minimum(gate, 7.0)
  return (jnp.clip(up, -7.0, 7.0) + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)


# Gated activations of another form than act(gate) * up.
GATED_ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {'clamped_swiglu': _clamped_swiglu}


def _xielu(x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array) -> jax.Array:
  """Computes xIELU (Huang and Schlag, 2024; Apertus): a parabola above 0, and an exponential below."""
  beta, eps = 0.5, -1e-6
  positive = jax.nn.softplus(alpha_p) * x * x
  negative = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x, eps)) - x)
  return jnp.where(x > 0, positive, negative) + beta * x


# Activations of a FeedForward that have trained scalars -> their names and initial values.
LEARNED_ACTIVATIONS = {'xielu': (_xielu, {'alpha_p': math.log(math.expm1(0.8)), 'alpha_n': math.log(math.expm1(0.3))})}


def check_activation(name: str, *, gated: bool) -> None:
  """Raises a UserError if `hidden_layer` has no activation of that name, with or without a gate."""
  names = {*ACTIVATIONS, *GATED_ACTIVATIONS} if gated else {*ACTIVATIONS}
  if name not in names:
    remark = 'needs a gate' if name in GATED_ACTIVATIONS else 'is unknown'
    raise UserError(f'activation {name!r} {remark}: choose one of {sorted(names)}.')


def hidden_layer(activation: str, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
  """Computes the hidden layer from pre-activations [..., F]: act(up), or with a gate act(gate) * up."""
  check_activation(activation, gated=gate is not None)
  if gate is None:
    return ACTIVATIONS[activation](up)
  if activation in GATED_ACTIVATIONS:
    return GATED_ACTIVATIONS[activation](up, gate)
  return ACTIVATIONS[activation](gate) * up


class FeedForward(nn.Module, kw_only=True):
  """Plain feed-forward sublayer: act(x . up) . down.

  Weights: `up` [D, F], `down` [F, D] (each under `.../kernel`), and the scalars [1] of a learned activation.

  Fields:
    hidden_dim: F.
    activation: a name in ACTIVATIONS or LEARNED_ACTIVATIONS.
    use_bias: whether every projection has a bias.
    dropout_rate: of the hidden layer in training; needs the rng `dropout`.
    dropout_broadcast_dims: dims of the hidden layer that share one mask; T5X has (-2,), all tokens of a row.
    dtype: of the computation.
    init_scale, down_init_scale: FanInNormal's scale for the kernels into and out of the hidden layer.
    up_split_dims, down_split_dims: of the kernels.
    hidden_split_dims, activation_split_dims: of the hidden layer and of the output.
    adapters: adapters of `up`, `down` and `gate`.
  """

  hidden_dim: int
  activation: str = 'gelu'
  use_bias: bool = False
  dropout_rate: float = 0.0
  dropout_broadcast_dims: tuple[int, ...] = ()
  dtype: Any = 'float32'
  init_scale: float = 1.0
  down_init_scale: float = 1.0
  up_split_dims: SplitDims = ('embed', 'mlp')
  down_split_dims: SplitDims = ('mlp', 'embed')
  hidden_split_dims: SplitDims = ('batch', 'seq', 'act_mlp')
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')
  adapters: tuple[Any, ...] = ()

  adaptable = staticmethod(lambda layer: kernels('up', 'down'))  # the projections that can have adapters

  def _up(self, name: str, x: jax.Array) -> jax.Array:
    pre_activation = project(
      self, name, x, self.hidden_dim, self.up_split_dims, self.hidden_split_dims, scale=self.init_scale
    )
    return checkpoint_name(pre_activation, PRE_ACTIVATIONS_NAME)

  def _hidden(self, x: jax.Array) -> jax.Array:
    """Computes the hidden layer [B, T, F] for x [B, T, D]; the variants differ only here."""
    up = self._up('up', x)
    if self.activation not in LEARNED_ACTIVATIONS:
      return hidden_layer(self.activation, up)
    function, initial_values = LEARNED_ACTIVATIONS[self.activation]
    scalars = [
      declare_weight(self, name, shape=(1,), init=constant(value), split_dims=(None,), tags=('no_decay',))
      for name, value in initial_values.items()
    ]
    return function(up, *(scalar.astype(up.dtype).reshape((1,) * up.ndim) for scalar in scalars))

  @nn.compact
  def __call__(
    self, x: jax.Array, segment_ids: jax.Array | None = None, *, train: bool = False
  ) -> tuple[jax.Array, dict[str, Statistics]]:
    """Returns ([B, T, D], {}). `segment_ids` are unused here; mixtures of experts need them."""
    del segment_ids
    drop = dropout(self.dropout_rate, broadcast_dims=self.dropout_broadcast_dims, train=train)
    hidden, model_dim, scale = drop(self._hidden(x)), x.shape[-1], self.down_init_scale
    y = project(self, 'down', hidden, model_dim, self.down_split_dims, self.activation_split_dims, scale=scale)
    return y, {}


class GatedFeedForward(FeedForward, kw_only=True):
  """Gated feed-forward sublayer: (act(x . gate) * (x . up)) . down (Shazeer, 2020).

  GEGLU with activation 'gelu', SwiGLU with 'silu'. Has FeedForward's fields and weights, and the weight `gate` [D, F].

  Fields:
    sparsity: of a token's gates, about this fraction is 0: those below the quantile of a normal distribution with their
      mean and deviation, which is subtracted from the others (Gemma 3n); 0 for none.
  """

  sparsity: float = 0.0

  adaptable = staticmethod(lambda layer: kernels('gate', 'up', 'down'))

  def _hidden(self, x: jax.Array) -> jax.Array:
    gate = self._up('gate', x)
    if self.sparsity:
      mean, deviation = (f(gate, axis=-1, keepdims=True) for f in (jnp.mean, jnp.std))
      gate = jax.nn.relu(gate - mean - deviation * statistics.NormalDist().inv_cdf(self.sparsity))
    return hidden_layer(self.activation, self._up('up', x), gate)
