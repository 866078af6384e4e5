"""Spikes: steps whose loss or gradient norm is far above that of recent steps, which a learner may skip.

A batch that an optimizer has not seen the like of (a broken document, a burst of one symbol) can undo hours of training
in one step. As in OLMo-core's SkipStepOptimizer, a step is skipped if its loss or gradient norm lies more than a number
of standard deviations above the mean of the last steps. Unlike there, a spike then counts as the largest value that is
none: however high it is, the next one is still found, and a level that has risen for good is accepted after some skips.
"""

from flax import struct
import jax
import jax.numpy as jnp


class RecentSteps(struct.PyTreeNode):
  """The losses and gradient norms of the last W finite steps.

  Attributes:
    values: float32 [2, W], losses and gradient norms; step n is in column n % W.
    count: int32 scalar, the number of steps so far.
  """

  values: jax.Array
  count: jax.Array

  @classmethod
  def empty(cls, window: int) -> 'RecentSteps':
    return cls(values=jnp.zeros((2, window), jnp.float32), count=jnp.zeros((), jnp.int32))

  def append(self, values: jax.Array) -> 'RecentSteps':
    """Appends a step's loss and gradient norm, float32 [2], and forgets the oldest ones."""
    column = self.count % self.values.shape[1]
    return RecentSteps(values=self.values.at[:, column].set(values), count=self.count + 1)

  def limits(self, threshold: float) -> jax.Array:
    """Returns the largest loss and gradient norm that are no spikes, float32 [2]; infinity before W / 2 steps."""
    window = self.values.shape[1]
    is_used = jnp.arange(window) < self.count  # [W]; columns that are not used are zero
    count = jnp.clip(self.count, 1, window)
    mean = self.values.sum(axis=1) / count
    deviations = jnp.where(is_used, self.values - mean[:, None], 0.0)
    std = jnp.sqrt(jnp.square(deviations).sum(axis=1) / count)
    return jnp.where(self.count < window // 2, jnp.inf, mean + threshold * std)
