"""Schedules: which microbatch each stage of a pipeline processes in each tick. Plain arithmetic, without arrays.

All stages work in lockstep. In every tick, each stage processes one microbatch and sends the result to the next stage.
A stage without a microbatch in a tick has a *bubble*.

    gpipe (V = 1)                    circular (V = 2): stage p holds two groups of layers, p and P + p
    tick      0  1  2  3  4          tick      0  1  2  3  4
    stage 0   0  1  2  3  .          stage 0   0  1  0' 1' .
    stage 1   .  0  1  2  3          stage 1   .  0  1  0' 1'

A circular tick runs 1/V of the layers. The bubble is P - 1 ticks for every V, so V repeats make it V times shorter.

GPipe: Huang et al., 2019. Circular (interleaved) stages: Narayanan et al., 2021. One forward, one backward (PipeDream):
Narayanan et al., 2019.

Shapes: P stages, M microbatches, V repeats.
"""

import dataclasses
from typing import Any, Literal, get_args

from spmd_tasks.errors import UserError

ScheduleName = Literal['gpipe', 'circular', 'one_forward_one_backward']
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """A forward pass of M microbatches through P stages, V times; a stage processes a microbatch as soon as it arrives.

  Raises:
    UserError: M is not a positive multiple of P.
  """

  num_stages: int
  num_microbatches: int
  num_repeats: int = 1

  def __post_init__(self):
    stages, microbatches = self.num_stages, self.num_microbatches
    if microbatches < stages or microbatches % stages:
      nearest = max(stages, round(microbatches / stages) * stages)
      raise UserError(
        f'num_microbatches={microbatches} must be a multiple of the {stages} stages, because every stage stores an '
        f'equal share of the microbatches: {nearest} is the nearest.'
      )

  @property
  def num_ticks(self) -> int:
    return self.num_microbatches * self.num_repeats + self.num_stages - 1

  @property
  def bubble_fraction(self) -> float:
    """The fraction of ticks in which a stage has a bubble: (P - 1) / (M V + P - 1)."""
    return (self.num_stages - 1) / self.num_ticks

  def work(self, stage: Any, tick: Any) -> tuple[Any, Any, Any]:
    """Returns (microbatch, repeat, whether it is work) of a stage in a tick, for ints, numpy or traced integers.

    In a bubble the microbatch and the repeat are arbitrary but in range, so that they can be used as indices.
    """
    step = tick - stage
    num_steps = self.num_microbatches * self.num_repeats
    is_work = (step >= 0) & (step < num_steps)
    return step % self.num_microbatches, (step // self.num_microbatches) % self.num_repeats, is_work


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSchedule:
  """The backward pass of one forward, one backward: M microbatches, each recomputed forward shortly before.

    P = 2, M = 3        warm-up  steady       cool-down
    tick                0        1   2   3    4
    stage 0, forward    0        1   2   .
    stage 0, backward            .   0   1    2
    stage 1, forward    .        0   1   2
    stage 1, backward            0   1   2    .

  The last stage runs backward with a microbatch in the tick in which it ran forward with it; the stages before it
  follow, one tick apart. At most `max_in_flight` microbatches have run forward and not yet backward, for every M. Only
  steady ticks have both halves, so each half has as many ticks as a forward pass, and the same bubble.
  """

  num_stages: int
  num_microbatches: int

  @property
  def warm_up(self) -> range:
    return range(self.num_stages - 1)

  @property
  def steady(self) -> range:
    return range(self.num_stages - 1, self.num_stages - 1 + self.num_microbatches)

  @property
  def cool_down(self) -> range:
    return range(self.steady.stop, self.steady.stop + self.num_stages - 1)

  @property
  def max_in_flight(self) -> int:
    """How many inputs stage 0 must store at once; stage p stores 2 (P - 1 - p) + 1."""
    return 2 * self.num_stages - 1

  def forward(self, stage: Any, tick: Any) -> tuple[Any, Any]:
    """Returns (microbatch, whether it is work) of the forward half; in a bubble the microbatch is any in range."""
    return self._clip(tick - stage)

  def backward(self, stage: Any, tick: Any) -> tuple[Any, Any]:
    """Returns the same for the backward half."""
    return self._clip(tick - 2 * (self.num_stages - 1) + stage)

  def _clip(self, microbatch: Any) -> tuple[Any, Any]:
    return microbatch % self.num_microbatches, (microbatch >= 0) & (microbatch < self.num_microbatches)
