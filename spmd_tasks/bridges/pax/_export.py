"""--mode export --format pax: writes a checkpoint of Paxml, which `paxml.main` goes on from.

    spmd-tasks --mode export --job_log_dir runs/pax --out jobs/pax     # jobs/pax/checkpoints/checkpoint_<step>

The variables, the optimizer state and the step are exported. The input's position is not: Paxml begins with the first
batch of its input.
"""

from absl import logging
from etils import epath
import jax.numpy as jnp
from jax.sharding import Mesh

from spmd_tasks import exit_codes
from spmd_tasks.bridges.pax._checkpoints import write_pax_checkpoint
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.command import OpenJob
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.watchdog import watch_steps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.programs.saved_steps import SavedSteps
from spmd_tasks.wings import kind_of


def export_checkpoint(opened: OpenJob, target: epath.Path, *, step: int | None, mesh: Mesh) -> int:
  """Exports one checkpoint; returns exit code OK. Every process writes its own shards.

  Args:
    opened: the job; nothing in its directory changes.
    target: the directory of a Pax job, new or not.
    step: the checkpoint's step; None takes the newest.
    mesh: any.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the job is not of Pax, or the target has something already.
  """
  job, emergency = opened.job, opened.emergency
  kind = kind_of(type(job.experiment))
  if kind is None or kind.name != 'Pax':
    raise UserError(f'{job.name} is not an experiment of Pax: leave --format out, or give --format hf.')
  model = partition_job(job, mesh)
  limit_s = job.experiment.first_step_timeout_s  # of a whole restore
  with (
    emergency.on_failure(),
    watch_steps(opened.directory / 'export', emergency, timeout_s=limit_s, first_step_timeout_s=limit_s),
  ):
    checkpointer = SavedSteps(opened.directory).open_checkpoints(read_only=True)
    try:
      restored = checkpointer.restore(model.canonical_state, step)
    finally:
      checkpointer.close()
    if restored is None:
      raise CheckpointError(
        f'{opened.directory / "checkpoints"} has no checkpoint: correct --job_log_dir, or train first.'
      )
    state = restored.state
    pax_state = {
      'step': state.step.astype(jnp.uint32),
      'mdl_vars': state.variables,
      'opt_states': state.learner.opt_state,
    }
    path = write_pax_checkpoint(target / 'checkpoints', restored.step, pax_state)
  logging.info('Exported step %d to %s.', restored.step, path)
  if is_primary():
    print(f'exported step {restored.step} to {path}', flush=True)
  return exit_codes.OK
