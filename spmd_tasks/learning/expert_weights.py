"""Two rules for mixtures of experts: the scale of experts' gradients, and the update of balance biases.

**Gradients of experts** (tag `expert`). T5X multiplies them by the number of expert partitions, "to account for
implicit averaging". Here a gradient is always the gradient of the mean over the global batch, so the scale is 1; T5X's
factor is for parity.

**Balance biases** (tag `balance_bias`). A router that balances load without an auxiliary loss adds a bias per expert to
its scores when it selects experts (Wang et al., "Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664; DeepSeek-V3).
In place of a gradient, the train step returns the load violation: the expert's load minus the mean load, summed over
tokens (layers/moe/_balance.py). The update is a step of fixed size:

    bias -= rate * sign(load violation)

This is not gradient descent. So the optimizer has no state for balance biases, and gradient norm, clipping and weight
decay exclude them.

Shapes: E experts.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from spmd_tasks.sharding import split_dims_to_partition_spec
from spmd_tasks.sharding.specs import current_sharding_scope, num_parts, spec_axes
from spmd_tasks.sharding.weights import BALANCE_BIAS_TAG

EXPERT_TAG = 'expert'

ExpertGradScale = float | Literal['t5x']


def scale_expert_grads(grads: Any, weight_specs: Any, scale: ExpertGradScale) -> Any:
  """Multiplies the float32 gradients of weights with the tag `expert`; returns other gradients unchanged.

  `scale` is a number, or 't5x' for the number of parts into which the mesh of the `sharding_scope` splits the experts
  (`num_expert_partitions` of `MoeTrainer` in T5X contrib/moe).
  """
  if scale == 1:
    return grads

  def scale_grad(spec, grad):
    if EXPERT_TAG not in spec.tags:
      return grad
    return grad * float(_num_expert_partitions(spec) if scale == 't5x' else scale)

  return jax.tree.map(scale_grad, weight_specs, grads)


def _num_expert_partitions(spec: Any) -> int:
  scope = current_sharding_scope()
  if scope is None or spec.split_dims is None:
    return 1
  resolved = split_dims_to_partition_spec(spec.split_dims, scope.mesh.axis_names, scope.axis_rules)
  return num_parts(spec_axes(resolved, len(spec.shape))[spec.stacked], scope.mesh.shape)


def update_balance_biases(weights: Any, grads: Any, weight_specs: Any, rate: float) -> Any:
  """Returns the weights with balance biases moved by `rate * sign(load violation)`, and other weights unchanged."""

  def update(spec: Any, weight: jax.Array, grad: jax.Array) -> jax.Array:
    if BALANCE_BIAS_TAG not in spec.tags:
      return weight
    return (weight.astype(jnp.float32) - rate * jnp.sign(grad)).astype(weight.dtype)

  return jax.tree.map(update, weight_specs, weights, grads)
