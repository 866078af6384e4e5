"""Restores what a training job starts from; restored_weights.py what other programs use.

state, step, origin = restore_or_init(model, checkpointer, job, iterator)
"""

from typing import Any

from absl import logging
import jax

from spmd_tasks.activity import doing
from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.inputs import InputIterator
from spmd_tasks.learning.frozen_weights import fill_in
from spmd_tasks.programs.origins import origin_of
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.runtime.origin import base_of, saved_part

LOOK_LIMIT_S = 300  # how long process 0 may take to look into a directory


@doing('restoring or initializing the state')
def restore_or_init(
  model: PartitionedModel, checkpointer: Checkpointer, job: Job, iterator: InputIterator
) -> tuple[TrainState, int, str]:
  """Returns the padded state that a job starts from, its step, and a phrase that says where the state is from.

  The job's own newest checkpoint comes first, with which `iterator` moves to its position. Without one, the job starts
  at step 0 with the weights that the experiment's `init_from` names, or with newly drawn weights.

  Raises:
    CheckpointError: there are checkpoints, but none that can be used; or there were, and they are gone.
    UserError: the input cannot continue exactly where the checkpoint left it, or the weights of `init_from` do not fit.
  """
  saved = saved_state(model, checkpointer, job)
  if saved is None:
    return initial_state(model, job.experiment)
  state, step, input_state = saved
  iterator.set_state(input_state)
  return state, step, f'resuming after step {step}'


def saved_state(
  model: PartitionedModel, checkpointer: Checkpointer, job: Job, step: int | None = None
) -> tuple[TrainState, int, Any] | None:
  """Returns the padded state of a checkpoint, its step and this process's position in the input.

  `step` None takes the newest that is whole, and None is returned where there never was one.
  """
  origin = job.experiment.origin()
  part = saved_part(model, origin)
  restored = checkpointer.restore(part(model.canonical_state), step)
  if restored is None:
    return None
  positions = [state for state in restored.input_states if state is not None]
  if len(positions) < len(restored.input_states):
    raise CheckpointError(f'the checkpoint of step {restored.step} holds no input position: it cannot be trained on.')
  input_state = restored.input_state
  if input_state is None:  # another number of processes saved the checkpoint
    input_state = job.train_input.reshard_states(positions, jax.process_count())[jax.process_index()]
  logging.info('Restored step %d from %d process(es).', restored.step, len(positions))
  state = model.from_canonical(restored.state, part)
  if (base := base_of(model, origin)) is not None:
    base.check(restored, checkpointer.path)
    state = state.replace(weights=fill_in(state.weights, base.frozen(model)))
  return state, restored.step, input_state


def initial_state(model: PartitionedModel, experiment: Experiment) -> tuple[TrainState, int, str]:
  """Returns what `restore_or_init` does for a job without a checkpoint of its own: the same weights every time."""
  if (origin := origin_of(experiment)) is not None:
    return origin.start(model, experiment.seed)
  return model.init(experiment.seed), 0, 'starting from new weights'


def newest_step(checkpointer: Checkpointer) -> int:
  """Returns the newest checkpoint's step, -1 without one. All processes get process 0's answer."""
  step = primary_decides(checkpointer.latest_step, 'newest_checkpoint', limit_s=LOOK_LIMIT_S)
  return -1 if step is None else step
