"""Learning rate schedules: frozen dataclasses that map a step to a float32 scalar, by optax's schedules.

    AdamW(learning_rate=LinearWarmupCosine(peak=3e-4, warmup_steps=100, total_steps=10_000))

A learning rate is a number, a schedule, or any function of the step, such as an optax schedule. Step 0 is the first
update. A warmup is linear from 0 at step 0 to `peak` at `step == warmup_steps`.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]
LearningRate = float | Schedule


def learning_rate_at(learning_rate: LearningRate, step: jax.typing.ArrayLike) -> jax.Array:
  """Evaluates a number or a schedule at `step`: a float32 scalar."""
  value = learning_rate(step) if callable(learning_rate) else learning_rate
  return jnp.asarray(value, jnp.float32)


def check_learning_rate(name: str, learning_rate: LearningRate) -> None:
  """Raises a UserError if the learning rate is neither a schedule nor a number of 0 or more."""
  if not callable(learning_rate) and not 0 <= learning_rate < float('inf'):
    raise UserError(f'{name} is {learning_rate}; it must be 0 or more and finite, or a schedule.')


def check_non_negative(name: str, value: float) -> None:
  """Raises a UserError if the value of a field is negative or not finite."""
  if not 0 <= value < float('inf'):
    raise UserError(f'{name} is {value}; it must be 0 or more and finite.')


def after_warmup(peak: float, warmup_steps: int, after: optax.Schedule, step: jax.typing.ArrayLike) -> jax.Array:
  """Evaluates a linear warmup followed by the schedule `after`, whose step 0 is the end of the warmup."""
  schedule = after
  if warmup_steps > 0:
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), after], [warmup_steps])
  return jnp.asarray(schedule(jnp.asarray(step)), jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearWarmupCosine:
  """Linear warmup, then cosine decay to `final_fraction * peak` at `total_steps`, then constant.

  With `decay_start`, the rate stays at `peak` until that step (Pax's LinearRampupCosineDecay).
  """

  peak: float
  warmup_steps: int
  total_steps: int
  final_fraction: float = 0.0
  decay_start: int | None = None

  def __post_init__(self):
    for name in ('peak', 'final_fraction', 'warmup_steps'):
      check_non_negative(name, getattr(self, name))
    if self.total_steps <= self.warmup_steps:
      raise UserError(
        f'total_steps {self.total_steps} must be larger than warmup_steps {self.warmup_steps}: shorten the warmup or '
        'train longer.'
      )
    if self.decay_start is not None and not self.warmup_steps <= self.decay_start < self.total_steps:
      raise UserError(
        f'decay_start is {self.decay_start}; it must be between warmup_steps {self.warmup_steps} and total_steps '
        f'{self.total_steps}, or None to start the decay after the warmup.'
      )

  def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
    start = self.warmup_steps if self.decay_start is None else self.decay_start
    after = optax.cosine_decay_schedule(self.peak, self.total_steps - start, alpha=self.final_fraction)
    if start > self.warmup_steps:
      after = optax.join_schedules([optax.constant_schedule(self.peak), after], [start - self.warmup_steps])
    return after_warmup(self.peak, self.warmup_steps, after, step)
