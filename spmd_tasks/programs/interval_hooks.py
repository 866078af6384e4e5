"""Hooks that use the state at intervals and at a job's end: they save it, and evaluate it."""

import functools
import time

import jax

from spmd_tasks.checkpoints.orbax_arrays import num_bytes
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.experiment import duration_s
from spmd_tasks.programs.evaluator import Evaluator
from spmd_tasks.programs.hooks import NewestEvals, PreemptedError, TrainHook, TrainRun
from spmd_tasks.programs.progress import format_metrics
from spmd_tasks.programs.training_loop import Outcome
from spmd_tasks.runtime.origin import saved_part

# A smaller state is on disk before the next step begins, so that a kill loses one interval at most; that takes about a
# second. A larger one is written while training goes on.
_WRITTEN_AT_ONCE_BYTES = 100_000_000
_LOOK_S = 10.0


def is_multiple(step: int, every_steps: int | None) -> bool:
  """Returns whether a step ends an interval; never without an interval, nor at step 0."""
  return every_steps is not None and step > 0 and step % every_steps == 0


class SaveCheckpoints(TrainHook):
  """Saves a checkpoint as often as `checkpoint_every` says, and when the loop has ended.

  If that is a time, process 0 decides when it is up and all processes save the step that ends next. They agree on that,
  and on the step at which they look again, `_LOOK_S` apart at most. A time that is up while an earlier checkpoint is
  still being written waits for that.
  """

  def prepare(self, run: TrainRun) -> None:
    every = run.experiment.checkpoint_every
    self._every_s = duration_s(every, 'checkpoint_every') if isinstance(every, str) else None
    self._every_steps = run.experiment.checkpoint_keep_every_steps if isinstance(every, str) else every
    self._part = saved_part(run.model, run.experiment.origin())

  def start(self, run: TrainRun) -> None:
    self._last_saved = run.first_step if run.is_saved else -1
    self._due: int | None = None  # the step that is saved because the time is up

  def before_loop(self, run: TrainRun) -> None:
    self._saved_s = self._looked_s = time.monotonic()
    self._looked, self._next_look = run.first_step, run.first_step + 1

  def needs_state(self, step: int) -> bool:
    return step == self._due or is_multiple(step, self._every_steps)

  def after_first_step(self, run: TrainRun) -> None:
    with run.compiling():
      run.model.compile_conversions(self._part)
      run.checkpointer.prepare()

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    if self.needs_state(outcome.step):
      self._save(run)
    if self._every_s is not None and outcome.step >= self._next_look:
      look = functools.partial(self._look, run, outcome.step)
      self._due, self._next_look = primary_decides(look, 'checkpoint_due', limit_s=run.limit_s)

  def _look(self, run: TrainRun, step: int) -> tuple[int | None, int]:
    """Returns the step that is saved because the time is up, if it is, and the step after which to look again."""
    assert self._every_s is not None
    now = time.monotonic()
    step_s = (now - self._looked_s) / max(1, step - self._looked)
    self._looked_s, self._looked = now, step
    left_s = self._saved_s + self._every_s - now
    if left_s <= step_s and not run.checkpointer.is_saving:
      return step + 1, step + 2
    # One process looks after every step, as it agrees with nobody.
    ahead_s = 0.0 if jax.process_count() == 1 else min(left_s / 2, _LOOK_S)
    return None, step + max(1, int(ahead_s / max(step_s, 1e-6)))

  def after_loop(self, run: TrainRun) -> None:
    if run.step > self._last_saved:
      self._save(run)
    with run.timed('checkpoint', 'checkpoint_save'):
      run.checkpointer.wait()

  def _save(self, run: TrainRun) -> None:
    """Saves a checkpoint; a large one is still being written when this returns."""
    self._saved_s = time.monotonic()
    with run.timed('checkpoint', 'checkpoint_save'):
      run.checkpointer.save(run.step, run.model.to_canonical(run.state, self._part), run.loop.input_state)
      if num_bytes(self._part(run.model.canonical_state)) < _WRITTEN_AT_ONCE_BYTES:
        run.checkpointer.wait()
    run.goodput.mark(run.step)
    self._last_saved = run.step


def describe_interval(every: int | str | None) -> str:
  """Says how often checkpoints are saved, from `checkpoint_every`."""
  if every is None:
    return 'at the end only'
  if isinstance(every, int):
    return f'every {every:,} steps' if every > 1 else 'every step'
  number, unit = int(every[:-1]), {'s': 'second', 'm': 'minute', 'h': 'hour', 'd': 'day'}[every[-1]]
  return f'every {number} {unit}s' if number > 1 else f'every {unit}'


class Evaluate(TrainHook):
  """Evaluates all eval sets every `eval_every_steps` and at the end of the training; gives `run.evals`.

  A resumed job makes the evals of its first step if the job was ended in them.
  """

  def prepare(self, run: TrainRun) -> None:
    self._every_steps = run.experiment.eval_every_steps
    keeps_examples = any(hook.wants_examples for hook in run.hooks)
    self._evaluator = Evaluator(run.job, run.model, run.job_log_dir, keeps_examples=keeps_examples)
    self._evaluator.refuse_other_data(run.limit_s)

  def open(self, run: TrainRun) -> None:
    run.stack.callback(self._evaluator.close)

  def before_loop(self, run: TrainRun) -> None:
    if self._was_ended_in_evals(run) and not self._evaluate(run):
      raise PreemptedError

  def needs_state(self, step: int) -> bool:
    return is_multiple(step, self._every_steps)

  def after_first_step(self, run: TrainRun) -> None:
    with run.compiling():
      self._evaluator.compile()

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    if is_multiple(outcome.step, self._every_steps):
      self._evaluate(run)

  def finish(self, run: TrainRun) -> None:
    if run.evals.step != run.step and not self._evaluate(run):
      raise PreemptedError

  def _was_ended_in_evals(self, run: TrainRun) -> bool:
    """Returns whether the restored step's evals were due, and not all of them are recorded."""
    step, evaluator = run.first_step, self._evaluator
    if step == 0 or not (step >= run.experiment.num_train_steps or is_multiple(step, self._every_steps)):
      return False
    return primary_decides(
      lambda: not all(evaluator.is_recorded(name, step) for name in evaluator.names),
      'missing_evals',
      limit_s=run.limit_s,
    )

  def _evaluate(self, run: TrainRun) -> bool:
    """Evaluates all sets; returns False if SIGTERM came before the last one was finished."""
    evals, start = {}, time.perf_counter()
    with run.timed('eval', 'evaluation'):
      variables = run.model.task.evaluation_variables(run.state)
      on_batch = functools.partial(run.watchdog.beat, run.step, 'eval')
      for name, metrics in self._evaluator.evaluate(variables, run.step, on_batch, run.should_stop):
        if run.step > run.first_step or not self._evaluator.is_recorded(name, run.step):
          self._evaluator.record(name, run.step, metrics)
        run.message(f'step {run.step}  eval {name}: ' + format_metrics(metrics))
        evals[name] = metrics
    if len(evals) < len(self._evaluator.names):
      return False
    run.evals = NewestEvals(run.step, evals, time.perf_counter() - start, dict(self._evaluator.examples))
    return True
