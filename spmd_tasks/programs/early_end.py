"""EarlyEnd: asks an experiment's EarlyStop after evals or steps, and tells every process whether the job ends.

  early_end = EarlyEnd(early_stop, limit_s=600)
  early_end.evals_done(step, {'valid': {'loss': 1.9}}, seconds=3.0)
  if early_end.is_reached(step, step_metrics):
    print(early_end.reason)

Every process asks it, with no step in flight.
"""

from collections.abc import Mapping

import jax

from spmd_tasks.distributed import PrimaryError, primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment
from spmd_tasks.runtime import EarlyStop, Metrics, StepReport


class EarlyEnd:
  """Whether a job ends early, and why. Process 0 decides; without an EarlyStop nothing is asked.

  Attributes:
    reason: why the job ends, once it has been decided; None until then.
  """

  def __init__(self, early_stop: EarlyStop | None, *, limit_s: int):
    """`limit_s`: how long processes wait for one another."""
    self._early_stop, self._limit_s = early_stop, limit_s
    self._evals: tuple[int, Mapping[str, Metrics], float] = (-1, {}, 0.0)
    self.reason: str | None = None

  def evals_done(self, step: int, evals: Mapping[str, Metrics], seconds: float) -> None:
    """Takes the metrics of all eval sets after a step, and how long the evals took."""
    self._evals = step, evals, seconds

  def asks_every_step(self) -> bool:
    """Whether each step is asked about, so that no other may be in flight."""
    return self._early_stop is not None and self._early_stop.every_step

  def asks_after_evals(self) -> bool:
    """Whether the metrics of evals decide."""
    return self._early_stop is not None

  def is_reached(self, step: int, step_metrics: Mapping[str, jax.Array]) -> bool:
    """Asks, if this step is one to ask about. A collective call, with no step in flight.

    Raises:
      UserError: the EarlyStop cannot answer.
    """
    evaluated, evals, seconds = self._evals
    if evaluated != step:
      evals, seconds = {}, 0.0
    early_stop = self._early_stop
    if early_stop is None or not (evals or early_stop.every_step):
      return False
    report = StepReport(step=step, metrics=step_metrics, evals=evals, eval_seconds=seconds)
    try:
      self.reason = primary_decides(lambda: early_stop.reason(report), 'early_end', limit_s=self._limit_s)
    except PrimaryError as error:
      raise UserError(str(error)) from error
    return self.reason is not None


def check_early_stop(early_stop: EarlyStop | None, experiment: Experiment, *, has_eval_sets: bool) -> None:
  """Checks that an EarlyStop which is asked after evals will be asked.

  Raises:
    UserError: the job makes no evals before its end.
  """
  if early_stop is None or early_stop.every_step or (has_eval_sets and experiment.eval_every_steps is not None):
    return
  missing = 'eval_every_steps is None' if has_eval_sets else 'the experiment has no eval sets'
  raise UserError(
    f'early_stop() returns {early_stop}, which is asked after evals, but {missing}: set eval_every_steps and return '
    'eval sets from eval_inputs().'
  )
