"""The experts: E feed-forward networks of one shape, their weights, and three ways to apply them.

Shapes: E experts, D model, F ffn, R rows, n tokens, k choices per token.

`Experts` declares the weights and returns them as `ExpertWeights`. `grouped_ffn` applies them to rows sorted by expert,
with a different number of rows per expert (dropless). `batched_ffn` applies them to equally many rows per expert
(capacity). `LocalExperts` holds the experts of one device and applies them to tokens that chose them.
"""

from typing import Any

from flax import struct
import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.layers.base import FanInNormal, declare_weight
from spmd_tasks.layers.feed_forward import activation_function, hidden_layer
from spmd_tasks.layers.moe._grouped_matmul import grouped_matmul, resolve_backend
from spmd_tasks.layers.moe._loop_backend import ffn_by_loop
from spmd_tasks.layers.moe._permutation import Permutation, combine_rows, gather_rows, sort_by_expert
from spmd_tasks.layers.transformer import ROUTING_NAME
from spmd_tasks.sharding import SplitDims, constrain


class ExpertWeights(struct.PyTreeNode):
  """The weights in the dtype of the computation, their activation and their split dims.

  Expert e maps x to act(x . up[e]) . down[e], or, if gated, to (act(x . gate[e]) * (x . up[e])) . down[e].

  Attributes:
    up: [E, D, F].
    down: [E, F, D].
    gate: [E, D, F], or None for a plain network.
    activation: a name in ACTIVATIONS.
    up_split_dims, down_split_dims: of `up` and `gate`, and of `down`.
  """

  up: jax.Array
  down: jax.Array
  gate: jax.Array | None
  activation: str = struct.field(pytree_node=False)
  up_split_dims: SplitDims = struct.field(pytree_node=False)
  down_split_dims: SplitDims = struct.field(pytree_node=False)


class Experts(nn.Module, kw_only=True):
  """Declares the weights `up`, `down` and, if gated, `gate`, all tagged `expert`.

  Fields:
    num_experts: E.
    hidden_dim: F.
    gated: whether there is a `gate`.
    activation: a name in ACTIVATIONS.
    dtype: of the computation; weights are float32.
    init_scale, down_init_scale: variance scale of the kernels into and out of the hidden layer.
    up_split_dims, down_split_dims: of these kernels.
  """

  num_experts: int
  hidden_dim: int
  gated: bool = True
  activation: str = 'silu'
  dtype: Any = 'float32'
  init_scale: float = 1.0
  down_init_scale: float = 1.0
  up_split_dims: SplitDims = ('expert', 'expert_embed', 'expert_mlp')
  down_split_dims: SplitDims = ('expert', 'expert_mlp', 'expert_embed')

  @nn.compact
  def __call__(self, model_dim: int) -> ExpertWeights:
    """Returns the weights for inputs of `model_dim`, cast to `dtype`."""
    activation_function(self.activation)  # raises for an unknown name

    def declare(name: str, num_inputs: int, num_outputs: int, scale: float, split_dims: SplitDims) -> jax.Array:
      weight = declare_weight(
        self,
        name,
        shape=(self.num_experts, num_inputs, num_outputs),
        init=FanInNormal(scale=scale, num_stacked_dims=1),
        split_dims=split_dims,
        tags=('expert',),
      )
      return weight.astype(self.dtype)

    gate = declare('gate', model_dim, self.hidden_dim, self.init_scale, self.up_split_dims) if self.gated else None
    return ExpertWeights(
      up=declare('up', model_dim, self.hidden_dim, self.init_scale, self.up_split_dims),
      down=declare('down', self.hidden_dim, model_dim, self.down_init_scale, self.down_split_dims),
      gate=gate,
      activation=self.activation,
      up_split_dims=self.up_split_dims,
      down_split_dims=self.down_split_dims,
    )


