"""Searches the best mesh, microbatches and remat policy for so many devices: --plan_search.

    found = search_plans(plan_with, resolve, num_devices=32, hbm_bytes=16e9)
    print(format_search(found))

A local search, the best known plan's neighbours first: a neighbour moves a prime factor from one mesh axis to another,
takes the next or the previous remat policy, or doubles or halves the microbatches. Before anything is compiled, a
setting is dropped if the experiment refuses it, or if weights and optimizer state alone, by their abstract shapes, do
not fit. The ranking is by predicted step time; what the limit leaves untried is said.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import heapq
import itertools
import math
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.layers import REMAT_POLICIES
from spmd_tasks.planning._levers import (
  MICROBATCHES,
  mesh_override,
  remat_order,
  remat_overrides,
  remat_paths,
  remat_place,
  rows_per_microbatch,
)
from spmd_tasks.planning.page import duration, size
from spmd_tasks.planning.search import Overrides, PlanWith, Resolve, Trial, TrialRunner
from spmd_tasks.runtime import bytes_per_device
from spmd_tasks.sharding import nearest_hybrid_shape, nearest_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """A point of the search.

  Attributes:
    ici, dcn: mesh shapes; dcn None: one slice.
    remat: the policy; None: the model has none that can be set.
    microbatches: of the learner; None: it cannot be set.
  """

  ici: tuple[int, ...]
  dcn: tuple[int, ...] | None
  remat: str | None
  microbatches: int | None

  def overrides(self, values: Mapping[str, Any]) -> Overrides:
    """The overrides that make an experiment have this setting."""
    dcn = 'None' if self.dcn is None else ','.join(map(str, self.dcn))
    return (
      mesh_override(self.ici),
      *((f'dcn_mesh_shape={dcn}',) if self.dcn is not None or values.get('dcn_mesh_shape') is not None else ()),
      *(remat_overrides(values, self.remat) if self.remat is not None else ()),
      *((f'{MICROBATCHES}={self.microbatches}',) if self.microbatches is not None else ()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """The result of a search.

  Attributes:
    trials: every setting that was compiled, the best first.
    num_refused: settings that the experiment refuses.
    num_pruned: settings whose weights and optimizer state alone do not fit.
    is_complete: whether the search ended before its limit, at a setting whose neighbours are all worse.
  """

  trials: list[Trial]
  num_refused: int
  num_pruned: int
  is_complete: bool


def search_plans(
  plan_with: PlanWith,
  resolve: Resolve,
  *,
  num_devices: int,
  num_slices: int = 1,
  hbm_bytes: float | None = None,
  can_offload: bool = False,
  limit: int = 12,
  progress: Callable[[str], None] = print,
) -> Found:
  """Searches settings for `num_devices` devices by compiling up to `limit` of them.

  Args:
    plan_with: compiles the experiment with further overrides.
    resolve: builds it.
    num_devices: of all slices.
    num_slices: over which the mesh has a DCN part.
    hbm_bytes: of a device; None: nothing is pruned.
    can_offload: whether the compiler knows a memory of the host beside the device's: those for TPU and GPU do.
    limit: how many settings are compiled at most.
    progress: gets a line per trial.

  Raises:
    UserError: no setting can be built at all.
  """
  job, values = resolve(())
  runner = TrialRunner(plan_with, limit, progress)
  pruner = _Pruner(resolve, values, hbm_bytes)
  order, tries = itertools.count(), itertools.count()
  start = _start(job, values, num_devices, num_slices)
  queue: list[tuple[Any, int, Setting]] = [((0,), next(order), start)]
  seen = {start}
  while queue and not runner.is_spent:
    _, _, setting = heapq.heappop(queue)
    trial = runner.try_setting(setting.overrides(values)) if pruner.is_worth_compiling(setting) else None
    # What cannot be compiled still leads on to its neighbours, after those of every plan.
    rank = trial.rank if trial is not None else (2, pruner.state_bytes.get((setting.ici, setting.dcn), math.inf))
    needs_less = trial is None or not trial.fits
    for place, neighbour in enumerate(_neighbours(setting, job, needs_less, can_offload)):
      if neighbour not in seen:
        seen.add(neighbour)
        heapq.heappush(queue, ((*rank, place), next(order), neighbour))
    if not runner.trials and next(tries) > _MAX_WITHOUT_A_TRIAL:
      break
  if not runner.trials:
    raise UserError(
      f'no setting of {job.name} on {num_devices} devices could be compiled: {pruner.num_refused} are refused '
      f'({pruner.last_refusal or "none"}) and {pruner.num_pruned} need more than {size(hbm_bytes)} for weights and '
      'optimizer state alone; take more devices, or a smaller model or optimizer.'
    )
  return Found(
    trials=runner.trials, num_refused=pruner.num_refused, num_pruned=pruner.num_pruned, is_complete=not queue
  )


_MAX_WITHOUT_A_TRIAL = 60  # each builds the experiment


class _Pruner:
  """Drops settings without compiling them: those that the experiment refuses, and those whose state does not fit."""

  def __init__(self, resolve: Resolve, values: Mapping[str, Any], hbm_bytes: float | None):
    self._resolve, self._values, self._hbm_bytes = resolve, values, hbm_bytes
    self.state_bytes: dict[Any, float] = {}
    self.num_refused = self.num_pruned = 0
    self.last_refusal = ''

  def is_worth_compiling(self, setting: Setting) -> bool:
    """Returns whether the experiment takes the setting, and weights and optimizer state fit."""
    mesh = setting.ici, setting.dcn
    try:
      job, _ = self._resolve(setting.overrides(self._values))
      if mesh not in self.state_bytes:
        self.state_bytes[mesh] = state_bytes(job)
    except UserError as error:
      self.num_refused += 1
      self.last_refusal = str(error)
      return False
    if self._hbm_bytes is not None and self.state_bytes[mesh] > self._hbm_bytes:
      self.num_pruned += 1
      return False
    return True


def state_bytes(job: Job) -> float:
  """Counts the bytes per device of weights and optimizer state, from abstract shapes; nothing is compiled."""
  state = partition_job(job, job.experiment.mesh_spec().build_abstract()).padded_state
  return bytes_per_device((state.weights, state.learner))


def _start(job: Job, values: Mapping[str, Any], num_devices: int, num_slices: int) -> Setting:
  """The experiment's own setting, on the nearest mesh that has the devices."""
  experiment = job.experiment
  ici, dcn = experiment.ici_mesh_shape, experiment.dcn_mesh_shape
  per_slice = num_devices // num_slices
  ici = tuple(max(1, size) for size in ici)
  if num_slices > 1:
    ici, dcn = nearest_hybrid_shape(ici, dcn or (1,) * len(ici), num_slices, per_slice)
  else:
    ici, dcn = nearest_shapes(ici, per_slice, limit=1)[0], None
  policies = {values[path] for path in remat_paths(values)}
  remat = policies.pop() if len(policies) == 1 else None
  microbatches = values.get(MICROBATCHES)
  return Setting(
    ici=ici,
    dcn=dcn,
    remat=remat if remat in REMAT_POLICIES else None,
    microbatches=microbatches if isinstance(microbatches, int) else None,
  )


