"""--mode=export: writes a checkpoint of a Pax experiment's job as Paxml writes one, so that Paxml can go on from it.

    spmd-tasks --mode export --job_log_dir runs/pax --export_to jobs/pax     # jobs/pax/checkpoints/checkpoint_<step>

The variables, the optimizer state and the step are exported. The input's position is not: Paxml begins with the first
batch of its input.
"""

from absl import logging
from etils import epath
import jax.numpy as jnp

from spmd_tasks import exit_codes
from spmd_tasks.bridges.pax import write_pax_checkpoint
from spmd_tasks.checkpoints import CheckpointError
from spmd_tasks.distributed import EmergencyExit, is_primary, watch_steps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.programs.saved_steps import SavedSteps


def export(
  job: Job, job_log_dir: epath.Path, target: epath.Path, *, emergency: EmergencyExit, step: int | None = None
) -> int:
  """Exports one checkpoint; returns exit code OK. Every process writes its own shards.

  Args:
    job: the built experiment, one of Pax.
    job_log_dir: the job's directory; nothing in it changes.
    target: the directory of a Pax job, new or not.
    emergency: the way out of a failure that other processes must hear of.
    step: the checkpoint's step; None takes the newest.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the experiment is not one of Pax, or the target has a checkpoint of that step.
  """
  if not hasattr(job.task, 'task'):  # of a PaxTask; asking its class would import Paxml
    raise UserError(f'{job.name} is not an experiment of Pax, and no other kind of checkpoint can be exported yet.')
  model = partition_job(job)
  limit_s = job.experiment.first_step_timeout_s  # of a whole restore
  with (
    emergency.on_failure(),
    watch_steps(job_log_dir / 'export', emergency, timeout_s=limit_s, first_step_timeout_s=limit_s),
  ):
    checkpointer = SavedSteps(job_log_dir).open_checkpoints(read_only=True)
    try:
      restored = checkpointer.restore(model.canonical_state, step)
    finally:
      checkpointer.close()
    if restored is None:
      raise CheckpointError(f'{job_log_dir / "checkpoints"} has no checkpoint: correct --job_log_dir, or train first.')
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
