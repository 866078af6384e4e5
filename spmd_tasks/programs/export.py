"""--mode=export: writes a job's model for other programs: a folder of Hugging Face's format, or a checkpoint of Paxml.

    spmd-tasks --mode export --format hf --job_log_dir runs/tuned --out models/tuned
    spmd-tasks --mode export --format hf --exp hf.Model --set model=models/llama --out models/again
    spmd-tasks --mode export --format peft --job_log_dir runs/lora --out models/adapter
    spmd-tasks --mode export --job_log_dir runs/pax --out jobs/pax     # jobs/pax/checkpoints/checkpoint_<step>

A folder has the weights that the job evaluates with, averaged ones if there are any, with low-rank adapters merged into
the weights that they belong to; a folder of `peft` has the adapters alone. For Paxml, the variables, the
optimizer state and the step are exported. The input's position is not: Paxml begins with the first batch of its input.
"""

from collections.abc import Mapping
import os
from pathlib import Path
import sys
from typing import Any

from absl import logging
from etils import epath
import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from spmd_tasks import exit_codes
from spmd_tasks.bridges.huggingface import export_adapter, export_folder, open_folder, weights_on_mesh
from spmd_tasks.checkpoints import CheckpointError
from spmd_tasks.distributed import EmergencyExit, is_primary, watch_steps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.files import is_remote
from spmd_tasks.programs.pretrained import pretrained_folder
from spmd_tasks.programs.restore import restore_evaluation_variables
from spmd_tasks.programs.saved_steps import SavedSteps
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.tuning.adapted_weights import adapters_of
from spmd_tasks.tuning.base_digest import describe_base
from spmd_tasks.tuning.merging import merge_adapters


def export(
  job: Job,
  job_log_dir: epath.Path,
  target: epath.Path,
  *,
  emergency: EmergencyExit,
  step: int | None = None,
  format: str | None = None,
  mesh: Mesh | None = None,
) -> int:
  """Exports one checkpoint; returns exit code OK. Every process writes its own shards, or process 0 the folder.

  Args:
    job: the built experiment.
    job_log_dir: the job's directory; nothing in it changes.
    target: a folder that does not exist yet; or the directory of a Pax job, new or not.
    emergency: the way out of a failure that other processes must hear of.
    step: the checkpoint's step; None takes the newest.
    format: 'hf', 'peft' or 'pax'; None: 'pax' for an experiment of Pax, else 'hf'.
    mesh: any; None makes the experiment's.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the format cannot express the model, or the target has something already.
  """
  is_pax = hasattr(job.task, 'task')  # asking the class of the task would import Paxml
  if (format or ('pax' if is_pax else 'hf')) in ('hf', 'peft'):
    only_adapters = format == 'peft'
    return _export_folder(
      job, job_log_dir, target, emergency=emergency, step=step, only_adapters=only_adapters, mesh=mesh
    )
  if not is_pax:
    raise UserError(f'{job.name} is not an experiment of Pax: leave --format out, or give --format hf.')
  from spmd_tasks.bridges.pax import write_pax_checkpoint

  model = partition_job(job, mesh)
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


def _export_folder(
  job: Job,
  job_log_dir: epath.Path,
  target: epath.Path,
  *,
  emergency: EmergencyExit,
  step: int | None,
  only_adapters: bool,
  mesh: Mesh | None,
) -> int:
  if is_remote(target):
    raise UserError(f'{target} is not on a mounted file system: export to a local folder, and copy that.')
  if target.exists():
    raise UserError(f'{target} exists: name a folder that does not, or move it away.')
  model = partition_job(job, mesh)
  folder = pretrained_folder(job.experiment)
  limit_s = job.experiment.first_step_timeout_s
  with (
    emergency.on_failure(),
    watch_steps(job_log_dir / 'export', emergency, timeout_s=limit_s, first_step_timeout_s=limit_s) as watchdog,
    tqdm(unit='tensor', file=sys.stderr, disable=not is_primary() or not sys.stderr.isatty()) as bar,
  ):
    origin = None if folder is None else open_folder(folder)
    if only_adapters and origin is None:
      raise UserError(f'{job.name} starts from no folder, which adapters would belong to: use --format hf.')
    checkpointer = SavedSteps(job_log_dir).open_checkpoints(read_only=True)
    try:
      is_changed = adapters_of(job.task.model) or job.task.frozen_dtype  # though nothing was trained yet
      if origin is not None and not step and not is_changed and checkpointer.is_fresh():
        restored, weights = 0, origin.lazy_weights(job.task.model, model.canonical_state.weights)
      else:
        variables, restored = restore_evaluation_variables(model, checkpointer, step, experiment=job.experiment)
        params = variables['params']
        if not only_adapters:  # quantized kernels become numbers, too
          params = merge_adapters(model, params)
        weights = weights_on_mesh(model, params)
    finally:
      checkpointer.close()

    if only_adapters:
      assert folder is not None
      assert origin is not None
      digest = describe_base(folder, job_log_dir)['sha256']
      local = Path(os.fspath(target))
      num = export_adapter(local, job.task.model, weights, base=origin, digest=digest, is_writer=is_primary())
      if is_primary():
        print(f'exported step {restored} to {target}: adapters of {num} modules', flush=True)
      return exit_codes.OK

    def on_tensor(done: int, total: int) -> None:
      bar.total = total
      bar.update()
      watchdog.beat(restored, 'export')

    architecture = export_folder(
      Path(os.fspath(target)),
      job.task.model,
      weights,
      origin=origin,
      settings=_settings(job, model),
      tokenizer_file=_tokenizer_file(job) if origin is None else None,
      is_writer=is_primary(),
      on_tensor=on_tensor,
    )
  if is_primary():
    print(f'exported step {restored} to {target}: {architecture}', flush=True)
  return exit_codes.OK


def _settings(job: Job, model: PartitionedModel) -> Mapping[str, Any]:
  """Returns the keys of config.json that the model does not decide."""
  lengths = [spec.shape[1] for spec in job.train_input.element_spec().values() if len(spec.shape) > 1]
  tokenizer = job.tokenizer
  ids = {} if tokenizer is None else {'bos_token_id': tokenizer.bos_id, 'eos_token_id': tokenizer.eos_id}
  return ids | {'max_position_embeddings': max(lengths)} if lengths else ids


def _tokenizer_file(job: Job) -> Path | None:
  path = getattr(job.tokenizer, 'path', None)
  return Path(path) if path and Path(path).name == 'tokenizer.json' else None
