"""--mode export --format hf and peft: writes the model of a job as a folder for transformers, or its adapters for peft.

    spmd-tasks --mode export --format hf --job_log_dir runs/tuned --out models/tuned
    spmd-tasks --mode export --format hf --exp hf.Model --set model=models/llama --out models/again
    spmd-tasks --mode export --format peft --job_log_dir runs/lora --out models/adapter

A folder has the weights that the job evaluates with, averaged ones if there are any, with low-rank adapters merged into
the weights that they belong to; a folder of `peft` has the adapters alone.
"""

from collections.abc import Mapping
import os
from pathlib import Path
import sys
from typing import Any

from etils import epath
from jax.sharding import Mesh
from tqdm import tqdm

from spmd_tasks import exit_codes
from spmd_tasks.bridges.huggingface._export import export_folder
from spmd_tasks.bridges.huggingface._folder import open_folder, weights_on_mesh
from spmd_tasks.bridges.huggingface._peft import export_adapter
from spmd_tasks.bridges.huggingface.origin import FolderOrigin
from spmd_tasks.command import OpenJob
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.watchdog import watch_steps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.files import is_remote
from spmd_tasks.programs.restore import restore_evaluation_variables
from spmd_tasks.programs.saved_steps import SavedSteps
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.tuning.adapted_weights import adapters_of
from spmd_tasks.tuning.base_digest import describe_base
from spmd_tasks.tuning.merging import merge_adapters


def export_model(opened: OpenJob, target: epath.Path, *, step: int | None, mesh: Mesh) -> int:
  """Writes a folder of Hugging Face's format; returns exit code OK. Every process reads its shards, process 0 writes.

  Args:
    opened: the job; nothing in its directory changes.
    target: a folder that does not exist yet.
    step: the checkpoint's step; None takes the newest.
    mesh: any.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
    UserError: the format cannot express the model, or the target has something already.
  """
  return _export(opened, target, step=step, mesh=mesh, only_adapters=False)


def export_adapters(opened: OpenJob, target: epath.Path, *, step: int | None, mesh: Mesh) -> int:
  """Writes a folder of `peft`; as `export_model`."""
  return _export(opened, target, step=step, mesh=mesh, only_adapters=True)


def _export(opened: OpenJob, target: epath.Path, *, step: int | None, mesh: Mesh, only_adapters: bool) -> int:
  job, job_log_dir, emergency = opened.job, opened.directory, opened.emergency
  if is_remote(target):
    raise UserError(f'{target} is not on a mounted file system: export to a local folder, and copy that.')
  if target.exists():
    raise UserError(f'{target} exists: name a folder that does not, or move it away.')
  model = partition_job(job, mesh)
  start = job.experiment.origin()
  folder = start.path if isinstance(start, FolderOrigin) else None
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
