"""Finds settings of an experiment that fit, or the best ones, by compiling them.

    trials = changes_that_fit(plan_with, resolve, base)                              # after a plan that does not fit
    found = search_plans(plan_with, resolve, num_devices=32, hbm_bytes=16e9)         # --plan_search
    print(format_search(found))

`plan_with(overrides)` compiles the experiment with further overrides and returns its plan.json; `resolve(overrides)`
only builds it. Both raise a UserError for a setting that is impossible. Nothing here depends on how a plan is made, so
the tests plan with a formula. Every trial is compiled; estimates only decide what is tried first.

A *lever* is one setting that changes the memory (remat policy, microbatches, mesh, optimizer dtype, batch) with the
values that need less than the present one, the weakest first. `changes_that_fit` pulls one after another.

`search_plans` is a local search over meshes, microbatches and remat policies, the best known plan's neighbours first: a
neighbour moves a prime factor from one mesh axis to another, takes the next or the previous remat policy, or doubles or
halves the microbatches. Before anything is compiled, a setting is dropped if the experiment refuses it, or if weights
and optimizer state alone, by their abstract shapes, do not fit. The ranking is by predicted step time.
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
from spmd_tasks.planning.page import duration, size
from spmd_tasks.runtime.parameter_table import bytes_per_device
from spmd_tasks.sharding import AxisRules, nearest_hybrid_shape, nearest_shapes

Overrides = tuple[str, ...]
Resolve = Callable[[Sequence[str]], tuple[Job, Mapping[str, Any]]]
PlanJson = Mapping[str, Any]  # as plan.json has it: fits, peak_bytes, hbm_bytes, argument_bytes, predicted_step_s
PlanWith = Callable[[Sequence[str]], PlanJson]

MICROBATCHES = 'task.learner.num_microbatches'
_OFFLOADED = 'attention_offloaded'
_MOMENTUM = 'task.learner.optimizer.momentum_dtype'
_MAX_WITHOUT_A_TRIAL = 60  # each builds the experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """A setting and its plan.

  Attributes:
    setting: `path=value`, beside the user's own overrides.
    fits, peak_bytes, predicted_step_s: of the plan.
    note: what the change costs.
  """

  setting: Overrides
  fits: bool
  peak_bytes: float | None
  predicted_step_s: float | None
  note: str = ''

  @property
  def rank(self) -> tuple[int, float]:
    """Sorts what fits first, the fastest first; of what does not fit, the smallest first."""
    figure = self.predicted_step_s if self.fits else self.peak_bytes
    return 0 if self.fits else 1, math.inf if figure is None else figure

  def to_json(self) -> dict[str, Any]:
    """The row in plan.json's `suggestions`."""
    return {**dataclasses.asdict(self), 'setting': list(self.setting)}


class TrialRunner:
  """Compiles settings, each once, up to a limit, and keeps the trials.

  Args:
    plan_with: compiles.
    limit: how many settings may be compiled.
    progress: gets a line per trial, before and after it.
  """

  def __init__(self, plan_with: PlanWith, limit: int, progress: Callable[[str], None]):
    self._plan_with, self._limit, self._progress = plan_with, limit, progress
    self._tried: dict[frozenset[str], Trial | None] = {}
    self.num_compiled = 0

  @property
  def trials(self) -> list[Trial]:
    """All trials, the best first; among equals the one that was tried first."""
    return sorted((trial for trial in self._tried.values() if trial is not None), key=lambda trial: trial.rank)

  @property
  def num_fitting(self) -> int:
    """How many of the trials fit."""
    return sum(trial.fits for trial in self.trials)

  @property
  def is_spent(self) -> bool:
    """Whether the limit is reached."""
    return self.num_compiled >= self._limit

  def known(self, setting: Overrides) -> Trial | None:
    """Returns the trial of a setting that was compiled."""
    return self._tried.get(frozenset(setting))

  def try_setting(self, setting: Overrides, note: str = '') -> Trial | None:
    """Returns the trial of a setting; None: it is impossible, or the limit is reached."""
    key = frozenset(setting)
    if key in self._tried:
      return self._tried[key]
    if self.is_spent:
      return None
    self.num_compiled += 1
    shown = ' '.join(setting) or 'as it is'
    self._progress(f'trying {self.num_compiled} of at most {self._limit}: {shown}')
    try:
      plan = self._plan_with(setting)
    except UserError as error:
      self.num_compiled -= 1  # refused before anything was compiled
      self._progress(f'  impossible: {error}')
      self._tried[key] = None
      return None
    trial = Trial(
      setting=setting,
      fits=plan['fits'] is not False,
      peak_bytes=plan['peak_bytes'],
      predicted_step_s=plan['predicted_step_s'],
      note=note,
    )
    self._progress(f'  {_outcome(trial)}')
    self._tried[key] = trial
    return trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lever:
  """One setting and its values.

  Attributes:
    name: for people.
    options: the overrides of each value, from the weakest change to the strongest.
    factors: by which each option divides the activations; empty where that is not known.
    note: what the change costs.
    changes_numbers: whether the run learns something else.
  """

  name: str
  options: tuple[Overrides, ...]
  factors: tuple[int, ...] = ()
  note: str = ''
  changes_numbers: bool = False


