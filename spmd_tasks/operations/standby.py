"""The training process of a host: it waits for its round, and makes the job fit the hosts of the round.

    {"coordinator": "10.0.0.1:1234", "num_processes": 3, "process_id": 1, "round": 2}      one line on its stdin

While it trains, the next one waits, so that a round that follows a failure begins without Python's imports.

The config has the mesh of all hosts. With fewer, one axis over which the batch is split becomes shorter in proportion,
that across slices first. The same rows make each batch, in more microbatches, so that a device holds no more rows of
one than before. config.json keeps the mesh of all hosts.
"""

import argparse
from collections.abc import Sequence
import contextlib
import dataclasses
import importlib
import json
import math
import os
import sys
from typing import Any

from etils import epath
import jax

from spmd_tasks import exit_codes
from spmd_tasks.errors import UserError
from spmd_tasks.files import write_durably
from spmd_tasks.operations import SUPERVISED
from spmd_tasks.programs import goodput
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.sharding import AxisRules, MeshSpec
from spmd_tasks.sharding.specs import axes_of

_ALWAYS = ('spmd_tasks.programs.train',)


def wait_for_round(flags: argparse.Namespace, modules_file: str) -> None:
  """Returns when this process is needed, with the flags and the environment of its round."""
  names = list(_ALWAYS)
  with contextlib.suppress(OSError, ValueError), open(modules_file) as file:
    names += json.load(file)
  for name in names:
    with contextlib.suppress(Exception):  # what is wrong is said when it is needed
      importlib.import_module(name)
  line = sys.stdin.readline()
  if not line:
    os._exit(exit_codes.OK)
  told: dict[str, Any] = json.loads(line)
  os.environ['SPMD_TASKS_ROUND'] = str(told['round'])
  flags.coordinator_address, flags.num_processes = told['coordinator'], told['num_processes']
  flags.process_id = told['process_id']
  goodput.woken = goodput.steady_now()
  nothing = os.open(os.devnull, os.O_RDONLY)
  os.dup2(nothing, 0)
  os.close(nothing)


class TellModules(TrainHook):
  """Tells the supervisor, once this process trains, which modules the next one will need."""

  def __init__(self, modules_file: str):
    self._path = epath.Path(modules_file)

  def after_first_step(self, run: TrainRun) -> None:
    write_durably(self._path, json.dumps([name for name in sys.modules if name != '__main__']))


def fit_job(job: Any) -> Any:
  """Returns the job for the hosts of this round, in a supervised training process.

  Raises a UserError: the job does not fit that number of hosts.
  """
  settings = json.loads(os.environ[SUPERVISED])
  num_hosts, max_hosts = jax.process_count(), settings['max_hosts']
  spec, rules = job.experiment.mesh_spec(), job.experiment.axis_rules
  sizes = {
    name: max(leaf.shape[0] for leaf in each.element_spec().values() if leaf.shape)
    for name, each in job.inputs().items()
  }
  problems = [why_not(spec, rules, sizes, hosts, max_hosts) for hosts in range(1, max_hosts + 1)]
  fitting = [hosts for hosts, problem in enumerate(problems, 1) if problem is None]
  write_durably(epath.Path(settings['sizes_file']), json.dumps(fitting))
  if settings['min_hosts'] < max_hosts and not any(settings['min_hosts'] <= hosts < max_hosts for hosts in fitting):
    raise UserError(f'{problems[-2]}, so it cannot go on with fewer hosts: give --supervise {max_hosts}:{max_hosts}.')
  if (problem := problems[num_hosts - 1]) is not None:
    raise UserError(f'{problem}; {" or ".join(map(str, fitting)) or "no other number of"} hosts would do.')
  if num_hosts == max_hosts:
    return job
  mesh = shrink_mesh(spec, rules, num_hosts, max_hosts)
  assert mesh is not None
  learner = job.task.learner
  num_microbatches = learner.num_microbatches
  if learner.accumulation == 'mean':  # a sum over other microbatches would be another gradient
    num_microbatches = more_microbatches(sizes['train_input'], num_microbatches, num_hosts, max_hosts)
  return dataclasses.replace(
    job,
    experiment=dataclasses.replace(
      job.experiment, ici_mesh_shape=mesh.ici_mesh_shape, dcn_mesh_shape=mesh.dcn_mesh_shape
    ),
    task=dataclasses.replace(job.task, learner=dataclasses.replace(learner, num_microbatches=num_microbatches)),
  )


def why_not(spec: MeshSpec, rules: AxisRules, batch_sizes: dict[str, int], hosts: int, max_hosts: int) -> str | None:
  """Says why a job does not fit `hosts` hosts, of whose mesh `spec` is that of `max_hosts`; None if it does."""
  if hosts == max_hosts:
    return None
  if shrink_mesh(spec, rules, hosts, max_hosts) is None:
    dcn = spec.dcn_mesh_shape or (1,) * len(spec.ici_mesh_shape)
    axes = ', '.join(f'{name} {i * d}' for name, i, d in zip(spec.axis_names, spec.ici_mesh_shape, dcn))
    return (
      f'the mesh of {max_hosts} hosts ({axes}) does not shrink to {hosts}: no axis over which the batch is split '
      f'({", ".join(batch_axes(rules)) or "none"}) has a size of which {hosts}/{max_hosts} is a whole number'
    )
  for name, size in batch_sizes.items():
    if size % hosts:
      return f'{name} has batches of {size} rows, which {hosts} hosts do not divide'
  return None


def shrink_mesh(spec: MeshSpec, rules: AxisRules, hosts: int, max_hosts: int) -> MeshSpec | None:
  """Returns the mesh on `hosts` of `max_hosts` hosts; None if no batch axis can be shorter in that proportion."""
  for field in ('dcn_mesh_shape', 'ici_mesh_shape'):
    shape = getattr(spec, field)
    if shape is not None and -1 in shape and spec.axis_names[shape.index(-1)] in batch_axes(rules):
      return spec  # it takes the devices that are there
    for axis in batch_axes(rules):
      index = spec.axis_names.index(axis) if shape is not None and axis in spec.axis_names else None
      if index is not None and shape[index] * hosts % max_hosts == 0:
        shorter = (*shape[:index], shape[index] * hosts // max_hosts, *shape[index + 1 :])
        return dataclasses.replace(spec, **{field: shorter})
  return None


def batch_axes(rules: AxisRules) -> Sequence[str]:
  """The mesh axes over which the batch is split."""
  return axes_of(next((axes for name, axes in rules if name == 'batch'), None))


def more_microbatches(batch_size: int, num_microbatches: int, hosts: int, max_hosts: int) -> int:
  """The smallest number of microbatches with which a device holds no more rows than on `max_hosts` hosts."""
  wanted = math.ceil(num_microbatches * max_hosts / hosts)
  return next(count for count in range(min(wanted, batch_size), batch_size + 1) if batch_size % count == 0)
