"""Case: one claim about an experiment in one setting, and how it is decided; broken ones are reduced.

    verdict = case.decide(bench)       # held, broken or not applicable

A broken agreement is repeated on smaller and smaller meshes, axis by axis, as long as it still breaks.
"""

from collections.abc import Callable, Sequence
import dataclasses
import shlex
from typing import Any, Literal, Protocol

from spmd_tasks.errors import UserError
from spmd_tasks.verification._agreement import Agreement
from spmd_tasks.verification._bench import Bench
from spmd_tasks.verification._layouts import smaller_meshes
from spmd_tasks.verification._noise import Difference
from spmd_tasks.verification._settings import Setting

Status = Literal['held', 'BROKEN', 'not applicable']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """How a case ended.

  Attributes:
    status: 'not applicable' counts neither as held nor as broken.
    detail: a phrase for the table: how near it came, what differs, or why it is not applicable.
    notes: what was not compared, and why.
    failure: of a broken case, plain JSON data for the last line.
  """

  status: Status
  detail: str
  notes: tuple[str, ...] = ()
  failure: dict[str, Any] = dataclasses.field(default_factory=dict)


class Case(Protocol):
  """A claim about the experiment in some setting.

  Attributes:
    claim: the name of the claim, an entry of CLAIMS.
    subject: in which case it is checked, such as 'data 2 x mdl 4'.
    settings: what `decide` runs, to be compiled ahead.
  """

  @property
  def claim(self) -> str: ...
  @property
  def subject(self) -> str: ...
  @property
  def settings(self) -> Sequence[Setting]: ...
  def begin(self, bench: Bench) -> None:
    """Starts what takes long and runs beside the other cases."""
    ...

  def decide(self, bench: Bench) -> Verdict:
    """Decides the case.

    Raises:
      UserError: the experiment refuses a setting, which makes the case not applicable.
    """
    ...


class _NothingToBegin:
  def begin(self, bench: Bench) -> None:
    del bench


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotApplicable(_NothingToBegin):
  """A case that this experiment cannot have."""

  claim: str
  subject: str
  reason: str
  settings: tuple[Setting, ...] = ()

  def decide(self, bench: Bench) -> Verdict:
    return Verdict(status='not applicable', detail=self.reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(_NothingToBegin):
  """A case that is decided by a function, which is called with the bench."""

  claim: str
  subject: str
  check: Callable[[Bench], Verdict]
  settings: tuple[Setting, ...] = ()

  def decide(self, bench: Bench) -> Verdict:
    return self.check(bench)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agree(_NothingToBegin):
  """A setting whose steps are those of a reference.

  Attributes:
    setting, reference: the two settings.
    metrics: the names of those that must agree; None: all.
    remark: what was changed for both sides, so that the documentation promises the same numbers.
    train: also compare the curve of losses of training without a stop.
    has_no_statistics: is for models without variables beside the weights, for these are statistics of a batch.
  """

  claim: str
  setting: Setting
  reference: Setting
  case: str | None = None
  metrics: tuple[str, ...] | None = None
  remark: str | None = None
  train: bool = True
  has_no_statistics: bool = False

  @property
  def subject(self) -> str:
    return self.case or str(self.setting)

  @property
  def settings(self) -> tuple[Setting, ...]:
    return (self.reference, self.setting)

  def decide(self, bench: Bench) -> Verdict:
    if self.has_no_statistics and (kept := bench.runner(self.reference).model.abstract_state.non_trainable):
      return Verdict(status='not applicable', detail=f'{", ".join(kept)} are statistics of a batch')
    found = bench.agree(self.setting, self.reference, metrics=self.metrics, train=self.train)
    notes = (*found.notes, *([self.remark] if self.remark else []))
    if found.first is None:
      return held(found, notes)
    is_of_curve = found.first.is_of_curve

    def find(smaller: Setting) -> Difference | None:
      if smaller == self.reference:
        return None
      return bench.agree(smaller, self.reference, metrics=self.metrics, train=is_of_curve).first

    smallest, first = reduced(self.setting, found.first, find)
    return broken(bench, self.claim, self.setting, first, smallest, notes)


def reduced(
  setting: Setting, first: Difference, find: Callable[[Setting], Difference | None]
) -> tuple[Setting, Difference]:
  """Returns the setting on the smallest mesh on which `find` still finds a difference, and that difference."""
  shrinking = True
  while shrinking:
    shrinking = False
    for mesh in smaller_meshes(setting.mesh):
      smaller = dataclasses.replace(setting, mesh=mesh)
      try:
        found = find(smaller)
      except UserError:
        continue
      if found is not None:
        setting, first, shrinking = smaller, found, True
        break
  return setting, first


def held(found: Agreement, notes: tuple[str, ...] = ()) -> Verdict:
  """Returns the verdict of a comparison without a difference that is too large; none, if nothing could be compared."""
  if not found.num_steps or found.closest is None:
    return Verdict(status='not applicable', detail='no step could be compared', notes=notes)
  near = found.closest
  share = f'{100 * near.difference / near.allowed:.0f}%' if near.allowed else '0%'
  return Verdict(
    status='held', detail=f'{_count(found.num_steps)}; at most {share} of what is allowed, {near.leaf}', notes=notes
  )


def _count(num_steps: int) -> str:
  return '1 step' if num_steps == 1 else f'{num_steps} steps'


def broken(
  bench: Bench,
  claim: str,
  setting: Setting,
  first: Difference,
  smallest: Setting | None = None,
  notes: tuple[str, ...] = (),
) -> Verdict:
  """Returns the verdict of a broken case, with the command that shows it on the smallest mesh."""
  smallest = smallest or setting
  command = reproduce(bench, claim, smallest)
  return Verdict(
    status='BROKEN',
    detail=str(first) + (f'; smallest mesh {smallest}' if smallest != setting else ''),
    notes=(*notes, f'see it by itself: {command}'),
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


def reproduce(bench: Bench, claim: str, setting: Setting) -> str:
  """Returns the command that checks one claim in one setting."""
  experiment = bench.source.base.experiment
  command = f'spmd-tasks {shlex.join(bench.source.flags)} --mode verify --claims {claim}'
  if set(dict(setting.mesh)) - set(experiment.mesh_axis_names):  # the axis of a stack that was made a pipeline
    return f'{command} --num_fake_devices {bench.num_devices} --seed {bench.seed}'
  shape = ','.join(str(dict(setting.mesh).get(name, 1)) for name in experiment.mesh_axis_names)
  return f'{command} --ici_mesh_shape {shape} --num_fake_devices {setting.num_devices}'
