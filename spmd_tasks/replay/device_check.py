"""CheckDevices: computes gradients twice with devices exchanged, and names the device that computed other bits.

    class MyExperiment(Base):
      def hooks(self):
        return [CheckDevices(every_steps=100)]

Before every `every_steps`-th step, the gradients of a part of its batch are computed on the mesh and again on one in
which the devices of each process have changed places, so that every shard is computed by another device. A device that
computes wrongly (silent corruption, see Dixit et al., 2021, and Hochschild et al., 2021) then gives other bits. A third
run, with other places again, says which of two devices was wrong. The step is not taken.

A run has two stages: `inputs`, the shards that each device holds before it computes, and `gradients` after. Copies of
one shard on several devices must agree as well. A fault in the middle of a program reaches every device through
sums over them, and so no shard tells where it was: then each device by itself computes the same products.

Legend: P places of the mesh, in its order; each has one shard of every array.
"""

import collections
from collections.abc import Mapping
import datetime
import json
import os
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.distributed.agreement import PrimaryError, gather, primary_decides
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.files import make_directory, write_durably
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.programs.interval_hooks import is_multiple
from spmd_tasks.programs.job_directory import DEVICE_FAULTS_DIRECTORY
from spmd_tasks.replay.fingerprints import fingerprint
from spmd_tasks.replay.statistics import gradient_model, gradient_state
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.sharding.weights import leaves_by_name

Stages = Mapping[str, Mapping[str, np.ndarray]]  # stage -> leaf -> fingerprints of its shards [P, 2]


class CorruptionError(JobError):
  """A device has computed other bits than another one from the same numbers."""

  exit_code = exit_codes.CORRUPTED


