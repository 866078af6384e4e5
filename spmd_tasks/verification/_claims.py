"""The claims: for each its name, what it says, and the cases of an experiment."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import itertools

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.verification._bench import Bench
from spmd_tasks.verification._cases import Agree, Case, NotApplicable
from spmd_tasks.verification._layouts import Mesh, draw_meshes, num_devices, scaled_mesh
from spmd_tasks.verification._settings import Setting, build_job

ONE_DEVICE = Setting()
_MAX_TRIES = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """One sentence about numbers, and a function that yields its cases."""

  sentence: str
  cases: Callable[[Bench, int], Iterator[Case]]


def mesh_cases(bench: Bench, num_more: int) -> Iterator[Case]:
  """Yields the experiment's own mesh, two others of all devices, an uneven one, and `num_more` drawn ones."""
  own = scaled_mesh(bench.source.base.experiment, bench.num_devices)
  names = [name for name, _ in own]
  if num_devices(own) == 1:
    yield NotApplicable(claim='mesh', subject="the experiment's mesh", reason='it is one device')
  else:
    yield agreement(bench, 'mesh', own)
  rng = np.random.default_rng((bench.seed, 10))
  all_devices = draw_meshes(names, [bench.num_devices], rng)
  uneven = draw_meshes(names, [n for n in (3, 6, 5, 7) if n <= bench.num_devices] or [bench.num_devices], rng)
  any_size = draw_meshes(names, rng.permutation(range(2, max(bench.num_devices, 2) + 1)).tolist(), rng)
  seen = {own}
  for meshes, wanted in ((all_devices, 2), (uneven, 1), (any_size, num_more)):
    for mesh in itertools.islice(meshes, _MAX_TRIES + 4 * wanted):
      if not wanted:
        break
      if mesh in seen or num_devices(mesh) == 1:
        continue
      seen.add(mesh)
      if refusal(bench, Setting(mesh=mesh)) is None:
        wanted -= 1
        yield agreement(bench, 'mesh', mesh)


def agreement(bench: Bench, claim: str, mesh: Mesh) -> Case:
  """Returns the case that a mesh gives the numbers of one device."""
  return Agree(claim=claim, setting=Setting(mesh=mesh), reference=ONE_DEVICE)


def refusal(bench: Bench, setting: Setting) -> str | None:
  """Returns why the experiment refuses a setting, as far as shapes tell; None if it takes it."""
  try:
    build_job(bench.source, setting)
  except UserError as error:
    return str(error)
  return None


CLAIMS: Mapping[str, Claim] = {
  'mesh': Claim(sentence='every mesh gives the numbers of one device, padded or not', cases=mesh_cases),
}
