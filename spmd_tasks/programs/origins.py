"""Reads the variables of a checkpoint: one of the job itself, or of another job, which `init_from` names.

origin = origin_of(experiment)             # OtherJob, or what Experiment.origin() returns
variables, step, place = origin.weights(model, model.task.evaluation_variables)
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.checkpoints.manifest import CheckpointError, leaf_entries
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.experiment import Experiment
from spmd_tasks.extensions import formats
from spmd_tasks.files import absolute_path
from spmd_tasks.learning.evaluation_weights import evaluation_weights, has_evaluation_weights
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen
from spmd_tasks.programs.job_directory import CheckpointRecord
from spmd_tasks.programs.upcycling import initialize_from
from spmd_tasks.runtime import Origin, PartitionedModel, TrainState
from spmd_tasks.runtime.origin import Base, RestoredVariables
from spmd_tasks.runtime.partition import Part
from spmd_tasks.runtime.task import Variables

if TYPE_CHECKING:
  from spmd_tasks.decoding.weight_storage import WeightStorage

_LOOK_LIMIT_S = 300


def origin_of(experiment: Experiment) -> Origin | None:
  """Returns where a job without a checkpoint takes its weights from: the experiment's origin, or another job."""
  origin = experiment.origin()
  if origin is None and experiment.init_from is not None:
    return OtherJob(directory=experiment.init_from, step=experiment.init_from_step)
  return origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherJob(Origin):
  """Another job's checkpoint, which `init_from = JOB_LOG_DIR` names; `step` None takes the newest."""

  directory: str
  step: int | None

  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Copies the weights, or repeats them as experts (upcycling.py)."""
    with self._checkpoints() as other:
      state, step = self._initialize(model, other, seed)
    return state, 0, f'starting from the weights of step {step} in {absolute_path(self.directory)}'

  def weights(self, model: PartitionedModel, part: Part, storage: Any = None) -> RestoredVariables | None:
    """Restores what evaluating in the other job's own directory would; weights of a dense job are repeated."""
    with self._checkpoints() as other:
      saved = {(leaf.name, leaf.shape) for leaf in other.saved_leaves(self.step)}
      own = {(leaf.name, leaf.shape) for leaf in leaf_entries(model.canonical_state.weights)}
      if saved == own:
        variables, step, _ = restore_variables(model, other, self.step, part, None)
      else:
        state, step = self._initialize(model, other, seed=0)
        variables = part(state)
      return RestoredVariables(variables, step, str(other.path / f'checkpoint_{step:08d}'))

  def _initialize(self, model: PartitionedModel, other: Checkpointer, seed: int) -> tuple[TrainState, int]:
    return initialize_from(model, other, seed, self.step)

  @contextlib.contextmanager
  def _checkpoints(self) -> Iterator[Checkpointer]:
    """Opens the other job's checkpoints to read them. Raises a CheckpointError if there are none."""
    directory = absolute_path(self.directory)
    with contextlib.closing(CheckpointRecord(directory).open_checkpoints(read_only=True)) as other:
      if primary_decides(other.latest_step, 'newest_checkpoint', limit_s=_LOOK_LIMIT_S) is None:
        prefixes = ', '.join(f'{fmt.name}:PLACE' for fmt in formats() if fmt.origin is not None)
        raise CheckpointError(
          f'init_from = {self.directory!r}: {other.path} holds no checkpoint of a job: name the --job_log_dir of a job '
          f'that has saved one, or a place in another format as {prefixes}.'
        )
      yield other


def restore_variables(
  model: PartitionedModel,
  checkpointer: Checkpointer,
  step: int | None,
  select: Callable[[TrainState], Variables],
  base: Base | None,
  storage: 'WeightStorage | None' = None,
) -> RestoredVariables:
  """Restores the variables that `select` selects from a checkpoint.

  Args:
    model, checkpointer: of the job that saved it.
    step: the checkpoint's step; None takes the newest.
    select: the task's `evaluation_variables` or `decoding_variables`.
    base: what completes the job's checkpoints, if it trains some weights of a folder.
    storage: converts each weight of the folder as soon as it is read.

  Raises a CheckpointError: there is no such checkpoint, or it is damaged.
  """
  canonical = model.canonical_state
  wanted = select(canonical)
  weights = wanted.pop('params')
  trained = without_frozen(weights, model.weight_specs) if model.has_frozen_weights else weights
  subtree = _subtree_of(trained, canonical)
  if subtree is None:  # they are spread over the state, as in Pax
    restored = checkpointer.restore(canonical, step)
    if restored is None:
      raise CheckpointError('there is no checkpoint to restore weights from: correct the path, or train first.')
    return RestoredVariables(model.from_canonical(select(restored.state), select), restored.step)
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
    # An average of `name`, if that is what the task evaluates, has another name in the state.
    source = next(key for key, tree in canonical.non_trainable.items() if tree is abstract)
    variables[name] = checkpointer.restore_weights(abstract, restored.step, subtree=f'non_trainable/{source}').state
  if base is None:
    return RestoredVariables(model.from_canonical(variables, select), restored.step)
  base.check(restored, checkpointer.path)
  variables = model.from_canonical(variables, lambda state: select(model.trained_part(state)))
  variables |= {'params': fill_in(variables['params'], base.frozen(model, storage))}
  return RestoredVariables(variables, restored.step)


def _subtree_of(weights: Any, state: TrainState) -> str | None:
  """Returns where in a state all leaves of a tree of weights are; None if they are in several places."""
  for name, tree in (('weights', state.weights), ('learner/ema_weights', state.learner.ema_weights)):
    own = {id(leaf) for leaf in jax.tree.leaves(tree)}
    if all(id(leaf) in own for leaf in jax.tree.leaves(weights)):
      return name
  return None
