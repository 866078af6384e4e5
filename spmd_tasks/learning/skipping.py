"""Skippable optax transformations: a non-finite step does not change their state.

`skippable` makes any optax transformation skippable by selecting its old or its new state. `scale_by_adam` selects
before it computes the direction, so that the direction depends only on the stored moments: otherwise two computations
would read the old moments, and XLA would copy them before it overwrites them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


class SkippableTransformation(optax.GradientTransformationExtraArgs):
  """An optax transformation whose `update` also takes `is_finite`, a bool scalar.

  If `is_finite` is false, `update` returns the old state, bit for bit, and an arbitrary direction.
  """


def keep_if_finite(is_finite: jax.typing.ArrayLike, new: Any, old: Any) -> Any:
  """Returns `new` if `is_finite`, else `old`: two congruent trees.

  A select, unlike a `lax.cond`, fuses into the update, writes in place, and does not make a GPU's host wait.
  """
  return jax.tree.map(lambda n, o: jnp.where(is_finite, n, o), new, old)


def skippable(transformation: optax.GradientTransformation) -> SkippableTransformation:
  """Makes a transformation skippable; returns a skippable one unchanged."""
  if isinstance(transformation, SkippableTransformation):
    return transformation
  inner = optax.with_extra_args_support(transformation)

  def update(
    grads: Any, state: Any, weights: Any = None, *, is_finite: jax.typing.ArrayLike, **extra_args: Any
  ) -> tuple[Any, Any]:
    directions, new_state = inner.update(grads, state, weights, **extra_args)
    return directions, keep_if_finite(is_finite, new_state, state)

  return SkippableTransformation(inner.init, update)


def chain(*transformations: optax.GradientTransformation) -> SkippableTransformation:
  """Makes transformations skippable and chains them as `optax.chain` does."""
  return SkippableTransformation(*optax.chain(*map(skippable, transformations)))


def scale_by_adam(
  *, beta1: float, beta2: float, epsilon: float, momentum_dtype: str, second_moment_dtype: str = 'float32'
) -> SkippableTransformation:
  """A skippable `optax.scale_by_adam` (Kingma and Ba, arXiv 1412.6980) with the same state.

  The arguments are AdamW's fields; the direction is always float32.
  """

  def init(weights: Any) -> optax.ScaleByAdamState:
    mu, nu = (
      jax.tree.map(lambda w, dtype=dtype: jnp.zeros(w.shape, dtype), weights)
      for dtype in (momentum_dtype, second_moment_dtype)
    )
    return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=mu, nu=nu)

  def update(
    grads: Any,
    state: Any,
    weights: Any = None,
    *,
    is_finite: jax.typing.ArrayLike,
    layer_numbers: Any = None,
    **extra_args: Any,
  ) -> tuple[Any, optax.ScaleByAdamState]:
    del weights, extra_args
    old_mu, old_nu = (jax.tree.map(lambda x: x.astype(jnp.float32), moment) for moment in (state.mu, state.nu))
    new_mu = jax.tree.map(lambda old, g: beta1 * old + (1 - beta1) * g, old_mu, grads)
    new_nu = jax.tree.map(lambda old, g: beta2 * old + (1 - beta2) * jnp.square(g), old_nu, grads)
    mu, nu = keep_if_finite(is_finite, (new_mu, new_nu), (old_mu, old_nu))
    # Use the incremented count in a skipped step too: at count 0 the corrections would divide by zero.
    count = optax.safe_increment(state.count)
    # Factors, because XLA turns a division by a scalar into one or not, by how many weights are divided by it.
    mu_factor, nu_factor = 1 / (1 - beta1**count), 1 / (1 - beta2**count)
    directions = jax.tree.map(lambda m, v: (m * mu_factor) / (jnp.sqrt(v * nu_factor) + epsilon), mu, nu)
    stored_mu = jax.tree.map(lambda x, old: x.astype(old.dtype), mu, state.mu)
    if second_moment_dtype != 'float32':
      treedef: Any
      leaves, treedef = jax.tree.flatten(nu)
      layers = [None] * len(leaves) if layer_numbers is None else treedef.flatten_up_to(layer_numbers)
      nu = treedef.unflatten(
        round_randomly(x, seed=count, stream=i, layers=numbers) for i, (x, numbers) in enumerate(zip(leaves, layers))
      )
    kept_count = keep_if_finite(is_finite, count, state.count)
    return directions, optax.ScaleByAdamState(count=kept_count, mu=stored_mu, nu=nu)

  return SkippableTransformation(init, update)


def round_randomly(x: jax.Array, *, seed: jax.Array, stream: int, layers: jax.Array | None = None) -> jax.Array:
  """Rounds float32 numbers to bfloat16, up or down at random, so that the expected value of the result is x.

  A moving average that is rounded to the nearest number stops moving once a step is smaller than half the distance of
  two numbers, 1/512 of a value. Numbers that bfloat16 has do not change.

  Args:
    x: finite, float32 [...].
    seed: int32 scalar, such as the step; other seeds give other random numbers.
    stream: the same for numbers that share no randomness, such as the index of the array.
    layers: if x has only some layers of a stack, in its first dims, their numbers in the stack: int32 [...].

  Returns bfloat16 [...], the same on every mesh: the random bits are a hash (Wellons' lowbias32) of the position.
  """
  # The position in row-major order, modulo 2 ** 32.
  layers = jnp.zeros((), jnp.uint32) if layers is None else layers.astype(jnp.uint32)
  position = jax.lax.broadcast_in_dim(layers, x.shape, range(layers.ndim))
  for dim, size in [*enumerate(x.shape)][layers.ndim :]:
    position = position * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
  bits = position * np.uint32(0x9E3779B9) + _hash(seed.astype(jnp.uint32) ^ np.uint32(stream << 20))
  noise = _hash(bits) >> 16  # 16 bits, as many as bfloat16 lacks
  rounded = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & np.uint32(0xFFFF0000)
  return jax.lax.bitcast_convert_type(rounded, jnp.float32).astype(jnp.bfloat16)


def _hash(x: jax.Array) -> jax.Array:
  x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
  return x ^ (x >> 16)
