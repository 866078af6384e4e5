"""The experts: E feed-forward networks of one shape, their weights, and two ways to apply them.

Shapes: E experts, D model, F ffn, R rows, n tokens, k choices per token.

`Experts` declares the weights and returns them as `ExpertWeights`. Their `apply_to_rows` takes rows sorted by expert,
with a different number of rows per expert (dropless). `batched_ffn` takes equally many rows per expert (capacity).
"""

from collections.abc import Callable, Mapping
import contextlib
from typing import Any, TypeVar

from flax import struct
import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import FanInNormal, declare_weight
from spmd_tasks.layers.feed_forward import PRE_ACTIVATIONS_NAME, check_activation, hidden_layer
from spmd_tasks.layers.linear import adapted, adapter_of
from spmd_tasks.layers.moe._permutation import (
  gather_gates,
  gather_rows,
  sort_by_expert,
  sum_rows,
  without_unrouted,
)
from spmd_tasks.layers.moe.grouped_matmul import grouped_matmul
from spmd_tasks.layers.transformer import ROUTING_NAME
from spmd_tasks.sharding import SplitDims, constrain

# Names a grouped matmul, as 'balanced_share=0.125', if with balanced routing only this share of its rows has an expert.
# Kernels skip the other rows, and a plan does not count them.
BALANCED_SHARE_NAME = 'balanced_share'
Axes = tuple[str, ...]
Decision = TypeVar('Decision')


class ExpertWeights(struct.PyTreeNode):
  """The weights in the dtype of the computation, their activation and their split dims.

  Expert e maps x to act(x . up[e]) . down[e], or, if gated, to (act(x . gate[e]) * (x . up[e])) . down[e], each product
  with its bias added if there are biases.

  Attributes:
    up, down: [E, D, F] and [E, F, D].
    gate: [E, D, F], or None for a plain network.
    up_bias, gate_bias, down_bias: [E, F], [E, F] and [E, D], or None.
    activation: see `hidden_layer`.
    up_split_dims, down_split_dims: of `up` and `gate`, and of `down`.
    dropout_rate, dropout_key: of the hidden layer; the key is None outside of training.
    gates_inputs: see `Experts`.
    backend: of the grouped matmuls; see `grouped_matmul`.
    balanced_load: the fraction of all assignments that these experts get with balanced routing.
  """

  up: jax.Array
  down: jax.Array
  gate: jax.Array | None
  activation: str = struct.field(pytree_node=False)
  up_split_dims: SplitDims = struct.field(pytree_node=False)
  down_split_dims: SplitDims = struct.field(pytree_node=False)
  up_bias: jax.Array | None = None
  gate_bias: jax.Array | None = None
  down_bias: jax.Array | None = None
  dropout_rate: float = struct.field(pytree_node=False, default=0.0)
  dropout_key: jax.Array | None = None
  gates_inputs: bool = struct.field(pytree_node=False, default=False)
  backend: str | None = struct.field(pytree_node=False, default=None)
  balanced_load: float = struct.field(pytree_node=False, default=1.0)

  @property
  def num_experts(self) -> int:
    return self.up.shape[0]

  def inputs(self) -> list[tuple[jax.Array, jax.Array | None]]:
    """Returns the kernels into the hidden layer with their biases, in the order of `hidden_layer`'s arguments."""
    return [(self.up, self.up_bias)] + ([] if self.gate is None else [(self.gate, self.gate_bias)])

  def map(
    self,
    *,
    up: Callable[[jax.Array], Any],
    down: Callable[[jax.Array], Any],
    up_bias: Callable[[jax.Array], Any] = lambda bias: bias,
    down_bias: Callable[[jax.Array], Any] = lambda bias: bias,
  ) -> Any:
    """Returns these weights with `up` and `gate` mapped by one function, `down` by another, and likewise the biases."""
    functions = {'up': up, 'gate': up, 'down': down, 'up_bias': up_bias, 'gate_bias': up_bias, 'down_bias': down_bias}
    weights = {name: getattr(self, name) for name in functions}
    return self.replace(**{name: functions[name](x) for name, x in weights.items() if x is not None})

  def specs(self, expert: Axes, hidden: Axes, up_embed: Axes = (), down_embed: Axes = ()) -> Any:
    """Returns the weights' PartitionSpecs, given the mesh axes that split E, F, D of `up` and D of `down`."""
    specs = self.map(
      up=lambda _: PartitionSpec(expert, up_embed, hidden),
      down=lambda _: PartitionSpec(expert, hidden, down_embed),
      up_bias=lambda _: PartitionSpec(expert, hidden),
      down_bias=lambda _: PartitionSpec(expert, None),
    )
    return specs.replace(dropout_key=None if self.dropout_key is None else PartitionSpec())

  def apply_to_rows(
    self, rows: jax.Array, group_sizes: jax.Array, gates: jax.Array, num_assignments: int | None = None
  ) -> jax.Array:
    """Applies each expert to its own rows: returns [R, D], in the rows' dtype, times the gates.

    The results and gradients of rows after the last group are undefined, whatever these rows hold.

    Args:
      rows: [R, D], sorted by expert.
      group_sizes: int32 [E], rows per expert, with a sum of at most R.
      gates: float32 [R]. They multiply the hidden layer, so that their gradient needs no results, or the rows.
      num_assignments: of the tokens that can have rows here, to experts of any device; default: R. Only plans use it.
    """
    num_rows, num_used = rows.shape[0], jnp.sum(group_sizes)
    share = min(1.0, self.balanced_load * (num_assignments or num_rows) / max(num_rows, 1))

    def project(
      rows: jax.Array, kernels: jax.Array, biases: jax.Array | None, gates: jax.Array | None = None
    ) -> jax.Array:
      y = grouped_matmul(rows, kernels, group_sizes, backend=self.backend)
      if biases is None:
        return y
      biases = jnp.repeat(biases, group_sizes, axis=0, total_repeat_length=num_rows)
      if gates is not None:
        biases = (gates[:, None] * biases).astype(y.dtype)
      is_used = jnp.arange(num_rows) < num_used
      return y + jnp.where(is_used[:, None], biases, 0)

    with jax.named_scope(f'{BALANCED_SHARE_NAME}={share:.4g}') if share < 1 else contextlib.nullcontext():
      if self.gates_inputs:
        rows, gates = (gates[:, None] * rows).astype(rows.dtype), jnp.ones_like(gates)
      pre_activations = [checkpoint_name(project(rows, *pair), PRE_ACTIVATIONS_NAME) for pair in self.inputs()]
      hidden = hidden_layer(self.activation, *pre_activations)
      hidden = (gates[:, None] * hidden).astype(hidden.dtype)
      return project(hidden, self.down, self.down_bias, gates)

  def apply_to_tokens(self, x: jax.Array, expert_ids: jax.Array, gates: jax.Array) -> jax.Array:
    """Returns [..., D]: for each token the sum of its experts' outputs by their gates.

    Args:
      x: [..., D], with the same leading dims as the other arguments.
      expert_ids: int32 [..., k] in [0, E]. The id E means 'not routed'.
      gates: float32 [..., k], 0 for an id of E.
    """
    shape, num_assignments = x.shape, expert_ids.size
    x, expert_ids, gates = (array.reshape(-1, array.shape[-1]) for array in (x, expert_ids, gates))
    if self.num_experts < expert_ids.shape[1]:
      expert_ids, gates = _one_choice_per_expert(expert_ids, gates, self.num_experts)
    permutation = name_routing(without_unrouted(sort_by_expert(expert_ids, self.num_experts)))
    rows, row_gates = gather_rows(x, permutation), gather_gates(gates, permutation)
    results = self.apply_to_rows(rows, permutation.group_sizes, row_gates, num_assignments)
    return sum_rows(results, permutation).reshape(shape)


