"""Restores the weights of one checkpoint, or of every new one, to evaluate, decode or serve them.

for weights, step in checkpoints_to_use(model, checkpointer, watch=True, ...):
  ...
"""

from collections.abc import Callable, Iterator
import functools
import time
from typing import TYPE_CHECKING, Any

import jax

from spmd_tasks.activity import doing, set_activity
from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.distributed.watchdog import StepWatchdog
from spmd_tasks.experiment import Experiment
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen
from spmd_tasks.programs.hooks import PreemptedError
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
    model: whose variables are restored.
    checkpointer: of the training job.
    step: the checkpoint's step; None takes the newest.
    part: selects the variables; None takes the task's `evaluation_variables`. To generate text, pass its
      `decoding_variables`.
    experiment: of the training job; None: the weights must be in a checkpoint.
    storage: converts each weight of a folder as soon as it is read, so that all are never in float32 at once.
      Weights of a checkpoint are not converted; in both cases the caller calls `storage.store` afterwards.

  Returns:
    (padded variables on the mesh, the checkpoint's step).

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
  """
  origin = None if experiment is None else experiment.origin()
  is_base = isinstance(origin, Base) and not step
  if is_base and primary_decides(checkpointer.is_fresh, 'is_fresh', limit_s=LOOK_LIMIT_S):
    assert isinstance(origin, Base)
    return origin.variables(model, storage), 0
  base = base_of(model, origin)
  canonical = model.canonical_state
  if part is None:
    part = model.task.evaluation_variables
  wanted = part(canonical)
  weights = wanted.pop('params')
  trained = without_frozen(weights, model.weight_specs) if model.has_frozen_weights else weights
  subtree = _subtree_of(trained, canonical)
  if subtree is None:  # they are spread over the state, as in Pax
    restored = checkpointer.restore(canonical, step)
    if restored is None:
      raise CheckpointError('there is no checkpoint to restore weights from: correct the path, or train first.')
    return model.from_canonical(part(restored.state), part), restored.step
  is_whole = base is None and subtree == 'weights'
  restored = checkpointer.restore_weights(weights if is_whole else trained, step, subtree=subtree)
  variables = {'params': restored.state}
  if base is None and not is_whole and model.has_frozen_weights:  # the average of what is trained, beside what is not
    saved = checkpointer.restore_weights(canonical.weights, restored.step)
    variables['params'] = fill_in(restored.state, saved.state)
  for name, abstract in wanted.items():
    variables[name] = checkpointer.restore_weights(abstract, restored.step, subtree=f'non_trainable/{name}').state
  if base is None:
    return model.from_canonical(variables, part), restored.step
  base.check(restored, checkpointer.path)
  select = part
  variables = model.from_canonical(variables, lambda state: select(model.trained_part(state)))
  return variables | {'params': fill_in(variables['params'], base.frozen(model, storage))}, restored.step


def _subtree_of(weights: Any, state: TrainState) -> str | None:
  """Returns where in a state all leaves of a tree of weights are; None if they are in several places."""
  for name, tree in (('weights', state.weights), ('learner/ema_weights', state.learner.ema_weights)):
    own = {id(leaf) for leaf in jax.tree.leaves(tree)}
    if all(id(leaf) in own for leaf in jax.tree.leaves(weights)):
      return name
  return None


def checkpoints_to_use(
  model: PartitionedModel,
  checkpointer: Checkpointer,
  experiment: Experiment,
  *,
  step: int | None = None,
  part: Callable[[TrainState], Variables] | None = None,
  storage: 'WeightStorage | None' = None,
  watch: bool = False,
  has_ended_at: Callable[[int], bool] = lambda step: False,
  poll_s: float,
  watchdog: StepWatchdog,
  should_stop: Callable[[], bool],
) -> Iterator[tuple[Variables, int]]:
  """Yields (padded variables, step) of one checkpoint, or with `watch` of every new checkpoint of a running job.

  Args:
    model: whose variables are restored.
    checkpointer: of the training job, read-only.
    experiment: of that job.
    step: the checkpoint's step; None takes the newest.
    part, storage: as in `restore_evaluation_variables`.
    watch: wait for new checkpoints until that of the last train step. Checkpoints that a newer one has overtaken are
      left out.
    has_ended_at: whether the job has ended early, with the checkpoint of a step; asked on process 0.
    poll_s: seconds between two looks for a new checkpoint.
    watchdog: gets a beat before every look.
    should_stop: asked before every look.

  Raises:
    PreemptedError: `should_stop` was true.
    CheckpointError: there is no such checkpoint, or it is damaged.
  """
  used = -1
  while True:
    watchdog.beat(used, 'waiting for a checkpoint')
    if should_stop():
      raise PreemptedError
    if not watch or newest_step(checkpointer) > used:
      with watchdog.allow('restore', experiment.first_step_timeout_s):
        variables, restored = restore_evaluation_variables(
          model, checkpointer, step, part, experiment=experiment, storage=storage
        )
      if restored > used:  # not so where the newest checkpoint is damaged and the one before it was used already
        used = restored
        yield variables, restored
    if not watch or used >= experiment.num_train_steps:
      return
    if primary_decides(functools.partial(has_ended_at, used), 'has_ended', limit_s=LOOK_LIMIT_S):
      return
    set_activity(None)
    time.sleep(poll_s)
