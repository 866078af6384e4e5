"""Functions that a stranger's config names are neither called nor imported, in any mode and from any field.

The stranger's archive is the current directory, and on sys.path; its module writes the file `ran` when imported.
"""

import json
import sys
from typing import Any

from etils import epath
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.config import resolve, to_json
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.errors import UserError
from spmd_tasks.flags import all_modes
from spmd_tasks.loading import load
from spmd_tasks.programs.job_directory import write_config
from spmd_tasks.tuning.reward_functions import load_reward
from tests import binary
from tests.tuning import reward_experiments

PAYLOAD = "open({ran!r}, 'w').close()\ndef score(*call):\n  return 1.0\n"
REFERENCES = ['pty:spawn', 'os:system', 'builtins:eval', 'payload:score', 'spmd_tasks.command:os.system', 'numpy:save']
OWN = 'tests.tuning.rewards:share_of_a'
JOB = 'tests.tuning.reward_experiments.Job'  # imported above, so its own code may name functions


@pytest.fixture
def archive(tmp_path, monkeypatch):
  directory = tmp_path / 'archive'
  directory.mkdir()
  (directory / 'payload.py').write_text(PAYLOAD.format(ran=str(tmp_path / 'ran')))
  (directory / 'payload.sh').write_text(f'#!/bin/sh\ntouch {tmp_path}/ran\n')
  (directory / 'payload.sh').chmod(0o755)
  (directory / 'prompts.jsonl').write_text(json.dumps({'prompt': './payload.sh'}) + '\n')
  monkeypatch.chdir(directory)
  monkeypatch.setattr(sys, 'path', [str(directory), *sys.path])
  yield directory
  assert not (tmp_path / 'ran').exists()
  assert 'payload' not in sys.modules


def saved(experiment='tune.Grpo', **config):
  return {'experiment': experiment, 'overrides': {}, 'config': {'data': 'prompts.jsonl', **config}}


def values(reference):
  yield {'reward': reference}
  yield {'reward': {'dict': {OWN: 1.0, reference: 1.0}}}
  yield {'environment': reference}
  yield {'eval_data': 'prompts.jsonl', 'reward': OWN, 'environment': reference}


@pytest.mark.parametrize('reference', REFERENCES)
@pytest.mark.parametrize('experiment', ['tune.Grpo', 'tune.LoraGrpo', 'tune.Distill'])
def test_no_field_of_a_file_may_name_a_function(archive, experiment, reference):
  for config in values(reference):
    with pytest.raises(UserError, match='a saved config alone never decides what is imported'):
      from_json(saved(experiment, **config))


@pytest.mark.parametrize('reference', REFERENCES)
def test_no_override_of_a_saved_config_may_name_a_function(archive, reference):
  for override in (f'reward={reference}', f'reward={{"{reference}": 1.0}}', f'environment={reference}'):
    with pytest.raises(UserError, match='a saved config alone never decides what is imported'):
      from_json(saved(JOB), [override])


@pytest.mark.parametrize('value', [['payload'], [['payload'], ['antigravity']], {'list': ['payload']}, 'payload:score'])
@pytest.mark.parametrize('path', ['task_modules', 'train_data.modules'])
def test_no_field_of_a_file_may_name_a_module(archive, path, value):
  with pytest.raises(UserError):
    from_json({'experiment': 'spmd_tasks.bridges.t5x.T5xExperiment', 'overrides': {}, 'config': {path: value}})


PARTS: dict[str, Any] = {
  'train_input.environment': 'os:system',
  'train_input.rewards': {'dict': {'payload:score': 1.0}},
}


@pytest.mark.parametrize('path', PARTS)
def test_no_part_of_an_experiment_may_name_a_function(archive, path):
  with pytest.raises(UserError, match=path):
    from_json(saved(JOB, **{path: PARTS[path]}))
  value = PARTS[path]
  with pytest.raises(UserError, match=path):
    from_json(saved(JOB), [f'{path}={value["dict"] if isinstance(value, dict) else value}'])
  resolved = from_json({'experiment': JOB, 'overrides': {}, 'config': {}})
  assert resolved.parts['train_input'].rewards == {OWN: 1.0}
  assert binary.REPOSITORY in resolved.code_directories
  assert archive not in resolved.code_directories


@pytest.mark.parametrize('mode', [*(mode.name for mode in all_modes()), '--print_config', 'load'])
def test_no_mode_calls_a_function_of_a_file(archive, mode, capsys):
  (archive / 'config.json').write_text(json.dumps(saved(reward='payload:score')))
  (archive / 'checkpoints/checkpoint_00000001').mkdir(parents=True)
  if mode == 'load':
    with pytest.raises(UserError, match='payload:score'):
      load(archive)
    return
  flags = [mode] if mode == '--print_config' else ['--mode', mode]
  before = binary.snapshot(archive)
  for named in (['--job_log_dir', archive], ['--config', 'config.json', '--job_log_dir', 'new']):
    assert binary.run_in_process(*flags, *named) not in (exit_codes.OK, None)
    assert 'Traceback' not in capsys.readouterr().err
  assert binary.snapshot(archive) == before


@pytest.mark.slow
@pytest.mark.parametrize('field', ['reward', pytest.param('environment', marks=pytest.mark.exhaustive)])
def test_the_binary_calls_no_function_of_a_file(archive, field):
  (archive / 'config.json').write_text(json.dumps(saved(**{field: 'pty:spawn'})))
  flags = ('--mode', 'train', '--job_log_dir', archive, '--num_fake_devices', 1)
  ended = binary.run_binary(*flags, cwd=archive, fresh=True)
  assert ended.returncode == exit_codes.USAGE
  assert ended.stderr.count('\n') == 1
  assert 'pty:spawn names code of Python itself' in ended.stderr


def test_functions_of_the_users_own_command_are_found_by_later_commands(archive, tmp_path, monkeypatch):
  (archive / 'my_rewards.py').write_text('def score(*call):\n  return 1.0\n')
  resolved = resolve(reward_experiments.Job, ['reward=my_rewards:score', 'data=prompts.jsonl'])
  config = to_json(resolved)
  assert config['origin'] == [str(binary.REPOSITORY), str(archive)]
  write_config(epath.Path(tmp_path), json.dumps(config))
  monkeypatch.chdir('/')  # a later command
  monkeypatch.setattr(sys, 'path', [path for path in sys.path if path != str(archive)])
  job = from_json(read_saved_config(tmp_path / 'config.json'), ['data=prompts.jsonl']).build()
  assert load_reward('my_rewards:score', job.code_directories)('p', 'c', {}) == 1.0
  del sys.modules['my_rewards']
  config['config']['seed'] = 7  # edited
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match='because it is not signed'):
    from_json(read_saved_config(tmp_path / 'config.json'))
  again = from_json(read_saved_config(tmp_path / 'config.json'), experiment_path=[archive])
  assert archive in again.code_directories
