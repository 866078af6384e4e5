"""Compares the steps of a setting with a reference, within rounding errors.

Every step starts from the state that the reference had before this step, so differences do not grow from step to step.
In addition, the setting trains without interruption, and its losses are compared. Learner updates are compared with the
reference's learner on the same gradients, because Adam turns the last bits of a small gradient into a whole step.

How large may a difference be (docs/verify.md explains why)? The reference repeats the step with weights perturbed by
one unit in the last place. The largest change of a leaf is its *spread*, and a difference is allowed up to

    SPREADS x spread + ROUNDINGS x epsilon x the leaf's largest entry

and for a leaf that is stored in 16 bits, up to the distance of two of its numbers more.

A leaf whose allowance exceeds MAX_SHARE of its largest entry is not compared in that step, which is reported. Larger
perturbations in more directions detect whether a step jumps, such as at a tie between experts.
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
_STORED = {'bfloat16': 2.0**-7, 'float16': 2.0**-10}  # the largest relative distance of two neighbors
# A leaf much smaller than the largest leaf of its kind may be all noise. Its allowance may be this share of that leaf.
_MAX_SHARE_OF_LARGEST = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """The difference of one leaf from the reference.

  Attributes:
    step: counted from 1.
    leaf: name of the leaf.
    difference: largest absolute difference; infinite if the leaf is missing.
    allowed: largest allowed difference.
    in_curve: whether it is a loss of uninterrupted training instead of a single step.
  """

  step: int
  leaf: str
  difference: float = float('inf')
  allowed: float = 0.0
  in_curve: bool = False

  def __str__(self) -> str:
    return f'step {self.step}, {self.leaf}: differs by {self.difference:.3g}, allowed {self.allowed:.3g}'


def perturb_weights(state: TrainState, epsilon: float, rng: np.random.Generator) -> TrainState:
  """Returns the state with every weight perturbed by a relative error of at most `epsilon`."""
  return state.replace(weights=perturb(state.weights, epsilon, rng))


def perturb(tree: Any, epsilon: float, rng: np.random.Generator) -> Any:
  """Multiplies every float of a tree by 1 - epsilon, 1 or 1 + epsilon."""

  def perturb_leaf(x):
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating) and x.dtype.name != 'bfloat16':
      return x
    signs = rng.integers(-1, 2, x.shape).astype(np.float32)
    return (x.astype(np.float32) * (1 + np.float32(epsilon) * signs)).astype(x.dtype)

  return jax.tree.map(perturb_leaf, tree)


def spread(reference: Leaves, samples: Iterable[Leaves]) -> dict[str, float]:
  """Returns the largest difference of each leaf from the reference in the samples."""
  sizes = dict.fromkeys(reference, 0.0)
  for sample in samples:
    for name, value in reference.items():
      sizes[name] = max(sizes[name], max_difference(value, sample[name]))
  return sizes


def max_difference(a: np.ndarray, b: np.ndarray) -> float:
  """Returns the largest absolute difference. Equal NaNs or infinities differ by 0, others by infinity."""
  a, b = (np.asarray(x, np.float64) for x in (a, b))
  if a.shape != b.shape:
    return float('inf')
  is_same = (a == b) | (np.isnan(a) & np.isnan(b))
  with np.errstate(invalid='ignore'):
    sizes = np.where(is_same, 0.0, np.abs(a - b))
  return float(np.max(np.where(np.isnan(sizes), np.inf, sizes), initial=0.0))


def max_abs(x: np.ndarray) -> float:
  """Returns the largest finite absolute entry."""
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
    reference, other, spreads: by name; a leaf that only the reference has differs by infinity.
    epsilon: the rounding unit of the computation.
    step: counted from 1.
    scales: name -> the magnitude to which rounding errors are relative; by default the leaf's largest entry.

  Returns (leaves with a difference that is too large, worst first; all leaves; names of leaves that are only noise).
  """
  sizes = {name: max_abs(value) for name, value in reference.items()}
  largest_by_kind: dict[str, float] = {}
  for name, size in sizes.items():
    kind = name.partition('/')[0]
    largest_by_kind[kind] = max(largest_by_kind.get(kind, 0.0), size)
  differences, noise = [], []
  for name, value in reference.items():
    if name not in other:
      differences.append(Difference(step=step, leaf=name))
      continue
    allowed_spread = SPREADS * spreads[name]
    if allowed_spread > max(MAX_SHARE * sizes[name], _MAX_SHARE_OF_LARGEST * largest_by_kind[name.partition('/')[0]]):
      noise.append(name)
      continue
    scale = (scales or {}).get(name, sizes[name])
    # Numbers that differ in their last bits may be stored as neighbors.
    allowed = allowed_spread + ROUNDINGS * epsilon * scale + _STORED.get(value.dtype.name, 0.0) * scale
    difference = max_difference(value, other[name])
    differences.append(Difference(step=step, leaf=name, difference=difference, allowed=allowed))
  too_large = sorted((d for d in differences if d.difference > d.allowed), key=_share_of_allowed, reverse=True)
  return too_large, differences, noise


