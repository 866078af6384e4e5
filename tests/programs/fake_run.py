"""A training run for the tests of single hooks: nothing is compiled, no step is made, and messages are kept."""

import contextlib
import types

from spmd_tasks.programs.goodput import Goodput
from spmd_tasks.programs.hooks import NewestEvals, TrainRun
from spmd_tasks.programs.training_loop import Outcome


def fake_run(job_log_dir, hooks, *, eval_inputs=(), step=0, **fields):
  """A TrainRun whose experiment has `fields`; `run.messages` are its messages, `run.loop` is a plain namespace."""
  experiment = types.SimpleNamespace(**{'first_step_timeout_s': 60.0, 'num_train_steps': 20} | fields)
  run = TrainRun(
    job=types.SimpleNamespace(experiment=experiment, eval_inputs=dict.fromkeys(eval_inputs)),
    job_log_dir=job_log_dir,
    model=None,
    hooks=hooks,
    goodput=Goodput(None, begun=0.0),
    guard=types.SimpleNamespace(should_stop=lambda: False),
    stack=contextlib.ExitStack(),
  )
  run.watchdog = types.SimpleNamespace(allow=lambda *args: contextlib.nullcontext())
  run.loop = types.SimpleNamespace(step=step, state=f'state {step}', input_state=None, is_running=False)
  run.messages = []
  run.progress = types.SimpleNamespace(message=run.messages.append)
  run.first_step = step
  return run


def outcome_at(run, step, **evals):
  """The outcome of `step`, to which `run` has come; with `evals`, metrics by eval set, as if there was an eval."""
  run.loop.step = step
  if evals:
    run.evals = NewestEvals(step, evals, 1.0)
  return Outcome(step, False, {'loss': 1.5})
