"""Bench: compiles settings, keeps their programs, and compares what their steps make.

Every step starts from the state that the reference had before this step, so differences do not grow from step to step
and each is held against the rounding of one step. Besides, the setting trains by itself, its state staying on its mesh,
and its curve of losses is compared with the reference's.

The gradients are those of the train step itself: a learner that records them stands in front of the experiment's. What
the learner makes of them is compared with what it makes of the same gradients on the reference's mesh, for Adam turns
the last bits of a small gradient into a whole step.
"""

from collections.abc import Iterable, Sequence
import concurrent.futures
import dataclasses
import functools
import threading
from typing import Any

import jax
import numpy as np

from spmd_tasks.runtime import TrainState
from spmd_tasks.verification._batches import Batch, draw_batches
from spmd_tasks.verification._layouts import Mesh, scaled_mesh
from spmd_tasks.verification._noise import Difference, compare, distance, largest, perturb, spread
from spmd_tasks.verification._settings import Leaves, Runner, Setting, Source, StepResult, leaves_of

_NUM_SAMPLES, _NUM_MORE_SAMPLES = 3, 8
_FURTHER = 16.0  # how many units in the last place the weights are moved to find out whether a step jumps
_MAX_CURVE_NOISE = 1e-3  # of the loss: a curve is followed as long as rounding alone moves it less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
  """What a comparison found.

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


class Trajectory:
  """The reference's steps: the state before each, what it made, and what rounding does to it."""

  def __init__(self, runner: Runner, initial: TrainState, batches: Sequence[Batch], seed: int):
    self.runner, self.batches = runner, batches
    self.results: list[StepResult] = []
    self._states = [initial]
    self._seed = seed

  def state(self, step: int) -> TrainState:
    """Returns the canonical state before step `step` (from 0)."""
    while len(self._states) <= step:
      self.result(len(self._states) - 1)
    return self._states[step]

  def result(self, step: int) -> StepResult:
    """Returns what step `step` (from 0) made."""
    while len(self.results) <= step:
      done = len(self.results)
      self.results.append(self.runner.step(self._states[done], self.batches[done]))
      self._states.append(self.results[done].state)
    return self.results[step]

  @functools.lru_cache  # noqa: B019 a trajectory lives as long as its bench
  def spreads(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns how rounding spreads the metrics and gradients of a step, and what the learner makes of gradients."""
    samples = list(self._samples(step, _NUM_SAMPLES, self.runner.epsilon))
    forward = spread(self.result(step).forward, [sample.forward for sample in samples])
    rng = np.random.default_rng((self._seed, step, 1))
    own, result = self.own_update(step), self.result(step)
    moved = [
      self.runner.updated_from(self.state(step), _with_gradients(result, perturb(_gradients(result), 2.0**-23, rng)))
      for _ in range(_NUM_SAMPLES)
    ]
    return forward, spread(own, moved)

  @functools.lru_cache  # noqa: B019
  def wide_spreads(self, step: int) -> dict[str, float]:
    """Like the first of `spreads`, with weights moved further and in more directions, to find jumps."""
    samples = self._samples(step, _NUM_MORE_SAMPLES, _FURTHER * self.runner.epsilon)
    return spread(self.result(step).forward, [sample.forward for sample in samples])

  @functools.lru_cache  # noqa: B019
  def own_update(self, step: int) -> Leaves:
    """Returns what the learner makes of the reference's own gradients."""
    return self.runner.updated_from(self.state(step), self.result(step))

  @functools.cached_property
  def curve(self) -> list[tuple[float, float]]:
    """(loss, by how much rounding moves it) of each step, of training without a stop."""
    rng = np.random.default_rng((self._seed, 2))
    losses = [float(self.result(step).forward['loss']) for step in range(len(self.batches))]
    spreads = [0.0] * len(losses)
    for _ in range(2):
      start = self.state(0)
      start = start.replace(weights=perturb(start.weights, self.runner.epsilon, rng))
      for step, result in enumerate(self.runner.steps(start, self.batches)):
        spreads[step] = max(spreads[step], distance(result.forward['loss'], np.asarray(losses[step])))
    return list(zip(losses, spreads))

  def _samples(self, step: int, num: int, epsilon: float) -> Iterable[StepResult]:
    state = self.state(step)
    for sample in range(num):
      rng = np.random.default_rng((self._seed, step, 3, sample))
      weights = perturb(state.weights, epsilon, rng)
      yield self.runner.step(state.replace(weights=weights), self.batches[step])


class Bench:
  """An experiment on this process's devices, in any setting."""

  def __init__(self, source: Source, *, num_devices: int, directory: str, num_steps: int = 4, seed: int = 0):
    """Makes a bench; nothing is compiled yet.

    Args:
      source: the experiment.
      num_devices: how many devices may be used.
      directory: gets the files of child processes.
      num_steps: how many steps are compared.
      seed: of everything that is drawn.
    """
    self.source, self.num_devices, self.directory = source, num_devices, directory
    self.num_steps, self.seed = num_steps, seed
    self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix='compile')
    self._runners: dict[Setting, concurrent.futures.Future[Runner]] = {}
    self._trajectories: dict[Setting, Trajectory] = {}
    self._lock = threading.Lock()

  @functools.cached_property
  def own_mesh(self) -> Mesh:
    """The experiment's mesh, scaled to the devices."""
    return scaled_mesh(self.source.base.experiment, self.num_devices)

  def prepare(self, settings: Iterable[Setting]) -> None:
    """Begins to compile these settings on other threads; `runner` waits for them."""
    for setting in settings:
      with self._lock:
        if setting not in self._runners:
          self._runners[setting] = self._pool.submit(self._compile, setting)

  def runner(self, setting: Setting) -> Runner:
    """Returns the compiled setting.

    Raises:
      UserError: the experiment refuses it.
    """
    self.prepare([setting])
    return self._runners[setting].result()

  def _compile(self, setting: Setting) -> Runner:
    runner = Runner(self.source, setting)
    runner.model.train_step.compile()
    return runner

  def close(self) -> None:
    """Ends the threads that compile."""
    self._pool.shutdown(cancel_futures=True)

  def trajectory(self, setting: Setting) -> Trajectory:
    """Returns the steps of a reference."""
    if setting not in self._trajectories:
      runner = self.runner(setting)
      # Weights are drawn once: those of a setting with the same weights are the same, and drawing compiles a program.
      shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), runner.model.canonical_state)
      same = [
        known
        for known in self._trajectories.values()
        if jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), known.runner.model.canonical_state) == shapes
      ]
      initial = same[0].state(0) if same else runner.init()
      batches = draw_batches(runner.job.train_input, self.num_steps, self.seed)
      self._trajectories[setting] = Trajectory(runner, initial, batches, self.seed)
    return self._trajectories[setting]

  def agree(
    self,
    setting: Setting,
    reference: Setting,
    *,
    ignored: Sequence[str] = (),
    num_steps: int | None = None,
    train: bool = True,
  ) -> Agreement:
    """Compares a setting with a reference, step by step, up to the first difference.

    Args:
      setting, reference: both are compiled if they are not yet.
      ignored: names of metrics that may differ.
      num_steps: fewer steps than the bench's.
      train: also compare the curve of losses of training without a stop.

    Raises:
      UserError: the experiment refuses one of the settings.
    """
    expected, runner = self.trajectory(reference), self.runner(setting)
    closest, notes = None, _Notes()
    num_compared = 0
    for step in range(self.num_steps if num_steps is None else num_steps):
      if not np.isfinite(expected.result(step).forward['loss']):
        notes.add('steps', f'{step + 1} (the loss is not finite)')
        break
      result = runner.step(expected.state(step), expected.batches[step])
      wrong, every = self.compare_step(expected, step, result, ignored, notes)
      if wrong is not None:
        return Agreement(first=wrong, closest=wrong, num_steps=step + 1, notes=notes.lines())
      if every:
        num_compared += 1
        closest = max([*every, *([closest] if closest else [])], key=_share)
    if train and num_compared:
      wrong = _compare_curves(runner, expected, notes)
      if wrong is not None:
        return Agreement(first=wrong, closest=wrong, num_steps=num_compared, notes=notes.lines())
    return Agreement(first=None, closest=closest, num_steps=num_compared, notes=notes.lines())

  def compare_step(
    self,
    expected: Trajectory,
    step: int,
    result: StepResult,
    ignored: Sequence[str] = (),
    notes: '_Notes | None' = None,
  ) -> tuple[Difference | None, list[Difference]]:
    """Returns the worst difference that is too large, and all differences; none if the step jumps by itself."""
    notes = notes or _Notes()
    if result.nonzero_padding:
      leaf = result.nonzero_padding[0]
      return Difference(step=step + 1, leaf=f'padding of {leaf}', difference=float('inf'), allowed=0.0), []
    epsilon = expected.runner.epsilon
    forward_spreads, update_spreads = expected.spreads(step)
    reference = {name: value for name, value in expected.result(step).forward.items() if name not in ignored}
    wrong, every, noise = compare(reference, result.forward, forward_spreads, epsilon, step + 1)
    if wrong:
      wide = expected.wide_spreads(step)
      if all(each.difference <= 4 * wide[each.leaf] for each in wrong if each.leaf in wide):
        notes.add('steps', f'{step + 1} (rounding alone makes the reference jump, as at a tie between experts)')
        return None, []
      return wrong[0], every
    for name in noise:
      notes.add('leaves', name)
    before, own = expected.state(step), expected.own_update(step)
    updated = expected.runner.updated_from(before, result)
    changes = _changes(before, own)
    wrong, of_update, noise = compare(updated, result.updated, update_spreads, 2.0**-23, step + 1, changes)
    for name in noise:
      notes.add('leaves', name)
    return (wrong[0] if wrong else None), every + of_update


