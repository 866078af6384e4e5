"""Evaluation counts every token of a set once, gives the same in and beside training, and can follow a running job."""

import math
import os
from pathlib import Path
import shutil
import signal
import threading
import time

from etils import epath
import jax
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.config import resolve
from spmd_tasks.distributed import EmergencyExit
from spmd_tasks.programs.eval import evaluate
from tests import binary
from tests.programs.small_jobs import SMALL
from tests.programs.small_runs import only_checkpoints, saved_arrays

LAST_STEP = 20
EMA = 'task.eval_with_ema=true'


def reference_metrics(weights, name: str) -> dict[str, float]:
  """Averages over all tokens of an eval set, in float64, from logits of one row at a time on one device."""
  # Text is packed into the same rows whatever the batch; synthetic rows belong to their batch.
  job = resolve(SMALL, ['eval_inputs.ragged.batch_size=1']).build()
  logits_of = jax.jit(lambda weights, row: job.task.model.apply({'params': weights}, row, train=False)['logits'])
  losses, z_losses, is_correct = [], [], []
  for batch in job.eval_inputs[name].make_iterator():
    for row in range(len(batch['ids'])):
      logits = np.asarray(
        logits_of(weights, {key: value[row : row + 1] for key, value in batch.items()})[0], np.float64
      )
      labels, counts = batch['labels'][row], batch['weights'][row] > 0
      log_normalizer = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
      losses += list((log_normalizer - logits[np.arange(len(logits)), labels])[counts])
      z_losses += list(1e-4 * np.square(log_normalizer)[counts])
      is_correct += list((logits.argmax(-1) == labels)[counts])
  cross_entropy = float(np.mean(losses))
  return {
    'loss': cross_entropy + float(np.mean(z_losses)),
    'cross_entropy': cross_entropy,
    'accuracy': float(np.mean(is_correct)),
    'perplexity': math.exp(cross_entropy),
    'num_tokens': len(losses),
  }


def eval_lines(directory: Path, name: str) -> list[dict]:
  return binary.metric_lines(directory / 'eval' / name)


def run_eval(directory: Path, *flags: object) -> int:
  return binary.run_in_process('--exp', SMALL, '--mode', 'eval', '--job_log_dir', directory, *flags)


def assert_metrics_agree(actual: dict, expected: dict, rtol: float) -> None:
  for name in ('loss', 'cross_entropy', 'accuracy', 'perplexity'):
    np.testing.assert_allclose(actual[name], expected[name], rtol=rtol, err_msg=name)


@pytest.mark.parametrize('name', ['valid', 'ragged'])
def test_metrics_are_averages_over_all_tokens(finished_job, name):
  expected = reference_metrics(saved_arrays(finished_job, LAST_STEP).weights, name)
  line = next(line for line in eval_lines(finished_job, name) if line['step'] == LAST_STEP)
  # Sums of about a hundred float32 losses, each off by a few units in the last place.
  assert_metrics_agree(line, expected, rtol=1e-6)
  assert line['num_batches'] == {'valid': 2, 'ragged': 4}[name]
  assert expected['num_tokens'] < line['num_batches'] * 64 if name == 'ragged' else expected['num_tokens'] == 128


def test_an_eval_set_without_an_end_is_cut_at_a_limit_that_is_named(finished_job, tmp_path, caplog):
  """Its first three batches are those of the set with an end, whose rows are in order."""
  directory = only_checkpoints(finished_job, tmp_path / 'job', (8,))
  endless = ['eval_inputs.ragged.num_epochs=None', 'eval_inputs.ragged.shuffle=False', 'eval_limit_batches=3']
  assert run_eval(directory, *(flag for each in endless for flag in ('--set', each))) == exit_codes.OK
  (line,) = eval_lines(directory, 'ragged')
  assert line['num_batches'] == 3
  assert "eval set 'ragged' has more than eval_limit_batches = 3 batches" in caplog.text
  other = only_checkpoints(finished_job, tmp_path / 'other', (8,))
  assert run_eval(other, '--set', 'eval_inputs.ragged.max_batches=3') == exit_codes.OK
  assert_metrics_agree(line, eval_lines(other, 'ragged')[0], rtol=1e-6)


