"""Compares the steps of a setting with those of a reference.

Every step starts from the state that the reference had before this step, so differences do not grow from step to step
and each is held against the rounding of one step. Besides, the setting trains by itself, its state staying on its mesh,
and its curve of losses is compared with the reference's.

The gradients are those of the train step itself: a learner that records them stands in front of the experiment's. What
the learner makes of them is compared with what it makes of the same gradients on the reference's mesh, for Adam turns
the last bits of a small gradient into a whole step.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from spmd_tasks.verification._noise import FLOAT32, MAX_SHARE, ROUNDINGS, SPREADS, Difference, compare, largest
from spmd_tasks.verification._runner import Runner, StepResult
from spmd_tasks.verification._trajectory import FURTHER, Trajectory

# A step jumps if weights moved FURTHER times as far move a leaf so many times more than FURTHER times as far.
_JUMP = 8.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
  """The result of a comparison.

  Attributes:
    first: the first difference that is too large; None: there is none.
    closest: the difference that came closest to what was allowed.
    num_steps: how many steps were compared.
    notes: what was not compared, and why.
  """

  first: Difference | None
  closest: Difference | None
  num_steps: int
  notes: tuple[str, ...] = ()


def agree(
  runner: Runner,
  expected: Trajectory,
  *,
  metrics: Sequence[str] | None = None,
  steps: Sequence[int] | None = None,
  train: bool = True,
) -> Agreement:
  """Compares a setting with a reference, step by step, up to the first difference.

  Args:
    runner: the setting.
    expected: the reference.
    metrics: the names of those that must agree; None: all.
    steps: which steps (from 0) to take from the reference's state; None: all.
    train: also compare the curve of losses of training without a stop.
  """
  closest: Difference | None = None
  notes, num_compared = Notes(), 0
  for step in range(expected.num_steps) if steps is None else steps:
    if not np.isfinite(expected.result(step).forward['loss']):
      notes.add('steps', f'{step + 1} (the loss is not finite)')
      break
    result = runner.step(expected.state(step), expected.batches[step])
    wrong, every = compare_step(expected, step, result, metrics, notes)
    if wrong is not None:
      return Agreement(first=wrong, closest=wrong, num_steps=step + 1, notes=notes.lines())
    if every:
      num_compared += 1
      closest = nearest([*every, *([closest] if closest else [])])
  wrong = _compare_curves(runner, expected, notes) if train and num_compared else None
  return Agreement(first=wrong, closest=wrong or closest, num_steps=num_compared, notes=notes.lines())


def compare_step(
  expected: Trajectory,
  step: int,
  result: StepResult,
  metrics: Sequence[str] | None = None,
  notes: 'Notes | None' = None,
) -> tuple[Difference | None, list[Difference]]:
  """Returns the worst difference that is too large, and all differences; none if the reference jumps by itself."""
  notes = notes or Notes()
  if result.nonzero_padding:
    return padding_difference(step + 1, result), []
  epsilon, spread = expected.runner.epsilon, expected.spread(step)
  reference = {
    name: value
    for name, value in expected.result(step).forward.items()
    if metrics is None or '/' in name or name in metrics
  }
  wrong, every, noise = compare(reference, result.forward, spread, epsilon, step + 1)
  if wrong:
    further = expected.spread_further(step)
    linear = {name: FURTHER * (spread[name] + epsilon * largest(value)) for name, value in reference.items()}
    if all(
      each.leaf in result.forward and further[each.leaf] > max(_JUMP * linear[each.leaf], each.difference / 4)
      for each in wrong
    ):
      notes.add('steps', f'{step + 1} (rounding alone makes the reference jump, as at a tie between experts)')
      return None, []
    return wrong[0], every
  updated = expected.runner.updated_from(expected.state(step), result)
  of_update = compare(
    updated, result.updated, expected.spread_of_update(step), FLOAT32, step + 1, expected.changes(step)
  )
  for name in (*noise, *of_update[2]):
    notes.add('leaves that are only noise', name)
  return (of_update[0][0] if of_update[0] else None), every + of_update[1]


def _compare_curves(runner: Runner, expected: Trajectory, notes: 'Notes') -> Difference | None:
  """Returns the first difference of training without a stop."""
  epsilon, results = expected.runner.epsilon, runner.steps(expected.state(0), expected.batches)
  for step, (result, loss, noise) in enumerate(zip(results, expected.losses, expected.spread_of_losses()), 1):
    if result.nonzero_padding:
      return dataclasses.replace(padding_difference(step, result), is_of_curve=True)
    allowed = SPREADS * noise + ROUNDINGS * step * epsilon * abs(loss)
    difference = abs(float(result.forward['loss']) - loss)
    if not np.isfinite(loss) or allowed > MAX_SHARE * abs(loss):
      notes.add('the curve of losses from step', f'{step} (rounding alone moves it)')
      return None
    if not difference <= allowed:
      if expected.spread_of_losses(True)[step - 1] > max(_JUMP * FURTHER * noise, difference / 4):
        notes.add('the curve of losses from step', f'{step} (rounding alone makes the reference jump)')
        return None
      leaf = 'loss of training without a stop'
      return Difference(step=step, leaf=leaf, difference=difference, allowed=float(allowed), is_of_curve=True)
  return None


def padding_difference(step: int, result: StepResult) -> Difference:
  """Returns the difference that the first leaf with padding that is not zero makes."""
  leaf = f'padding of {result.nonzero_padding[0]}'
  return Difference(step=step, leaf=leaf, difference=float('inf'), allowed=0.0)


def nearest(differences: Sequence[Difference]) -> Difference | None:
  """Returns the difference that is the largest part of what is allowed."""
  return max(differences, key=lambda each: each.difference / max(each.allowed, 1e-30), default=None)


class Notes:
  """Collects what was not compared, without repetition."""

  def __init__(self):
    self._items: dict[str, dict[str, None]] = {}

  def add(self, kind: str, item: str) -> None:
    """Adds an item of a kind, such as a step."""
    self._items.setdefault(kind, {})[item] = None

  def lines(self) -> tuple[str, ...]:
    """Returns a line for each kind."""
    return tuple(f'not compared: {kind} {", ".join(items)}' for kind, items in self._items.items())
