"""Saves and restores a tree of sharded arrays: asynchronous, digested, independent of mesh and number of processes.

    checkpointer = Checkpointer(job_log_dir / 'checkpoints')
    restored = checkpointer.restore(abstract_state)      # None in a fresh directory
    checkpointer.save(step, state, input_state=iterator.get_state())
    checkpointer.close()

A checkpoint is complete once it has a manifest, which lists every file. A restore verifies the files that it reads, and
falls back from a damaged checkpoint to the previous one. Arrays are saved unpadded, with all layers of a stack in one
dim, so they can be restored on any mesh, with any number of stages or degree of expert parallelism.

Read checkpointer.py (the API), arrays.py (array files), checkpoint_directory.py (names, deletion), manifest.py
(digests), verifying.py (which checkpoint is restored), store_directory.py (object stores).
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.checkpoints.checkpoint_directory import Retention, SaveRecord
  from spmd_tasks.checkpoints.checkpointer import Checkpointer
