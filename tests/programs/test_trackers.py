"""A job's metrics also go to Weights & Biases and MLflow, and a job that goes on continues the same run."""

from collections.abc import Iterator
import json
import struct
import warnings

import numpy as np
import PIL.Image
import pytest

from spmd_tasks import exit_codes
from tests.binary import metric_lines, run_in_process
from tests.programs.media_experiment import PIXELS

EXPERIMENT = 'tests.programs.media_experiment.WithPictures'
JOB = ('--exp', EXPERIMENT, '--mode', 'train', '--set', 'eval_every_steps=10', '--set', 'checkpoint_every=10')
BOTH = "trackers=('wandb', 'mlflow')"


def train(directory, trackers: str, *num_steps: int) -> None:
  for steps in num_steps:
    flags = ('--job_log_dir', directory, '--set', trackers, '--num_train_steps', steps)
    assert run_in_process(*JOB, *flags) == exit_codes.OK


@pytest.fixture(scope='module')
def tracked(tmp_path_factory):
  """The directory of a job of 10 steps, which then went on to 14, with both services."""
  for name in ('wandb', 'mlflow'):
    pytest.importorskip(name)
  directory = tmp_path_factory.mktemp('tracked')
  with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
    warnings.simplefilter('default')  # MLflow's own
    for name, value in (
      *(('WANDB_MODE', 'offline'), ('WANDB_SILENT', 'true'), ('MLFLOW_ALLOW_FILE_STORE', 'true')),
      ('MLFLOW_TRACKING_URI', (directory / 'mlruns').as_uri()),
    ):
      patch.setenv(name, value)
    train(directory / 'job', BOTH, 10, 14)
  return directory


def losses_of(directory) -> tuple[dict[int, float], dict[int, float]]:
  """By step, of training and of the eval."""
  return tuple(
    {line['step']: line['loss'] for line in metric_lines(path)} for path in (directory, directory / 'eval' / 'valid')
  )


def test_a_tracker_that_is_not_known_is_refused(tmp_path, capsys):
  assert run_in_process(*JOB, '--job_log_dir', tmp_path / 'job', '--set', "trackers=('comet',)") == exit_codes.USAGE
  assert "has 'comet': the known ones are tensorboard, wandb, mlflow" in capsys.readouterr().err
  assert not (tmp_path / 'job').exists()


def records(data: bytes) -> Iterator[bytes]:
  """The records of a file of W&B: LevelDB's log format (blocks of 32 KiB) after 7 bytes of its own."""
  at, record = 7, b''
  while at + 7 <= len(data):
    if (left := 32768 - at % 32768) < 7:
      at += left
      continue
    _, length, kind = struct.unpack_from('<IHB', data, at)
    record += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):  # whole, or the last part
      yield record
      record = b''


def test_offline_runs_of_wandb(tracked):
  from wandb.proto.wandb_internal_pb2 import Record

  losses, eval_losses, ids, config, with_picture, with_eval_picture = {}, {}, [], {}, [], []
  files = sorted((tracked / 'job' / 'wandb').glob('offline-run-*/*.wandb'))
  for file in files:
    for record in map(Record.FromString, records(file.read_bytes())):
      if record.WhichOneof('record_type') == 'run':
        ids.append(record.run.run_id)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
      if record.WhichOneof('record_type') == 'history':
        row = {item.key or '/'.join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        with_picture += [record.history.step.num] * any(name.startswith('pictures/noise') for name in row)
        with_eval_picture += [record.history.step.num] * any(name.startswith('eval/valid/ids') for name in row)
        losses |= {record.history.step.num: row['loss']} if 'loss' in row else {}
        eval_losses |= {record.history.step.num: row['eval/valid/loss']} if 'eval/valid/loss' in row else {}
  assert (len(files), len(set(ids))) == (2, 1)
  assert config['batch_size'] == 8
  assert (losses, eval_losses) == losses_of(tracked / 'job')
  media = files[0].parent / 'files' / 'media'
  pictures = sorted((media / 'images' / 'pictures').glob('noise_*.png'))
  assert (with_picture, len(pictures)) == ([3, 6, 9, 12], 3)
  assert with_eval_picture == sorted(eval_losses)
  np.testing.assert_array_equal(np.asarray(PIL.Image.open(pictures[0])), PIXELS)
  tables = sorted((media / 'table').glob('answers_*.json'))
  assert json.loads(tables[0].read_text())['data'] == [['a|b', 0.5, True], ['c', None, None]]


@pytest.mark.filterwarnings('default')  # its own
def test_runs_of_mlflow_in_files(tracked, monkeypatch):
  import mlflow

  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  client = mlflow.MlflowClient((tracked / 'mlruns').as_uri())
  (run,) = client.search_runs([client.get_experiment_by_name('spmd_tasks').experiment_id])
  assert run.info.status == 'FINISHED'
  assert run.data.params['batch_size'] == '8'
  histories = (client.get_metric_history(run.info.run_id, name) for name in ('loss', 'eval/valid/loss'))
  assert tuple({each.step: each.value for each in history} for history in histories) == losses_of(tracked / 'job')
  artifacts = [file.path for file in client.list_artifacts(run.info.run_id, 'media/pictures/noise')]
  assert artifacts == [f'media/pictures/noise/step_{step:08d}.png' for step in (3, 6, 9, 12)]
  of_eval = [file.path for file in client.list_artifacts(run.info.run_id, 'media/eval/valid/ids')]
  assert of_eval == [f'media/eval/valid/ids/step_{step:08d}.png' for step in sorted(losses_of(tracked / 'job')[1])]


@pytest.mark.filterwarnings('default')
def test_services_that_fail_end_no_job(tracked, tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_PROJECT', 'a/b')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', 'nonsense://')
  train(tmp_path / 'job', BOTH, 2)
  printed = capsys.readouterr().err
  assert all(f'{tracker} gets no metrics from here on' in printed for tracker in ('wandb', 'mlflow'))