def _share_of_allowed(difference: Difference) -> float:
  return difference.difference / max(difference.allowed, 1e-30)


FURTHER = 16.0  # perturbation, in units in the last place, that detects whether a step jumps
_NUM_SAMPLES, _NUM_FURTHER_SAMPLES = 3, 10


class Trajectory:
  """The reference's steps: the state before each step, its result, and the spread of the result."""

  def __init__(self, runner: Runner, initial: TrainState, batches: Sequence[Batch], seed: int = 0):
    """`initial` is the canonical state before the first step; `seed` is the seed of perturbations."""
    self.runner, self.batches = runner, batches
    self._initial, self._seed = initial, seed

  def state(self, step: int) -> TrainState:
    """Returns the canonical state before step `step` (from 0)."""
    return self.result(step - 1).state if step else self._initial

  @functools.cache  # noqa: B019 lives as long as the trajectory
  def result(self, step: int) -> StepResult:
    """Returns the result of step `step` (from 0)."""
    return self.runner.step(self.state(step), self.batches[step])

  @functools.cached_property
  def losses(self) -> np.ndarray:
    """The loss of each step."""
    return np.array([float(self.result(step).forward['loss']) for step in range(len(self.batches))])

  @functools.cache  # noqa: B019
  def spread(self, step: int, further: bool = False) -> dict[str, float]:
    """Returns the spread of each metric and gradient of a step; with `further`, for FURTHER times the perturbation."""
    num_samples, units = (_NUM_FURTHER_SAMPLES, FURTHER) if further else (_NUM_SAMPLES, 1.0)
    epsilon = units * self.runner.epsilon
    seeds = [(self._seed, step, sample, int(epsilon / FLOAT32)) for sample in range(num_samples)]
    states = [perturb_weights(self.state(step), epsilon, np.random.default_rng(seed)) for seed in seeds]
    samples = [self.runner.step(state, self.batches[step]).forward for state in states]
    return spread(self.result(step).forward, samples)

  @functools.cache  # noqa: B019
  def _update(self, step: int) -> Leaves:
    """Returns the learner's update from the reference's own gradients."""
    return self.runner.learner_update(self.state(step), self.result(step))

  @functools.cache  # noqa: B019
  def update_spread(self, step: int) -> dict[str, float]:
    """Returns the spread of the learner's update for perturbed gradients."""
    rng = np.random.default_rng((self._seed, step, 1))
    result, before = self.result(step), self.state(step)
    samples = [_with_gradients(result, perturb(_gradients(result), FLOAT32, rng)) for _ in range(_NUM_SAMPLES)]
    return spread(self._update(step), [self.runner.learner_update(before, sample) for sample in samples])

  def changes(self, step: int) -> dict[str, float]:
    """Returns the scales of an update's rounding errors: a weight's largest change plus 1/16 of its largest entry."""
    before, after = leaves_of({'weights': self.state(step).weights}), self._update(step)
    return {
      name: max_difference(after[name], value) + float(np.max(np.abs(value), initial=0)) / 16
      for name, value in before.items()
    }

  @functools.cache  # noqa: B019
  def loss_spread(self, further: bool = False) -> np.ndarray:
    """Returns the spread of the losses of uninterrupted training for perturbed initial weights."""
    num_samples, units = (_NUM_FURTHER_SAMPLES, FURTHER) if further else (2, 1.0)
    rngs = [np.random.default_rng((self._seed, sample, int(units))) for sample in range(num_samples)]
    starts = [perturb_weights(self._initial, units * self.runner.epsilon, rng) for rng in rngs]
    return np.max([np.abs(self.runner.losses(start, self.batches) - self.losses) for start in starts], axis=0)


def _gradients(result: StepResult) -> Any:
  return result.state.learner.opt_state['gradients']


def _with_gradients(result: StepResult, gradients: Any) -> StepResult:
  learner = result.state.learner
  learner = learner.replace(opt_state={**learner.opt_state, 'gradients': gradients})
  return dataclasses.replace(result, state=result.state.replace(learner=learner))


# A step jumps if FURTHER times the perturbation changes a leaf by more than _JUMP * FURTHER times its spread.
_JUMP = 8.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
  """The result of a comparison.

  Attributes:
    first: the first difference that is too large; None if there is none.
    closest: the difference that is closest to its allowance.
    num_steps: the number of steps that were compared.
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
    metrics: the names of the metrics to compare; None for all.
    steps: the steps (from 0) to take from the reference's state; None for all.
    train: whether to compare the losses of uninterrupted training too.
  """
  closest: Difference | None = None
  notes, num_compared = collections.defaultdict[str, dict](dict), 0
  for step in range(len(expected.batches)) if steps is None else steps:
    if not np.isfinite(expected.result(step).forward['loss']):
      notes['steps'][f'{step + 1} (the loss is not finite)'] = None
      break
    result = runner.step(expected.state(step), expected.batches[step])
    worst, differences = compare_step(expected, step, result, metrics, notes)
    if worst is not None:
      return Agreement(first=worst, closest=worst, num_steps=step + 1, notes=_lines(notes))
    if differences:
      num_compared += 1
      closest = closest_to_allowed([*differences, *([closest] if closest else [])])
  first = _compare_curves(runner, expected, notes) if train and num_compared else None
  return Agreement(first=first, closest=first or closest, num_steps=num_compared, notes=_lines(notes))


