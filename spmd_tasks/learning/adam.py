"""Adam's direction, arranged so that skipping a step that is not finite costs nothing.

The old moments are kept when a step is not finite. If the direction were computed from the new moments before that
choice is made (as with `optax.scale_by_adam`), two computations would read the old moments, the weights' and their own,
and XLA would copy them before it writes over them: 3 to 8% of a small step on 8 fake devices. Here the choice is made
first, and the direction is a function of what is stored.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.learning.skipping import SkippableTransformation, keep_if_finite


def scale_by_adam(*, beta1: float, beta2: float, epsilon: float, momentum_dtype: str) -> SkippableTransformation:
  """`optax.scale_by_adam` (Kingma and Ba, arXiv 1412.6980) with the same state, skippable.

  Args:
    beta1: decay of the first moment.
    beta2: decay of the second moment.
    epsilon: added to the root of the second moment.
    momentum_dtype: of the stored first moment; the direction is float32 all the same.
  """
  init = optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon, mu_dtype=jnp.dtype(momentum_dtype)).init

  def update(
    grads: Any, state: Any, weights: Any = None, *, is_finite: jax.typing.ArrayLike, **extra_args: Any
  ) -> tuple[Any, optax.ScaleByAdamState]:
    del weights, extra_args
    old_mu, old_nu = (jax.tree.map(lambda x: x.astype(jnp.float32), moment) for moment in (state.mu, state.nu))
    new_mu = jax.tree.map(lambda old, g: beta1 * old + (1 - beta1) * g, old_mu, grads)
    new_nu = jax.tree.map(lambda old, g: beta2 * old + (1 - beta2) * jnp.square(g), old_nu, grads)
    mu, nu = keep_if_finite(is_finite, (new_mu, new_nu), (old_mu, old_nu))
    # Counted on also in a step that is skipped: at count 0 the corrections would divide by zero.
    count = optax.safe_increment(state.count)
    mu_correction, nu_correction = 1 - beta1**count, 1 - beta2**count
    directions = jax.tree.map(lambda m, v: (m / mu_correction) / (jnp.sqrt(v / nu_correction) + epsilon), mu, nu)
    stored_mu = jax.tree.map(lambda x, old: x.astype(old.dtype), mu, state.mu)
    kept_count = keep_if_finite(is_finite, count, state.count)
    return directions, optax.ScaleByAdamState(count=kept_count, mu=stored_mu, nu=nu)

  return SkippableTransformation(init, update)