def grouped_ffn(
  rows: jax.Array,
  group_sizes: jax.Array,
  weights: ExpertWeights,
  *,
  recompute_activation: bool = False,
  backend: str | None = None,
) -> jax.Array:
  """Applies each expert's network to its own rows. Returns [R, D], in the rows' dtype.

  Rows after the last group give zeros and take no gradient, whatever they hold.

  Args:
    rows: [R, D], sorted by expert.
    group_sizes: int32 [E], rows per expert, with a sum of at most R.
    weights: of all E experts, in the rows' dtype.
    recompute_activation: save only the rows and the pre-activation [R, F], and compute the activation again in the
      backward pass (MegaBlocks' memory-optimized form). The backend 'loop' always recomputes, because that is faster
      on CPU.
    backend: of the grouped matmuls; see `grouped_matmul`.
  """
  backend = resolve_backend(backend)
  if backend == 'loop':
    return ffn_by_loop(weights.activation, rows, group_sizes, weights.up, weights.gate, weights.down)

  def multiply(rows: jax.Array, kernels: jax.Array) -> jax.Array:
    return grouped_matmul(rows, kernels, group_sizes, backend=backend)

  up = multiply(rows, weights.up)
  gate = None if weights.gate is None else multiply(rows, weights.gate)

  def project_down(up: jax.Array, gate: jax.Array | None, down: jax.Array) -> jax.Array:
    return multiply(hidden_layer(weights.activation, up, gate), down)

  if recompute_activation:
    project_down = jax.checkpoint(project_down)  # its gradients need the hidden layer, but not its result again
  return project_down(up, gate, weights.down)


def batched_ffn(rows: jax.Array, weights: ExpertWeights, *, hidden_split_dims: SplitDims = None) -> jax.Array:
  """Applies each expert's network to equally many rows: [E, ..., D] to [E, ..., D], in the rows' dtype.

  Args:
    rows: [E, ..., D], in the dtype of the computation.
    weights: of all E experts.
    hidden_split_dims: of the hidden layer [E, ..., F].
  """

  def multiply(rows: jax.Array, kernels: jax.Array) -> jax.Array:
    return jnp.einsum('e...i,eio->e...o', rows, kernels)

  up = constrain(multiply(rows, weights.up), hidden_split_dims)
  gate = None if weights.gate is None else constrain(multiply(rows, weights.gate), hidden_split_dims)
  return multiply(hidden_layer(weights.activation, up, gate), weights.down)


class LocalExperts(struct.PyTreeNode):
  """The experts that one device holds, with the options of their computation. Here E counts these experts only.

  Attributes:
    weights: of E experts.
    recompute_activation: see `grouped_ffn`.
    saved_bits: see `combine_rows`.
    backend: see `grouped_matmul`.
  """

  weights: ExpertWeights
  recompute_activation: bool = struct.field(pytree_node=False)
  saved_bits: int | None = struct.field(pytree_node=False)
  backend: str | None = struct.field(pytree_node=False)

  @property
  def num_experts(self) -> int:
    return self.weights.up.shape[0]

  def apply_to_rows(self, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns [R, D] for rows [R, D] sorted by expert; group_sizes is int32 [E]."""
    return grouped_ffn(
      rows, group_sizes, self.weights, recompute_activation=self.recompute_activation, backend=self.backend
    )

  def combine(self, rows: jax.Array, gates: jax.Array, permutation: Permutation) -> jax.Array:
    """Returns [n, D]: each token's rows summed by their gates float32 [n, k]."""
    return combine_rows(rows, gates, permutation, saved_bits=self.saved_bits)

  def apply_to_tokens(self, x: jax.Array, expert_ids: jax.Array, gates: jax.Array) -> jax.Array:
    """Returns [..., D]: for each token the sum of its experts' outputs by their gates.

    Args:
      x: [..., D], with the same leading dims as the other arguments.
      expert_ids: int32 [..., k] in [0, E]. The id E means 'not routed'.
      gates: float32 [..., k], 0 for an id of E.
    """
    shape = x.shape
    x, expert_ids, gates = (array.reshape(-1, array.shape[-1]) for array in (x, expert_ids, gates))
    if self.num_experts < expert_ids.shape[1]:
      expert_ids, gates = _one_choice_per_expert(expert_ids, gates, self.num_experts)
    permutation = name_routing(sort_by_expert(expert_ids, self.num_experts))
    rows = self.apply_to_rows(gather_rows(x, permutation), permutation.group_sizes)
    return self.combine(rows, gates, permutation).reshape(shape)


def _one_choice_per_expert(expert_ids: jax.Array, gates: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
  """Rewrites the assignments [n, k] as [n, E], choice e being expert e or not routed: fewer rows if E < k."""
  experts = jnp.arange(num_experts, dtype=expert_ids.dtype)
  is_chosen = expert_ids[:, None, :] == experts[None, :, None]  # [n, E, k]
  gates = jnp.sum(jnp.where(is_chosen, gates[:, None, :], 0.0), axis=-1)
  return jnp.where(jnp.any(is_chosen, axis=-1), experts[None, :], num_experts), gates


def name_routing(permutation: Permutation) -> Permutation:
  """Names the permutation as a routing decision. Every remat policy saves these, so the backward pass does not sort."""
  return jax.tree.map(lambda array: checkpoint_name(array, ROUTING_NAME), permutation)
