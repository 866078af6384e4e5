"""Hooks one by one on a run without a model, their declared order, and how an experiment adds its own."""

import types

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.programs.train import job_hooks
from tests import binary
from tests.programs.small_jobs import Small


class Needs(TrainHook):
  """Needs the state after some steps."""

  def __init__(self, *steps):
    self._steps = steps

  def needs_state(self, step):
    return step in self._steps


def test_the_state_is_there_only_where_a_hook_has_asked_for_it(tmp_path):
  job = types.SimpleNamespace(experiment=types.SimpleNamespace(num_train_steps=20))
  given = dict.fromkeys(('model', 'iterator', 'goodput', 'guard', 'stack')) | {'hooks': (Needs(2), Needs(4))}
  run = TrainRun(job=job, job_log_dir=tmp_path, **given)
  for step in (1, 2, 3, 4, 5, 20):
    run.loop = types.SimpleNamespace(step=step, state='a state', is_running=True)
    assert run.is_awaited(step) == (step in (2, 4, 20))
    if run.is_awaited(step):
      assert run.state == 'a state'
    else:
      with pytest.raises(RuntimeError, match='needs_state'):
        run.state  # noqa: B018


class Recorder(TrainHook):
  """Notes in which order its methods are called."""

  def __init__(self):
    self.calls = []

  def prepare(self, run):
    assert not run.job_log_dir.exists()
    self.calls.append('prepare')

  def open(self, run):
    self.calls.append('open')
    run.stack.callback(self.calls.append, 'close')

  def restore(self, run, newest_checkpoint):
    self.calls.append(f'restore {newest_checkpoint}')

  def start(self, run):
    self.calls.append(f'start {run.first_step}')

  def before_loop(self, run):
    self.calls.append('before_loop')

  def after_first_step(self, run):
    self.calls.append('after_first_step')

  def after_step(self, run, outcome):
    evals = ' with evals' if run.evals.step == outcome.step else ''
    self.calls.append(f'after_step {outcome.step}{evals}')
    if outcome.step == 3:
      run.end_early('three are enough')

  def after_loop(self, run):
    self.calls.append(f'after_loop {run.step}')

  def finish(self, run):
    self.calls.append('finish with evals' if run.evals.step == run.step else 'finish')


RECORDER = Recorder()


class Recorded(Small):
  """Its hook is seen by the test, as the job runs in this process."""

  eval_every_steps = 2

  def hooks(self):
    return [RECORDER]


def test_a_job_calls_the_hook_of_its_experiment_in_the_order_of_its_life(tmp_path, capfd):
  flags = ('--exp', f'{__name__}.Recorded', '--mode', 'train', '--job_log_dir', tmp_path / 'job')
  assert binary.run_in_process(*flags) == exit_codes.OK, capfd.readouterr().err
  assert RECORDER.calls == [
    'prepare',
    'open',
    'restore -1',
    'start 0',
    'before_loop',
    'after_first_step',
    'after_step 1',
    'after_step 2 with evals',
    'after_step 3',
    'after_loop 3',
    'finish with evals',
    'close',
  ]
  assert 'Ended after step 3 of 20: three are enough.' in capfd.readouterr().err
  assert binary.checkpoint_names(tmp_path / 'job')[-1] == 'checkpoint_00000003'


def job_with(hook, **settings):
  own = dict.fromkeys(('sample_every_steps', 'profile_steps')) | {'trackers': ('tensorboard',)}
  experiment = types.SimpleNamespace(hooks=lambda: [hook], **own | settings)
  return types.SimpleNamespace(name='X', train_input=None, eval_inputs={}, experiment=experiment)


def test_the_hooks_of_an_experiment_come_after_evals_and_before_the_end_is_reported():
  names = [type(hook).__name__ for hook in job_hooks(job_with(Needs()))]
  assert names[0] == 'CountGoodput'
  assert names.index('SaveCheckpoints') < names.index('Evaluate') < names.index('Needs')
  assert names[-1] == 'ReportEnd'
  asked = job_hooks(job_with(Needs(), sample_every_steps=2, profile_steps=(0, 1)))
  few = [type(hook).__name__ for hook in asked if type(hook).__name__ not in names[:-3]]
  assert few == ['Sample', 'Needs', 'Profile', 'ReportEnd']
