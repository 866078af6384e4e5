"""Compares the steps of a setting with those of a reference, as far as rounding lets expect.

Every step starts from the state that the reference had before this step, so differences do not grow from step to step.
Besides, the setting trains by itself, and its curve of losses is compared. What the learner makes of the gradients is
compared with what it makes of the same gradients on the reference's mesh, for Adam turns the last bits of a small
gradient into a whole step.

How large may a difference be (docs/verify.md says why)? The reference's step is taken again from weights that were
moved by one unit in the last place. How far a leaf then moves is its *spread*, and a difference is allowed up to

    SPREADS x spread + ROUNDINGS x epsilon x the leaf's largest entry

A leaf whose allowance exceeds MAX_SHARE of its largest entry is not compared in that step, and is reported as such. A
jump is recognised by moving the weights a little further, in more directions.
"""

import collections
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from spmd_tasks.runtime import TrainState
from spmd_tasks.verification._runner import Leaves, Runner, StepResult, leaves_of
from spmd_tasks.verification._settings import Batch

Notes = MutableMapping[str, dict[str, None]]  # what was not compared: kind, such as 'steps' -> items
SPREADS, ROUNDINGS = 16.0, 64.0
MAX_SHARE = 1e-3
FLOAT32 = 2.0**-23  # the rounding unit
# A leaf far smaller than the largest of its kind may be all noise: its allowance is also good up to this share of that.
_MAX_SHARE_OF_LARGEST = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """One leaf that differs: the step (from 1), its name, the largest difference (infinite: it lacks), what was allowed.

  `is_of_curve`: found in the curve of losses of training without a stop, not in a single step.
  """

  step: int
  leaf: str
  difference: float = float('inf')
  allowed: float = 0.0
  is_of_curve: bool = False

  def __str__(self) -> str:
    return f'step {self.step}, {self.leaf}: differs by {self.difference:.3g}, allowed {self.allowed:.3g}'


def moved(state: TrainState, epsilon: float, rng: np.random.Generator) -> TrainState:
  """Returns the state with every weight moved by at most `epsilon` of itself."""
  return state.replace(weights=perturb(state.weights, epsilon, rng))


def perturb(tree: Any, epsilon: float, rng: np.random.Generator) -> Any:
  """Moves every float of a tree by at most `epsilon` of itself, up, down or not at all."""

  def move(x):
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating) and x.dtype.name != 'bfloat16':
      return x
    steps = rng.integers(-1, 2, x.shape).astype(np.float32)
    return (x.astype(np.float32) * (1 + np.float32(epsilon) * steps)).astype(x.dtype)

  return jax.tree.map(move, tree)


def spread(reference: Leaves, samples: Iterable[Leaves]) -> dict[str, float]:
  """Returns by how much each leaf differs at most from the reference in the samples."""
  sizes = dict.fromkeys(reference, 0.0)
  for sample in samples:
    for name, value in reference.items():
      sizes[name] = max(sizes[name], distance(value, sample[name]))
  return sizes


def distance(a: np.ndarray, b: np.ndarray) -> float:
  """Returns the largest absolute difference; 0 where both are the same NaN or infinity, infinity where only one is."""
  a, b = (np.asarray(x, np.float64) for x in (a, b))
  if a.shape != b.shape:
    return float('inf')
  is_same = (a == b) | (np.isnan(a) & np.isnan(b))
  with np.errstate(invalid='ignore'):
    sizes = np.where(is_same, 0.0, np.abs(a - b))
  return float(np.max(np.where(np.isnan(sizes), np.inf, sizes), initial=0.0))


def largest(x: np.ndarray) -> float:
  """Returns the largest absolute entry that is finite."""
  x = np.abs(np.asarray(x, np.float64))
  return float(np.max(x, where=np.isfinite(x), initial=0.0))


def compare(
  reference: Leaves,
  other: Leaves,
  spreads: dict[str, float],
  epsilon: float,
  step: int,
  scales: Mapping[str, float] | None = None,
) -> tuple[list[Difference], list[Difference], list[str]]:
  """Compares all leaves of a step.

  Args:
    reference, other, spreads: by name; a leaf that only one side has differs by infinity.
    epsilon: the rounding unit of the computation.
    step: counted from 1.
    scales: name -> the size that roundings are relative to; of other leaves it is the largest entry.

  Returns (leaves that differ by more than is allowed, largest first; all leaves; names of leaves that are only noise).
  """
  sizes = {name: largest(value) for name, value in reference.items()}
  largest_of: dict[str, float] = {}
  for name, size in sizes.items():
    kind = name.partition('/')[0]
    largest_of[kind] = max(largest_of.get(kind, 0.0), size)
  every, noise = [], []
  for name, value in reference.items():
    if name not in other:
      every.append(Difference(step=step, leaf=name))
      continue
    noisy = SPREADS * spreads[name]
    if noisy > max(MAX_SHARE * sizes[name], _MAX_SHARE_OF_LARGEST * largest_of[name.partition('/')[0]]):
      noise.append(name)
      continue
    rounding = (scales or {}).get(name, sizes[name])
    allowed = noisy + ROUNDINGS * epsilon * rounding
    every.append(Difference(step=step, leaf=name, difference=distance(value, other[name]), allowed=allowed))
  wrong = [each for each in every if each.difference > each.allowed]
  return sorted(wrong, key=lambda each: -each.difference / max(each.allowed, 1e-30)), every, noise


