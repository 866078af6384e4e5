"""The state that a Pax experiment starts from when a checkpoint of Paxml is named.

--set continue_from=/jobs/pax          # weights, other variables, optimizer state and step: goes on as Paxml would
--set init_from=/jobs/pax              # weights and other variables, at step 0, with a new optimizer state
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.bridges.pax._checkpoint_arrays import read_pax_checkpoint
from spmd_tasks.bridges.pax._checkpoint_files import checkpoint_format, is_complete, open_pax_checkpoint
from spmd_tasks.bridges.pax._task import pax_state
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path
from spmd_tasks.runtime import Origin, PartitionedModel, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaxJob(Origin):
  """A checkpoint of Paxml that a Pax experiment starts from.

  Attributes:
    directory: a job of Paxml, its `checkpoints`, or one checkpoint.
    step: of the checkpoint; None takes the newest.
    takes_all: whether the job goes on with the optimizer's state and the step; otherwise it has the variables alone.
  """

  directory: str
  step: int | None
  takes_all: bool = False

  def start(self, model: PartitionedModel, seed: int) -> tuple[TrainState, int, str]:
    """Reads the checkpoint, each device its own part of each array.

    The steps derive their keys from the seed's, with the step's number, as Paxml's do.

    Raises:
      UserError: there is no such checkpoint, or it is not one of this model and learner.
    """
    path = _find(self.directory, self.step)
    return _whole_state(model, path, seed) if self.takes_all else _variables(model, path, seed)


def _whole_state(model: PartitionedModel, path: Any, seed: int) -> tuple[TrainState, int, str]:
  canonical = model.canonical_state
  wanted = pax_state(canonical).replace(step=jax.ShapeDtypeStruct((), jnp.uint32, sharding=canonical.step.sharding))
  found = read_pax_checkpoint(path, wanted)
  variables = dict(found.mdl_vars)
  rng = jax.random.key_data(model.task.make_key(seed))

  def zero():  # an array of its own each time: a step donates every leaf
    return jax.device_put(jnp.zeros((), jnp.int32), canonical.step.sharding)

  state = TrainState(
    step=jax.jit(lambda step: step.astype(jnp.int32), out_shardings=canonical.step.sharding)(found.step),
    rng=jax.device_put(rng, canonical.rng.sharding),
    weights=variables.pop('params'),
    learner=canonical.learner.replace(opt_state=found.opt_states, num_skipped=zero(), num_skipped_in_a_row=zero()),
    non_trainable=variables,
  )
  number = int(found.step)
  return model.from_canonical(state), number, f'going on after step {number} of {path}'


def _variables(model: PartitionedModel, path: Any, seed: int) -> tuple[TrainState, int, str]:
  canonical = model.canonical_state
  found = read_pax_checkpoint(path, {'mdl_vars': canonical.variables})['mdl_vars']
  variables = model.from_canonical(found, lambda state: state.variables)
  state = model.init(seed)
  state = state.replace(
    weights=variables['params'], non_trainable={name: variables[name] for name in state.non_trainable}
  )
  return state, 0, f'starting from the weights of {path}'


def is_pax_job(directory: str) -> bool:
  """Tells whether the newest checkpoint of a job is Paxml's."""
  path = absolute_path(directory)
  return any(checkpoint_format(place) == 'pax' for place in (path / 'checkpoints', path)) or is_complete(path)


def _find(directory: str, step: int | None) -> Any:
  """Returns the path of one checkpoint below a job, its `checkpoints`, or itself."""
  path = absolute_path(directory)
  inner = path / 'checkpoints'
  try:
    return open_pax_checkpoint(inner if inner.is_dir() else path, step).path
  except UserError as error:
    raise UserError(f'{error} (looked for by continue_from or init_from = {directory!r})') from error
