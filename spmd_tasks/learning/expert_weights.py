"""Two rules for the weights of mixtures of experts: a scale for experts' gradients, and steps of balance biases.

**Gradients of experts** (tag `expert`). T5X multiplies them by the number of expert partitions, "to account for
implicit averaging". Here gradients are those of a mean over the global batch on every mesh, so that 1 is right, and
T5X's factor exists for parity.

**Balance biases** (tag `balance_bias`). A router that balances without an auxiliary loss adds a bias per expert to the
scores by which it chooses (Wang et al., "Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664; DeepSeek-V3). The
gradient that the train step returns for such a bias is the load of its expert minus the mean load, a sum over tokens
(layers/moe/_balance.py), and the update is a step of fixed size against it:

    bias -= rate * sign(load violation)

This is not a descent on the loss. The optimizer therefore keeps no state for balance biases, and gradient norm,
clipping and weight decay exclude them.

Shapes: E experts.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import split_dims_to_partition_spec
from spmd_tasks.sharding.specs import current_sharding_scope, num_parts, spec_axes
from spmd_tasks.sharding.weights import BALANCE_BIAS_TAG

EXPERT_TAG = 'expert'

ExpertGradScale = float | Literal['t5x']


def check_expert_grad_scale(scale: ExpertGradScale) -> None:
  """Raises a UserError if the scale is neither a number above 0 nor 't5x'."""
  if scale != 't5x' and not (isinstance(scale, int | float) and scale > 0):
    raise UserError(
      f"learner.expert_grad_scale is {scale!r}; it must be a number larger than 0 (1: the loss's own gradient), or "
      "'t5x' for T5X's factor, the number of expert partitions of the mesh."
    )


def scale_expert_grads(grads: Any, weight_specs: Any, scale: ExpertGradScale) -> Any:
  """Multiplies the gradients of weights tagged `expert`, float32; other gradients are returned unchanged.

  The scale is a number; or 't5x' for the number of parts into which the mesh of the `sharding_scope` splits the
  experts, the weight's first dim after its `stacked` ones (T5X contrib/moe: `num_expert_partitions` of `MoeTrainer`).
  """
  if scale == 1:
    return grads

  def scaled(spec, grad):
    return grad * float(_num_partitions(spec) if scale == 't5x' else scale) if EXPERT_TAG in spec.tags else grad

  return jax.tree.map(scaled, weight_specs, grads)


def _num_partitions(spec: Any) -> int:
  scope = current_sharding_scope()
  if scope is None or spec.split_dims is None:
    return 1
  resolved = split_dims_to_partition_spec(spec.split_dims, scope.mesh.axis_names, scope.axis_rules)
  return num_parts(spec_axes(resolved, len(spec.shape))[spec.stacked], scope.mesh.shape)


def with_balance_bias_steps(steps: Any, grads: Any, weight_specs: Any, rate: float) -> Any:
  """Fills in the steps, float32, of the balance biases, None so far: `rate` times the sign of their load violation."""
  return jax.tree.map(
    lambda spec, grad, step: rate * jnp.sign(grad) if BALANCE_BIAS_TAG in spec.tags else step,
    weight_specs,
    grads,
    steps,
  )
