"""EarlyEnd: a hook that ends a training job before its last step, by what it reads off its evals.

    class UntilGood(MyExperiment):
      def hooks(self):
        return [EvalTarget(eval_set='valid', metric='loss', at_most=2.0)]

Process 0 decides, and all processes do what it says: the step is saved, and the job has ended as after its last step.
The same command goes on from there, until the next reason to end; a job that was ended is asked anew.
"""

import abc
from collections.abc import Mapping
import dataclasses

import jax

from spmd_tasks.distributed.agreement import PrimaryError, primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.programs.hooks import NewestEvals, TrainHook, TrainRun
from spmd_tasks.programs.training_loop import Outcome
from spmd_tasks.runtime.metrics import Metrics, scalars


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
  """What is known after a training step."""

  step: int  # updates applied
  metrics: Mapping[str, jax.Array]  # on the devices; {} where a resumed job makes up for an eval
  evals: Mapping[str, Metrics]  # of each eval set, if the sets were evaluated after this step; otherwise {}
  eval_seconds: float  # how long that took


class EarlyEnd(TrainHook, abc.ABC):
  """Ends a job for a reason that a subclass finds. It lives as long as the process, and may remember earlier steps."""

  every_step: bool = False  # asked after every step, not only after evals; then no other step is launched before
  _last_metrics: Mapping[str, jax.Array] = {}

  @abc.abstractmethod
  def reason(self, report: StepReport) -> str | None:
    """Returns why the job ends after this step, a phrase for people; None if it goes on. Called on process 0 alone."""

  def prepare(self, run: TrainRun) -> None:
    """Checks that evals will be made. Raises a UserError if not."""
    if self.every_step or (run.job.eval_inputs and run.experiment.eval_every_steps is not None):
      return
    missing = 'eval_every_steps is None' if run.job.eval_inputs else 'the experiment has no eval sets'
    raise UserError(
      f'hooks() returns {self}, which is asked after evals, but {missing}: set eval_every_steps and return eval sets '
      'from eval_inputs().'
    )

  def before_loop(self, run: TrainRun) -> None:
    if run.evals.step == run.first_step < run.experiment.num_train_steps:  # as the job that was ended in them
      self._ask_and_end(run, run.first_step)

  def needs_state(self, step: int) -> bool:
    return self.every_step

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._last_metrics = outcome.metrics
    if outcome.step < run.experiment.num_train_steps:
      self._ask_and_end(run, outcome.step)

  def finish(self, run: TrainRun) -> None:
    if run.step >= run.experiment.num_train_steps:
      self._ask(run, run.step)  # is told of the last evals too, and changes nothing any more

  def _ask_and_end(self, run: TrainRun, step: int) -> None:
    if (reason := self._ask(run, step)) is not None:
      run.end_early(reason)

  def _ask(self, run: TrainRun, step: int) -> str | None:
    evals = run.evals if run.evals.step == step else NewestEvals()
    if not (evals.metrics or self.every_step):
      return None
    report = StepReport(step=step, metrics=self._last_metrics, evals=evals.metrics, eval_seconds=evals.seconds)
    try:
      return primary_decides(lambda: self.reason(report), 'early_end', limit_s=run.limit_s)
    except PrimaryError as error:
      raise UserError(str(error)) from error


@dataclasses.dataclass(kw_only=True)
class EvalTarget(EarlyEnd):
  """Ends a job as soon as a metric of an eval set has reached a value, which is an upper or a lower limit."""

  eval_set: str  # a name of `eval_inputs()`
  metric: str = 'loss'  # one with a single value, such as 'loss' or 'accuracy'
  at_most: float | None = None
  at_least: float | None = None

  def __post_init__(self):
    if (self.at_most is None) == (self.at_least is None):
      raise UserError(
        f'EvalTarget has at_most = {self.at_most} and at_least = {self.at_least}: give one of them, the value of '
        f'{self.metric} at which the job ends.'
      )

  def reason(self, report: StepReport) -> str | None:
    """Returns the metric and the limit that it has reached. Raises a UserError if there is no such metric."""
    if self.eval_set not in report.evals:
      raise UserError(f'EvalTarget.eval_set = {self.eval_set!r} is none of the eval sets {sorted(report.evals)}.')
    metrics = scalars(report.evals[self.eval_set])
    if self.metric not in metrics:
      raise UserError(
        f'EvalTarget.metric = {self.metric!r} is none of the metrics of eval set {self.eval_set!r}: take one of '
        f'{sorted(metrics)}.'
      )
    value = metrics[self.metric]
    reached = f'{self.metric} of {self.eval_set} is {value:.6g}'
    if self.at_most is not None and value <= self.at_most:
      return f'{reached}, at most {self.at_most:g}'
    if self.at_least is not None and value >= self.at_least:
      return f'{reached}, at least {self.at_least:g}'
    return None
