"""T5X's models, checkpoints and setups: read, trained on and written back, to T5X's numbers; T5X is never imported.

    spmd-tasks --exp t5.V11Small --mode train --set init_from=t5x:MODEL_DIR --job_log_dir runs/t5
    spmd-tasks --mode export --format t5x --job_log_dir runs/t5 --out MODEL_DIR

Read `_files.py` (the files of checkpoints), `_weights.py` (the rules between T5X's arrays and ours), `origin.py` (a job
goes on from a checkpoint of T5X), `exporting.py` (T5X from one of ours), and `_seqio.py` (inputs).
"""

from etils import epy

from spmd_tasks.wings import Format, Wing

with epy.lazy_api_imports(globals()):
  from spmd_tasks.bridges.t5x._files import T5xCheckpoint, open_checkpoint, write_checkpoint
  from spmd_tasks.bridges.t5x._seqio import SeqIoInput
  from spmd_tasks.bridges.t5x.origin import T5xOrigin

__all__ = ['WING', 'SeqIoInput', 'T5xCheckpoint', 'T5xOrigin', 'open_checkpoint', 'write_checkpoint']

WING = Wing(
  name='t5x',
  formats=(
    Format(
      name='t5x',
      help='a checkpoint of T5X, with its optimizer state',
      origin='spmd_tasks.bridges.t5x.origin:open_origin',
      export='spmd_tasks.bridges.t5x.exporting:export_checkpoint',
    ),
  ),
)
