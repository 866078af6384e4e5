"""Balancing without an auxiliary loss (Wang et al., 2024; DeepSeek-V3): a bias per expert, moved by the load alone.

The bias is added to the scores for the choice of experts only. After every step it moves by a fixed rate, up for
experts below the mean load and down for those above. The loss has no gradient with respect to it.

A step here keeps no state beside the weights, so the load leaves the model by the one way that there is: as the
*gradient* of the bias. It is linear in the counts, so gradients that are averaged over microbatches of as many tokens
give the whole batch's violation. The learner moves weights tagged `balance_bias` by `-rate * sign(gradient)`, outside
the optimizer, clipping and norms.

Shapes: E experts.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.balance import RoutingSums


def load_violation(counts: jax.Array) -> jax.Array:
  """How far each expert's load is above the mean, as a fraction of the mean: float32 [E], with sum 0.

  Args:
    counts: float32 [E], assignments per expert. Where all are 0 nothing is violated.
  """
  mean = jnp.mean(counts)
  return (counts - mean) / jnp.where(mean == 0, 1.0, mean)


@jax.custom_vjp
def attach_gradient(x: Any, bias: jax.Array, gradient: jax.Array) -> Any:
  """Returns x; differentiated, gives `bias` the cotangent `gradient`, whatever the cotangent of x.

  Nothing else changes: x's cotangent passes as it is. The loss must depend on x, or nobody asks for the cotangent.

  Args:
    x: an array or a tree of them.
    bias: its value is not read.
    gradient: of bias's shape and dtype; takes no gradient itself.
  """
  del bias, gradient
  return x


def _attach_forward(x, bias, gradient):
  del bias
  return x, gradient


def _attach_backward(gradient, cotangent):
  return cotangent, gradient, jnp.zeros_like(gradient)


attach_gradient.defvjp(_attach_forward, _attach_backward)


def attach_balance_gradient(y: jax.Array, bias: jax.Array, sums: RoutingSums) -> jax.Array:
  """Returns y, from which the balance bias [E] gets the load violation as its gradient.

  For training only. The load is of the whole batch, before any token is dropped and without padding.
  """
  return attach_gradient(y, bias, load_violation(jnp.sum(sums.counts, axis=0)))
