"""Which stage of a pipeline works on what, tick by tick. Plain arithmetic: no arrays of a model, no mesh.

Shapes: P stages, M microbatches, V repeats.

All stages work in lockstep, in ticks: in each, every stage does its part for one microbatch and hands the result to its
neighbour. A stage that has no microbatch in a tick has a *bubble*.

    gpipe (V = 1)                    circular (V = 2): stage p holds two groups of layers, p and P + p
    tick      0  1  2  3  4          tick      0  1  2  3  4
    stage 0   0  1  2  3  .          stage 0   0  1  0' 1' .
    stage 1   .  0  1  2  3          stage 1   .  0  1  0' 1'

A circular tick has 1/V of the layers, so that the bubble, P - 1 ticks whatever V, is V times shorter.

GPipe: Huang et al., 2019. Circular (interleaved) stages: Narayanan et al., 2021. One forward, one backward (PipeDream):
Narayanan et al., 2019.
"""

import dataclasses
from typing import Any, Literal, get_args

from spmd_tasks.errors import UserError

ScheduleName = Literal['gpipe', 'circular', 'one_forward_one_backward']
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """A forward pass of M microbatches through P stages, V times round; each microbatch goes on as soon as it can.

  Raises:
    UserError: M is not a positive multiple of P, the rows that the stages keep of it being equal in number.
  """

  num_stages: int
  num_microbatches: int
  num_repeats: int = 1

  def __post_init__(self):
    stages, microbatches = self.num_stages, self.num_microbatches
    if microbatches < stages or microbatches % stages:
      nearest = max(stages, round(microbatches / stages) * stages)
      raise UserError(
        f'num_microbatches={microbatches} must be a multiple of the {stages} stages, each of which keeps an equal '
        f'share of the microbatches (and with fewer than that most stages would idle): {nearest} is the nearest.'
      )

  @property
  def num_ticks(self) -> int:
    return self.num_microbatches * self.num_repeats + self.num_stages - 1

  @property
  def bubble_fraction(self) -> float:
    """The part of the ticks in which a stage idles: (P - 1) / (M V + P - 1)."""
    return (self.num_stages - 1) / self.num_ticks

  def work(self, stage: Any, tick: Any) -> tuple[Any, Any, Any]:
    """(microbatch, repeat, whether it is work) of a stage in a tick, for ints as for traced or numpy integers.

    In a bubble the microbatch and the repeat are some in range, so that they can be used as indices.
    """
    step = tick - stage
    num_steps = self.num_microbatches * self.num_repeats
    is_work = (step >= 0) & (step < num_steps)
    return step % self.num_microbatches, (step // self.num_microbatches) % self.num_repeats, is_work


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSchedule:
  """One forward, one backward: the backward pass of M microbatches, each computed forward again just before.

    P = 2, M = 3        warm-up  steady       cool-down
    tick                0        1   2   3    4
    stage 0, forward    0        1   2   .
    stage 0, backward            .   0   1    2
    stage 1, forward    .        0   1   2
    stage 1, backward            0   1   2    .

  The last stage goes backward with a microbatch in the tick in which it has gone forward with it, and the others follow
  one tick apart. At most `max_in_flight` microbatches have gone forward and not yet backward, whatever M. Only the
  steady ticks have both halves, so that each half has as many ticks as a forward pass, and the same bubble.
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
    """On stage 0; stage p has 2 (P - 1 - p) + 1."""
    return 2 * self.num_stages - 1

  def forward(self, stage: Any, tick: Any) -> tuple[Any, Any]:
    """(microbatch, whether it is work) of the forward half; a bubble's microbatch is some in range."""
    return self._clip(tick - stage)

  def backward(self, stage: Any, tick: Any) -> tuple[Any, Any]:
    """The same of the backward half."""
    return self._clip(tick - 2 * (self.num_stages - 1) + stage)

  def _clip(self, microbatch: Any) -> tuple[Any, Any]:
    return microbatch % self.num_microbatches, (microbatch >= 0) & (microbatch < self.num_microbatches)