def _changes(before: TrainState, after: Leaves) -> dict[str, float]:
  """Returns by how much a step changes each weight at most, and four roundings of the weight itself."""
  weights = leaves_of({'weights': before.weights})
  return {name: distance(after[name], value) + largest(value) / 16 for name, value in weights.items()}


def _compare_curves(runner: Runner, expected: Trajectory, notes: '_Notes') -> Difference | None:
  epsilon = expected.runner.epsilon
  results = runner.steps(expected.state(0), expected.batches)
  for step, (result, (loss, noise)) in enumerate(zip(results, expected.curve), 1):
    if result.nonzero_padding:
      leaf = result.nonzero_padding[0]
      return Difference(step=step, leaf=f'padding of {leaf}', difference=float('inf'), allowed=0.0, is_of_curve=True)
    if not np.isfinite(loss) or 16 * noise > _MAX_CURVE_NOISE * abs(loss):
      notes.add('the curve of losses from step', str(step))
      return None
    allowed = 16 * noise + 64 * step * epsilon * abs(loss)
    difference = distance(result.forward['loss'], np.asarray(loss))
    if difference > allowed:
      leaf = 'loss (trained without a stop)'
      return Difference(step=step, leaf=leaf, difference=difference, allowed=allowed, is_of_curve=True)
  return None


def _gradients(result: StepResult) -> Any:
  return result.state.learner.opt_state['gradients']


def _with_gradients(result: StepResult, gradients: Any) -> StepResult:
  learner = result.state.learner
  learner = learner.replace(opt_state={**learner.opt_state, 'gradients': gradients})
  return dataclasses.replace(result, state=result.state.replace(learner=learner))


def _share(difference: Difference) -> float:
  return difference.difference / max(difference.allowed, 1e-30)


class _Notes:
  """Collects what was not compared, without repetition."""

  def __init__(self):
    self._items: dict[str, dict[str, None]] = {}

  def add(self, kind: str, item: str) -> None:
    self._items.setdefault(kind, {})[item] = None

  def lines(self) -> tuple[str, ...]:
    return tuple(f'not compared: {kind} {", ".join(items)}' for kind, items in self._items.items())