def levers(job: Job, values: Mapping[str, Any], *, can_offload: bool = False) -> list[Lever]:
  """Returns the levers of an experiment, the cheapest first; the last two change what is learned.

  Args:
    job: the built experiment.
    values: the value of every field by its path, as config.json has it.
    can_offload: whether the compiler knows a memory of the host beside the device's: those for TPU and GPU do.
  """
  found = [
    _remat(values, can_offload),
    _pipeline(values),
    _microbatches(job, values),
    _mesh(job),
    _momentum(values),
    _batch(job, values),
  ]
  return [lever for lever in found if lever is not None and lever.options]


def remat_paths(values: Mapping[str, Any]) -> list[str]:
  """The fields that set the remat policy: the experiment's own, or else those of the model's stacks."""
  if isinstance(values.get('remat_policy'), str):
    return ['remat_policy']
  return [path for path in values if path.startswith('task.model.') and path.endswith('.remat_policy')]


def remat_order(can_offload: bool) -> list[str]:
  """The remat policies that differ in the device's memory, from most to least of it.

  Args:
    can_offload: see `levers`. Without it, `attention_offloaded` is `attention` and left out.
  """
  return [policy for policy in REMAT_POLICIES if can_offload or policy != _OFFLOADED]


def remat_place(policy: str, order: Sequence[str]) -> int:
  """The index of a policy in `remat_order`."""
  return order.index(policy if policy in order else 'attention')


def remat_overrides(values: Mapping[str, Any], policy: str) -> Overrides:
  """The overrides that set a remat policy everywhere."""
  return tuple(f'{path}={policy}' for path in remat_paths(values))


def batch_axes(rules: AxisRules) -> tuple[str, ...]:
  """The mesh axes over which the axis rules split a batch."""
  return _axes_of(rules, 'batch')


def mesh_override(shape: Sequence[int]) -> str:
  """The override of a mesh's ICI shape."""
  return f'ici_mesh_shape={",".join(map(str, shape))}'


def rows_per_microbatch(job: Job, num_microbatches: int, sizes: Mapping[str, int] | None = None) -> float:
  """Returns the rows of a microbatch for each part of the batch; below 1 some devices hold padding alone.

  Args:
    job: the built experiment; one without a `batch_size` counts as having rows enough.
    num_microbatches: of the learner.
    sizes: axis -> size; None: of the experiment's mesh.
  """
  experiment = job.experiment
  if sizes is None:
    dcn = experiment.dcn_mesh_shape or (1,) * len(experiment.ici_mesh_shape)
    sizes = {name: max(i, 1) * d for name, i, d in zip(experiment.mesh_axis_names, experiment.ici_mesh_shape, dcn)}
  batch = getattr(experiment, 'batch_size', None)
  parts = math.prod(sizes.get(axis, 1) for axis in batch_axes(experiment.axis_rules))
  return batch / num_microbatches / parts if batch else math.inf


def _remat(values: Mapping[str, Any], can_offload: bool) -> Lever | None:
  paths = remat_paths(values)
  if not paths or any(values[path] not in REMAT_POLICIES for path in paths):
    return None
  order = remat_order(can_offload)
  present = max(remat_place(values[path], order) for path in paths)
  options = tuple(remat_overrides(values, policy) for policy in order[present + 1 :])
  note = 'keeps less on the device for the backward pass: more is computed again, or fetched from the host'
  return Lever(name='remat policy', options=options, note=note)


