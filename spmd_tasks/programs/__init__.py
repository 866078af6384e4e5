"""Runs the modes of the binary: one module for each --mode, and the modules that they share.

    from spmd_tasks.programs import train

    code = train.train(job, job_log_dir, emergency=EmergencyExit(), begun=time.time(), config_json='{}')

`train`, `eval`, `decode` and `preview` are modules. Each has one function that takes a built experiment (`Job`), runs
it to its end and returns an exit code. Read `train.py` first, from top to bottom: it opens a job, restores or
initializes its state, makes its steps and ends; its hooks do everything else, in the order of `job_hooks`. Then read
`hooks.py` (TrainHook, TrainRun, and the hooks: progress, metrics, checkpoints, evals) and `training_loop.py` (why the
host launches a step before it knows how the last one ended). Beside them are `restore.py` and `restored_weights.py`
(what a program starts from) and `job_directory.py` (one running job per directory; a lost job never restarts unasked).

The other names below are imported when they are first used, so that a mode imports no more than it runs.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.programs import decode, eval, preview, train
