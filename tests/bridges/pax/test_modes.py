"""All modes run a Pax experiment or raise a UserError, and decode jobs have the outputs of Paxml."""

import json
from pathlib import Path
import pickle
import re

import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.flags import all_modes
from tests import binary
from tests.bridges.pax.conftest import PAX_EXPERIMENTS

DECODE = 'pax_lab.decode_lm.DecodeLm'
HELPERS = 'tests.bridges.pax.paxml_decoding'
FAKE = ('--num_fake_devices', 8)
IN_TRAINING = (
  *('--eval_on_test', '--decode_during_train=true', '--set', 'task.train.decode_interval_steps=1'),
  *('--set', 'task.train.decode_start_after_n_steps=3', '--set', 'task.train.decode_use_ema_states=true'),
  *('--set', 'task.train.max_inflight_steps=5'),
)

# Words in the stderr of commands.
WORDS = {
  'train': 'step 3/3  loss',
  'eval': 'step 3  eval valid: ',
  'decode': 'step 3  decode prompts: 14 outputs of 2 batches',
  'decode_once': 'decode prompts: already done',
  'plan': 'plan: compiling the eval step',
  'replay': '',
  'print_config': '',
  'preview': 'the training input has no tokenizer',
  'serve': '--mode serve needs the Linen model',
  'verify': '--mode verify needs the Linen model',
  'export': '--mode export needs the Linen model',
  'export t5x': '--mode export needs the Linen model',
  'plan decode': 'text generation needs the Linen model',
  'decode a file': 'decodes batches of its own datasets',
  'decode none': 'decode_datasets()',
}
REFUSED = [*WORDS][[*WORDS].index('preview') :]
CASES = list(dict.fromkeys((*(mode.name for mode in all_modes()), *WORDS)))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope='module')
def runs(run_pax_together, tmp_path_factory):
  """Trains two jobs of DecodeLm for 3 steps on a mesh 1 x 4 x 2, and runs all commands on the second one.

  The first job evaluates and decodes in training. The second one's checkpoint is written in Paxml's format and decoded,
  and Paxml decodes it. Returns the job directories, and the exit code and stderr of each command.
  """
  names = ('first', 'second', 'empty', 'own', 'paxml', 'copy', 'by paxml')
  first, second, empty, own, *places, by_paxml = (tmp_path_factory.mktemp(name) for name in names)

  def flags(directory, exp=DECODE):
    steps = ('--num_train_steps', 3, '--set', 'log_every_steps=1', '--set', 'trackers=tensorboard')
    return '--exp', exp, '--job_log_dir', directory, *steps

  more = {
    'replay': ('--step', 2),
    'plan': ('--target', 'cpu:8', '--plan_steps', 'eval'),
    'plan decode': ('--mode', 'plan', '--target', 'cpu:8', '--plan_steps', 'decode'),
    'export': ('--out', tmp_path_factory.getbasetemp() / 'exported'),
    'export t5x': ('--mode', 'export', '--format', 't5x', '--out', tmp_path_factory.getbasetemp() / 'exported'),
    'decode a file': ('--mode', 'decode_once', '--decode_input', 'prompts.jsonl'),
    'decode none': ('--mode', 'decode_once'),
    'print_config': ('--print_config',),
  }
  commands = {'in training': (*flags(first), '--mode', 'train', *IN_TRAINING, *FAKE)}
  for case in CASES:
    mode_flags = more.get(case, ())
    mode_flags = mode_flags if '--mode' in mode_flags or case == 'print_config' else ('--mode', case, *mode_flags)
    job_flags = flags(empty, 'pax_lab.dense_lm.DenseLm') if case == 'decode none' else flags(second)
    commands[case] = (*job_flags, *mode_flags, *(() if case.startswith('plan') else FAKE))
  commands['write'] = (f'{HELPERS}:write_as_paxml', second, *places)
  for mode in ('decode', 'decode_once'):
    for place in places:
      commands[f'{mode} {place}'] = (*flags(own), '--mode', mode, '--set', f'init_from={place}', *FAKE)
  commands['by paxml'] = (f'{HELPERS}:run_decode_program', second, by_paxml, PAX_EXPERIMENTS)
  ends = dict(zip(commands, run_pax_together(*commands.values()), strict=True))
  return {'first': first, 'second': second, 'own': own, 'places': places, 'by paxml': by_paxml}, ends