class Experts(nn.Module, kw_only=True):
  """Declares the weights `up`, `down` and, if gated, `gate`, all tagged `expert`.

  With `use_bias` also `up_bias`, `gate_bias` and `down_bias`, tagged `expert` and `no_decay`.

  Fields:
    num_experts: E.
    hidden_dim: F.
    gated: whether there is a `gate`.
    use_bias: whether every projection of every expert has a bias (gpt-oss).
    activation: see `hidden_layer`.
    gates_inputs: whether a token's gate multiplies the expert's input instead of its output (Llama 4).
    dropout_rate: of the hidden layer in training, one mask for all slots of an expert in a group, as Flaxformer has it;
      needs the rng `dropout`, and a computation by capacity.
    dtype: of the computation; weights are float32.
    init_scale, down_init_scale: variance scale of the kernels into and out of the hidden layer.
    up_split_dims, down_split_dims: of these kernels.
    adapters: adapters of `up`, `down` and `gate`; each expert has its own.
  """

  num_experts: int
  hidden_dim: int
  gated: bool = True
  use_bias: bool = False
  activation: str = 'silu'
  gates_inputs: bool = False
  dropout_rate: float = 0.0
  dtype: Any = 'float32'
  init_scale: float = 1.0
  down_init_scale: float = 1.0
  up_split_dims: SplitDims = ('expert', 'expert_embed', 'expert_mlp')
  down_split_dims: SplitDims = ('expert', 'expert_mlp', 'expert_embed')
  adapters: tuple[Any, ...] = ()

  @staticmethod
  def adaptable(layer: Any) -> Mapping[str, str]:
    """Returns the weights that can have adapters; see layers/adapter.py."""
    return {name: name for name in ('up', 'down', *(('gate',) if layer.gated else ()))}

  @nn.compact
  def __call__(self, model_dim: int, *, train: bool = False) -> ExpertWeights:
    """Returns the weights for inputs of `model_dim`, cast to `dtype`."""
    check_activation(self.activation, gated=self.gated)
    if not 0 <= self.dropout_rate < 1:
      raise UserError(f'dropout_rate={self.dropout_rate} of experts must be at least 0 and less than 1.')

    def declare(name: str, num_inputs: int, num_outputs: int, scale: float, split_dims: SplitDims) -> jax.Array:
      shape, init = (self.num_experts, num_inputs, num_outputs), FanInNormal(scale=scale, num_stacked_dims=1)
      weight = declare_weight(
        self, name, shape=shape, init=init, split_dims=split_dims, tags=('expert',), num_input_dims=1
      )
      # Every dispatch multiplies by whole kernels, so adapters join them, for one layer at a time.
      adapted_kernel = adapted(
        adapter_of(self.adapters, name),
        module=self,
        value=weight,
        prefix=f'{name}_',
        num_stacked_dims=1,
        split_dims=split_dims,
        dtype=self.dtype,
        tags=('expert',),
      )
      if adapted_kernel is not None:
        return adapted_kernel.kernel()
      return weight.astype(self.dtype)

    def declare_bias(name: str, num_outputs: int, split_dims: SplitDims) -> jax.Array | None:
      if not self.use_bias:
        return None
      shape, zeros, tags = (self.num_experts, num_outputs), jax.nn.initializers.zeros, ('expert', 'no_decay')
      bias = declare_weight(self, name, shape=shape, init=zeros, split_dims=split_dims, tags=tags)
      return bias.astype(self.dtype)

    gate = declare('gate', model_dim, self.hidden_dim, self.init_scale, self.up_split_dims) if self.gated else None
    hidden_split_dims = self.up_split_dims and (self.up_split_dims[0], self.up_split_dims[2])
    return ExpertWeights(
      up=declare('up', model_dim, self.hidden_dim, self.init_scale, self.up_split_dims),
      down=declare('down', self.hidden_dim, model_dim, self.down_init_scale, self.down_split_dims),
      gate=gate,
      activation=self.activation,
      gates_inputs=self.gates_inputs,
      up_split_dims=self.up_split_dims,
      down_split_dims=self.down_split_dims,
      up_bias=declare_bias('up_bias', self.hidden_dim, hidden_split_dims),
      gate_bias=declare_bias('gate_bias', self.hidden_dim, hidden_split_dims) if self.gated else None,
      # Not split over D: the devices that split an expert's hidden layer sum whole results.
      down_bias=declare_bias('down_bias', model_dim, self.down_split_dims and (self.down_split_dims[0], None)),
      dropout_rate=self.dropout_rate,
      dropout_key=self.make_rng('dropout') if train and self.dropout_rate else None,
    )


