"""Launches training steps and yields their outcomes, one step behind the device.

    loop = TrainingLoop(train_step=..., state=state, ..., is_awaited=lambda step: step % 100 == 0)
    for outcome in loop.run(batches):
      if outcome.step % 100 == 0:
        save(loop.state)  # exactly the state after this step; `outcome.skipped`: without an update

The host launches step t+1 before it reads whether step t was skipped, so the device always has work. `TrainState.step`
counts applied updates only. The host's own count is exact whenever no step is in flight, and the loop makes sure of
that after every step that `is_awaited`, at the end, and when the iteration is over. On CPU devices every step is
awaited: the host computes the steps itself, so a queue of them gains nothing but buffers.
"""

from collections.abc import Callable, Iterator, Mapping
import math
from typing import Any, NamedTuple

import jax

from spmd_tasks.errors import JobError
from spmd_tasks.layers.losses import StepOutputs
from spmd_tasks.runtime import TrainState
from spmd_tasks.runtime.compilation import CompiledStep


class TrainingInputEndedError(JobError):
  """The training input ended before the last step."""


class TrainingDivergedError(JobError):
  """Too many steps in a row were skipped, or an update made weights that are not finite."""


class Outcome(NamedTuple):
  """The outcome of one launched step."""

  step: int  # updates applied so far; this one counts, unless it was skipped
  skipped: bool  # the loss or a gradient was not finite, or a spike, so that the step changed nothing
  metrics: dict[str, jax.Array]
  outputs: StepOutputs | None = None  # per-example outputs, if a hook `wants_examples`, and summaries


def is_spike(metrics: Mapping[str, Any]) -> bool:
  """Whether a step with these metrics was skipped although its loss and gradients were finite."""
  is_finite = math.isfinite(float(metrics['loss'])) and math.isfinite(float(metrics['grad_norm']))
  return bool(metrics['skipped']) and is_finite


class _Launched(NamedTuple):
  """A step in flight: its metrics, on the devices, and the input's position after its batch."""

  metrics: dict[str, Any]
  input_state: Any


