"""The claim that every mesh gives the numbers of one device, padded or not."""

from collections.abc import Iterator
import itertools

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import stage_axis
from spmd_tasks.verification._bench import Bench
from spmd_tasks.verification._cases import Case, agreement, not_applicable
from spmd_tasks.verification._layouts import Mesh, draw_meshes
from spmd_tasks.verification._promises import for_a_pipeline
from spmd_tasks.verification._settings import Setting, build_job

_MAX_TRIES = 40


def mesh_cases(bench: Bench, num_more: int) -> Iterator[Case]:
  """Yields the experiment's own mesh, two others of all devices, an uneven one, and `num_more` drawn ones."""
  if Setting(mesh=bench.own_mesh).num_devices == 1:
    yield not_applicable('mesh', "the experiment's mesh", 'it is one device')
  else:
    yield _mesh_case(bench, bench.own_mesh)
  uneven = [n for n in (3, 6, 5, 7) if n <= bench.num_devices] or [bench.num_devices]
  any_size = np.random.default_rng((bench.seed, 12)).permutation(range(2, max(bench.num_devices, 2) + 1)).tolist()
  seen = {bench.own_mesh}
  for sizes, wanted in (([bench.num_devices], 2), (uneven, 1), (any_size, num_more)):
    for mesh in itertools.islice(drawn_meshes(bench, sizes), wanted + len(seen)):
      if wanted and mesh not in seen:
        seen.add(mesh)
        wanted -= 1
        yield _mesh_case(bench, mesh)


def _mesh_case(bench: Bench, mesh: Mesh) -> Case:
  """Returns the case that a mesh gives the numbers of one device; of the same pipeline, where masks depend on it."""
  experiment = bench.source.base.experiment
  axis = stage_axis(experiment.mesh_axis_names, experiment.axis_rules)
  setting = Setting(mesh=mesh)
  if axis is not None and dict(mesh)[axis] > 1 and for_a_pipeline(bench.source).overrides:
    pipeline = Setting(mesh=((axis, dict(mesh)[axis]),))
    return agreement('mesh', setting, pipeline, subject=f'{setting} against {pipeline}')
  return agreement('mesh', setting, Setting())


def other_mesh(bench: Bench) -> Mesh:
  """Returns a mesh that is not the experiment's, one of `mesh_cases`; one device if there is no other."""
  meshes = itertools.islice(drawn_meshes(bench, [bench.num_devices]), 2)
  return next((mesh for mesh in meshes if mesh != bench.own_mesh), ())


def drawn_meshes(bench: Bench, sizes: list[int]) -> Iterator[Mesh]:
  """Yields random meshes that the experiment takes, always the same ones, of the next of `sizes` devices each."""
  rng = np.random.default_rng((bench.seed, 10, *sizes))
  tries = 0
  for mesh in draw_meshes(bench.source.base.experiment.mesh_axis_names, sizes, rng):
    try:
      build_job(bench.source, Setting(mesh=mesh))
    except UserError:
      tries += 1
      if tries > _MAX_TRIES:
        return
      continue
    tries = 0
    yield mesh
