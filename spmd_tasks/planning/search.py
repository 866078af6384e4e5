"""Searches the settings with which a train step is fastest: mesh, remat policy, microbatches, chunks of the logits.

    found = search(resolve, target)      # resolve(overrides) returns the experiment's ResolvedConfig

None of these settings changes what is learned. Each candidate is planned from its traced step (estimate.py), and
differs in one setting from a candidate before it. The fastest one is extended first; one that needs more memory than
there is counts as slower by as much, so that the search can pass through it: a mesh may fit only with another remat
policy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import heapq
import itertools
import math
import sys
import time
from typing import Any

from spmd_tasks.config.resolution import ResolvedConfig
from spmd_tasks.config.tree import walk
from spmd_tasks.errors import UserError
from spmd_tasks.layers.transformer import REMAT_POLICIES
from spmd_tasks.planning.plan import make_plan
from spmd_tasks.planning.targets import Target
from spmd_tasks.sharding.specs import axes_of

Json = dict[str, Any]
Resolve = Callable[[Sequence[str]], ResolvedConfig]
Paths = tuple[str, ...]
Settings = Mapping[Paths, Any]  # the value of config paths that are set together

MAX_PLANS = 60
NUM_BEST = 5
_WORTH = 1.25  # a candidate slower than the best one by more is not extended
_LESS = 0.98  # of the memory of a faster one, which a slower one needs at most to be among the best
_MESH = ('ici_mesh_shape',)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """Settings and what their plan says."""

  settings: Settings
  plan: Json

  @property
  def seconds(self) -> float:
    """The predicted time of a step."""
    return self.plan['predicted_step_s']

  @property
  def memory(self) -> int:
    """The bytes that a device needs at the peak."""
    return self.plan['peak_bytes']

  @property
  def score(self) -> float:
    """The time of a step, longer if it does not fit by the ratio of its memory to the device's."""
    return self.seconds * max(1.0, self.memory / self.plan['hbm_bytes'])


def search(resolve: Resolve, target: Target) -> Json:
  """Plans an experiment with other settings, and compares their memory and time.

  Args:
    resolve: resolves the experiment with more overrides.
    target: the chips; their number stays.

  Returns:
    `search` of plan.json, see docs/planning.md.

  Raises:
    UserError: the chips' speed is not known, or the experiment as it is cannot be planned.
  """
  if not target.chip.peak_flops:
    raise UserError(f'--search compares step times, of which {target.name} has none: give --target, such as v5p:4x4x4.')
  begun = time.perf_counter()
  resolved = resolve(())
  plan = make_plan(resolved.build(), target, compiles=False)
  start = Candidate(settings=_settings(resolved, plan), plan=plan)
  seen = {_key(start.settings)}
  candidates, single = [start], []  # without those that cost the same as another
  refused: list[Json] = []
  order = itertools.count()  # of candidates with equal scores
  queue = [(start.score, next(order), start)]
  best = start.score
  while queue:
    score, _, candidate = heapq.heappop(queue)
    if score > _WORTH * best:
      break
    for settings in _neighbours(candidate.settings, resolved):
      if _key(settings) in seen:
        continue
      if len(seen) == MAX_PLANS:
        queue.clear()
        break
      seen.add(_key(settings))
      try:
        plan = make_plan(resolve(_overrides(settings, start.settings)).build(), target, compiles=False)
      except (UserError, ValueError, TypeError) as error:  # a user's own model may say it in its own way
        lines = str(error).splitlines() or [type(error).__name__]
        refused.append({'flags': _flags(settings, start.settings), 'why': lines[0]})
        continue
      new = Candidate(settings=settings, plan=plan)
      if any((new.seconds, new.memory) == (one.seconds, one.memory) for one in candidates):
        continue  # such as `dots_no_batch` beside `dots`, if a kernel computes attention
      best = min(best, new.score)
      candidates.append(new)
      if candidate is start:
        single.append(new)
      heapq.heappush(queue, (new.score, next(order), new))
      fastest = min((one.seconds for one in candidates if one.plan['fits']), default=math.inf)
      found = f'the fastest that fits: {fastest:.4g} s' if fastest < math.inf else 'none fits so far'
      print(f'plan: {len(seen)} of at most {MAX_PLANS} plans, {found}', file=sys.stderr, flush=True)
  return {
    'num_plans': len(seen) - len(refused),
    'seconds': round(time.perf_counter() - begun, 1),
    'start': _row(start, start),
    'best': [_row(candidate, start) for candidate in _best(candidates)],
    'nearest': [_row(min(candidates, key=lambda one: one.memory), start)],
    'single': [_row(candidate, start) for candidate in sorted(single, key=lambda one: one.score)],
    'refused': refused,
  }