class TrainingLoop:
  """Runs `train_step` over placed batches until `num_train_steps` updates are applied.

  The iteration ends early, with no step in flight, if `should_stop` answers true or the input ends.
  """

  def __init__(
    self,
    *,
    train_step: CompiledStep,
    state: TrainState,
    num_train_steps: int,
    max_consecutive_skips: int,
    is_awaited: Callable[[int], bool],
    platform: str,
    on_activity: Callable[[int, str], None],
    should_stop: Callable[[], bool],
    before_step: Callable[[dict[str, jax.Array]], None] = lambda batch: None,
  ):
    """Makes a loop; nothing runs yet.

    Args:
      train_step: `(state, batch) -> (state, metrics)`; donates the state.
      state: where to start.
      num_train_steps: updates, those before `state` included.
      max_consecutive_skips: so many skipped steps in a row end the job.
      is_awaited: whether a step's outcome is read before the next step is launched, such as before a checkpoint.
      platform: of the devices, such as 'tpu'. On 'cpu' every step is awaited.
      on_activity: called with (step, 'input') before a batch is taken and with (step, 'step') before the launch.
      should_stop: asked before every launch.
      before_step: called with the placed batch before the launch; what it raises leaves `state` as it is.
    """
    self._train_step = train_step
    self._num_train_steps = num_train_steps
    self._max_consecutive_skips = max_consecutive_skips
    self._is_awaited = is_awaited if platform != 'cpu' else lambda step: True
    self._on_activity = on_activity
    self._should_stop = should_stop
    self._before_step = before_step
    self._skipped_in_a_row = int(state.learner.num_skipped_in_a_row)
    self.state = state  # the live, padded one, after the last launched step
    self.step = int(state.step)  # updates applied, up to the last outcome
    self.input_state: Any = None  # the input's position after the last launched batch
    self.outcome_input_state: Any = None  # the same after the batch of the last outcome
    self.num_skipped = int(state.learner.num_skipped)  # since the job's first start
    self.input_has_ended = False  # there was no batch for the next step
    self.is_running = False  # the outcomes are being iterated, so that a step may be in flight
    self._in_flight: _Launched | None = None

  def is_idle(self) -> bool:
    """Returns whether every launched step has finished: the device has nothing to do."""
    return self._in_flight is None or self._in_flight.metrics['skipped'].is_ready()

  def run(self, batches: Iterator[tuple[dict[str, jax.Array], Any]]) -> Iterator[Outcome]:
    """Yields the outcome of every step, in order, until `should_stop`, the last step or the end of the input.

    `batches` yields (placed batch, the input's position after it).

    Raises a TrainingDivergedError: `max_consecutive_skips` steps in a row were skipped, or an update made weights that
    are not finite.
    """
    self.is_running = True
    expected = self.step  # counts the step in flight as applied, until its outcome is read
    while expected < self._num_train_steps and not self._should_stop():
      launched = self._launch(expected, batches)
      if launched is None:
        break
      before, self._in_flight = self._in_flight, launched
      if before is not None:  # the device is busy with the new step meanwhile
        yield from self._outcome(before)
      expected = self.step + 1
      if expected >= self._num_train_steps or self._is_awaited(expected):
        yield from self._finish()
        expected = self.step
    yield from self._finish()
    self.is_running = False

  def _finish(self) -> Iterator[Outcome]:
    """Yields the outcome of the step in flight, if there is one."""
    last, self._in_flight = self._in_flight, None
    if last is not None:
      yield from self._outcome(last)

  def _launch(self, step: int, batches: Iterator[tuple[dict[str, jax.Array], Any]]) -> _Launched | None:
    """Launches the step after `step`; returns None if the input has ended."""
    self._on_activity(step, 'input')
    try:
      batch, self.input_state = next(batches)
    except StopIteration:
      self.input_has_ended = True
      return None
    self._on_activity(step, 'step')
    self._before_step(batch)
    self.state, metrics = self._train_step(self.state, batch)
    return _Launched(metrics, self.input_state)

  def _outcome(self, launched: _Launched) -> Iterator[Outcome]:
    """Waits for a step, counts it and yields its outcome; raises if the job must not continue."""
    metrics, self.outcome_input_state = launched
    outputs = metrics.pop('outputs', None)
    if float(metrics['skipped']):
      self.num_skipped += 1
      self._skipped_in_a_row += 1
      yield Outcome(self.step, True, metrics, outputs)
      if self._skipped_in_a_row >= self._max_consecutive_skips:
        last = f'(the last: loss {float(metrics["loss"])}, gradient norm {float(metrics["grad_norm"])})'
        good = f'The weights are those of step {self.step}, still good'
        if is_spike(metrics):
          raise TrainingDivergedError(
            f'{self._skipped_in_a_row} steps in a row had a loss or gradient above learner.spike_threshold {last}. '
            f'{good}. Look at the data after that step, or raise the threshold if the level has changed for good.'
          )
        advice = 'Lower the learning rate, clip gradients, or look at the data after that step'
        if self.step == 0:
          advice = 'No step was ever finite: look at the data'
        raise TrainingDivergedError(
          f'{self._skipped_in_a_row} steps in a row had a loss or gradient that is not finite {last}. {good}. '
          f'{advice}: NaNs, or an id, or a label with a weight, outside [0, vocab_size).'
        )
    elif not math.isfinite(float(metrics['weight_norm'])):
      # Finite gradients and still no finite update: an optimizer that divides by zero, or overflows.
      raise TrainingDivergedError(
        f'the update of step {self.step + 1} made weights that are not finite, from a finite loss and gradient; they '
        'are not saved. The job can go on from its newest checkpoint: look at the optimizer (a larger epsilon, a lower '
        'learning rate).'
      )
    else:
      self.step += 1
      self._skipped_in_a_row = 0
      yield Outcome(self.step, False, metrics, outputs)
