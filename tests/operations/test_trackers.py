"""A job's metrics also go to Weights & Biases and MLflow, and a job that goes on continues the same run."""

from collections.abc import Iterator
import json
import struct

import pytest

from spmd_tasks import exit_codes
from tests.binary import metric_lines, run_in_process
from tests.programs.small_jobs import SMALL

JOB = ('--exp', SMALL, '--mode', 'train', '--set', 'eval_every_steps=10', '--set', 'checkpoint_every_steps=10')


def train(directory, tracker: str, *num_steps: int) -> None:
  for steps in num_steps:
    flags = ('--job_log_dir', directory, '--set', f'trackers=({tracker!r},)', '--num_train_steps', steps)
    assert run_in_process(*JOB, *flags) == exit_codes.OK


def expected(directory) -> dict[int, float]:
  return {line['step']: line['loss'] for line in metric_lines(directory)}


def expected_of_eval(directory) -> dict[int, float]:
  return {line['step']: line['loss'] for line in metric_lines(directory / 'eval' / 'valid')}


def test_a_tracker_that_is_not_known_is_refused(tmp_path, capsys):
  assert run_in_process(*JOB, '--job_log_dir', tmp_path / 'job', '--set', "trackers=('comet',)") == exit_codes.USAGE
  assert "has 'comet': the known ones are wandb, mlflow" in capsys.readouterr().err
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


def test_offline_runs_of_wandb(tmp_path, monkeypatch):
  pytest.importorskip('wandb')
  from wandb.proto.wandb_internal_pb2 import Record

  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  train(tmp_path / 'job', 'wandb', 10, 14)
  losses, eval_losses, ids, config = {}, {}, [], {}
  files = sorted((tmp_path / 'job' / 'wandb').glob('offline-run-*/*.wandb'))
  for file in files:
    for record in map(Record.FromString, records(file.read_bytes())):
      if record.WhichOneof('record_type') == 'run':
        ids.append(record.run.run_id)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
      if record.WhichOneof('record_type') == 'history':
        row = {item.key or '/'.join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        losses |= {record.history.step.num: row['loss']} if 'loss' in row else {}
        eval_losses |= {record.history.step.num: row['eval/valid/loss']} if 'eval/valid/loss' in row else {}
  assert len(files) == 2
  assert len(set(ids)) == 1
  assert config['batch_size'] == 8
  assert losses == expected(tmp_path / 'job')
  assert eval_losses == expected_of_eval(tmp_path / 'job')


@pytest.mark.filterwarnings('default')  # its own
def test_runs_of_mlflow_in_files(tmp_path, monkeypatch):
  mlflow = pytest.importorskip('mlflow')
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', (tmp_path / 'mlruns').as_uri())
  train(tmp_path / 'job', 'mlflow', 10, 14)
  client = mlflow.MlflowClient()
  (run,) = client.search_runs([client.get_experiment_by_name('spmd_tasks').experiment_id])
  assert run.info.status == 'FINISHED'
  assert run.data.params['batch_size'] == '8'
  for name, values in (('loss', expected), ('eval/valid/loss', expected_of_eval)):
    assert {each.step: each.value for each in client.get_metric_history(run.info.run_id, name)} == values(
      tmp_path / 'job'
    )


@pytest.mark.filterwarnings('default')
@pytest.mark.parametrize('tracker', ['wandb', 'mlflow'])
def test_a_service_that_fails_ends_no_job(tmp_path, monkeypatch, capsys, tracker):
  pytest.importorskip(tracker)
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_PROJECT', 'a/b')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', 'nonsense://')
  train(tmp_path / 'job', tracker, 2)
  assert f'{tracker} gets no metrics from here on' in capsys.readouterr().err
