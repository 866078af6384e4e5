"""Small jobs that end before their last step."""

from spmd_tasks.programs.early_end import EarlyEnd, EvalTarget
from tests.programs.small_jobs import Small


class UntilTarget(Small):
  """Ends at step 8, its first eval."""

  target_loss: float = 100.0

  def hooks(self):
    return [EvalTarget(eval_set='valid', at_most=self.target_loss)]


class UntilStep(Small):
  """Asked after every step; ends at step 3, which is neither saved nor evaluated by its intervals."""

  def hooks(self):
    return [AtStep(3)]


class AtStep(EarlyEnd):
  """Ends a job at a step."""

  every_step = True

  def __init__(self, step):
    self._step = step

  def reason(self, report):
    assert set(report.evals) in (set(), {'valid', 'ragged'})
    assert float(report.metrics['loss']) > 0
    return f'step {report.step} is enough' if report.step == self._step else None
