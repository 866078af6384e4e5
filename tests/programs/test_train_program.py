"""What a training job leaves in its directory and shows on the way."""

import fcntl
import json
import os
import pty
import re
import struct
import termios
import threading

import numpy as np
import pytest

from spmd_tasks.config import resolve, to_json
from spmd_tasks.programs.goodput import CAUSES
from tests import binary
from tests.programs.small_jobs import SMALL

NUM_STEPS = 20
EVAL_METRICS = {'step', 'time', 'loss', 'cross_entropy', 'perplexity', 'z_loss', 'accuracy'}
EVERY_STEP = EVAL_METRICS | {'loss_weight', 'grad_norm', 'weight_norm', 'learning_rate', 'num_skipped_steps'}
EVERY_STEP |= {'padding_waste', 'num_compilations', 'goodput', 'wall_seconds', *(f'badput/{each}' for each in CAUSES)}
# Not of the first step, which compiles.
RATES = {'steps_per_second', 'tokens_per_second', 'flops_per_second', 'host_wait_fraction'}


def test_one_line_of_metrics_per_logged_step(finished_job):
  lines = binary.metric_lines(finished_job)
  assert [line['step'] for line in lines] == list(range(1, NUM_STEPS + 1))
  for line in lines:
    assert line.keys() == EVERY_STEP | (RATES if line['step'] > 1 else set())


def test_values_are_those_of_the_step(finished_job):
  for line in binary.metric_lines(finished_job):
    assert line['loss_weight'] == 64  # every token of 8 rows of 8
    assert line['learning_rate'] == np.float32(0.01)
    assert line['num_skipped_steps'] == 0
    np.testing.assert_allclose(line['goodput'] + sum(line[f'badput/{cause}'] for cause in CAUSES), 1)
    np.testing.assert_allclose(line['perplexity'], np.exp(line['cross_entropy']), rtol=1e-12)
    np.testing.assert_allclose(line['loss'], line['cross_entropy'] + line['z_loss'], rtol=1e-6)
    if line['step'] > 1:
      np.testing.assert_allclose(line['tokens_per_second'], 64 * line['steps_per_second'])
      assert 0 <= line['host_wait_fraction'] <= 1
  losses = list(binary.column(finished_job, 'loss').values())
  assert abs(losses[0] - np.log(259)) < 0.6  # about uniform at first
  assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2  # and it learns


def test_every_eval_set_has_its_own_metrics(finished_job):
  for name in ('valid', 'ragged'):
    lines = binary.metric_lines(finished_job / 'eval' / name)
    assert [line['step'] for line in lines] == [8, 16, NUM_STEPS]
    for line in lines:
      assert line.keys() == {*EVAL_METRICS, 'num_batches'}


def test_the_resolved_config_is_beside_the_run(finished_job):
  saved = json.loads((finished_job / 'config.json').read_text())
  assert saved.pop('environment')['jax_enable_x64'] is False
  assert len(saved.pop('signature')) == 64
  assert saved == to_json(resolve(SMALL))
  assert saved['config']['num_train_steps'] == NUM_STEPS
  assert saved['config']['task.learner.ema_decay'] == 0.9


def test_nothing_is_compiled_after_the_first_step(finished_job):
  """Ten saves and three evals included."""
  assert set(binary.column(finished_job, 'num_compilations').values()) == {0}


def test_logs_at_its_interval_at_the_first_and_at_the_last_step(finished_job, tmp_path, capsys):
  directory = tmp_path / 'job'
  flags = ('--exp', SMALL, '--mode', 'train', '--job_log_dir', directory)
  intervals = ('--set', 'log_every_steps=4', '--set', 'checkpoint_every=None', '--set', 'eval_every_steps=None')
  assert binary.run_in_process(*flags, *intervals, '--num_train_steps', 10) == 0
  lines = binary.metric_lines(directory)
  expected = binary.column(finished_job, 'loss')
  assert {line['step']: line['loss'] for line in lines} == {step: expected[step] for step in (1, 4, 8, 10)}
  assert binary.checkpoint_names(directory) == ['checkpoint_00000010']  # always at the end, and an eval
  assert [line['step'] for line in binary.metric_lines(directory / 'eval' / 'valid')] == [10]
  shown = capsys.readouterr().err
  assert re.findall(r'^\d\d:\d\d:\d\d step (\d+)/10  loss \d', shown, re.MULTILINE) == ['1', '4', '8', '10']
  assert '\r' not in shown


def run_on_a_terminal(*flags: object) -> tuple[int, str]:
  """Exit code and what the binary wrote to a terminal of 120 columns that is its stderr."""
  ours, its = pty.openpty()
  fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 120, 0, 0))
  process = binary.start_binary(*flags, stderr=its)
  os.close(its)
  written = []

  def read():
    # Reading a terminal that nobody has open any more is an error on Linux.
    while True:
      try:
        data = os.read(ours, 4096)
      except OSError:
        return
      written.append(data)

  reader = threading.Thread(target=read)
  reader.start()
  finished = binary.finish(process)
  reader.join()
  os.close(ours)
  return finished.returncode, b''.join(written).decode()


@pytest.mark.slow
def test_a_bar_on_a_terminal(tmp_path):
  directory = tmp_path / 'job'
  flags = ('--exp', SMALL, '--mode', 'train', '--job_log_dir', directory, '--num_fake_devices', 8)
  # Slow batches, since the bar is redrawn five times a second only.
  slowly = ('--set', 'train_input.seconds_per_batch=0.1', '--num_train_steps', 10)
  code, shown = run_on_a_terminal(*flags, *slowly)
  assert code == 0, shown
  bars = [text for text in shown.split('\r') if re.search(r'\d+/10 \[', text)]
  done = [int(re.search(r'(\d+)/10 \[', text)[1]) for text in bars]
  assert done[-1] == 10
  assert len(set(done)) > 3  # it moves
  assert done == sorted(done)
  assert re.search(r'10/10 .*loss \d\.\d+', bars[-1])
  assert not re.search(r'step \d+/10', shown)
  assert 'eval valid: ' in shown  # scrolls above the bar
