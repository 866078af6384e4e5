"""Restores the weights of one checkpoint, or of every new one, to evaluate, decode or serve them.

with open_reader(job, model, job_log_dir, 'eval', emergency) as reader:
  for weights, step in reader.checkpoints(compile_steps, watch=True):
    ...
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

from etils import epath
import jax
from jax.sharding import Mesh

from spmd_tasks.activity import doing, set_activity
from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.distributed import EmergencyExit
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.distributed.preemption import PreemptionGuard
from spmd_tasks.distributed.watchdog import StepWatchdog, watch_steps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import MESH_FIELDS, Experiment, Job
from spmd_tasks.learning.evaluation_weights import evaluation_weights, has_evaluation_weights
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen
from spmd_tasks.programs.hooks import PreemptedError
from spmd_tasks.programs.job_directory import SavedSteps
from spmd_tasks.programs.restore import LOOK_LIMIT_S, newest_step
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.runtime.origin import Base, base_of
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
) -> tuple[Variables, int]:
  """Restores from one checkpoint the variables that evaluation uses, with raw or averaged weights.

  A job without a checkpoint that starts from a Base (runtime/origin.py) has that folder's weights, at step 0. Frozen
  weights are always read from the folder.

  Args:
    model, checkpointer: of the training job.
    step: the checkpoint's step; None takes the newest.
    part: selects the variables; None takes the task's `evaluation_variables`. To generate text, pass its
      `decoding_variables`.
    experiment: of the training job; None: the weights must be in a checkpoint.
    storage: converts each weight of a folder as soon as it is read, so that all are never in float32 at once.
      Weights of a checkpoint are not converted; in both cases the caller calls `storage.store` afterwards.

  Returns (padded variables on the mesh, the checkpoint's step).

  Raises a CheckpointError: there is no such checkpoint, or it is damaged.
  """
  origin = None if experiment is None else experiment.origin()
  is_base = isinstance(origin, Base) and not step
  if is_base and primary_decides(checkpointer.is_fresh, 'is_fresh', limit_s=LOOK_LIMIT_S):
    assert isinstance(origin, Base)
    return origin.variables(model, storage), 0
  base = base_of(model, origin)
  canonical = model.canonical_state
  select = model.task.evaluation_variables if part is None else part
  wanted = select(canonical)
  weights = wanted.pop('params')
  trained = without_frozen(weights, model.weight_specs) if model.has_frozen_weights else weights
  subtree = _subtree_of(trained, canonical)
  if subtree is None:  # they are spread over the state, as in Pax
    restored = checkpointer.restore(canonical, step)
    if restored is None:
      raise CheckpointError('there is no checkpoint to restore weights from: correct the path, or train first.')
    return model.from_canonical(select(restored.state), select), restored.step
  is_whole = base is None and subtree == 'weights'
  restored = checkpointer.restore_weights(weights if is_whole else trained, step, subtree=subtree)
  variables = {'params': restored.state}
  if subtree == 'weights' and has_evaluation_weights(canonical.learner.opt_state):
    saved = checkpointer.restore_weights(canonical.learner.opt_state, restored.step, subtree='learner/opt_state')
    variables['params'] = evaluation_weights(saved.state, restored.state)
  if base is None and not is_whole and model.has_frozen_weights:  # the average of what is trained, beside what is not
    saved = checkpointer.restore_weights(canonical.weights, restored.step)
    variables['params'] = fill_in(restored.state, saved.state)
  for name, abstract in wanted.items():
    variables[name] = checkpointer.restore_weights(abstract, restored.step, subtree=f'non_trainable/{name}').state
  if base is None:
    return model.from_canonical(variables, select), restored.step
  base.check(restored, checkpointer.path)
  variables = model.from_canonical(variables, lambda state: select(model.trained_part(state)))
  return variables | {'params': fill_in(variables['params'], base.frozen(model, storage))}, restored.step


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


def _subtree_of(weights: Any, state: TrainState) -> str | None:
  """Returns where in a state all leaves of a tree of weights are; None if they are in several places."""
  for name, tree in (('weights', state.weights), ('learner/ema_weights', state.learner.ema_weights)):
    own = {id(leaf) for leaf in jax.tree.leaves(tree)}
    if all(id(leaf) in own for leaf in jax.tree.leaves(weights)):
      return name
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointReader:
  """Reads a training job's checkpoints for a mode that a signal may stop; `open_reader` makes it."""

  job: Job
  model: PartitionedModel
  saved: SavedSteps
  checkpointer: Checkpointer  # read-only
  watchdog: StepWatchdog  # gets the beats of the mode's own steps
  guard: PreemptionGuard  # sees a signal from the first checkpoint on; before, SIGTERM loses nothing
  stack: contextlib.ExitStack  # closes what it is given when the mode ends

  def checkpoints(
    self,
    compile_steps: Callable[[], None],
    *,
    step: int | None = None,
    part: Callable[[TrainState], Variables] | None = None,
    storage: 'WeightStorage | None' = None,
    watch: bool = False,
    poll_s: float = 10.0,
  ) -> Iterator[tuple[Variables, int]]:
    """Yields (padded variables, step) of one checkpoint, or with `watch` of every new checkpoint of a running job.

    Args:
      compile_steps: called before each is yielded.
      step: the checkpoint's step; None takes the newest.
      part, storage: as in `restore_evaluation_variables`; the variables are stored.
      watch: wait for new checkpoints until that of the last train step, or until the job has ended early. Checkpoints
        that a newer one has overtaken are left out.
      poll_s: seconds between two looks for a new checkpoint.

    Raises:
      PreemptedError: a signal came while it waited.
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    used, experiment = -1, self.job.experiment
    while True:
      self.watchdog.beat(used, 'waiting for a checkpoint')
      if self.guard.should_stop():
        raise PreemptedError
      if not watch or newest_step(self.checkpointer) > used:
        with self.watchdog.allow('restore', experiment.first_step_timeout_s):
          variables, restored = restore_evaluation_variables(
            self.model, self.checkpointer, step, part, experiment=experiment, storage=storage
          )
        if restored > used:  # not so where the newest checkpoint is damaged and the one before it was used already
          used = restored
          with self.watchdog.allow('compile', experiment.first_step_timeout_s):
            compile_steps()
          variables = variables if storage is None else storage.store(variables)
          self.guard.start()
          yield variables, restored
      if not watch or used >= experiment.num_train_steps:
        return
      if primary_decides(functools.partial(self.saved.has_ended_at, used), 'has_ended', limit_s=LOOK_LIMIT_S):
        return
      set_activity(None)
      time.sleep(poll_s)


@contextlib.contextmanager
def open_reader(
  job: Job, model: PartitionedModel, job_log_dir: epath.Path, activity: str, emergency: EmergencyExit
) -> Iterator[CheckpointReader]:
  """Opens a job's checkpoints; the records of an `activity` of several processes are in the directory of that name."""
  experiment = job.experiment
  limits = {'timeout_s': experiment.step_timeout_s, 'first_step_timeout_s': experiment.first_step_timeout_s}
  with contextlib.ExitStack() as stack, emergency.on_failure():
    watchdog = stack.enter_context(watch_steps(job_log_dir / activity, emergency, **limits))
    guard, saved = PreemptionGuard(), SavedSteps(job_log_dir)
    stack.callback(guard.stop)
    checkpointer = stack.enter_context(contextlib.closing(saved.open_checkpoints(read_only=True)))
    yield CheckpointReader(
      job=job, model=model, saved=saved, checkpointer=checkpointer, watchdog=watchdog, guard=guard, stack=stack
    )
