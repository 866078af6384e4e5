"""Balance biases: router weights that follow the load of the experts and not the loss.

A router that balances without an auxiliary loss adds a bias per expert to the scores by which it chooses (Wang et al.,
"Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664; DeepSeek-V3). Such a weight is tagged `balance_bias`. What the
step returns as its gradient is its expert's load above the mean; what is wanted is a step of one size against it:

    bias -= rate * sign(load violation)

That is no descent on the loss, so the optimizer has no part in it: it keeps no state for these weights, and they are
in no gradient norm, clipping or weight decay.
"""

from typing import Any

import jax
import jax.numpy as jnp

BALANCE_BIAS_TAG = 'balance_bias'


def without_balance_biases(tree: Any, weight_specs: Any) -> Any:
  """The tree (congruent to the weights) with None, a subtree without leaves, in the place of every balance bias."""
  return jax.tree.map(lambda spec, leaf: None if BALANCE_BIAS_TAG in spec.tags else leaf, weight_specs, tree)


def with_balance_bias_steps(steps: Any, grads: Any, weight_specs: Any, rate: float) -> Any:
  """Fills in the steps of the balance biases.

  Args:
    steps: float32, what is subtracted from each weight, with None in the biases' places.
    grads: congruent to the weights; a bias's is its load violation, of which only the sign counts.
    weight_specs: tree of WeightSpec congruent to the weights.
    rate: the size of a bias's step.
  """
  return jax.tree.map(
    lambda spec, grad, step: rate * jnp.sign(grad) if BALANCE_BIAS_TAG in spec.tags else step,
    weight_specs,
    grads,
    steps,
  )
