"""Hooks of a Pax experiment that decode in training and end it early:

    hooks = [DecodeInTraining(), PaxEarlyEnd(input_names={'valid': 'valid'})]

DecodeInTraining must come first, because PaxEarlyEnd passes its metrics to `task.early_stopping_fn`.
"""

from collections.abc import Mapping
import contextlib
import os
import time
from typing import Any, cast

from paxml import tasks_lib, trainer_lib

from spmd_tasks.bridges.pax._decode import PaxDecoder
from spmd_tasks.distributed.preemption import PreemptedError
from spmd_tasks.errors import UserError, own_code_errors
from spmd_tasks.programs.hooks import EarlyEnd, StepReport, TrainHook, TrainRun
from spmd_tasks.programs.training_loop import Outcome
from spmd_tasks.runtime.metrics import scalars

# Paxml's environment variable: pass training metrics to every call of early_stopping_fn, not only to calls with evals.
_ALWAYS_TRAIN_METRICS = 'PAXML_EARLY_STOP_ALWAYS_AGGREGATE_TRAIN_METRICS'


class DecodeInTraining(TrainHook):
  """Decodes all decode datasets every `decode_interval_steps`, and at the end of training.

  Starts at `decode_start_after_n_steps`, and uses averaged weights if `decode_use_ema_states`. A job that was
  interrupted while decoding decodes again when it resumes.
  """

  step = -1  # the step of `metrics`; on process 0
  metrics: Any = None  # tuning_lib.DecodeMetrics

  def prepare(self, run: TrainRun) -> None:
    """Creates the decoder. Raises a UserError if no datasets, interval or averaged weights are configured."""
    task = cast(Any, run.model.task)
    self._train = task.task.train
    self._num_train_steps = run.experiment.num_train_steps
    interval = self._train.decode_interval_steps
    if not interval or interval < 0:
      raise UserError(
        f'task.train.decode_interval_steps = {interval} must be a positive number of steps with decode_during_train.'
      )
    if not run.job.decode_inputs:
      raise UserError('decode_during_train is set, but decode_datasets() returns no datasets: return some.')
    if self._train.decode_use_ema_states and not tasks_lib.has_ema(task.task):
      raise UserError(
        'task.train.decode_use_ema_states requires averaged weights: set task.train.learner.optimizer.ema_decay, such '
        'as 0.9999.'
      )
    self._decoder: Any = PaxDecoder(
      run.model,
      cast(Any, run.job.decode_inputs),
      run.job_log_dir,
      trackers=run.experiment.trackers,
      on_batch=lambda: run.beat('decode'),
      report=lambda text: run.message(text),
      in_training=True,
    )

  def before_loop(self, run: TrainRun) -> None:
    if run.first_step > 0:
      self._decode_if_due(run)

  def needs_state(self, step: int) -> bool:
    return self._is_due(step)

  def after_first_step(self, run: TrainRun) -> None:
    with run.compiling():
      self._decoder.compile()

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    if outcome.step < self._num_train_steps:
      with contextlib.suppress(PreemptedError):
        self._decode_if_due(run)

  def finish(self, run: TrainRun) -> None:
    if self.step != run.step:
      self._decode_if_due(run)

  def _is_due(self, step: int) -> bool:
    train = self._train
    is_interval = step % train.decode_interval_steps == 0 and step >= train.decode_start_after_n_steps
    return is_interval or step >= self._num_train_steps

  def _decode_if_due(self, run: TrainRun) -> None:
    if not self._is_due(run.step):
      return
    from paxml import tuning_lib  # imports PyGlove, which is rarely needed

    task, start = cast(Any, run.model.task), time.perf_counter()
    with run.timed('decode', 'evaluation'):
      variables = task.averaged_variables(run.state) if self._train.decode_use_ema_states else run.state.variables
      decoded = {name: self._decoder.run(name, variables, run.step) for name in run.job.decode_inputs}
    if None in decoded.values():  # on another process, or already decoded
      return
    self.step = run.step
    self.metrics = tuning_lib.DecodeMetrics(
      metrics_list=[outputs.decoded for outputs in decoded.values()],
      processed_metrics_list=[outputs.processed for outputs in decoded.values()],
      seqio_metrics_list=[None] * len(decoded),
      steps_per_sec=sum(outputs.num_batches for outputs in decoded.values()) / (time.perf_counter() - start),
      input_names=[outputs.dataset for outputs in decoded.values()],
    )


