"""Runs T5X's gin setups with T5X's numbers, and reads and writes its checkpoints, without importing T5X.

    spmd-tasks --gin_file pretrain.gin --gin.MODEL_DIR="'runs/t5'" --mode train
    spmd-tasks --exp t5.V11Small --mode train --set init_from=t5x:MODEL_DIR --job_log_dir runs/t5
    spmd-tasks --mode export --format t5x --job_log_dir runs/t5 --out MODEL_DIR

Read `_files.py` (files of checkpoints), `_weights.py` (rules between T5X's arrays and ours) and `origin.py` (a job
starts from a checkpoint of T5X, or exports one). Then read `_seqio.py` (SeqIO tasks as inputs and prompts, and their
metrics), `_gin.py` (reads gin files; the folder `gin` has T5X's and Flaxformer's), `_gin_translation.py` (gin bindings
to fields of an experiment), `experiments.py` (that experiment) and `_gin_start.py` (the command).
"""

from typing import Any

from spmd_tasks.extensions import Extension, Flag, Format
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.bridges.t5x._files import open_checkpoint, write_checkpoint
  from spmd_tasks.bridges.t5x._seqio import SeqIoInput, SeqIoPrompts, TfExampleInput
  from spmd_tasks.bridges.t5x.experiments import T5xExperiment, T5xMoeExperiment, t5x_axis_rules
  from spmd_tasks.bridges.t5x.origin import T5xOrigin


def _expand(flags: Any) -> int | None:
  """Translates a gin setup to --exp and --set; returns an exit code if that is all the command does."""
  if not (flags.gin_file or flags.gin or flags.translate or (flags.exp or '').endswith('.gin')):
    return None
  from spmd_tasks.bridges.t5x import _gin_start

  return _gin_start.start(flags)


EXTENSION = Extension(
  name='t5x',
  formats=(
    Format(
      name='t5x',
      help='a checkpoint of T5X, with its optimizer state',
      origin='spmd_tasks.bridges.t5x.origin:open_origin',
      export='spmd_tasks.bridges.t5x.origin:export_checkpoint',
    ),
  ),
  flags=(
    Flag(name='gin_file', metavar='FILE', repeats=True, help='a gin setup of T5X, in place of --exp; repeatable'),
    Flag(name='gin', metavar='NAME=VALUE', repeats=True, help="binds a value of the setup, as T5X's --gin.NAME=VALUE"),
    Flag(name='gin_search_paths', metavar='DIR', repeats=True, help='directory with gin files; repeatable'),
    Flag(name='translate', metavar='FILE', help='write the gin setup as a Python file, and exit'),
  ),
  expand=_expand,
  foreign_flags={
    'gin_bindings': 'Write --gin.NAME=VALUE.',
    'run_mode': 'Write --mode: train, eval, decode_once for infer, or plan for precompile.',
    'dry_run': 'Write --print_config, which shows the config and runs nothing.',
    'process_count': 'Write --num_processes N.',
    'process_index': 'Write --process_id I.',
    'multiprocess_gpu': 'Processes of Slurm, Kubernetes and Open MPI are found by themselves: leave it out.',
    'tfds_data_dir': 'TensorFlow Datasets reads the environment variable TFDS_DATA_DIR.',
    'seqio_additional_cache_dirs': 'Call seqio.add_global_cache_dirs in the module of the tasks.',
  },
  fields_of_modules=('modules', 'task_modules'),
  packages=('t5', 'seqio'),
)