FURTHER = 16.0  # how many units in the last place weights are moved to find out whether a step jumps
_NUM_SAMPLES, _NUM_FURTHER_SAMPLES = 3, 10


class Trajectory:
  """The reference's steps: the state before each, what it made, and how far rounding moves that."""

  def __init__(self, runner: Runner, initial: TrainState, batches: Sequence[Batch], seed: int = 0):
    """`initial` is the canonical state before the first step; `seed` is of the directions in which weights move."""
    self.runner, self.batches = runner, batches
    self._initial, self._seed = initial, seed

  def state(self, step: int) -> TrainState:
    """Returns the canonical state before step `step` (from 0)."""
    return self.result(step - 1).state if step else self._initial

  @functools.cache  # noqa: B019 lives as long as the trajectory
  def result(self, step: int) -> StepResult:
    """Returns what step `step` (from 0) made."""
    return self.runner.step(self.state(step), self.batches[step])

  @functools.cached_property
  def losses(self) -> np.ndarray:
    """The loss of each step."""
    return np.array([float(self.result(step).forward['loss']) for step in range(len(self.batches))])

  @functools.cache  # noqa: B019
  def spread(self, step: int, further: bool = False) -> dict[str, float]:
    """Returns how far rounding moves each metric and gradient of a step, or weights moved FURTHER times as far do."""
    num_samples, units = (_NUM_FURTHER_SAMPLES, FURTHER) if further else (_NUM_SAMPLES, 1.0)
    epsilon = units * self.runner.epsilon
    seeds = [(self._seed, step, sample, int(epsilon / FLOAT32)) for sample in range(num_samples)]
    states = [moved(self.state(step), epsilon, np.random.default_rng(seed)) for seed in seeds]
    samples = [self.runner.step(state, self.batches[step]).forward for state in states]
    return spread(self.result(step).forward, samples)

  @functools.cache  # noqa: B019
  def _own_update(self, step: int) -> Leaves:
    """Returns what the learner makes of the reference's own gradients."""
    return self.runner.updated_from(self.state(step), self.result(step))

  @functools.cache  # noqa: B019
  def spread_of_update(self, step: int) -> dict[str, float]:
    """Returns how far rounding of the gradients moves what the learner makes of them."""
    rng = np.random.default_rng((self._seed, step, 1))
    result, before = self.result(step), self.state(step)
    samples = [_with_gradients(result, perturb(_gradients(result), FLOAT32, rng)) for _ in range(_NUM_SAMPLES)]
    return spread(self._own_update(step), [self.runner.updated_from(before, sample) for sample in samples])

  def changes(self, step: int) -> dict[str, float]:
    """Returns by how much a step changes each weight at most, and four roundings of the weight itself."""
    before, after = leaves_of({'weights': self.state(step).weights}), self._own_update(step)
    return {
      name: distance(after[name], value) + float(np.max(np.abs(value), initial=0)) / 16
      for name, value in before.items()
    }

  @functools.cache  # noqa: B019
  def spread_of_losses(self, further: bool = False) -> np.ndarray:
    """Returns how far rounding of the first weights moves the losses of training without a stop."""
    num_samples, units = (_NUM_FURTHER_SAMPLES, FURTHER) if further else (2, 1.0)
    rngs = [np.random.default_rng((self._seed, sample, int(units))) for sample in range(num_samples)]
    starts = [moved(self._initial, units * self.runner.epsilon, rng) for rng in rngs]
    return np.max([np.abs(self.runner.losses(start, self.batches) - self.losses) for start in starts], axis=0)


def _gradients(result: StepResult) -> Any:
  return result.state.learner.opt_state['gradients']