def batched_ffn(
  rows: jax.Array, weights: ExpertWeights, *, hidden_split_dims: SplitDims = None, factors: jax.Array | None = None
) -> jax.Array:
  """Applies each expert's network to equally many rows: [E, ..., D] to [E, ..., D], in the rows' dtype.

  `hidden_split_dims` are of the hidden layer [E, ..., F], and so are `factors`, broadcast to it; None for 1.
  """

  def project(rows: jax.Array, kernels: jax.Array, biases: jax.Array | None) -> jax.Array:
    y = jnp.einsum('e...i,eio->e...o', rows, kernels)
    return y if biases is None else y + biases.reshape(len(biases), *[1] * (y.ndim - 2), -1)

  pre_activations = [constrain(project(rows, *pair), hidden_split_dims) for pair in weights.inputs()]
  hidden = hidden_layer(weights.activation, *pre_activations)
  if factors is not None:
    hidden = hidden * factors.astype(hidden.dtype)
  return project(hidden, weights.down, weights.down_bias)


def _one_choice_per_expert(expert_ids: jax.Array, gates: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
  """Rewrites the assignments [n, k] as [n, E], choice e being expert e or not routed: fewer rows if E < k."""
  experts = jnp.arange(num_experts, dtype=expert_ids.dtype)
  is_chosen = expert_ids[:, None, :] == experts[None, :, None]  # [n, E, k]
  gates = jnp.sum(jnp.where(is_chosen, gates[:, None, :], 0.0), axis=-1)
  return jnp.where(jnp.any(is_chosen, axis=-1), experts[None, :], num_experts), gates


def name_routing(decision: Decision) -> Decision:
  """Names the arrays of a routing decision. Every remat policy saves these, so the backward pass does not sort."""
  return jax.tree.map(lambda array: checkpoint_name(array, ROUTING_NAME), decision)
