"""Checkpoints: a tree of sharded arrays on disk, digested, asynchronous, and independent of mesh and process count.

    checkpointer = Checkpointer(job_log_dir / 'checkpoints', max_to_keep=3)
    restored = checkpointer.restore(abstract_state)      # None in a fresh directory
    checkpointer.save(step, state, input_state=iterator.get_state())
    checkpointer.close()

A checkpoint counts only when its manifest lists every file with size and SHA-256; a restore verifies every byte and
falls back from a damaged checkpoint to the one before it. A checkpoint holds unpadded arrays with all layers of a stack
in one dim, so any mesh, stage count or expert-parallel degree can restore it.

Read checkpointer.py (what a program calls), checkpoint_directory.py (names, deleting), verifying.py (choosing),
manifest.py (digests), orbax_arrays.py (array files).
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.checkpoints.checkpointer import Checkpointer
