"""Finds the settings of an experiment that fit, the fastest first, by compiling them.

    trials, left_out = search_plans(plan_with, resolve, num_devices=32, hbm_bytes=16e9)
    trials[0].setting                                 # 'ici_mesh_shape=1,16,2', 'remat_policy=full'

`plan_with(overrides)` compiles the experiment with further overrides and returns its plan.json; `resolve(overrides)`
only builds it. Both raise a UserError for a setting that is impossible. Nothing here depends on how a plan is made, so
the tests plan with a formula.

It is a local search over meshes, microbatches and remat policies, the best known plan's neighbours first. A neighbour
moves a prime factor from one mesh axis to another, takes the next remat policy, or doubles or halves the microbatches;
that of a plan that does not fit needs less memory. Before anything is compiled, a setting is dropped if the experiment
refuses it, or if weights and optimizer state alone, by their abstract shapes, do not fit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import heapq
import itertools
import math
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.layers.transformer import REMAT_POLICIES
from spmd_tasks.planning.report import duration, size
from spmd_tasks.runtime.parameter_table import bytes_per_device
from spmd_tasks.sharding import nearest_hybrid_shape, nearest_shapes

Overrides = tuple[str, ...]
Resolve = Callable[[Sequence[str]], tuple[Job, Mapping[str, Any]]]
PlanWith = Callable[[Sequence[str]], Mapping[str, Any]]  # plan.json: fits, peak_bytes, predicted_step_s

MICROBATCHES = ('task.learner.num_microbatches', 'num_microbatches')  # of the learner; of a pipeline
_OFFLOADED = 'attention_offloaded'
_MAX_WITHOUT_A_TRIAL = 60  # settings, each of which builds the experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """A setting and its plan.

  Attributes:
    setting: `path=value`, beside the user's own overrides; empty: the experiment as it is.
    fits, peak_bytes, predicted_step_s: of the plan.
  """

  setting: Overrides
  fits: bool
  peak_bytes: float | None
  predicted_step_s: float | None

  @property
  def rank(self) -> tuple[int, float]:
    """Sorts what fits first, the fastest first; of what does not fit, the smallest first."""
    figure = self.predicted_step_s if self.fits else self.peak_bytes
    return 0 if self.fits else 1, math.inf if figure is None else figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """A point of the search.

  Attributes:
    ici, dcn: mesh shapes; dcn None: one slice.
    remat: the policy; None: the model has none that can be set.
    microbatches: by the paths of MICROBATCHES that the experiment has.
  """

  ici: tuple[int, ...]
  dcn: tuple[int, ...] | None
  remat: str | None
  microbatches: tuple[tuple[str, int], ...]


def search_plans(
  plan_with: PlanWith,
  resolve: Resolve,
  *,
  num_devices: int,
  num_slices: int = 1,
  hbm_bytes: float | None = None,
  can_offload: bool = False,
  limit: int = 12,
  wanted: float = math.inf,
  progress: Callable[[str], None] = print,
) -> tuple[list[Trial], str]:
  """Searches settings for `num_devices` devices by compiling up to `limit` of them.

  Args:
    plan_with: compiles the experiment with further overrides.
    resolve: builds it.
    num_devices: of all slices.
    num_slices: over which the mesh has a DCN part.
    hbm_bytes: of a device; None: no setting is dropped because of its state.
    can_offload: whether the compiler knows a memory of the host beside the device's: those for TPU and GPU do.
    limit: how many settings are compiled at most.
    wanted: the search ends after so many that fit.
    progress: gets a line per trial, before and after it.

  Returns:
    every setting that was compiled, the best first, and a sentence on what was left out.

  Raises:
    UserError: no setting can be built at all.
  """
  space = _Space(*resolve(()), can_offload)
  start = space.start(num_devices, num_slices)
  queue: list[tuple[tuple[float, ...], int, Setting]] = [((0.0,), 0, start)]
  order, seen = itertools.count(1), {start}
  trials: list[Trial] = []
  state_of: dict[Any, float] = {}  # by mesh
  num_refused, num_pruned, last_refusal, num_taken = 0, 0, 'none', 0
  while queue and len(trials) < limit and sum(trial.fits for trial in trials) < wanted:
    if not trials and num_taken > _MAX_WITHOUT_A_TRIAL:
      break
    _, _, setting = heapq.heappop(queue)
    num_taken += 1
    overrides, mesh = space.overrides(setting), (setting.ici, setting.dcn)
    rank: tuple[float, ...] = (2, math.inf)  # a setting that is not compiled still leads on to its neighbours
    is_over = True
    try:
      job, _ = resolve(overrides)
      if mesh not in state_of:
        state_of[mesh] = state_bytes(job)
      rank = 2, state_of[mesh]
      if hbm_bytes is not None and state_of[mesh] > hbm_bytes:
        num_pruned += 1
      else:
        progress(f'trying {len(trials) + 1} of at most {limit}: {" ".join(overrides) or "as it is"}')
        plan = plan_with(overrides)
        figures = {name: plan[name] for name in ('peak_bytes', 'predicted_step_s')}
        trial = Trial(setting=overrides, fits=plan['fits'] is not False, **figures)
        verdict = 'fits' if trial.fits else 'does not fit'
        progress(f'  {verdict}: peak {size(trial.peak_bytes)}, predicted step {duration(trial.predicted_step_s)}')
        trials.append(trial)
        rank, is_over = trial.rank, not trial.fits
    except UserError as error:
      num_refused, last_refusal = num_refused + 1, str(error)
      progress(f'impossible: {" ".join(overrides)}: {error}')
    for place, neighbour in enumerate(space.neighbours(setting, is_over)):
      if neighbour not in seen:
        seen.add(neighbour)
        heapq.heappush(queue, ((*rank, place), next(order), neighbour))
  if not trials:
    raise UserError(
      f'no setting of {space.job.name} on {num_devices} devices could be compiled: {num_refused} are refused '
      f'({last_refusal}) and {num_pruned} need more than {size(hbm_bytes)} for weights and optimizer state alone; take '
      'more devices, or a smaller model or optimizer.'
    )
  end = 'the limit left others untried' if queue else 'every neighbour of these was tried or dropped'
  dropped = f'{num_refused} settings refused by the experiment, {num_pruned} whose state alone does not fit'
  return sorted(trials, key=lambda trial: trial.rank), f'{len(trials)} compiled; {dropped}; {end}.'


def state_bytes(job: Job) -> float:
  """Counts the bytes per device of weights and optimizer state, from abstract shapes; nothing is compiled."""
  state = partition_job(job, job.experiment.mesh_spec().build_abstract()).padded_state
  return bytes_per_device((state.weights, state.learner))


class _Space:
  """The settings of an experiment.

  Args:
    job: the built experiment.
    values: the value of every field by its path, as config.json has it.
    can_offload: see `search_plans`. Without it, `attention_offloaded` is `attention`.
  """

  def __init__(self, job: Job, values: Mapping[str, Any], can_offload: bool):
    self.job, self._values = job, values
    self._policies = [policy for policy in REMAT_POLICIES if can_offload or policy != _OFFLOADED]  # less and less kept
    in_model = [path for path in values if path.startswith('task.model.') and path.endswith('.remat_policy')]
    self._remat_paths = ['remat_policy'] if isinstance(values.get('remat_policy'), str) else in_model
    policies = {values[path] for path in self._remat_paths}
    self._own = Setting(
      ici=tuple(job.experiment.ici_mesh_shape),
      dcn=job.experiment.dcn_mesh_shape,
      remat=policies.pop() if len(policies) == 1 and policies <= set(REMAT_POLICIES) else None,
      microbatches=tuple((path, values[path]) for path in MICROBATCHES if isinstance(values.get(path), int)),
    )

  def start(self, num_devices: int, num_slices: int) -> Setting:
    """The experiment's own setting, on the nearest mesh that has the devices."""
    ici, dcn = tuple(max(1, size) for size in self._own.ici), self._own.dcn
    per_slice = num_devices // num_slices
    if num_slices > 1:
      ici, dcn = nearest_hybrid_shape(ici, dcn or (1,) * len(ici), num_slices, per_slice)
    else:
      ici, dcn = nearest_shapes(ici, per_slice, limit=1)[0], None
    return dataclasses.replace(self._own, ici=ici, dcn=dcn)

  def overrides(self, setting: Setting) -> Overrides:
    """The overrides that make the experiment have a setting: those that change it."""
    own = self._own
    changed: list[tuple[str, Any]] = [('ici_mesh_shape', _sizes(setting.ici))] * (setting.ici != own.ici)
    changed += [('dcn_mesh_shape', _sizes(setting.dcn))] * (setting.dcn != own.dcn)
    changed += [(path, setting.remat) for path in self._remat_paths if setting.remat != own.remat]
    changed += [(path, str(count)) for path, count in setting.microbatches if count != dict(own.microbatches)[path]]
    return tuple(f'{path}={value}' for path, value in changed)

  def neighbours(self, setting: Setting, is_over: bool) -> Iterator[Setting]:
    """Yields the settings one move away: after one that does not fit, first those that need less memory."""
    ways = (1,) if is_over else (-1, 1)  # 1: less memory
    changes = []
    for at, (path, count) in enumerate(setting.microbatches):
      for new in (count * 2 if way > 0 else count // 2 for way in ways):
        others = setting.microbatches[:at], setting.microbatches[at + 1 :]
        changes += [dataclasses.replace(setting, microbatches=(*others[0], (path, new), *others[1]))] if new else []
    if setting.remat is not None:
      policies = self._policies
      at = policies.index(setting.remat if setting.remat in policies else 'attention')
      changes += [
        dataclasses.replace(setting, remat=policies[at + way]) for way in ways if 0 <= at + way < len(policies)
      ]
    meshes = [dataclasses.replace(setting, ici=ici) for ici in _moves(setting.ici)]
    meshes += [dataclasses.replace(setting, dcn=dcn) for dcn in _moves(setting.dcn or ())]
    first, rest = (changes, meshes) if is_over else (meshes, changes)
    return (each for each in (*first, *rest) if not self._splits_rows(each))

  def _splits_rows(self, setting: Setting) -> bool:
    """Whether microbatches of the learner are so small that some devices hold padding alone."""
    experiment = self.job.experiment
    batch, count = getattr(experiment, 'batch_size', 0), dict(setting.microbatches).get(MICROBATCHES[0], 1)
    axes = next((axes for name, axes in experiment.axis_rules if name == 'batch'), None)
    names = (axes,) if isinstance(axes, str) else axes if isinstance(axes, tuple) else ()
    dcn = setting.dcn or (1,) * len(setting.ici)
    sizes = {name: i * d for name, i, d in zip(experiment.mesh_axis_names, setting.ici, dcn)}
    return bool(batch) and count > 1 and batch / count < math.prod(sizes.get(axis, 1) for axis in names)


def _sizes(shape: Sequence[int] | None) -> str:
  return 'None' if shape is None else ','.join(map(str, shape))


def _moves(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
  """Yields the shapes that differ by one prime factor moved from an axis to another, inner axes' factors first."""
  for giver, taker in itertools.permutations(reversed(range(len(shape))), 2):
    factor = next((p for p in range(2, shape[giver] + 1) if shape[giver] % p == 0), None)
    if factor is not None:
      moved = list(shape)
      moved[giver] //= factor
      moved[taker] *= factor
      yield tuple(moved)
