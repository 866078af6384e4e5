"""Trajectory: the steps of a reference, and what rounding does to each of them."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from spmd_tasks.runtime import TrainState
from spmd_tasks.verification._batches import Batch
from spmd_tasks.verification._noise import distance, perturb, spread
from spmd_tasks.verification._runner import Leaves, Runner, StepResult, leaves_of

FURTHER = 16.0  # how many units in the last place weights are moved to find out whether a step jumps
_NUM_SAMPLES, _NUM_FURTHER_SAMPLES = 3, 10
_FLOAT32 = 2.0**-23


class Trajectory:
  """The reference's steps: the state before each, what it made, and how far rounding moves that."""

  def __init__(self, runner: Runner, initial: TrainState, batches: Sequence[Batch], seed: int = 0):
    """Makes a trajectory; steps are taken when they are asked for.

    Args:
      runner: the reference.
      initial: the canonical state before the first step.
      batches: one for each step.
      seed: of the directions in which weights are moved.
    """
    self.runner, self.batches = runner, batches
    self._results: list[StepResult] = []
    self._states = [initial]
    self._seed = seed

  @property
  def num_steps(self) -> int:
    """How many steps there are."""
    return len(self.batches)

  def state(self, step: int) -> TrainState:
    """Returns the canonical state before step `step` (from 0)."""
    while len(self._states) <= step:
      self.result(len(self._states) - 1)
    return self._states[step]

  def result(self, step: int) -> StepResult:
    """Returns what step `step` (from 0) made."""
    while len(self._results) <= step:
      done = len(self._results)
      self._results.append(self.runner.step(self._states[done], self.batches[done]))
      self._states.append(self._results[done].state)
    return self._results[step]

  @functools.cached_property
  def losses(self) -> np.ndarray:
    """The loss of each step."""
    return np.array([float(self.result(step).forward['loss']) for step in range(self.num_steps)])

  @functools.cache  # noqa: B019 lives as long as the trajectory
  def spread(self, step: int) -> dict[str, float]:
    """Returns how far rounding moves each metric and gradient of a step."""
    return self._spread(step, _NUM_SAMPLES, self.runner.epsilon)

  @functools.cache  # noqa: B019
  def spread_further(self, step: int) -> dict[str, float]:
    """Returns how far they move if the weights are moved FURTHER times as far, in more directions."""
    return self._spread(step, _NUM_FURTHER_SAMPLES, FURTHER * self.runner.epsilon)

  def _spread(self, step: int, num_samples: int, epsilon: float) -> dict[str, float]:
    state, samples = self.state(step), []
    for sample in range(num_samples):
      rng = np.random.default_rng((self._seed, step, sample, int(epsilon / _FLOAT32)))
      moved = state.replace(weights=perturb(state.weights, epsilon, rng))
      samples.append(self.runner.step(moved, self.batches[step]).forward)
    return spread(self.result(step).forward, samples)

  @functools.cache  # noqa: B019
  def own_update(self, step: int) -> Leaves:
    """Returns what the learner makes of the reference's own gradients."""
    return self.runner.updated_from(self.state(step), self.result(step))

  @functools.cache  # noqa: B019
  def spread_of_update(self, step: int) -> dict[str, float]:
    """Returns how far rounding of the gradients moves what the learner makes of them."""
    rng = np.random.default_rng((self._seed, step, 1))
    result, before = self.result(step), self.state(step)
    moved = [_with_gradients(result, perturb(_gradients(result), _FLOAT32, rng)) for _ in range(_NUM_SAMPLES)]
    return spread(self.own_update(step), [self.runner.updated_from(before, each) for each in moved])

  def changes(self, step: int) -> dict[str, float]:
    """Returns by how much a step changes each weight at most, and four roundings of the weight itself."""
    before, after = leaves_of({'weights': self.state(step).weights}), self.own_update(step)
    return {
      name: distance(after[name], value) + float(np.max(np.abs(value), initial=0)) / 16
      for name, value in before.items()
    }

  @functools.cache  # noqa: B019
  def spread_of_losses(self, further: bool = False) -> np.ndarray:
    """Returns how far rounding of the first weights moves the losses of training without a stop."""
    num_samples, epsilon = (_NUM_FURTHER_SAMPLES, FURTHER) if further else (2, 1.0)
    return np.max([np.abs(losses - self.losses) for losses in self._losses(num_samples, epsilon)], axis=0)

  def _losses(self, num_samples: int, units: float) -> Iterator[np.ndarray]:
    start = self.state(0)
    for sample in range(num_samples):
      rng = np.random.default_rng((self._seed, sample, int(units)))
      moved = start.replace(weights=perturb(start.weights, units * self.runner.epsilon, rng))
      yield np.array([float(result.forward['loss']) for result in self.runner.steps(moved, self.batches)])


def _gradients(result: StepResult) -> Any:
  return result.state.learner.opt_state['gradients']


def _with_gradients(result: StepResult, gradients: Any) -> StepResult:
  learner = result.state.learner
  learner = learner.replace(opt_state={**learner.opt_state, 'gradients': gradients})
  return dataclasses.replace(result, state=result.state.replace(learner=learner))
