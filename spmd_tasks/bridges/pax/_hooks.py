"""What a Pax experiment does in its training beside steps and evals: it decodes, and may end early.

hooks = [DecodeInTraining(), PaxEarlyEnd(input_names={'valid': 'valid'})]      # in this order
"""

from collections.abc import Mapping
import contextlib
import os
import time
from typing import Any, cast

from paxml import tasks_lib, trainer_lib

from spmd_tasks.distributed.preemption import PreemptedError
from spmd_tasks.errors import UserError, naming_own_code
from spmd_tasks.programs.hooks import EarlyEnd, StepReport, TrainHook, TrainRun
from spmd_tasks.programs.training_loop import Outcome
from spmd_tasks.runtime.metrics import scalars

# Paxml's own switch: metrics of the training step for every call, not only for those with evals.
_ALWAYS_TRAIN_METRICS = 'PAXML_EARLY_STOP_ALWAYS_AGGREGATE_TRAIN_METRICS'


class DecodeInTraining(TrainHook):
  """Decodes all decode datasets every `decode_interval_steps`, and at the end of the training.

  Not before `decode_start_after_n_steps`, and with averaged weights if `decode_use_ema_states`. A resumed job decodes
  what it was ended in.
  """

  step = -1  # after which `metrics` were decoded; on process 0
  metrics: Any = None  # the tuning_lib.DecodeMetrics of that step

  def prepare(self, run: TrainRun) -> None:
    """Raises a UserError if there is nothing to decode, or never."""
    task = cast(Any, run.model.task)
    self._train = task.task.train
    self._num_train_steps = run.experiment.num_train_steps
    interval = self._train.decode_interval_steps
    if not interval or interval < 0:
      raise UserError(
        f'decode_during_train needs an interval, but task.train.decode_interval_steps is {interval}: set it to a '
        'number of steps.'
      )
    if not run.job.decode_inputs:
      raise UserError('decode_during_train needs datasets, but decode_datasets() returns none: return some.')
    if self._train.decode_use_ema_states and not tasks_lib.has_ema(task.task):
      raise UserError(
        'task.train.decode_use_ema_states needs averaged weights: set task.train.learner.optimizer.ema_decay, for '
        'example to 0.9999.'
      )

    def on_batch() -> None:
      run.watchdog.beat(run.step, 'decode')
      if run.should_stop():
        raise PreemptedError

    self._decoder = task.make_decoder(
      run.model,
      run.job.decode_inputs,
      run.job_log_dir,
      trackers=run.experiment.trackers,
      on_batch=on_batch,
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
    from paxml import tuning_lib  # with PyGlove, which is seldom needed

    task, began = cast(Any, run.model.task), time.perf_counter()
    with run.timed('decode', 'evaluation'):
      variables = task.averaged_variables(run.state) if self._train.decode_use_ema_states else run.state.variables
      decoded = {name: self._decoder.run(name, variables, run.step) for name in run.job.decode_inputs}
    if None in decoded.values():  # on another process, or done already
      return
    self.step = run.step
    self.metrics = tuning_lib.DecodeMetrics(
      metrics_list=[outputs.decoded for outputs in decoded.values()],
      processed_metrics_list=[outputs.processed for outputs in decoded.values()],
      seqio_metrics_list=[None] * len(decoded),
      steps_per_sec=sum(outputs.num_batches for outputs in decoded.values()) / (time.perf_counter() - began),
      input_names=[outputs.dataset for outputs in decoded.values()],
    )


class PaxEarlyEnd(EarlyEnd):
  """Asks a task's `early_stopping_fn` as Paxml does, after every training step, and ends a job where it answers True.

  The arguments are made by Paxml's own `tuning_lib`. There are no metrics of an eval on the next training batch
  (`eval_train/`), which is not made here.
  """

  def __init__(self, *, input_names: Mapping[str, str], decodes: DecodeInTraining | None = None):
    """`input_names` gives Pax' names of the eval sets by ours; `decodes` is the hook that decodes, if there is one."""
    self._input_names, self._decodes = input_names, decodes
    self._last: tuple[int, float] | None = None

  def prepare(self, run: TrainRun) -> None:
    self._task = cast(Any, run.model.task).task
    self.every_step = self._task.early_stopping_fn is not None
    self._num_params = run.model.total_num_params
    self._checkpoints = run.job_log_dir / 'checkpoints'
    self._num_train_steps, self._eval_every_steps = run.experiment.num_train_steps, run.experiment.eval_every_steps

  def reason(self, report: StepReport) -> str | None:
    """Returns the function's name where it answers True."""
    if self._task.early_stopping_fn is None:
      return None
    from paxml import tuning_lib  # with PyGlove, which is seldom needed

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
    has = {'has_eval_metrics': evals is not None, 'has_decode_metrics': decoded is not None}
    is_last = tuning_lib.is_last_checkpoint(
      trainer_lib.RunningMode.detect(has_train_metrics=True, **has),
      report.step,
      self._num_train_steps,
      self._eval_every_steps or 0,
      train.decode_interval_steps,
      train.save_interval_steps,
      train_to_end=getattr(function, 'train_to_end', False),
    )
    metrics = {}
    if is_last or any(has.values()) or os.getenv(_ALWAYS_TRAIN_METRICS) == 'true':
      metrics = {name: float(x) for name, x in report.metrics.items() if x.ndim == 0 and name != 'skipped'}
    with naming_own_code('task.early_stopping_fn', part=function):
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
    return f'task.early_stopping_fn, {name}, says so' if stops else None

  def _steps_per_second(self, step: int) -> float | None:
    """Returns steps per second since the last call that gave them; None between Paxml's intervals for it."""
    now = time.time()
    last_step, last = self._last = self._last or (step - 1, now)
    if step % self._task.train.compute_steps_per_sec_interval_steps or now <= last:
      return None
    self._last = step, now
    return (step - last_step) / (now - last)