class PaxEarlyEnd(EarlyEnd):
  """Calls `task.early_stopping_fn` after every training step as Paxml does, and ends training if it returns True.

  Paxml's `tuning_lib` prepares the arguments. They have no `eval_train/` metrics, because the next training batch is
  not evaluated.
  """

  def __init__(self, *, input_names: Mapping[str, str], decodes: DecodeInTraining | None = None):
    """Initializes the hook.

    Args:
      input_names: our name of an eval set -> its name in Pax.
      decodes: the hook that decodes in training, if there is one.
    """
    self._input_names, self._decodes = input_names, decodes
    self._last: tuple[int, float] | None = None

  def prepare(self, run: TrainRun) -> None:
    self._task = cast(Any, run.model.task).task
    self.every_step = self._task.early_stopping_fn is not None
    self._num_params = run.model.total_num_params
    self._checkpoints = run.job_log_dir / 'checkpoints'
    self._num_train_steps, self._eval_every_steps = run.experiment.num_train_steps, run.experiment.eval_every_steps

  def reason(self, report: StepReport) -> str | None:
    """Returns a text with the name of the function if it returns True."""
    if self._task.early_stopping_fn is None:
      return None
    from paxml import tuning_lib  # imports PyGlove, which is rarely needed

    function, train, evals = self._task.early_stopping_fn, self._task.train, None
    if report.evals:
      values = [dict(scalars(metrics)) for metrics in report.evals.values()]
      num_batches = sum(metrics.pop('num_batches') for metrics in values)
      evals = tuning_lib.EvalMetrics(
        metrics_list=values,
        scoring_metrics_list=[None] * len(values),
        steps_per_sec=num_batches / report.eval_seconds,
        input_names=[self._input_names.get(name, name) for name in report.evals],
      )
    decoded = None
    if self._decodes is not None and self._decodes.step == report.step:
      decoded = self._decodes.metrics
    has_metrics = {'has_eval_metrics': evals is not None, 'has_decode_metrics': decoded is not None}
    is_last = tuning_lib.is_last_checkpoint(
      trainer_lib.RunningMode.detect(has_train_metrics=True, **has_metrics),
      report.step,
      self._num_train_steps,
      self._eval_every_steps or 0,
      train.decode_interval_steps,
      train.save_interval_steps,
      train_to_end=getattr(function, 'train_to_end', False),
    )
    metrics = {}
    if is_last or any(has_metrics.values()) or os.getenv(_ALWAYS_TRAIN_METRICS) == 'true':
      metrics = {name: float(x) for name, x in report.metrics.items() if x.ndim == 0 and name != 'skipped'}
    with own_code_errors('task.early_stopping_fn', part=function):
      stops = tuning_lib.should_early_stop(
        function,
        report.step,
        is_last,
        train_weighted_scalars=metrics or None,
        eval_metrics=evals,
        decode_metrics=decoded,
        num_params=self._num_params,
        train_steps_per_sec=self._steps_per_second(report.step),
        checkpoint_path=self._checkpoints,
      )
    name = getattr(function, '__qualname__', type(function).__qualname__)
    return f'task.early_stopping_fn, {name}, returned True' if stops else None

  def _steps_per_second(self, step: int) -> float | None:
    """Returns steps per second since the last call that returned them; None between Paxml's intervals."""
    now = time.time()
    last_step, last_time = self._last = self._last or (step - 1, now)
    if step % self._task.train.compute_steps_per_sec_interval_steps or now <= last_time:
      return None
    self._last = step, now
    return (step - last_step) / (now - last_time)