def _with_gradients(result: StepResult, gradients: Any) -> StepResult:
  learner = result.state.learner
  learner = learner.replace(opt_state={**learner.opt_state, 'gradients': gradients})
  return dataclasses.replace(result, state=result.state.replace(learner=learner))


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
    runner, expected: the setting and the reference.
    metrics: the names of those that must agree; None: all.
    steps: which steps (from 0) to take from the reference's state; None: all.
    train: also compare the curve of losses of training without a stop.
  """
  closest: Difference | None = None
  notes, num_compared = collections.defaultdict[str, dict](dict), 0
  for step in range(len(expected.batches)) if steps is None else steps:
    if not np.isfinite(expected.result(step).forward['loss']):
      notes['steps'][f'{step + 1} (the loss is not finite)'] = None
      break
    result = runner.step(expected.state(step), expected.batches[step])
    wrong, every = compare_step(expected, step, result, metrics, notes)
    if wrong is not None:
      return Agreement(first=wrong, closest=wrong, num_steps=step + 1, notes=_lines(notes))
    if every:
      num_compared += 1
      closest = nearest([*every, *([closest] if closest else [])])
  wrong = _compare_curves(runner, expected, notes) if train and num_compared else None
  return Agreement(first=wrong, closest=wrong or closest, num_steps=num_compared, notes=_lines(notes))


def compare_step(
  expected: Trajectory,
  step: int,
  result: StepResult,
  metrics: Sequence[str] | None = None,
  notes: Notes | None = None,
) -> tuple[Difference | None, list[Difference]]:
  """Returns the worst difference that is too large, and all differences; none if the reference jumps by itself."""
  notes = collections.defaultdict(dict) if notes is None else notes
  if result.nonzero_padding:
    return Difference(step=step + 1, leaf=f'padding of {result.nonzero_padding[0]}'), []
  epsilon, spread = expected.runner.epsilon, expected.spread(step)
  reference = {
    name: value
    for name, value in expected.result(step).forward.items()
    if metrics is None or '/' in name or name in metrics
  }
  wrong, every, noise = compare(reference, result.forward, spread, epsilon, step + 1)
  if wrong:
    further = expected.spread(step, further=True)
    linear = {name: FURTHER * (spread[name] + epsilon * largest(value)) for name, value in reference.items()}
    if all(
      each.leaf in result.forward and further[each.leaf] > max(_JUMP * linear[each.leaf], each.difference / 4)
      for each in wrong
    ):
      notes['steps'][f'{step + 1} (rounding alone makes the reference jump, as at a tie between experts)'] = None
      return None, []
    return wrong[0], every
  updated = expected.runner.updated_from(expected.state(step), result)
  of_update = compare(
    updated,
    result.updated,
    expected.spread_of_update(step),
    expected.runner.update_epsilon,
    step + 1,
    expected.changes(step),
  )
  for name in (*noise, *of_update[2]):
    notes['leaves that are only noise'][name] = None
  return (of_update[0][0] if of_update[0] else None), every + of_update[1]


def _compare_curves(runner: Runner, expected: Trajectory, notes: Notes) -> Difference | None:
  """Returns the first difference of training without a stop."""
  results = runner.steps(expected.state(0), expected.batches)
  for step, result in enumerate(results, 1):
    if result.nonzero_padding:
      return Difference(step=step, leaf=f'padding of {result.nonzero_padding[0]}', is_of_curve=True)
  losses = [float(result.forward['loss']) for result in results]
  compared = compare_losses(losses, expected, notes, 'loss of training without a stop')
  return next((each for each in compared if not each.difference <= each.allowed), None)


def compare_losses(losses: Sequence[float], expected: Trajectory, notes: Notes, leaf: str) -> list[Difference]:
  """Returns the differences of a curve of losses from a reference's, up to where rounding alone moves that."""
  compared = []
  for step, (mine, loss, noise) in enumerate(zip(losses, expected.losses, expected.spread_of_losses()), 1):
    allowed = SPREADS * noise + ROUNDINGS * step * expected.runner.epsilon * abs(loss)
    difference = abs(mine - loss)
    reason = None
    if not np.isfinite(loss) or allowed > MAX_SHARE * abs(loss):
      reason = 'rounding alone moves it'
    elif not difference <= allowed and _jumps(expected, step - 1, max(_JUMP * FURTHER * noise, difference / 4)):
      reason = 'rounding alone makes the reference jump'
    if reason:
      notes.setdefault('the curve of losses from step', {})[f'{step} ({reason})'] = None
      break
    compared.append(Difference(step=step, leaf=leaf, difference=difference, allowed=float(allowed), is_of_curve=True))
  return compared


def _jumps(expected: Trajectory, step: int, size: float) -> bool:
  """Whether weights moved FURTHER times as far move the reference's loss of a step (from 0) by more than a size."""
  return expected.spread_of_losses(True)[step] > size


def _lines(notes: Notes) -> tuple[str, ...]:
  return tuple(f'not compared: {kind} {", ".join(items)}' for kind, items in notes.items())


def nearest(differences: Sequence[Difference]) -> Difference | None:
  """Returns the difference that is the largest part of what is allowed."""
  return max(differences, key=lambda each: each.difference / max(each.allowed, 1e-30), default=None)
