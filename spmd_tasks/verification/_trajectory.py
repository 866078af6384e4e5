"""Trajectory: the steps of a reference, and what rounding does to each of them."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from spmd_tasks.runtime import TrainState
from spmd_tasks.verification._batches import Batch
from spmd_tasks.verification._noise import FLOAT32, distance, moved, perturb, spread
from spmd_tasks.verification._runner import Leaves, Runner, StepResult, leaves_of

FURTHER = 16.0  # how many units in the last place weights are moved to find out whether a step jumps
_NUM_SAMPLES, _NUM_FURTHER_SAMPLES = 3, 10


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
    self._initial, self._seed = initial, seed

  @property
  def num_steps(self) -> int:
    """The number of steps."""
    return len(self.batches)

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
    return np.array([float(self.result(step).forward['loss']) for step in range(self.num_steps)])

  @functools.cache  # noqa: B019
  def spread(self, step: int) -> dict[str, float]:
    """Returns how far rounding moves each metric and gradient of a step."""
    return self._spread(step, _NUM_SAMPLES, self.runner.epsilon)

  @functools.cache  # noqa: B019
  def spread_further(self, step: int) -> dict[str, float]:
    """Returns how far they move if the weights are moved FURTHER times as far, in more directions."""
    return self._spread(step, _NUM_FURTHER_SAMPLES, FURTHER * self.runner.epsilon)

  def _spread(self, step: int, num_samples: int, epsilon: float) -> dict[str, float]:
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
