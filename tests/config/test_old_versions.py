"""What version e2bba1f (November 2026) saved is read by the version of today.

data/e2bba1f/configs.json holds the names that it wrote (and those of the other classes that a config could hold then),
and two whole configs; uneven_half is the directory of a real job, synthetic.Uneven, stopped at step 10 of 20.
"""

import importlib
import json
from pathlib import Path
import shutil

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.config import from_json, refuse_changed_config, resolve, symbol_of, to_json
from spmd_tasks.config.symbols import current_experiment, current_names, current_symbol
from spmd_tasks.recipes import MoeLanguageModel
from tests import binary

DATA = Path(__file__).parents[1] / 'data' / 'e2bba1f'
SAVED = json.loads((DATA / 'configs.json').read_text())


@pytest.mark.parametrize('symbol', SAVED['symbols'])
def test_an_old_name_is_read_as_the_name_that_is_saved_today(symbol):
  now = current_symbol(symbol)
  module, _, qualname = now.partition(':')
  assert symbol_of(getattr(importlib.import_module(module), qualname)) == now
  assert current_symbol(now) == now


@pytest.mark.parametrize('name', SAVED['configs'])
def test_an_old_config_is_accepted_and_read_back(name, tmp_path):
  saved = SAVED['configs'][name]
  now = to_json(resolve(name))
  (tmp_path / 'config.json').write_text(json.dumps(saved))
  (tmp_path / 'checkpoints' / 'checkpoint_00000010').mkdir(parents=True)
  for mode in ('train', 'eval'):
    refuse_changed_config(tmp_path, now, mode=mode)
  # Rules of a stage axis have changed since; an old job keeps its own, which give the same numbers.
  read, wanted = ({**config, 'axis_rules': None} for config in (to_json(from_json(saved))['config'], now['config']))
  assert read == wanted


def test_an_experiment_that_has_moved_is_found():
  saved = {'experiment': 'moe.MoeLanguageModel', 'overrides': {}, 'config': {'num_experts': 5}}
  resolved = from_json(saved)
  assert (type(resolved.experiment), resolved.experiment.num_experts) == (MoeLanguageModel, 5)
  assert current_experiment('moe.StdlibTiny') == 'moe.StdlibTiny'


def test_only_names_are_renamed():
  old, new = 'spmd_tasks.layers.positions:Rotary', 'spmd_tasks.layers.attention:Rotary'
  partial = {'symbol': old, 'closure': {'symbol': 3, 'rotary': {'object': old, 'repr': old}}}
  renamed = {'symbol': new, 'closure': {'symbol': 3, 'rotary': {'object': new, 'repr': old}}}
  assert current_names([partial, old, {'dict': {'a': old}}]) == [renamed, old, {'dict': {'a': old}}]
  assert current_symbol('no colon') == 'no colon'
  assert current_symbol('jax:relu') == 'jax:relu'
  assert current_symbol('flax.linen.linear:Dense') == 'flax.linen:Dense'  # of a package that we do not know


@pytest.fixture(scope='module')
def resumed(tmp_path_factory):
  """The old job, finished by the code of today."""
  directory = tmp_path_factory.mktemp('old') / 'job'
  shutil.copytree(DATA / 'uneven_half', directory)
  assert binary.run_in_process('--mode', 'train', '--job_log_dir', directory) == exit_codes.OK
  return directory


def test_an_old_job_goes_on_as_if_it_had_not_been_interrupted(resumed, tmp_path):
  flags = ('--exp', 'synthetic.Uneven', '--set', 'tensorboard=false', '--mode', 'train')
  assert binary.run_in_process(*flags, '--job_log_dir', tmp_path / 'job') == exit_codes.OK
  losses, undisturbed = binary.column(resumed, 'loss'), binary.column(tmp_path / 'job', 'loss')
  assert list(losses) == list(range(1, 21))
  assert losses == pytest.approx(undisturbed, rel=2e-6)  # compiled for another processor, at another level


def test_an_old_checkpoint_is_evaluated_and_decoded(resumed, tmp_path):
  directory = ('--job_log_dir', resumed)
  assert binary.run_in_process('--mode', 'eval', *directory, '--checkpoint_step', 10) == exit_codes.OK
  (tmp_path / 'prompts.jsonl').write_text('{"prompt_ids": [1, 2, 3], "max_tokens": 3}\n')
  output = tmp_path / 'output.jsonl'
  flags = ('--decode_input', tmp_path / 'prompts.jsonl', '--decode_output', output, '--checkpoint_step', 10)
  assert binary.run_in_process('--mode', 'decode_once', *directory, *flags) == exit_codes.OK
  assert len(json.loads(output.read_text())['outputs'][0]['ids']) == 3
