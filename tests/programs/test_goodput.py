"""Every second of a job has one cause, over all its processes: with a clock that the test sets, and in a killed job."""

import json
import random
import time

from etils import epath
import pytest

from spmd_tasks.programs.goodput import CAUSES, Goodput, process_start_time
from spmd_tasks.programs.job_directory import GOODPUT_FILE
from tests import binary
from tests.programs.small_runs import train


class Life:
  """One process of a job: a ledger and the clock that it reads."""

  def __init__(self, directory, *, begun, first_step, startup=0.0):
    self.time = begun
    self.goodput = Goodput(epath.Path(directory), begun=begun, now=lambda: self.time)
    self.step = first_step
    self.waited = 0.0
    self.time += startup
    self.goodput.resume(first_step)

  def spend(self, cause, seconds):
    with self.goodput.spend(cause):
      self.time += seconds

  def steps(self, count, *, seconds, waited=0.0, is_skipped=False):
    self.goodput.switch('steps')
    for _ in range(count):
      self.time += seconds
      self.waited += waited
      self.step += not is_skipped
      self.goodput.step(self.step, is_skipped=is_skipped, seconds_waited=self.waited)

  def seconds(self):
    """Of each cause, those that lost nothing left out."""
    metrics = self.goodput.metrics()
    shares = {'steps': metrics['goodput']} | {cause: metrics[f'badput/{cause}'] for cause in CAUSES}
    return {cause: round(share * metrics['wall_seconds'], 6) for cause, share in shares.items() if share > 1e-9}


def test_every_second_of_one_process_has_its_cause(tmp_path):
  life = Life(tmp_path, begun=1000.0, first_step=0, startup=7)
  life.spend('compilation', 20)
  life.steps(10, seconds=2, waited=0.5)
  life.steps(2, seconds=3, is_skipped=True)
  life.spend('checkpoint_save', 4)
  life.spend('evaluation', 5)
  assert life.seconds() == {
    'program_startup': 7,
    'compilation': 20,
    'steps': 15,
    'data_loading': 5,
    'skipped_steps': 6,
    'checkpoint_save': 4,
    'evaluation': 5,
  }
  assert life.goodput.metrics()['wall_seconds'] == life.time - 1000
  assert life.goodput.end() == (
    'goodput 24.2% of 62 s; lost: compilation 32.3%, program_startup 11.3%, skipped_steps 9.7%, data_loading 8.1%, '
    'evaluation 8.1%, checkpoint_save 6.5%'
  )


@pytest.mark.parametrize('restored, wasted', [(10, 14.0), (7, 20.0), (0, 34.0)])
def test_a_restart_counts_the_steps_made_again_and_the_time_without_a_process(tmp_path, restored, wasted):
  """Killed after step 17, two seconds into the next: steps 1 to 10 took 2 s each, the others 1 s less a wait."""
  life = Life(tmp_path, begun=1000.0, first_step=0)
  life.steps(10, seconds=2)
  life.goodput.mark(10)
  life.steps(7, seconds=2, waited=0.5)
  life.time += 3.5
  life.goodput.close()
  killed = life.time

  again = Life(tmp_path, begun=killed + 60, first_step=restored, startup=3)
  seconds = again.seconds()
  assert seconds.pop('infrastructure_recovery') == 60
  assert seconds.pop('program_startup') == 3
  assert seconds.pop('data_loading') == 3.5
  assert seconds.pop('wasted_progress') == pytest.approx(wasted)
  assert seconds.pop('steps', 0.0) == pytest.approx(34 - wasted)
  assert not seconds
  assert again.goodput.metrics()['wall_seconds'] == pytest.approx(again.time - 1000)


def test_a_process_that_made_no_step_wasted_no_progress(tmp_path):
  life = Life(tmp_path, begun=1000.0, first_step=0, startup=7)
  life.goodput.switch('steps')
  life.time += 106  # in its first step, or waiting for its first batch
  life.goodput.close()
  again = Life(tmp_path, begun=life.time, first_step=0)
  again.steps(1, seconds=2)
  assert again.seconds() == {'program_startup': 113, 'steps': 2}


def test_shares_add_up_whatever_happens(tmp_path):
  rng = random.Random(0)
  begun = now = 5000.0
  saved = 0
  for _ in range(6):
    life = Life(tmp_path, begun=now, first_step=saved, startup=rng.uniform(1, 9))
    for _ in range(rng.randint(0, 12)):
      life.steps(rng.randint(1, 5), seconds=rng.uniform(1, 3), waited=rng.uniform(0, 4), is_skipped=rng.random() < 0.2)
      life.spend(rng.choice(['evaluation', 'checkpoint_save']), rng.uniform(0, 5))
      if rng.random() < 0.5:
        saved = life.step
        life.goodput.mark(saved)
    metrics = life.goodput.metrics()
    assert metrics['wall_seconds'] == pytest.approx(life.time - begun)
    assert metrics['goodput'] + sum(metrics[f'badput/{cause}'] for cause in CAUSES) == pytest.approx(1)
    assert min(metrics.values()) >= -1e-9
    life.goodput.close()
    now = life.time + rng.uniform(0, 30)


BROKEN = ['{', '{"format": 2}', '\x00' * 40]


@pytest.mark.parametrize('content', BROKEN, ids=lambda content: content[:12])
def test_a_record_that_cannot_be_read_is_reported_and_counting_begins_anew(tmp_path, content, caplog):
  (tmp_path / GOODPUT_FILE).write_text(content)
  life = Life(tmp_path, begun=1000.0, first_step=30)
  life.steps(2, seconds=1)
  assert life.seconds() == {'steps': 2}
  assert 'goodput counts from now on' in caplog.text
  assert json.loads((tmp_path / GOODPUT_FILE).read_text())['marks'] == {'30': 0.0}


def test_a_clock_that_is_set_counts_for_nothing(monkeypatch):
  goodput = Goodput(None, begun=process_start_time())
  expected = goodput.metrics()['wall_seconds']
  monkeypatch.setattr(time, 'time', lambda: 4e9)
  assert goodput.metrics()['wall_seconds'] < expected + 10


def test_a_job_that_python_runs_counts_from_its_own_start(tmp_path):
  """As one of a sweep or a notebook does: the process is older."""
  started = time.monotonic()
  assert train(tmp_path / 'job', '--num_train_steps', 2, '--set', 'eval_every_steps=None') == 0
  elapsed = time.monotonic() - started
  total = json.loads((tmp_path / 'job' / 'startup.json').read_text())['total']
  assert 0 < total < elapsed
  assert 0 < binary.metric_lines(tmp_path / 'job')[-1]['wall_seconds'] < elapsed