class CheckDevices(TrainHook):
  """Compares gradients bit for bit with those of exchanged devices. See the module's docstring.

  Args:
    every_steps: between two checks.
    num_parts: a check takes one of so many parts of a batch, in turn; None: as many as the learner has microbatches, at
      least 2 where the rows allow it.
    stops: whether a difference ends the job (exit code 45). If not, the check is made once more, and if the
      devices agree then, the job goes on with the step.

  Attributes:
    num_checks, num_differences: how often was checked, and how often something differed.
  """

  def __init__(self, *, every_steps: int = 100, num_parts: int | None = None, stops: bool = True):
    if every_steps < 1 or (num_parts is not None and num_parts < 1):
      raise UserError(f'CheckDevices(every_steps={every_steps}, num_parts={num_parts}) needs numbers of at least 1.')
    self._every_steps, self._num_parts, self._stops = every_steps, num_parts, stops
    self._models: dict[int, PartitionedModel] = {}
    self._programs: dict[Any, Any] = {}
    self._shards: dict[str, dict[str, list[str]]] = {}
    self._cut_part: Any = None
    self.num_checks = self.num_differences = 0

  def prepare(self, run: TrainRun) -> None:
    own = [device for device in run.model.mesh.devices.flat if device.process_index == jax.process_index()]
    if len(own) < 2:
      raise UserError('CheckDevices exchanges the devices of a process, and this one has a single one: leave it out.')
    num_rows = max(spec.shape[0] for spec in run.model.input_layout.spec.values() if spec.shape)
    microbatches = run.model.task.learner.num_microbatches
    parts = self._num_parts or (microbatches if microbatches > 1 else 2 - num_rows % 2)
    if num_rows % parts:
      raise UserError(f'CheckDevices(num_parts={parts}) must divide the batch of {num_rows} rows.')
    self._parts, self._rows, self._num_places = parts, num_rows // parts, len(own)
    self._model(run, 0).train_step.trace()  # what cannot be computed on a part of a batch is refused now

  def after_first_step(self, run: TrainRun) -> None:
    with run.compiling():
      for number in (0, 1):
        self._model(run, number).train_step.compile()

  def needs_state(self, step: int) -> bool:
    return is_multiple(step + 1, self._every_steps)

  def before_step(self, run: TrainRun, batch: dict[str, jax.Array]) -> None:
    if not is_multiple(run.step + 1, self._every_steps):
      return
    with run.watchdog.allow('device check', run.experiment.first_step_timeout_s):
      self.num_checks += 1
      if (found := self._check(run, batch)) is None:
        return
      self.num_differences += 1
      run.metrics['num_device_differences'] = float(self.num_differences)
      what, culprits = found
      if self._stops or self._check(run, batch) is not None:
        _record(run, what, culprits)
        raise CorruptionError(
          f'before step {run.step + 1}, which is not taken: {what}. The job can go on from its newest checkpoint: '
          'take that device out first.'
        )
    run.message(f'before step {run.step + 1}: {what}. Computed again, all devices agree, and the job goes on.')

  def computed(self, number: int, stage: str, arrays: Any) -> Any:
    """Returns the arrays of a stage as the devices have them; tests override it to change bits on one device.

    Args:
      number: how many places the devices have moved.
      stage: 'inputs', 'program' (the inputs, after their fingerprints were taken) or 'gradients'.
      arrays: a tree of arrays on the mesh with the devices exchanged.
    """
    del number, stage
    return arrays

  def compute_alone(self, device: jax.Device) -> Any:
    """Returns the fingerprint of products that one device computes by itself; the same on all that work."""
    return np.asarray(_products(jax.device_put(np.float32(1.0), device))).tolist()

  def _check(self, run: TrainRun, batch: dict[str, jax.Array]) -> tuple[str, list[str]] | None:
    """Returns what is wrong and where, with the devices that did it as far as they are known; or None."""
    runs = [self._run(run, batch, number) for number in (0, 1)]
    for stage, first in runs[0].items():
      copies = self._unequal_copies(run, first, stage)
      names = [name for name in first if name in copies or (first[name] != runs[1][stage][name]).any()]
      if not names:
        continue
      culprits = set().union(*copies.values())
      if any((first[name] != runs[1][stage][name]).any() for name in names):
        culprits = self._culprits(run, batch, runs, stage)
      shown = [name.partition('/')[2] for name in names[:3]]  # without the number of the tree
      what = f'{stage} of {", ".join(shown)}{f" and {len(names) - 3} more" * (len(names) > 3)}'
      places = _processes(run)
      is_one_host = jax.process_count() > 1 and len({places[name] for name in culprits}) == 1  # of two devices, say
      if is_one_host or 0 < len(culprits) <= max(1, run.model.mesh.size // 4):
        return f'{" and ".join(sorted(culprits))} gave other bits than other devices ({what})', sorted(culprits)
      if faulty := self._faulty_alone(run):
        said = f'{" and ".join(faulty)} computes other products than the other devices, which changed bits ({what})'
        return said, faulty
      said = (
        f'devices gave other bits ({what}), which have spread, so that no shard tells which of {run.model.mesh.size} '
        'was wrong; by itself each computes the same products'
      )
      return said, []
    return None

  def _culprits(self, run: TrainRun, batch: Any, runs: list[Stages], stage: str) -> set[str]:
    """Lets a third run decide at each place which of two devices was wrong; where there are but two, both may be."""
    third = 2 if self._num_places > 2 else 0
    prints = [each[stage] for each in (*runs, self._run(run, batch, third))]
    devices = [self._mesh(run, number).devices.flat for number in (0, 1, third)]
    culprits = set()
    for name in prints[0]:
      for place, (a, b, c) in enumerate(zip(*(each[name].tolist() for each in prints), strict=True)):
        wrong: tuple[int, ...] = (
          () if a == b == c else (2,) if a == b else (1,) if a == c else (0,) if b == c else (0, 1, 2)
        )
        wrong = (0, 1) if wrong == (1,) and third == 0 else wrong
        culprits |= {_name(devices[number][place]) for number in wrong}
    return culprits

  def _unequal_copies(self, run: TrainRun, prints: Mapping[str, np.ndarray], stage: str) -> dict[str, set[str]]:
    """Returns, by leaf, the devices whose copy of a shard is not that of most others, in the run without exchange."""
    unequal: dict[str, set[str]] = {}
    for name, shards in self._shards[stage].items():
      copies = collections.defaultdict(list)
      for place, shard in enumerate(shards):
        copies[shard].append(place)
      for places in copies.values():
        values = [tuple(prints[name][place]) for place in places]
        (common, count), *others = collections.Counter(values).most_common()
        is_tie = bool(others) and others[0][1] == count
        wrong = [place for place, value in zip(places, values, strict=True) if is_tie or value != common]
        if wrong:
          unequal.setdefault(name, set()).update(_name(run.model.mesh.devices.flat[place]) for place in wrong)
    return unequal

  def _faulty_alone(self, run: TrainRun) -> list[str]:
    """Returns the devices that compute other products by themselves than most do."""
    own = [[_name(device), self.compute_alone(device)] for device in run.model.mesh.local_devices]
    every = [pair for each in gather(own, 'alone', limit_s=run.limit_s) for pair in each]
    (common, _), *_ = collections.Counter(str(products) for _, products in every).most_common()
    return [name for name, products in every if str(products) != common]

  def _run(self, run: TrainRun, batch: dict[str, jax.Array], number: int) -> Stages:
    """Computes gradients with the devices moved by `number` places; returns the fingerprints of all shards."""
    part = self._cut(run)(batch, (run.step // self._every_steps) % self._parts)
    mesh, state = self._mesh(run, number), gradient_state(run.state)
    inputs = self.computed(number, 'inputs', jax.tree.map(lambda x: _moved(x, mesh), (state, part)))
    prints = {'inputs': self._prints(run, mesh, inputs, 'inputs')}
    outputs = self._model(run, number).train_step(*self.computed(number, 'program', inputs))
    return prints | {'gradients': self._prints(run, mesh, self.computed(number, 'gradients', outputs), 'gradients')}

  def _prints(self, run: TrainRun, mesh: Mesh, tree: Any, stage: str) -> dict[str, np.ndarray]:
    """Returns the fingerprint of every shard of every leaf, by its place: [P, 2]. A collective call."""
    named = list(leaves_by_name(tree).items())
    leaves = [leaf for _, leaf in named]
    if (mesh, stage) not in self._programs:
      self._programs[mesh, stage] = _shard_fingerprints(mesh, tuple(leaf.sharding.spec for leaf in leaves))
    if stage not in self._shards:
      self._shards[stage] = {name: _shards_by_place(leaf, mesh) for name, leaf in named}
    prints = self._programs[mesh, stage](leaves)
    own = [[shard.index[0].start or 0, np.asarray(shard.data)[0].tolist()] for shard in prints.addressable_shards]
    every = sorted(pair for each in gather(own, f'prints {stage}', limit_s=run.limit_s) for pair in each)
    table = np.array([rows for _, rows in every], np.uint32)  # [P, leaves, 2]
    return {name: table[:, number] for number, (name, _) in enumerate(named)}

  def _mesh(self, run: TrainRun, number: int) -> Mesh:
    """The mesh with the devices of each process moved by so many places among themselves."""
    mesh = run.model.mesh
    flat = mesh.devices.flatten()
    own = collections.defaultdict(list)
    for place, device in enumerate(flat):
      own[device.process_index].append(place)
    moved = flat.copy()
    for places in own.values():
      moved[places] = np.roll(flat[places], -number)
    return Mesh(moved.reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)

  def _model(self, run: TrainRun, number: int) -> PartitionedModel:
    if number not in self._models:
      mesh = self._mesh(run, number)
      self._models[number] = gradient_model(run.model, run.experiment, mesh, self._rows, num_microbatches=1)
    return self._models[number]

  def _cut(self, run: TrainRun) -> Any:
    """Returns a function that takes part number i of a placed batch, as it is placed for a batch of fewer rows."""
    if self._cut_part is None:
      whole, part = run.model.input_layout, self._model(run, 0).input_layout

      def cut(batch, index):
        return {name: place(x, part.padded[name], index) for name, x in whole.true_rows(batch).items()}

      def place(x, padded, index):
        if not x.ndim:
          return x
        rows = jax.lax.dynamic_slice_in_dim(x, index * self._rows, self._rows)
        return jnp.zeros(padded.shape, x.dtype).at[part.row_positions[self._rows]].set(rows)

      self._cut_part = jax.jit(cut, out_shardings={name: x.sharding for name, x in part.padded.items()})
    return self._cut_part


def _moved(x: Any, mesh: Mesh) -> jax.Array:
  """Moves each shard of an array to the device that has its place on another mesh."""
  target = NamedSharding(mesh, x.sharding.spec)
  if target.mesh == x.sharding.mesh:
    return x
  devices = dict(zip(x.sharding.mesh.devices.flat, mesh.devices.flat, strict=True))
  shards = [jax.device_put(shard.data, devices[shard.device]) for shard in x.addressable_shards]
  return jax.make_array_from_single_device_arrays(x.shape, target, shards)


def _shard_fingerprints(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
  """Compiles: leaves -> the fingerprints of the shards that each place has, uint32 [P, leaves, 2]."""

  def own(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([fingerprint(leaf) for leaf in leaves])[None]

  by_place = PartitionSpec(mesh.axis_names)
  return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(list(specs),), out_specs=by_place, check_vma=False))


def _shards_by_place(x: jax.Array, mesh: Mesh) -> list[str]:
  """Names the shard that each place has; places of one name have copies."""
  indices = x.sharding.devices_indices_map(x.shape)
  return [str(indices[device]) for device in mesh.devices.flat]


@jax.jit
def _products(one: jax.Array) -> jax.Array:
  """Multiplies matrices again and again."""
  numbers = jnp.sin(jnp.arange(256 * 256, dtype=jnp.float32)).reshape(256, 256) * one
  return fingerprint(jax.lax.fori_loop(0, 32, lambda _, x: jnp.tanh(x @ numbers / 8), numbers))


def _record(run: TrainRun, found: str, culprits: list[str]) -> None:
  """Writes <job_log_dir>/device_faults/round_R_step_N.json before the job ends; supervisors read it."""
  number, step, processes = int(os.environ.get('SPMD_TASKS_ROUND', 0)), run.step + 1, _processes(run)
  fault = {
    'found': found,
    'devices': culprits,
    'processes': sorted({processes[name] for name in culprits}),
    'step': step,
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  }

  def write() -> None:
    directory = run.job_log_dir / DEVICE_FAULTS_DIRECTORY
    make_directory(directory)
    write_durably(directory / f'round_{number:06}_step_{step:08}.json', json.dumps(fault, indent=1) + '\n')

  try:
    primary_decides(write, 'device_fault', limit_s=run.limit_s)  # all wait: a process that leaves ends process 0, too
  except (OSError, PrimaryError) as error:
    logging.error('the finding could not be written: %s', error)


def _processes(run: TrainRun) -> dict[str, int]:
  """Returns the process of each device, by its name."""
  return {_name(device): device.process_index for device in run.model.mesh.devices.flat}


def _name(device: jax.Device) -> str:
  return f'device {device.id} of process {device.process_index} ({device.device_kind})'