def compare_step(
  expected: Trajectory,
  step: int,
  result: StepResult,
  metrics: Sequence[str] | None = None,
  notes: Notes | None = None,
) -> tuple[Difference | None, list[Difference]]:
  """Returns (the worst difference that is too large or None, all differences).

  Without a worst difference, there are none if the reference jumps, or if its loss and most gradients are only noise.
  """
  notes = collections.defaultdict(dict) if notes is None else notes
  if result.nonzero_padding:
    return Difference(step=step + 1, leaf=f'padding of {result.nonzero_padding[0]}'), []
  epsilon, spread = expected.runner.epsilon, expected.spread(step)
  reference = {
    name: value
    for name, value in expected.result(step).forward.items()
    if metrics is None or '/' in name or name in metrics
  }
  too_large, differences, noise = compare(reference, result.forward, spread, epsilon, step + 1)
  if too_large:
    further = expected.spread(step, further=True)
    linear = {name: FURTHER * (spread[name] + epsilon * max_abs(value)) for name, value in reference.items()}
    if all(
      d.leaf in result.forward and further[d.leaf] > max(_JUMP * linear[d.leaf], d.difference / 4) for d in too_large
    ):
      notes['steps'][f'{step + 1} (rounding alone makes the reference jump, as at a tie between experts)'] = None
      return None, []
    return too_large[0], differences
  too_large, update_differences, update_noise = compare(
    expected.runner.learner_update(expected.state(step), result),
    result.updated,
    expected.update_spread(step),
    expected.runner.update_epsilon,
    step + 1,
    expected.changes(step),
  )
  if not too_large and _hides_differences(reference, noise):
    kind = 'steps in which rounding alone changes the loss and most gradients'
    kind += ' (--set the dtypes of the model to float32):' if epsilon > FLOAT32 else ':'
    notes[kind][f'{step + 1}'] = None
    return None, []
  for name in (*noise, *update_noise):
    notes['leaves that are only noise'][name] = None
  return (too_large[0] if too_large else None), differences + update_differences


def _hides_differences(reference: Leaves, noise: Sequence[str]) -> bool:
  """Returns whether the loss and most gradients are only noise, so that what is left says nothing."""
  gradients = [name for name in reference if name.startswith('gradients/')]
  return 'loss' in noise and 2 * len(set(gradients) & set(noise)) > len(gradients)


def _compare_curves(runner: Runner, expected: Trajectory, notes: Notes) -> Difference | None:
  """Returns the first difference of uninterrupted training that is too large."""
  results = runner.steps(expected.state(0), expected.batches)
  for step, result in enumerate(results, 1):
    if result.nonzero_padding:
      return Difference(step=step, leaf=f'padding of {result.nonzero_padding[0]}', in_curve=True)
  losses = [float(result.forward['loss']) for result in results]
  differences = compare_losses(losses, expected, notes, 'loss of uninterrupted training')
  return next((d for d in differences if not d.difference <= d.allowed), None)


def compare_losses(losses: Sequence[float], expected: Trajectory, notes: Notes, leaf: str) -> list[Difference]:
  """Compares losses of uninterrupted training, up to the step at which rounding errors alone are too large."""
  differences = []
  for step, (loss, expected_loss, spread) in enumerate(zip(losses, expected.losses, expected.loss_spread()), 1):
    allowed = SPREADS * spread + ROUNDINGS * step * expected.runner.epsilon * abs(expected_loss)
    difference = abs(loss - expected_loss)
    reason = None
    if not np.isfinite(expected_loss) or allowed > MAX_SHARE * abs(expected_loss):
      reason = 'rounding alone changes it'
    elif not difference <= allowed:
      jump = expected.loss_spread(True)[step - 1]
      if jump > max(_JUMP * FURTHER * spread, difference / 4):
        reason = 'rounding alone makes the reference jump'
    if reason:
      notes.setdefault('the losses from step', {})[f'{step} ({reason})'] = None
      break
    differences.append(Difference(step=step, leaf=leaf, difference=difference, allowed=float(allowed), in_curve=True))
  return differences


def _lines(notes: Notes) -> tuple[str, ...]:
  return tuple(f'not compared: {kind} {", ".join(items)}' for kind, items in notes.items())


def closest_to_allowed(differences: Sequence[Difference]) -> Difference | None:
  """Returns the difference that is the largest share of its allowance."""
  return max(differences, key=_share_of_allowed, default=None)