def test_eval_of_a_checkpoint_gives_what_training_gave(finished_job, tmp_path):
  directory = only_checkpoints(finished_job, tmp_path / 'job', (8, 16))
  assert run_eval(directory, '--checkpoint_step', 8) == exit_codes.OK
  assert run_eval(directory) == exit_codes.OK  # the newest
  for name in ('valid', 'ragged'):
    lines = eval_lines(directory, name)
    in_training = eval_lines(finished_job, name)
    assert [line['step'] for line in lines] == [8, 16]
    for line, expected in zip(lines, in_training):
      assert line.keys() == expected.keys()
      assert_metrics_agree(line, expected, rtol=1e-6)


def test_ids_outside_the_vocabulary_make_an_eval_nan_and_say_so(finished_job, tmp_path, caplog):
  directory = only_checkpoints(finished_job, tmp_path / 'job')
  assert run_eval(directory, '--set', 'eval_inputs.valid.vocab_size=1000') == exit_codes.OK
  assert eval_lines(directory, 'valid')[0]['loss'] == 'nan'
  assert math.isfinite(eval_lines(directory, 'ragged')[0]['loss'])
  assert "eval set 'valid': the loss of step 20 is nan: look for ids or labels outside [0, vocab_size)" in caplog.text


def test_averaged_weights(finished_job, tmp_path):
  directory = only_checkpoints(finished_job, tmp_path / 'job')
  assert run_eval(directory, '--set', EMA, '--accept_config_changes') == exit_codes.OK
  saved = saved_arrays(finished_job, LAST_STEP)
  expected = reference_metrics(saved.learner.ema_weights, 'ragged')
  (line,) = eval_lines(directory, 'ragged')
  assert_metrics_agree(line, expected, rtol=1e-6)
  raw = eval_lines(finished_job, 'ragged')[-1]
  assert abs(line['loss'] / raw['loss'] - 1) > 1e-3  # the average is behind: the two are told apart


def test_watch_follows_new_checkpoints_and_ends_with_the_last(finished_job, tmp_path):
  """The job is played by a thread that moves finished checkpoints in, once the one before has been evaluated."""
  directory = tmp_path / 'job'
  steps = (4, 10, LAST_STEP)

  def play_job():
    for number, step in enumerate(steps):
      while number and len(eval_lines(directory, 'ragged')) < number:
        time.sleep(0.01)
      only_checkpoints(finished_job, tmp_path / f'checkpoint{step}', (step,))
      (directory / 'checkpoints').mkdir(parents=True, exist_ok=True)
      name = f'checkpoint_{step:08d}'
      (tmp_path / f'checkpoint{step}' / 'checkpoints' / name).rename(directory / 'checkpoints' / name)

  job = threading.Thread(target=play_job, daemon=True)
  job.start()
  job_log_dir = epath.Path(directory)
  code = evaluate(resolve(SMALL).build(), job_log_dir, emergency=EmergencyExit(), watch=True, poll_s=0.02)
  job.join()
  assert code == exit_codes.OK
  assert [line['step'] for line in eval_lines(directory, 'ragged')] == list(steps)


def test_sigterm_ends_an_eval_job_with_the_code_of_preemption(finished_job, tmp_path):
  directory = only_checkpoints(finished_job, tmp_path / 'job', (8,))

  def preempt():
    while not eval_lines(directory, 'ragged'):
      time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=preempt, daemon=True).start()
  code = evaluate(resolve(SMALL).build(), epath.Path(directory), emergency=EmergencyExit(), watch=True, poll_s=0.02)
  assert code == exit_codes.PREEMPTED
  assert [line['step'] for line in eval_lines(directory, 'ragged')] == [8]


