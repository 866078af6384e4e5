"""Learning rate schedules: frozen dataclasses that map a step to a float32 scalar, by optax's schedules.

    AdamW(learning_rate=LinearWarmupCosine(peak=3e-4, warmup_steps=100, total_steps=10_000))

A learning rate is a number, a schedule, or any function of the step, such as an optax schedule. Step 0 is the first
update. A warmup is linear from 0 at step 0 to `peak` at `step == warmup_steps`.
"""

from collections.abc import Callable
import dataclasses
import math

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


def _check_non_negative(name: str, value: float) -> None:
  """Raises a UserError if the value of a field is negative or not finite."""
  if not 0 <= value < float('inf'):
    raise UserError(f'{name} is {value}; it must be 0 or more and finite.')


def _after_warmup(peak: float, warmup_steps: int, after: optax.Schedule, step: jax.typing.ArrayLike) -> jax.Array:
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
      _check_non_negative(name, getattr(self, name))
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
    return _after_warmup(self.peak, self.warmup_steps, after, step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
  """The same value at every step."""

  value: float

  def __post_init__(self):
    _check_non_negative('value', self.value)

  def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(self.value, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearWarmupRsqrt:
  """Linear warmup, then `peak * sqrt(warmup_steps / step)`, the schedule of the original Transformer.

  T5 uses `peak = 1 / sqrt(warmup_steps)`, and a constant rate instead of the warmup.
  """

  peak: float
  warmup_steps: int

  def __post_init__(self):
    _check_non_negative('peak', self.peak)
    if self.warmup_steps < 1:
      raise UserError(
        f'warmup_steps is {self.warmup_steps}; it must be 1 or more, because the decay is relative to the warmup.'
      )

  def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
    def after(num_since_warmup: jax.typing.ArrayLike) -> jax.Array:
      # join_schedules evaluates both schedules at every step; during the warmup this count is negative.
      steps = self.warmup_steps + jnp.maximum(num_since_warmup, 0)
      return self.peak * jnp.sqrt(self.warmup_steps / steps)

    return _after_warmup(self.peak, self.warmup_steps, after, step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductOfFactors:
  """T5X's schedules: a product of named factors, such as 'constant * linear_warmup * rsqrt_decay'.

  The factors at step s = max(step - step_offset, 0), with w = `warmup_steps`, are

      constant                  base
      linear_warmup             min(1, s / w)
      linear_decay              base * min(s / w, 1 + decay_factor * (w - s))
      rsqrt_decay               1 / sqrt(max(s, w))
      rsqrt_normalized_decay    sqrt(w / max(s, w))
      decay_every               decay_factor ** floor(s / steps_per_decay)
      cosine_decay              (1 + cos(pi * ((s - w) / steps_per_cycle mod 1))) / 2; 1 before w

  So `constant * rsqrt_decay` is constant up to step w, and with `linear_warmup` the first step has the rate `minimum`.

  Attributes:
    factors: names separated by `*`.
    base: T5X's `base_learning_rate`.
    warmup_steps, decay_factor, steps_per_decay, steps_per_cycle, step_offset: see above.
    minimum: lower bound of the rate, T5X's `min_learning_rate`.
  """

  factors: str = 'constant * linear_warmup * rsqrt_decay'
  base: float = 0.5
  warmup_steps: int = 1000
  decay_factor: float = 0.5
  steps_per_decay: int = 20000
  steps_per_cycle: int = 100000
  step_offset: int = 0
  minimum: float = 1e-8

  def __post_init__(self):
    _check_non_negative('base', self.base)
    for name in ('warmup_steps', 'steps_per_decay', 'steps_per_cycle'):
      if getattr(self, name) < 1:
        raise UserError(f'{name} is {getattr(self, name)}; it must be 1 or more, because factors divide by it.')
    known = self._values(jnp.zeros(()))
    if unknown := [name for name in self._names if name not in known]:
      raise UserError(f'factors has {unknown[0]!r}; it must be a product of {", ".join(known)}.')

  @property
  def _names(self) -> list[str]:
    return [name.strip() for name in self.factors.split('*')]

  def _values(self, step: jax.Array) -> dict[str, jax.typing.ArrayLike]:
    warmup, after = self.warmup_steps, jnp.maximum(step, self.warmup_steps)
    progress = (after - warmup) / self.steps_per_cycle
    return {
      'constant': self.base,
      'linear_warmup': jnp.minimum(1.0, step / warmup),
      'linear_decay': self.base * jnp.minimum(step / warmup, 1.0 + self.decay_factor * (warmup - step)),
      'rsqrt_decay': 1 / jnp.sqrt(after),
      'rsqrt_normalized_decay': jnp.sqrt(warmup / after),
      'decay_every': self.decay_factor ** (step // self.steps_per_decay),
      'cosine_decay': 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0))),
    }

  def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
    values = self._values(jnp.maximum(jnp.asarray(step, jnp.float32) - self.step_offset, 0))
    rate = math.prod([values[name] for name in self._names])
    return jnp.maximum(jnp.asarray(rate, jnp.float32), self.minimum)