@pytest.mark.parametrize('case', CASES)
def test_modes_run_or_raise_user_errors(runs, case):
  code, stderr = runs[1][case]
  assert code in (exit_codes.OK, exit_codes.USAGE), stderr
  assert len(re.findall('^spmd-tasks: ', stderr, re.MULTILINE)) == (code == exit_codes.USAGE), stderr
  assert 'Traceback' not in stderr
  if case in WORDS:
    assert (code == exit_codes.USAGE) == (case in REFUSED), stderr
    assert WORDS[case] in stderr


def test_training_evaluates_and_decodes_with_switches(runs):
  """With averaged weights, like a decode job; ignored settings are listed."""
  (first, second, *_), ends = runs[0].values(), runs[1]
  code, stderr = ends['in training']
  assert code == exit_codes.OK, stderr
  assert list(binary.column(first / 'eval' / 'valid', 'loss')) == [3]
  assert outputs(first) == outputs(second)  # only of step 3
  assert 'task.train.max_inflight_steps = 5 (one step is dispatched ahead)' in stderr
  _, stderr = ends['train']
  assert 'eval valid' not in stderr
  assert 'decode prompts' not in stderr
  assert 'task.train.eval_interval_steps = 10 (evals in training need --eval_on_test)' in stderr


def outputs(directory: Path) -> dict[str, list]:
  """Returns the values of all datasets in the .jsonl files."""
  return {
    str(file.relative_to(directory)): [json.loads(line) for line in file.read_text().splitlines()]
    for file in sorted(directory.glob('decoder_out/*/*.jsonl'))
  }


def scalars(directory: Path) -> dict[str, float]:
  """Returns the last value of each tag of TensorBoard; Paxml writes tensors."""
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
  from tensorboard.util import tensor_util

  events = EventAccumulator(str(directory)).Reload()
  values = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()['scalars']}
  tensors = {tag: events.Tensors(tag)[-1].tensor_proto for tag in events.Tags()['tensors']}
  return values | {tag: float(tensor_util.make_ndarray(tensor)) for tag, tensor in tensors.items()}


def test_decode_jobs_equal_paxmls_decode_program(runs):
  """With averaged weights, strings, a dataset that is reset for eval, and another of one batch; ours on 8 devices."""
  job, by_paxml = runs[0]['second'], runs[0]['by paxml']
  ours, theirs = outputs(job), outputs(by_paxml)
  assert [(name, len(values)) for name, values in ours.items()] == [
    ('decoder_out/first/decoder_out_3_shard_0.jsonl', 7),
    ('decoder_out/prompts/decoder_out_3_shard_0.jsonl', 14),
  ]
  for name, values in theirs.items():
    for our, their in zip(ours[name], values, strict=True):
      np.testing.assert_allclose(our.pop('logprobs'), their.pop('logprobs'), atol=1e-5)
      assert our == their
    pickled = [pickle.loads((root / name).with_suffix('.pickle').read_bytes()) for root in (job, by_paxml)]
    assert [key for key, _ in pickled[0]] == [key for key, _ in pickled[1]]
  for dataset in ('prompts', 'first'):
    assert scalars(job / 'summaries' / f'decode_test_{dataset}') == pytest.approx(
      scalars(by_paxml / 'summaries' / f'decode_test_{dataset}')
    )


def test_a_checkpoint_of_paxml_decodes_to_the_same_text(runs):
  """A checkpoint of another path is refused."""
  directories, ends = runs
  own, places, expected = directories['own'], directories['places'], outputs(directories['second'])
  decoded = [ends[f'{mode} {place}'] for mode in ('decode', 'decode_once') for place in places]
  assert [code for code, _ in decoded] == [0, exit_codes.USAGE, 0, exit_codes.USAGE], decoded
  newest = f'{places[0]}/checkpoints/checkpoint_00000003'
  assert f'has outputs of the weights of {newest}, not of {places[1]}' in decoded[1][1]
  assert 'already done' in decoded[2][1]
  assert outputs(own).keys() == expected.keys()
  for name, values in outputs(own).items():
    for our, their in zip(values, expected[name], strict=True):
      np.testing.assert_allclose(our.pop('logprobs'), their.pop('logprobs'), atol=1e-5)
      assert our == their
