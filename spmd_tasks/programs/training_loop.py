"""The training loop: launches steps without waiting for them, and acts at intervals.

The host launches step t+1 before it reads whether step t was skipped, so the device always has work. `TrainState.step`
counts applied updates only; the host's own count is exact whenever nothing is in flight, which the loop makes true
before everything that depends on it: checkpoints, evals, the end.
"""

from collections.abc import Callable, Iterator
import dataclasses
import math
from typing import Any

import jax

from spmd_tasks.errors import JobError
from spmd_tasks.runtime.compiled_step import CompiledStep
from spmd_tasks.runtime.train_state import TrainState


class TrainingInputEndedError(JobError):
  """The training input ended before the last step."""


class TrainingDivergedError(JobError):
  """Too many steps in a row had a loss or gradient that is not finite."""


@dataclasses.dataclass
class Interval:
  """`action(step, loop)` whenever the step count reaches a multiple of `every_steps` (None: never)."""

  every_steps: int | None
  action: Callable[[int, 'TrainingLoop'], None]

  def is_due(self, step: int) -> bool:
    return self.every_steps is not None and step > 0 and step % self.every_steps == 0


class TrainingLoop:
  """Runs `train_step` over placed batches until `num_train_steps` updates are applied.

  Attributes:
    state: the live, padded TrainState.
    step: updates applied, counting the one in flight as applied until it is known to be skipped.
    input_state: the input's position after the last batch that was launched.
    num_skipped: steps skipped since the job's first start.
  """

  def __init__(
    self,
    *,
    train_step: CompiledStep,
    state: TrainState,
    batches: Iterator[tuple[dict[str, jax.Array], Any]],
    num_train_steps: int,
    max_consecutive_skips: int,
    intervals: list[Interval],
    on_launch: Callable[[int, str], None],
    on_step: Callable[[int, dict[str, jax.Array]], None],
    on_skip: Callable[[int, dict[str, jax.Array]], None],
    should_stop: Callable[[], bool],
  ):
    self._train_step = train_step
    self._batches = batches
    self._num_train_steps = num_train_steps
    self._max_consecutive_skips = max_consecutive_skips
    self._intervals = intervals
    self._on_launch = on_launch
    self._on_step = on_step
    self._on_skip = on_skip
    self._should_stop = should_stop
    self._in_flight: dict[str, jax.Array] | None = None
    self.state = state
    self.input_state: Any = None
    self.step = int(state.step)
    self.num_skipped = int(state.learner.num_skipped)
    self._skipped_in_a_row = int(state.learner.num_skipped_in_a_row)

  def run(self) -> bool:
    """Trains to the end; returns False if `should_stop` asked to leave earlier.

    Raises:
      TrainingDivergedError: `max_consecutive_skips` steps in a row were not finite.
      TrainingInputEndedError: there was no batch for the next step; `state` and `step` are those of the last one.
    """
    last_acted = self.step
    while self.step < self._num_train_steps:
      if self._should_stop():
        self.settle()
        return False
      self._launch()
      if self.step >= self._num_train_steps or any(interval.is_due(self.step) for interval in self._intervals):
        self.settle()
        if self.step > last_acted:
          last_acted = self.step
          for interval in self._intervals:
            if interval.is_due(self.step):
              interval.action(self.step, self)
    return True

  def _launch(self) -> None:
    self._on_launch(self.step, 'input')
    try:
      batch, self.input_state = next(self._batches)
    except StopIteration:
      self.settle()
      raise TrainingInputEndedError(
        f'the training input ended after step {self.step} of {self._num_train_steps}; what was trained is saved. Let '
        'the input repeat itself (num_epochs or num_batches = None), or lower num_train_steps.'
      ) from None
    self._on_launch(self.step, 'step')
    self.state, metrics = self._train_step(self.state, batch)
    self.settle()  # the step before this one: the device is busy with the new one meanwhile
    self._in_flight = metrics
    self.step += 1

  def _advice(self) -> str:
    if self.step == 0:
      return 'No step ever was: look for ids outside vocab_size in the data, or for NaNs in it.'
    return 'Lower the learning rate, clip gradients, or look at the data after that step.'

  def settle(self) -> None:
    """Waits for the step in flight, if any, and takes its outcome into account."""
    if self._in_flight is None:
      return
    metrics, self._in_flight = self._in_flight, None
    if float(metrics['skipped']):
      self.step -= 1
      self.num_skipped += 1
      self._skipped_in_a_row += 1
      self._on_skip(self.step, metrics)
      if self._skipped_in_a_row >= self._max_consecutive_skips:
        raise TrainingDivergedError(
          f'{self._skipped_in_a_row} steps in a row had a loss or gradient that is not finite (the last: loss '
          f'{float(metrics["loss"])}, gradient norm {float(metrics["grad_norm"])}). The weights are those of step '
          f'{self.step}, still good. ' + self._advice()
        )
    elif not math.isfinite(float(metrics['weight_norm'])):
      # Finite gradients and still no finite update: an optimizer that divides by zero, or overflows.
      raise TrainingDivergedError(
        f'the update of step {self.step} made weights that are not finite, from a finite loss and gradient; it is not '
        'saved. The job can go on from its newest checkpoint: look at the optimizer (a larger epsilon, a lower '
        'learning rate).'
      )
    else:
      self._skipped_in_a_row = 0
      self._on_step(self.step, metrics)