def _neighbours(setting: Setting, job: Job, needs_less: bool, can_offload: bool) -> Iterator[Setting]:
  """Yields the settings one move away; first those that need less memory, if that is what is wanted, or else more."""
  policies = remat_order(can_offload)
  step = 1 if needs_less else -1
  changes: list[Setting] = []
  if setting.microbatches is not None:
    for count in sorted({setting.microbatches * 2, max(1, setting.microbatches // 2)}, reverse=needs_less):
      changes.append(dataclasses.replace(setting, microbatches=count))
  if setting.remat is not None:
    at = remat_place(setting.remat, policies)
    changes += [
      dataclasses.replace(setting, remat=policies[new]) for new in (at + step, at - step) if 0 <= new < len(policies)
    ]
  meshes = [dataclasses.replace(setting, ici=ici) for ici in _moves(setting.ici)]
  meshes += [dataclasses.replace(setting, dcn=dcn) for dcn in _moves(setting.dcn or ())]
  first, rest = (changes, meshes) if needs_less else (meshes, changes)
  for neighbour in (*first, *rest):
    if neighbour != setting and not _splits_rows(neighbour, job):
      yield neighbour


def _splits_rows(setting: Setting, job: Job) -> bool:
  """Whether microbatches would be so small that some devices hold padding alone."""
  dcn = setting.dcn or (1,) * len(setting.ici)
  sizes = {name: i * d for name, i, d in zip(job.experiment.mesh_axis_names, setting.ici, dcn)}
  return (setting.microbatches or 1) > 1 and rows_per_microbatch(job, setting.microbatches or 1, sizes) < 1


def _moves(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
  """Yields the shapes that differ by one prime factor moved from an axis to another, inner axes' factors first."""
  for giver in reversed(range(len(shape))):
    for taker in reversed(range(len(shape))):
      factor = next((p for p in range(2, shape[giver] + 1) if shape[giver] % p == 0), None)
      if factor is not None and giver != taker:
        moved = list(shape)
        moved[giver] //= factor
        moved[taker] *= factor
        yield tuple(moved)


def format_search(found: Found, limit: int = 10) -> str:
  """Formats the ranking as a table."""
  lines = [('', 'predicted step', 'peak', 'setting')]
  for rank, trial in enumerate(found.trials[:limit], 1):
    place = f'{rank}' if trial.fits else '-'
    peak = size(trial.peak_bytes) + ('' if trial.fits else ' (does not fit)')
    lines.append((place, duration(trial.predicted_step_s), peak, ' '.join(trial.setting)))
  widths = [max(map(len, column)) for column in zip(*lines)]
  table = ['  '.join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
  end = 'every neighbour of these was tried or dropped' if found.is_complete else 'the limit left others untried'
  dropped = f'{found.num_refused} settings refused by the experiment, {found.num_pruned} whose state alone does not fit'
  return '\n'.join([*table, f'{len(found.trials)} compiled; {dropped}; {end}.'])
