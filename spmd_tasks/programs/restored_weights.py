"""Restores the weights of one checkpoint, or of every new one, to evaluate, decode or serve them.

with open_reader(job, model, job_log_dir, 'eval', emergency) as reader:
  for variables, step, place in reader.checkpoints(compile_steps, watch=True):
    ...

A job without a checkpoint has the weights that it would start from: `init_from`, or another Origin.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import time
from typing import TYPE_CHECKING

from etils import epath
import jax
from jax.sharding import Mesh

from spmd_tasks.activity import doing, set_activity
from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.distributed import EmergencyExit, is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.distributed.preemption import PreemptedError, PreemptionGuard
from spmd_tasks.distributed.watchdog import StepWatchdog, watch_steps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import MESH_FIELDS, Experiment, Job
from spmd_tasks.programs.job_directory import CONFIG_FILE, CheckpointRecord
from spmd_tasks.programs.origins import origin_of, restore_variables
from spmd_tasks.programs.restore import LOOK_LIMIT_S, newest_step
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.runtime.origin import RestoredVariables, base_of
from spmd_tasks.runtime.task import Variables

if TYPE_CHECKING:
  from spmd_tasks.decoding.weight_storage import WeightStorage


@doing('restoring the weights')
def restore_evaluation_variables(
  model: PartitionedModel,
  checkpointer: Checkpointer,
  step: int | None = None,
  part: Callable[[TrainState], Variables] | None = None,
  *,
  experiment: Experiment | None = None,
  storage: 'WeightStorage | None' = None,
) -> RestoredVariables:
  """Restores the variables that evaluation uses, with raw or averaged weights.

  A job without a checkpoint has the variables of its Origin (runtime/origin.py). Frozen weights are always read from
  the folder of a Base.

  Args:
    model, checkpointer: of the training job.
    step: the checkpoint's step; None takes the newest.
    part: selects the variables; None takes the task's `evaluation_variables`. To generate text, pass its
      `decoding_variables`.
    experiment: of the training job; None: the weights must be in a checkpoint.
    storage: converts each weight of a folder as soon as it is read, so that all are never in float32 at once.
      Weights of a checkpoint are not converted; in both cases the caller calls `storage.store` afterwards.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the weights of the Origin cannot be read, or belong to another model.
  """
  select = model.task.evaluation_variables if part is None else part
  if experiment is None or not _is_fresh(checkpointer):
    origin = None if experiment is None else experiment.origin()
    return restore_variables(model, checkpointer, step, select, base_of(model, origin), storage)
  restored = _read_origin(model, checkpointer, experiment, step, select, storage)
  if restored is None:
    raise CheckpointError(
      f'{checkpointer.path} has no checkpoint to restore weights from: correct the path, train first, or name weights '
      'by --set init_from=PLACE.'
    )
  return restored


def _is_fresh(checkpointer: Checkpointer) -> bool:
  return primary_decides(checkpointer.is_fresh, 'is_fresh', limit_s=LOOK_LIMIT_S)


@doing('reading the weights that the job starts from')
def _read_origin(
  model: PartitionedModel,
  checkpointer: Checkpointer,
  experiment: Experiment,
  step: int | None,
  select: Callable[[TrainState], Variables],
  storage: 'WeightStorage | None',
) -> RestoredVariables | None:
  """Returns the variables that a job without a checkpoint starts from; None if they are newly initialized."""
  origin = origin_of(experiment)
  if origin is not None and step:
    raise CheckpointError(
      f'{checkpointer.path} holds no checkpoint of step {step}: --checkpoint_step names one of the job itself, '
      "init_from_step one of the place that the job's weights come from."
    )
  return None if origin is None else origin.weights(model, select, storage)


def mesh_of_all_devices(experiment: Experiment, overrides: Sequence[str]) -> Mesh:
  """Makes the experiment's mesh; if it is not for this number of devices, and no override set it, one long axis."""
  spec, num_devices = experiment.mesh_spec(), jax.device_count()
  try:
    spec.sizes(num_devices)
  except UserError:
    if any(override.partition('=')[0].split('.')[0] in ('mesh', *MESH_FIELDS) for override in overrides):
      raise
    long = spec.axis_names.index('data') if 'data' in spec.axis_names else len(spec.axis_names) - 1
    shape = tuple(num_devices if axis == long else 1 for axis in range(len(spec.axis_names)))
    spec = dataclasses.replace(spec, ici_mesh_shape=shape, dcn_mesh_shape=None)
  return spec.build()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointReader:
  """Reads a training job's checkpoints for a mode that a signal may stop; `open_reader` makes it."""

  job: Job
  model: PartitionedModel
  record: CheckpointRecord
  checkpointer: Checkpointer  # read-only
  watchdog: StepWatchdog  # gets the beats of the mode's own steps
  guard: PreemptionGuard  # sees a signal from the first checkpoint on; before, SIGTERM loses nothing
  stack: contextlib.ExitStack  # is closed when the mode ends

  def checkpoints(
    self,
    compile_steps: Callable[[], None],
    *,
    step: int | None = None,
    part: Callable[[TrainState], Variables] | None = None,
    storage: 'WeightStorage | None' = None,
    watch: bool = False,
    poll_s: float = 10.0,
  ) -> Iterator[RestoredVariables]:
    """Yields the variables of one checkpoint, or with `watch` of every new checkpoint of a running job.

    Args:
      compile_steps: called before variables are yielded.
      step: the checkpoint's step; None takes the newest.
      part, storage: as in `restore_evaluation_variables`; the variables are stored.
      watch: wait for new checkpoints until the last train step's, or until the job has ended early. Only the newest is
        yielded if several are new. The weights of the Origin come first; if no training job has begun in the directory
        by then, nothing is awaited.
      poll_s: seconds between two checks for a new checkpoint.

    Raises:
      PreemptedError: a signal came while it waited.
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    used, experiment = -1, self.job.experiment
    is_first = True
    while True:
      self.beat(used, 'waiting for a checkpoint')
      restored = None
      with self.watchdog.allow('restore', experiment.first_step_timeout_s):
        if not watch or newest_step(self.checkpointer) > used:
          restored = restore_evaluation_variables(
            self.model, self.checkpointer, step, part, experiment=experiment, storage=storage
          )
        elif is_first and _is_fresh(self.checkpointer):
          select = self.model.task.evaluation_variables if part is None else part
          restored = _read_origin(self.model, self.checkpointer, experiment, None, select, storage)
      is_first = False
      # An older step comes if the newest checkpoint is damaged and the one before it was used already.
      if restored is not None and (restored.place is not None or restored.step > used):
        with self.watchdog.allow('compile', experiment.first_step_timeout_s):
          compile_steps()
        if storage is not None:
          restored = restored._replace(variables=storage.store(restored.variables))
        self.guard.start()
        yield restored
        if restored.place is None:
          used = restored.step
        elif watch and not self._has_begun():
          if is_primary():
            directory = self.checkpointer.path.parent
            print(f'No training job has begun in {directory}: no checkpoint is awaited.', flush=True)
          return
      if not watch or used >= experiment.num_train_steps:
        return
      if primary_decides(functools.partial(self.record.has_ended_at, used), 'has_ended', limit_s=LOOK_LIMIT_S):
        return
      set_activity(None)
      time.sleep(poll_s)

  def beat(self, step: int, activity: str) -> None:
    """Called by the mode before each of its own steps. Raises PreemptedError if a signal came."""
    self.watchdog.beat(step, activity)
    if self.guard.should_stop():
      raise PreemptedError

  def _has_begun(self) -> bool:
    """Returns whether a training job has begun in the directory."""
    has_config = (self.checkpointer.path.parent / CONFIG_FILE).exists
    return primary_decides(lambda: bool(has_config()), 'has_begun', limit_s=LOOK_LIMIT_S)


@contextlib.contextmanager
def open_reader(
  job: Job, model: PartitionedModel, job_log_dir: epath.Path, activity: str, emergency: EmergencyExit
) -> Iterator[CheckpointReader]:
  """Opens a job's checkpoints; the records of an `activity` of several processes are in the directory of that name."""
  experiment = job.experiment
  limits = {'timeout_s': experiment.step_timeout_s, 'first_step_timeout_s': experiment.first_step_timeout_s}
  with contextlib.ExitStack() as stack, emergency.on_failure():
    watchdog = stack.enter_context(watch_steps(job_log_dir / activity, emergency, **limits))
    guard, record = PreemptionGuard(), CheckpointRecord(job_log_dir)
    stack.callback(guard.stop)
    checkpointer = stack.enter_context(contextlib.closing(record.open_checkpoints(read_only=True)))
    yield CheckpointReader(
      job=job, model=model, record=record, checkpointer=checkpointer, watchdog=watchdog, guard=guard, stack=stack
    )
