"""Case: one claim about an experiment in one setting, and its decision.

    bench = Bench(source, num_devices=8)     # compiles settings, and caches them
    verdict = case.decide(bench)             # held, BROKEN or skipped

A broken agreement is repeated on smaller meshes, axis by axis, while it still breaks.
"""

from collections.abc import Callable, Iterable, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import shlex
from typing import Any, Literal

import jax

from spmd_tasks.errors import UserError
from spmd_tasks.verification._agreement import Agreement, Difference, Trajectory, agree
from spmd_tasks.verification._formula_runner import FormulaRunner
from spmd_tasks.verification._runner import Runner
from spmd_tasks.verification._settings import Mesh, Setting, Source, draw_batches, scaled_mesh, smaller_meshes


class Bench:
  """An experiment on this process's devices, in any setting."""

  def __init__(
    self,
    source: Source,
    *,
    num_devices: int,
    num_steps: int = 4,
    seed: int = 0,
    num_random_meshes: int = 0,
    widths: Sequence[int] = (),
  ):
    """Does not compile anything. Claims about meshes and rows add `num_random_meshes` random meshes.

    `widths` are those of the claim `coordinates`; () for the shrunk width times 1, 2, 4 and 8.
    """
    self.source, self.num_devices = source, num_devices
    self.num_steps, self.seed, self.num_random_meshes = num_steps, seed, num_random_meshes
    self.widths = tuple(widths)
    # Two threads compile, one runs programs: two programs at once could wait for each other's devices.
    self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix='compile')
    self._runners: dict[Setting, concurrent.futures.Future[Runner]] = {}
    self._trajectories: dict[Setting, Trajectory] = {}

  @functools.cached_property
  def own_mesh(self) -> Mesh:
    """The experiment's mesh, scaled to the devices."""
    return scaled_mesh(self.source.base.experiment, self.num_devices)

  def prepare(self, settings: Iterable[Setting]) -> None:
    """Starts to compile these settings on other threads; `runner` waits for them."""
    for setting in settings:
      if setting not in self._runners:
        self._runners[setting] = self._pool.submit(self._compile, setting)

  def runner(self, setting: Setting) -> Runner:
    """Returns the compiled setting. Raises a UserError if the experiment refuses it."""
    self.prepare([setting])
    return self._runners[setting].result()

  def _compile(self, setting: Setting) -> Any:
    if setting.by_formulas:
      return FormulaRunner(self.source, setting)
    runner = Runner(self.source, setting)
    runner.model.train_step.compile()
    return runner

  def close(self) -> None:
    """Stops the compiling threads."""
    self._pool.shutdown(cancel_futures=True)

  def trajectory(self, setting: Setting) -> Trajectory:
    """Returns the steps of a reference."""
    if setting not in self._trajectories:
      runner = self.runner(setting)
      # Reuse initial weights of the same shapes, because init compiles a program.
      others = (trajectory for key, trajectory in self._trajectories.items() if not key.by_formulas)
      same = next((trajectory for trajectory in others if _shapes(trajectory.runner) == _shapes(runner)), None)
      initial = runner.start(runner.init() if same is None else same.state(0))
      batches = draw_batches(runner.job.train_input, self.num_steps, self.seed)
      self._trajectories[setting] = Trajectory(runner, initial, batches, self.seed)
    return self._trajectories[setting]

  def agree(
    self, setting: Setting, reference: Setting, *, metrics: Sequence[str] | None = None, train: bool = True
  ) -> Agreement:
    """Compares a setting with a reference, step by step, up to the first difference; see `agree`.

    Raises a UserError if the experiment refuses one of the settings.
    """
    return agree(self.runner(setting), self.trajectory(reference), metrics=metrics, train=train)


def _shapes(runner: Runner) -> object:
  return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), runner.model.canonical_state)


