"""PaxEarlyEnd: asks a task's `early_stopping_fn` as Paxml does, after every training step.

The arguments are made by Paxml's own `tuning_lib`: metrics by the names of its summaries, the running mode, the step,
whether this is the last eval, and the directory of the checkpoints. There are no metrics of an eval on the next
training batch (`eval_train/`), which is not made here.
"""

from collections.abc import Mapping
import os
import time
from typing import Any, cast

import jax
from paxml import trainer_lib

from spmd_tasks.programs.early_end import EarlyEnd, StepReport
from spmd_tasks.programs.hooks import TrainRun
from spmd_tasks.runtime.metrics import Metrics, scalars

# Paxml's own switch: metrics of the training step for every call, not only for those with evals.
_ALWAYS_TRAIN_METRICS = 'PAXML_EARLY_STOP_ALWAYS_AGGREGATE_TRAIN_METRICS'


class PaxEarlyEnd(EarlyEnd):
  """Ends a job where the `early_stopping_fn` of its PaxTask answers True."""

  def __init__(self, *, input_names: Mapping[str, str]):
    """`input_names` gives Pax' names of the eval sets by ours."""
    self._input_names = input_names
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

    function, train = self._task.early_stopping_fn, self._task.train
    evals = self._eval_metrics(report) if report.evals else None
    is_last = tuning_lib.is_last_checkpoint(
      trainer_lib.RunningMode.detect(
        has_train_metrics=True, has_eval_metrics=evals is not None, has_decode_metrics=False
      ),
      report.step,
      self._num_train_steps,
      self._eval_every_steps or 0,
      train.decode_interval_steps,
      train.save_interval_steps,
      train_to_end=getattr(function, 'train_to_end', False),
    )
    reads_metrics = is_last or evals is not None or os.getenv(_ALWAYS_TRAIN_METRICS) == 'true'
    stops = tuning_lib.should_early_stop(
      function,
      report.step,
      is_last,
      train_weighted_scalars=_train_scalars(report.metrics) if reads_metrics and report.metrics else None,
      eval_metrics=evals,
      num_params=self._num_params,
      train_steps_per_sec=self._steps_per_second(report.step),
      checkpoint_path=self._checkpoints,
    )
    return f'task.early_stopping_fn, {_name_of(function)}, says so' if stops else None

  def _eval_metrics(self, report: StepReport) -> Any:
    from paxml import tuning_lib

    num_batches = sum(scalars(metrics)['num_batches'] for metrics in report.evals.values())
    return tuning_lib.EvalMetrics(
      metrics_list=[_without_our_own(metrics) for metrics in report.evals.values()],
      scoring_metrics_list=[None] * len(report.evals),
      steps_per_sec=num_batches / report.eval_seconds,
      input_names=[self._input_names.get(name, name) for name in report.evals],
    )

  def _steps_per_second(self, step: int) -> float | None:
    """Returns steps per second since the last call that gave them; None between Paxml's intervals for it."""
    now = time.time()
    last_step, last = self._last = self._last or (step - 1, now)
    if step % self._task.train.compute_steps_per_sec_interval_steps or now <= last:
      return None
    self._last = step, now
    return (step - last_step) / (now - last)


def _without_our_own(metrics: Metrics) -> dict[str, float]:
  return {name: value for name, value in scalars(metrics).items() if name != 'num_batches'}


def _train_scalars(metrics: Mapping[str, jax.Array]) -> dict[str, float]:
  return {name: float(value) for name, value in metrics.items() if value.ndim == 0 and name != 'skipped'}


def _name_of(function: Any) -> str:
  return getattr(function, '__qualname__', type(function).__qualname__)
