"""Checkpoints: a tree of sharded arrays on disk, digested, asynchronous, and independent of mesh and process count.

    checkpointer = Checkpointer(job_log_dir / 'checkpoints')
    restored = checkpointer.restore(abstract_state)      # None in a fresh directory
    checkpointer.save(step, state, input_state=iterator.get_state())
    checkpointer.close()

A checkpoint counts only when its manifest lists every file; a restore verifies what it reads, and falls back from a
damaged checkpoint to the one before it. A checkpoint holds unpadded arrays with all layers of a stack in one dim, so
any mesh, stage count or expert-parallel degree can restore it.

Read checkpointer.py (what a program calls), arrays.py (array files), checkpoint_directory.py (names, deleting),
manifest.py (digests), verifying.py (choosing), store_directory.py (object stores).
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.checkpoints.checkpoint_directory import Retention, SaveRecord
  from spmd_tasks.checkpoints.checkpointer import Checkpointer