def _best(candidates: Sequence[Candidate]) -> list[Candidate]:
  """Returns the fastest that fits, then those that are a bit slower but need less memory."""
  best: list[Candidate] = []
  for candidate in sorted(candidates, key=lambda one: one.seconds):
    if candidate.plan['fits'] and (not best or candidate.memory < _LESS * best[-1].memory):
      best.append(candidate)
  return best[:NUM_BEST]


def _settings(resolved: ResolvedConfig, plan: Json) -> dict[Paths, Any]:
  """Returns what the experiment sets: its mesh, and its fields or the paths of its task with a name in _MOVES.

  Paths of one name and value, as in a sequence of stacks, change together.
  """
  experiment = resolved.experiment
  dcn_shape = experiment.dcn_mesh_shape or itertools.repeat(1)
  settings: dict[Paths, Any] = {_MESH: tuple(size // dcn for size, dcn in zip(plan['mesh'].values(), dcn_shape))}
  paths: dict[tuple[str, Any], list[str]] = {}
  for path, field in walk(resolved.parts['task'], 'task.'):
    name = path.rpartition('.')[2]
    if name not in _MOVES or not isinstance(field.value, int | str):
      continue
    if path.startswith('task.learner.') or not hasattr(experiment, name):
      paths.setdefault((name, field.value), []).append(path)
    else:
      settings[(name,)] = getattr(experiment, name)
  return settings | {tuple(same): value for (_, value), same in paths.items()}


def _neighbours(settings: Settings, resolved: ResolvedConfig) -> Iterator[dict[Paths, Any]]:
  """Yields the settings with one change."""
  for paths, value in settings.items():
    others = _meshes(value, resolved) if paths == _MESH else _MOVES[paths[0].rpartition('.')[2]](value)
    for other in others:
      yield {**settings, paths: other}


def _meshes(shape: tuple[int, ...], resolved: ResolvedConfig) -> Iterator[tuple[int, ...]]:
  """Yields the shapes in which one axis gives a factor to another; axes that split nothing get none."""
  experiment = resolved.experiment
  used = {axis for _, axes in experiment.axis_rules for axis in axes_of(axes)}
  for i, size in enumerate(shape):
    factor = next((n for n in range(2, size + 1) if size % n == 0), None)
    for j, name in enumerate(experiment.mesh_axis_names):
      if factor and i != j and name in used:
        yield tuple(n // factor if k == i else n * factor if k == j else n for k, n in enumerate(shape))


def _policies(policy: str) -> Sequence[str]:
  """Returns the two policies before and after `policy`; all of them, if it is written as 'save(...) offload(...)'."""
  policies = list(REMAT_POLICIES)  # from the most device memory to the least
  if policy not in policies:
    return policies
  at = policies.index(policy)
  return [other for i, other in enumerate(policies) if 0 < abs(i - at) <= 2]


def _halves_and_doubles(number: int) -> list[int]:
  return [*([number // 2] if number % 2 == 0 else []), 2 * number]


def _chunks(number: int | str) -> Sequence[int | str]:
  """Returns all logits at once for 'auto', or 'auto' and half and twice the chunks."""
  return ['auto', *_halves_and_doubles(number)] if isinstance(number, int) else [1]


_MOVES: Mapping[str, Callable[[Any], Sequence[Any]]] = {
  'remat_policy': _policies,
  'num_microbatches': _halves_and_doubles,
  'num_logit_chunks': _chunks,
}


def _key(settings: Settings) -> tuple:
  return tuple(settings.items())


def _changed(settings: Settings, start: Settings) -> Iterator[tuple[str, str]]:
  """Yields the path and the new value, as text, of what differs from the start."""
  for paths, value in settings.items():
    if value != start[paths]:
      text = ','.join(map(str, value)) if paths == _MESH else str(value)
      yield from ((path, text) for path in paths)


def _overrides(settings: Settings, start: Settings) -> list[str]:
  return [f'{path}={text}' for path, text in _changed(settings, start)]


def _flags(settings: Settings, start: Settings) -> str:
  """Returns the flags that a user adds to a command."""
  return ' '.join(
    f'--{path} {text}' if (path,) == _MESH else f'--set {path}={text}' for path, text in _changed(settings, start)
  )


def _row(candidate: Candidate, start: Candidate) -> Json:
  before, after = ({term['name']: term['seconds'] for term in one.plan['terms']} for one in (start, candidate))
  names = {*before, *after}
  changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in sorted(names)}
  plan = candidate.plan
  return {
    'flags': _flags(candidate.settings, start.settings),
    'overrides': _overrides(candidate.settings, start.settings),
    **{name: plan[name] for name in ('predicted_step_s', 'predicted_mfu', 'peak_bytes', 'fits', 'mesh')},
    'limit': plan['terms'][0]['name'],
    'gain_s': start.seconds - candidate.seconds,
    'changes_s': dict(sorted(changes.items(), key=lambda item: -abs(item[1]))),
  }