def _pipeline(values: Mapping[str, Any]) -> Lever | None:
  """More microbatches, which are smaller; at last the schedule that keeps few of them."""
  present, batch, schedule = (values.get(name) for name in ('num_microbatches', 'batch_size', 'schedule'))
  if not isinstance(present, int) or not isinstance(batch, int) or not isinstance(schedule, str):
    return None
  counts = [count for count in (present * 2, present * 4) if batch % count == 0]
  options: list[Overrides] = [(f'num_microbatches={count}',) for count in counts]
  if schedule != 'one_forward_one_backward':
    strongest = 'schedule=one_forward_one_backward', *(('num_repeats=1',) if values.get('num_repeats', 1) != 1 else ())
    options.append(strongest)
  return Lever(
    name='pipeline', options=tuple(options), note='smaller microbatches, or fewer of them kept in a pipeline'
  )


def _microbatches(job: Job, values: Mapping[str, Any]) -> Lever | None:
  present = values.get(MICROBATCHES)
  batch = values.get('batch_size')
  if not isinstance(present, int) or not isinstance(batch, int):
    return None
  counts = []
  count = present * 2
  while batch % count == 0 and rows_per_microbatch(job, count) >= 1:
    counts.append(count)
    count *= 2
  return Lever(
    name='microbatches',
    options=tuple((f'{MICROBATCHES}={count}',) for count in counts),
    factors=tuple(count // present for count in counts),
    note='gradients are accumulated; weights are gathered once per microbatch',
  )


def _mesh(job: Job) -> Lever | None:
  """Moves devices from the batch axes to the axis that splits the wide dims, a factor of 2 at a time."""
  experiment = job.experiment
  names, shape = experiment.mesh_axis_names, list(experiment.ici_mesh_shape)
  wide = next((axis for axis in _axes_of(experiment.axis_rules, 'mlp') if axis in names), None)
  if wide is None or -1 in shape:
    return None
  options: list[Overrides] = []
  while len(options) < 2:
    donors = [names.index(axis) for axis in batch_axes(experiment.axis_rules) if axis in names and axis != wide]
    donor = max(donors, key=lambda at: shape[at], default=None)
    if donor is None or shape[donor] % 2:
      break
    shape[donor] //= 2
    shape[names.index(wide)] *= 2
    options.append((mesh_override(shape),))
  return Lever(name='mesh', options=tuple(options), note=f'more traffic over {wide}')


def _momentum(values: Mapping[str, Any]) -> Lever | None:
  if values.get(_MOMENTUM) != 'float32':
    return None
  note = "changes the numbers: Adam's first moment is rounded to 8 bits of mantissa"
  return Lever(name='optimizer dtype', options=((f'{_MOMENTUM}=bfloat16',),), note=note, changes_numbers=True)


def _batch(job: Job, values: Mapping[str, Any]) -> Lever | None:
  batch = values.get('batch_size')
  if not isinstance(batch, int):
    return None
  factors = [
    factor for factor in (2, 4, 8, 16, 32, 64) if batch % factor == 0 and rows_per_microbatch(job, factor) >= 1
  ]
  return Lever(
    name='batch',
    options=tuple((f'batch_size={batch // factor}',) for factor in factors),
    factors=tuple(factors),
    note='changes what is learned: a smaller batch',
    changes_numbers=True,
  )


def _axes_of(rules: AxisRules, name: str) -> tuple[str, ...]:
  """The mesh axes of the first axis rule of a logical name."""
  axes = next((axes for rule, axes in rules if rule == name), None)
  if isinstance(axes, str):
    return (axes,)
  return () if axes is None or isinstance(axes, int) else tuple(axes)


def changes_that_fit(
  plan_with: PlanWith,
  resolve: Resolve,
  base: PlanJson,
  *,
  can_offload: bool = False,
  limit: int = 8,
  wanted: int = 3,
  progress: Callable[[str], None] = print,
) -> list[Trial]:
  """Finds the smallest changes with which a run fits that does not.

  Each lever alone, the cheapest first: of its values the weakest that fits. Then levers together: the first ones at
  their strongest, the last one as weak as it may be. What changes the numbers of the run (another dtype of optimizer
  state, a smaller batch) is tried only where nothing else suffices.

  Args:
    plan_with: compiles the experiment with further overrides.
    resolve: builds it.
    base: the plan that does not fit.
    can_offload: whether the compiler knows a memory of the host beside the device's: those for TPU and GPU do.
    limit: how many settings are compiled at most.
    wanted: the search ends after so many that fit.
    progress: gets a line per trial.

  Returns:
    every trial, those that fit first, the fastest first.
  """
  job, values = resolve(())
  runner = TrialRunner(plan_with, limit, progress)
  all_levers = levers(job, values, can_offload=can_offload)
  harmless = [lever for lever in all_levers if not lever.changes_numbers]
  _try_alone(runner, harmless, base, wanted, limit - limit // 3)
  _try_together(runner, [lever for lever in harmless if _may_suffice(lever, base)], base, wanted)
  if not runner.num_fitting:
    _try_alone(runner, [lever for lever in all_levers if lever.changes_numbers], base, wanted, limit)
  if not runner.num_fitting:
    _try_together(runner, all_levers, base, wanted)
  return runner.trials


def _try_alone(runner: TrialRunner, choices: Sequence[Lever], base: PlanJson, wanted: int, limit: int) -> None:
  """Tries each lever without others; while nothing fits, only until `limit` compilations."""
  for lever in choices:
    has_room = runner.num_fitting > 0 or runner.num_compiled < limit
    if runner.num_fitting < wanted and has_room and _may_suffice(lever, base):
      _weakest_that_fits(runner, lever, (), base)


def _try_together(runner: TrialRunner, choices: Sequence[Lever], base: PlanJson, wanted: int) -> None:
  """Tries each lever beside the strongest values of those before it, until one fits."""
  others: Overrides = ()
  notes: list[str] = []
  for lever in choices:
    if runner.num_fitting >= wanted or (others and _weakest_that_fits(runner, lever, others, base, notes)):
      break
    others, notes = (*others, *lever.options[-1]), [*notes, lever.note]


def _weakest_that_fits(
  runner: TrialRunner, lever: Lever, others: Overrides, base: PlanJson, notes: Sequence[str] = ()
) -> Trial | None:
  """Compiles values of a lever, beside other changes, until the weakest that fits is known."""
  low, high, found = 0, len(lever.options), None
  known = runner.known(others)
  peak = known.peak_bytes if known else base['peak_bytes']
  at = _first_guess(lever, base, peak)
  while low < high and not runner.is_spent:
    trial = runner.try_setting((*others, *lever.options[at]), '; '.join((*notes, lever.note)))
    if trial is not None and trial.fits:
      found, high = trial, at
    elif trial is not None and not others and trial.peak_bytes and peak and trial.peak_bytes >= peak:
      break  # it makes things worse, and more of it would too
    else:
      low = at + 1
    at = (low + high) // 2
  return found


def _first_guess(lever: Lever, base: PlanJson, peak: float | None) -> int:
  """The index of the value to begin with: that by which activations must be divided, if they alone shrink.

  One that is too weak costs little: compilers refuse in seconds what they compile in minutes.
  """
  if not lever.factors or not peak or not base['hbm_bytes']:
    return 0
  kept = min(base['argument_bytes'] or 0.0, 0.95 * base['hbm_bytes'])
  wanted = (peak - kept) / (base['hbm_bytes'] - kept)
  return next((at for at, factor in enumerate(lever.factors) if factor >= wanted), len(lever.factors) - 1)


def _may_suffice(lever: Lever, base: PlanJson) -> bool:
  """Whether a lever alone could save enough: activations are what the arguments leave, a moment half of itself."""
  if not (base['peak_bytes'] and base['hbm_bytes'] and base['argument_bytes']):
    return True
  over = base['peak_bytes'] - base['hbm_bytes']
  if lever.name == 'optimizer dtype':
    return over < base['argument_bytes'] / 4
  if lever.name == 'mesh':
    return True
  return over < base['peak_bytes'] - base['argument_bytes']


def _outcome(trial: Trial) -> str:
  verdict = 'fits' if trial.fits else 'does not fit'
  return f'{verdict}: peak {size(trial.peak_bytes)}, predicted step {duration(trial.predicted_step_s)}'


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
