"""What every program begins with: the partitioned model, its weights or state, and a watchdog over the steps."""

import contextlib
from typing import Any

from absl import logging
from etils import epath
import jax

from spmd_tasks.checkpoints.checkpointer import Checkpointer, CheckpointError
from spmd_tasks.checkpoints.durable_files import absolute_path
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.distributed.emergency_exit import EmergencyExit
from spmd_tasks.distributed.initialization import finish
from spmd_tasks.distributed.rank_records import open_rank_records
from spmd_tasks.distributed.watchdog import StepWatchdog
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.inputs.base import InputIterator
from spmd_tasks.runtime.partition import PartitionedModel, partition_spmd_model
from spmd_tasks.runtime.train_state import TrainState
from spmd_tasks.runtime.upcycling import initialize_from

CHECKPOINTS = 'checkpoints'
LOOK_LIMIT_S = 300  # for process 0's look into a directory


def partition_job(job: Job) -> PartitionedModel:
  """The job's task, partitioned over the mesh of all devices.

  Raises:
    UserError: the mesh does not fit the devices, or the task or its input do not fit the mesh.
  """
  experiment = job.experiment
  return partition_spmd_model(
    job.task,
    experiment.mesh_spec().build(),
    job.train_input.element_spec(),
    axis_rules=experiment.axis_rules,
    inputs_split_mapping=experiment.inputs_split_mapping,
  )


def restore_or_init(
  model: PartitionedModel, checkpointer: Checkpointer, job: Job, iterator: InputIterator
) -> tuple[TrainState, int, str]:
  """What a training job begins with.

  Returns:
    (padded state, its step, a phrase on where it is from). The job's own newest checkpoint, and the iterator set to its
    position; or else step 0, with the weights that the experiment's `init_from` names, or drawn ones.

  Raises:
    CheckpointError: there are checkpoints, but none that can be used.
    UserError: the input cannot go on exactly where the checkpoint left it, or the weights of `init_from` do not fit.
  """
  experiment = job.experiment
  restored = checkpointer.restore(model.canonical_state)
  if restored is None and experiment.init_from is not None:
    directory = absolute_path(experiment.init_from)
    other = Checkpointer(checkpoint_directory(directory), read_only=True)
    try:
      state, step = initialize_from(model, other, experiment.seed, experiment.init_from_step)
    finally:
      other.close()
    return state, 0, f'starting from the weights of step {step} in {directory}'
  if restored is None:
    return model.init(experiment.seed), 0, 'starting from new weights'
  positions = [state for state in restored.input_states if state is not None]
  if len(positions) < len(restored.input_states):
    raise CheckpointError(f'the checkpoint of step {restored.step} holds no input position: it cannot be trained on.')
  input_state = restored.input_state
  if input_state is None:  # another number of processes saved it
    input_state = job.train_input.reshard_states(positions, jax.process_count())[jax.process_index()]
  iterator.set_state(input_state)
  logging.info('Restored step %d from %d process(es).', restored.step, len(positions))
  return model.from_canonical(restored.state), restored.step, f'resuming after step {restored.step}'


def restore_evaluation_weights(
  model: PartitionedModel, checkpointer: Checkpointer, step: int | None
) -> tuple[Any, int]:
  """Padded weights, raw or averaged as the task evaluates them, of one checkpoint (None: the newest); and its step."""
  if model.task.eval_with_ema:
    subtree, part = 'learner/ema_weights', lambda state: state.learner.ema_weights
  else:
    subtree, part = 'weights', lambda state: state.weights
  restored = checkpointer.restore_weights(part(model.canonical_state), step, subtree=subtree)
  return model.from_canonical(restored.state, part), restored.step


def newest_step(checkpointer: Checkpointer) -> int:
  """The newest checkpoint's step for every process, also where their views of the directory differ; -1: none yet."""
  step = primary_decides(checkpointer.latest_step, 'newest_checkpoint', limit_s=LOOK_LIMIT_S)
  return -1 if step is None else step


def checkpoint_directory(job_log_dir: epath.Path) -> epath.Path:
  return job_log_dir / CHECKPOINTS


def is_primary() -> bool:
  return jax.process_index() == 0


def watch_steps(
  stack: contextlib.ExitStack, experiment: Experiment, directory: epath.Path, emergency: EmergencyExit
) -> StepWatchdog:
  """A running StepWatchdog; several processes exchange their progress and failures in `directory`/ranks.

  What `stack` closes last before the watchdog itself is a wait for the other processes: the end is watched too.
  """
  records = open_rank_records(directory) if jax.process_count() > 1 else None
  if records is not None:
    emergency.attach(records)
  watchdog = stack.enter_context(
    StepWatchdog(
      timeout_s=experiment.step_timeout_s,
      first_step_timeout_s=experiment.first_step_timeout_s,
      emergency=emergency,
      records=records,
    )
  )

  def wait_for_peers():
    with watchdog.allow('finish', experiment.step_timeout_s):
      finish()

  stack.callback(wait_for_peers)
  return watchdog
