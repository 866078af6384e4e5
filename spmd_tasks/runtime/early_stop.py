"""EarlyStop: ends a training job before its last step, by what an experiment reads off its evals.

    class UntilGood(MyExperiment):
      def early_stop(self, model, job_log_dir):
        return EvalTarget(eval_set='valid', metric='loss', at_most=2.0)

The training program asks on process 0, and all processes do what it answers: the step is saved, and the job has ended
as after its last step. The same command goes on from there, until the next answer; a job that was ended is asked anew.
"""

from collections.abc import Mapping
import dataclasses
from typing import Protocol

import jax

from spmd_tasks.errors import UserError
from spmd_tasks.runtime.metrics import Metrics, scalars


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
  """What is known after a training step.

  Attributes:
    step: updates applied.
    metrics: of the step, on the devices; {} where a resumed job makes up for an eval before its first step.
    evals: the metrics of each eval set, if the sets were evaluated after this step; otherwise {}.
    eval_seconds: how long that took.
  """

  step: int
  metrics: Mapping[str, jax.Array]
  evals: Mapping[str, Metrics]
  eval_seconds: float


class EarlyStop(Protocol):
  """Decides whether a job ends early. It lives as long as the process, so that it may remember earlier steps."""

  @property
  def every_step(self) -> bool:
    """Whether it is asked after every step, not only after evals. Each step is then awaited before the next begins."""
    ...

  def reason(self, report: StepReport) -> str | None:
    """Returns why the job ends after this step, a phrase for people; None if it goes on."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTarget:
  """Ends a job as soon as a metric of an eval set has reached a value.

  Attributes:
    eval_set: a name of `eval_inputs()`.
    metric: a metric of the set with one value, such as 'loss' or 'accuracy'.
    at_most, at_least: the value, as an upper or as a lower limit.

  Raises (on construction):
    UserError: both limits are given, or none.
  """

  eval_set: str
  metric: str = 'loss'
  at_most: float | None = None
  at_least: float | None = None

  def __post_init__(self):
    if (self.at_most is None) == (self.at_least is None):
      raise UserError(
        f'EvalTarget has at_most = {self.at_most} and at_least = {self.at_least}: give one of them, the value of '
        f'{self.metric} at which the job ends.'
      )

  @property
  def every_step(self) -> bool:
    return False

  def reason(self, report: StepReport) -> str | None:
    """Returns the metric and the limit that it has reached.

    Raises:
      UserError: there is no such eval set, or it has no such metric.
    """
    if self.eval_set not in report.evals:
      raise UserError(f'EvalTarget.eval_set = {self.eval_set!r} is none of the eval sets {sorted(report.evals)}.')
    metrics = scalars(report.evals[self.eval_set])
    if self.metric not in metrics:
      raise UserError(
        f'EvalTarget.metric = {self.metric!r} is none of the metrics of eval set {self.eval_set!r}: take one of '
        f'{sorted(metrics)}.'
      )
    value = metrics[self.metric]
    if self.at_most is not None and value <= self.at_most:
      return f'{self.metric} of {self.eval_set} is {value:.6g}, at most {self.at_most:g}'
    if self.at_least is not None and value >= self.at_least:
      return f'{self.metric} of {self.eval_set} is {value:.6g}, at least {self.at_least:g}'
    return None