def test_a_step_that_the_file_has_is_shown_and_not_recorded_again(finished_job, tmp_path, capsys):
  directory = only_checkpoints(finished_job, tmp_path / 'job', (8, 16))
  shutil.copytree(finished_job / 'eval' / 'valid', directory / 'eval' / 'valid')
  before = (directory / 'eval' / 'valid' / 'metrics.jsonl').read_text()
  assert run_eval(directory, '--checkpoint_step', 8) == exit_codes.OK
  assert (directory / 'eval' / 'valid' / 'metrics.jsonl').read_text() == before
  assert [line['step'] for line in eval_lines(directory, 'ragged')] == [8]
  shown = {line.split()[4]: line for line in capsys.readouterr().err.splitlines() if ' eval ' in line}
  assert 'not recorded' in shown['valid:']
  assert 'not recorded' not in shown['ragged:']


def test_an_eval_job_of_its_own_reads_another_jobs_weights(finished_job, tmp_path, capfd):
  """Saved on 8 devices, evaluated on 1 as in that job's own directory, raw and averaged; nothing is written there."""
  before = sorted(finished_job.rglob('*'))
  own = tmp_path / 'own'
  flags = ('--exp', SMALL, '--mode', 'eval', '--job_log_dir', own, '--set', f'init_from={finished_job}')
  one = ('--num_fake_devices', 1, '--ici_mesh_shape', '1,1,1')
  finished = binary.run_binary(*flags, *one, '--set', 'init_from_step=16')
  assert finished.returncode == exit_codes.OK, finished.stderr
  place = f'{finished_job}/checkpoints/checkpoint_00000016'
  assert f'step 16 of {place}  eval ragged: ' in finished.stderr
  assert binary.run_in_process(*flags) == exit_codes.OK  # the newest; --watch ends, as no training job has begun here
  assert binary.run_in_process(*flags, '--watch') == exit_codes.OK
  assert 'not recorded: metrics.jsonl has this step' in capfd.readouterr().err
  lines, expected = eval_lines(own, 'ragged'), {line['step']: line for line in eval_lines(finished_job, 'ragged')}
  assert [line['step'] for line in lines] == [16, LAST_STEP]
  assert lines[0]['weights_from'] == place
  for line in lines:
    assert_metrics_agree(line, expected[line['step']], rtol=1e-6)

  averaged = only_checkpoints(finished_job, tmp_path / 'averaged')
  assert run_eval(averaged, '--set', EMA, '--accept_config_changes') == exit_codes.OK
  assert binary.run_in_process(*flags, '--job_log_dir', tmp_path / 'ema', '--set', EMA) == exit_codes.OK
  (line,) = eval_lines(tmp_path / 'ema', 'ragged')
  assert_metrics_agree(line, eval_lines(averaged, 'ragged')[0], rtol=1e-6)
  assert sorted(finished_job.rglob('*')) == before


def test_weights_of_two_places_are_two_records_of_a_step(finished_job, tmp_path):
  other = only_checkpoints(finished_job, tmp_path / 'other')
  for place in (finished_job, other, other):
    assert run_eval(tmp_path / 'own', '--set', f'init_from={place}') == exit_codes.OK
  lines = eval_lines(tmp_path / 'own', 'ragged')
  assert [line['weights_from'] for line in lines] == [
    f'{place}/checkpoints/checkpoint_00000020' for place in (finished_job, other)
  ]


@pytest.mark.parametrize(
  'flags, words',
  [
    (
      (),
      'has no checkpoint to restore weights from: correct the path, train first, or name weights by --set init_from',
    ),
    (('--set', 'init_from={job}/nowhere'), 'nowhere/checkpoints holds no checkpoint of a job: name the --job_log_dir'),
    (('--set', 'init_from={job}', '--set', 'init_from_step=7'), 'no checkpoint of step 7, only steps [2, 4'),
    (('--set', 'init_from={job}', '--checkpoint_step', 8), '--checkpoint_step names one of the job itself, init_from'),
    (('--set', 'init_from={job}', '--set', 'num_layers=2'), 'Give it the layers and sizes of the job'),
  ],
)
def test_a_wrong_place_of_weights_is_named_in_one_sentence(finished_job, tmp_path, capfd, flags, words):
  flags = [str(flag).format(job=finished_job) for flag in flags]
  assert run_eval(tmp_path / 'own', *flags) == exit_codes.USAGE
  assert words in capfd.readouterr().err
  assert not (tmp_path / 'own' / 'eval').exists()
