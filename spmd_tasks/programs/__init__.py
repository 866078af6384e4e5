"""Runs the modes of the binary: one module for each --mode, and the modules that they share.

    from spmd_tasks.programs import train

    code = train.train(job, job_log_dir, emergency=EmergencyExit(), clock=StartupClock(), config_json='{}')

`train`, `eval`, `decode` and `preview` are modules. Each has one function that takes a built experiment (`Job`), runs
it to its end and returns an exit code. Read `train.py` first, from top to bottom: it restores or initialises a state,
iterates over the outcomes of steps, and logs, saves and evaluates in the body of that loop. Then read
`training_loop.py` (why the host launches a step before it knows how the last one ended), `interval_actions.py` (what
the loop's body calls at intervals), `early_end.py` (who ends it early), `eval.py` (Evaluator), `restore.py` (what a
program starts from), `saved_steps.py` (a lost job never starts again unasked), `job_directory.py` (one running job a
directory), `goodput.py`, `timing.py` and `progress.py` (what a job reports).

The other names below are imported when they are first used, so that a mode imports no more than it runs.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from spmd_tasks.programs import decode, eval, preview, train
  from spmd_tasks.programs.eval import Evaluator
  from spmd_tasks.programs.job_directory import claim
  from spmd_tasks.programs.restore import restore_evaluation_variables
  from spmd_tasks.programs.saved_steps import SavedSteps
  from spmd_tasks.programs.timing import StartupClock
  from spmd_tasks.programs.training_loop import TrainingDivergedError, TrainingInputEndedError, TrainingLoop

__all__ = [
  'Evaluator',
  'SavedSteps',
  'StartupClock',
  'TrainingDivergedError',
  'TrainingInputEndedError',
  'TrainingLoop',
  'claim',
  'decode',
  'eval',
  'preview',
  'restore_evaluation_variables',
  'train',
]