Status = Literal['held', 'BROKEN', 'ERROR', 'skipped']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """The outcome of a case.

  Attributes:
    status: 'ERROR' is an exception, so nothing was decided; 'skipped' counts neither as held nor as broken.
    detail: a phrase for the table: how close it was, what differs, or why it was skipped.
    notes: what was not compared, and why.
    failure: plain JSON data about a broken case or an error, for the last line.
  """

  status: Status
  detail: str
  notes: tuple[str, ...] = ()
  failure: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A claim about the experiment in some setting.

  Attributes:
    claim: the name of the claim in CLAIMS.
    subject: describes the case, such as 'data 2 x mdl 4'.
    decide: decides the case; if it raises a UserError, because the experiment refuses a setting, the case is skipped.
    settings: the settings that `decide` runs, to compile ahead.
  """

  claim: str
  subject: str
  decide: Callable[[Bench], Verdict]
  settings: Sequence[Setting] = ()


def skipped_case(claim: str, subject: str, reason: str) -> Case:
  """Returns a case that does not apply to the experiment."""
  verdict = Verdict(status='skipped', detail=reason)
  return Case(claim=claim, subject=subject, decide=lambda bench: verdict)


def agreement_case(
  claim: str,
  setting: Setting,
  reference: Setting,
  *,
  subject: str | None = None,
  metrics: Sequence[str] | None = None,
  remark: str | None = None,
) -> Case:
  """Returns the case that the steps of a setting agree with a reference.

  `metrics` names the metrics to compare (None: all); `remark` says what was changed on both sides.
  """

  def decide(bench: Bench) -> Verdict:
    result = bench.agree(setting, reference, metrics=metrics)
    notes = (*result.notes, *([remark] if remark else []))
    if result.first is None:
      return held_verdict(result.closest, result.num_steps, notes)
    in_curve = result.first.in_curve

    def compare(smaller: Setting) -> Difference | None:
      return None if smaller == reference else bench.agree(smaller, reference, metrics=metrics, train=in_curve).first

    smallest, first = reduce_mesh(setting, result.first, compare)
    return broken_verdict(bench, claim, setting, first, smallest, notes)

  return Case(claim=claim, subject=subject or str(setting), decide=decide, settings=(reference, setting))


def reduce_mesh(
  setting: Setting, first: Difference, compare: Callable[[Setting], Difference | None]
) -> tuple[Setting, Difference]:
  """Returns the setting on the smallest mesh for which `compare` still returns a difference, and that difference."""
  for mesh in smaller_meshes(setting.mesh):
    smaller = dataclasses.replace(setting, mesh=mesh)
    with contextlib.suppress(UserError):  # the experiment refuses this mesh
      if (difference := compare(smaller)) is not None:
        return reduce_mesh(smaller, difference, compare)
  return setting, first


def held_verdict(closest: Difference | None, num_steps: int, notes: tuple[str, ...] = ()) -> Verdict:
  """Returns the verdict of a comparison without a too large difference; 'skipped' if no step could be compared."""
  if not num_steps or closest is None:
    return Verdict(status='skipped', detail='no step could be compared', notes=notes)
  share = f'{100 * closest.difference / closest.allowed:.0f}%' if closest.allowed else '0%'
  steps = '1 step' if num_steps == 1 else f'{num_steps} steps'
  return Verdict(status='held', detail=f'{steps}; at most {share} of what is allowed, {closest.leaf}', notes=notes)


def broken_verdict(
  bench: Bench,
  claim: str,
  setting: Setting,
  first: Difference,
  smallest: Setting | None = None,
  notes: tuple[str, ...] = (),
) -> Verdict:
  """Returns the verdict of a broken case, with the command that reproduces it on the smallest mesh."""
  smallest = smallest or setting
  sizes = dict(smallest.mesh)
  shape = ','.join(str(sizes.get(name, 1)) for name in bench.source.base.experiment.mesh_axis_names)
  command = f'spmd-tasks {shlex.join(bench.source.flags)} --mode verify --claims {claim}'
  command += f' --ici_mesh_shape {shape} --num_fake_devices {smallest.num_devices}'
  return Verdict(
    status='BROKEN',
    detail=str(first) + (f'; smallest mesh {smallest}' if smallest != setting else ''),
    notes=(*notes, f'reproduce it: {command}'),
    failure={
      'claim': claim,
      'mesh': dict(setting.mesh),
      'overrides': list(setting.overrides),
      'step': first.step,
      'leaf': first.leaf,
      'difference': first.difference,
      'allowed': first.allowed,
      'smallest_mesh': dict(smallest.mesh),
      'command': command,
    },
  )
