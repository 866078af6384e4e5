"""Schedules: which microbatch each stage of a pipeline processes in each tick. Plain arithmetic, without arrays.

All stages work in lockstep. In every tick, each stage processes one microbatch and sends the result to the next stage.
A stage without a microbatch in a tick has a *bubble*.

    gpipe (V = 1)                    circular (V = 2): stage p holds two groups of layers, p and P + p
    tick      0  1  2  3  4          tick      0  1  2  3  4
    stage 0   0  1  2  3  .          stage 0   0  1  0' 1' .
    stage 1   .  0  1  2  3          stage 1   .  0  1  0' 1'

A circular tick runs 1/V of the layers. The bubble is P - 1 ticks for every V, so V repeats make it V times shorter.
The backward pass has as many ticks. In gpipe and circular it is the forward pass in reverse; one forward, one backward
takes the microbatches in their order, from the last stage to the first.

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
  """A forward pass of M microbatches, a positive multiple of P, through P stages, V times, each when it arrives."""

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
