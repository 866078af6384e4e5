"""A job in an object store: what it computes, and that one job at a time has it."""

import json

from etils import epath
import pytest

import spmd_tasks
from spmd_tasks import files
from spmd_tasks.append_objects import _writer
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import TextFiles
from spmd_tasks.programs import job_lock
from spmd_tasks.programs.job_directory import claim
from spmd_tasks.runtime.metrics import read_jsonl
from spmd_tasks.store_files import local_folder, read_appended, replace_appended
from spmd_tasks.stores import upload, write
from tests import binary
from tests.programs.small_jobs import SMALL
from tests.programs.small_runs import assert_same_arrays, saved_arrays
from tests.programs.test_decode import flags_of
from tests.store_fixtures import one_kind_of_store


@one_kind_of_store  # several processes that share a store are in tests/multi_process/test_store_processes.py
def test_a_job_in_a_store_is_that_on_a_disk(store, finished_job, tmp_path, monkeypatch):
  """Trained, ended, resumed, evaluated, decoded."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  own = ('--exp', SMALL, '--job_log_dir', store)
  assert binary.run_in_process(*own, '--mode', 'train', '--num_train_steps', 4) == 0
  files.write_durably(store / 'checkpoints' / 'checkpoint_00000006' / 'state_0' / 'left', b'by a kill')
  assert binary.run_in_process(*own, '--mode', 'train', '--num_train_steps', 8) == 0
  assert_same_arrays(saved_arrays(store, 8), saved_arrays(finished_job, 8))
  metrics, expected = (read_jsonl(epath.Path(directory)) for directory in (store, finished_job))
  assert list(metrics) == list(range(1, 9))
  for step, values in metrics.items():
    assert all(values[name] == expected[step][name] for name in ('loss', 'grad_norm', 'weight_norm')), step
  valid = read_jsonl(epath.Path(finished_job) / 'eval' / 'valid')
  assert read_jsonl(store / 'eval' / 'valid')[8]['loss'] == valid[8]['loss']
  assert binary.run_in_process(*own, '--mode', 'eval', '--checkpoint_step', 4) == 0
  assert set(read_jsonl(store / 'eval' / 'valid')) == {4, 8}
  parent, _, name = str(store).rpartition('/')
  for place in (store, parent, f'{parent}/{name[:-1]}*'):
    frame = spmd_tasks.read_metrics(place)
    assert frame[frame.run == name].loss.tolist() == [values['loss'] for values in metrics.values()]
    assert frame[frame.run == name]['eval/valid/loss'].notna().sum() == 2

  write(store / 'prompts.jsonl', b'{"prompt": "a", "max_tokens": 2}\n{"prompt": "bc", "max_tokens": 3}\n')
  assert binary.run_in_process(*flags_of(store, '--decode_input', store / 'prompts.jsonl')) == 0
  lines = [json.loads(line) for line in files.read_bytes(store / 'decode' / 'prompts' / 'step_8.jsonl').splitlines()]
  assert [len(line['outputs'][0]['ids']) for line in lines] == [2, 3]


def test_one_job_at_a_time_has_a_directory(store, monkeypatch):
  monkeypatch.setattr(job_lock, 'HEARTBEAT_PERIOD_S', 0.2)
  monkeypatch.setattr(job_lock, 'HEARTBEAT_TIMEOUT_S', 2.0)
  first = claim(store, experiment_name='a').lock
  with pytest.raises(UserError, match='in use by another running job'):
    claim(store, experiment_name='a')
  first.release()
  second = claim(store, experiment_name='a').lock  # without waiting
  second.check()
  second._stopped.set()  # as if the process were suspended
  third = claim(store, experiment_name='a').lock
  with pytest.raises(JobError, match='another job'):
    second.check()
  third.check()
  third.release()


def test_a_dead_process_of_this_machine_holds_nothing(store):
  claim(store, experiment_name='a').lock._stopped.set()
  path = store / 'job.lock.000001'
  holder = json.loads(files.read_bytes(path))
  write(path, json.dumps(holder | {'pid': 2**22 + 1}).encode())
  claim(store, experiment_name='a').lock.release()


def test_a_file_grows_by_parts(store):
  path, content = store / 'log.txt', b''
  for number in range(6):
    if number == 3:  # as if another process continued
      _writer.end_part(path)
    line = b'%d ' % number * 100_000
    files.append(path, line)
    files.sync_path(path)
    content += line
  assert read_appended(path) == content
  assert len(files.glob_below(store, 'log.txt.*')) == 4
  replace_appended(path, b'cut')
  files.append(path, b' off')
  assert read_appended(path) == b'cut off'


@one_kind_of_store
def test_folders_and_texts_of_a_store_are_copied_once(store, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  made = tmp_path / 'made'
  (made / 'below').mkdir(parents=True)
  for name, text in (('config.json', '{}'), ('below/a.txt', 'one two'), ('b.txt', 'three')):
    (made / name).write_text(text)
  upload(made, store / 'folder')
  copy = local_folder(f'{store}/folder/')
  assert {path.name: path.read_text() for path in (copy, *copy.glob('*'), *copy.glob('below/*')) if path.is_file()} == {
    'config.json': '{}',
    'a.txt': 'one two',
    'b.txt': 'three',
  }
  source, local = (TextFiles(pattern=f'{place}/**/*.txt').open() for place in (store / 'folder', made))
  assert (len(source), source.fingerprint()) == (2, local.fingerprint())
  with pytest.raises(UserError, match='no text file matches'):
    TextFiles(pattern=f'{store}/folder/*.md').open()
  with pytest.raises(UserError, match='there is nothing at'):
    local_folder(store / 'none')
