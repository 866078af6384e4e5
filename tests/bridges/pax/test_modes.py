"""All modes run a Pax experiment or raise a UserError. Jobs have the losses of Paxml, resume and decode as Paxml does.

tests/data/pax_lab has the experiment, and the losses of Paxml 1.4.0 on 8 devices.
"""

import json
from pathlib import Path
import pickle
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.flags import all_modes
from tests import binary
from tests.bridges.pax.conftest import CONTINUED, PAX_EXPERIMENTS

DECODE = 'pax_lab.decode_lm.DecodeLm'
HELPERS = 'tests.bridges.pax.paxml_decoding'
FAKE = ('--num_fake_devices', 8)
STEPS = 20
# Of DenseLm, which has the loss of DecodeLm.
LOSSES = json.loads((PAX_EXPERIMENTS / 'pax_lab' / 'expected_losses.json').read_text())['losses']
IN_TRAINING = (
  *('--eval_on_test', '--decode_during_train=true', '--set', 'task.train.decode_interval_steps=1'),
  *('--set', f'task.train.decode_start_after_n_steps={STEPS}', '--set', 'task.train.decode_use_ema_states=true'),
  *('--set', 'task.train.max_inflight_steps=5'),
)

# Words in the stderr of commands.
WORDS = {
  'train': f'step {STEPS}/{STEPS}  loss',
  'eval': f'step {STEPS}  eval valid: ',
  'decode': f'step {STEPS}  decode prompts: 14 outputs of 2 batches',
  'decode_once': 'decode prompts: already done',
  'plan': 'plan: compiling the eval step',
  'replay': '',
  'print_config': '',
  'preview': '',
  'serve': '--mode serve needs the Linen model',
  'verify': '--mode verify needs the Linen model',
  'export': '--mode export needs the Linen model',
  'export t5x': '--mode export needs the Linen model',
  'plan decode': 'text generation needs the Linen model',
  'decode a file': 'decodes batches of its own datasets',
  'decode none': 'decode_datasets()',
}
REFUSED = [*WORDS][[*WORDS].index('serve') :]
CASES = list(dict.fromkeys((*(mode.name for mode in all_modes()), *WORDS)))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope='module')
def runs(run_pax_together, paxml_job, tmp_path_factory):
  """Trains two jobs of DecodeLm on a mesh 1 x 4 x 2, and runs all commands on the second one.

  The first job evaluates and decodes in training. The second one's checkpoint is written in Paxml's format and decoded,
  and Paxml decodes it. A copy of the second one, as it was after step 10, resumes with its saved config. Other jobs
  evaluate and continue a job of Paxml. Returns the job directories, and the exit code and stderr of each command.
  """
  names = ('first', 'second', 'empty', 'own', 'paxml', 'copy', 'by paxml')
  first, second, empty, own, *places, by_paxml = (tmp_path_factory.mktemp(name) for name in names)
  resumed = second.with_name('resumed')

  def flags(directory, exp=DECODE):
    steps = ('--num_train_steps', STEPS, '--set', 'log_every_steps=1', '--set', 'trackers=tensorboard')
    saved = ('--set', 'checkpoint_every=10', '--set', f'eval_with_ema={str(exp == DECODE).lower()}')
    return '--exp', exp, '--job_log_dir', directory, *steps, *saved

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
  own_weights = ('--set', 'eval_with_ema=false', '--accept_config_changes')
  commands['eval of own weights'] = (*flags(second), *own_weights, '--mode', 'eval', *FAKE)
  commands['copy'] = ('tests.binary:copy_at', second, 10, resumed)
  commands['resume'] = ('--mode', 'train', '--job_log_dir', resumed, *FAKE)
  commands['write'] = (f'{HELPERS}:write_as_paxml', second, *places)
  for mode in ('decode', 'decode_once'):
    for place in places:
      commands[f'{mode} {place}'] = (*flags(own), '--mode', mode, '--set', f'init_from={place}', *FAKE)
  commands['by paxml'] = (f'{HELPERS}:run_decode_program', second, by_paxml, PAX_EXPERIMENTS)
  before = binary.checkpoint_names(paxml_job)
  given = ('--exp', 'pax_lab.restored.Restored', *FAKE)
  ema, on = (tmp_path_factory.mktemp(name) for name in ('ema', 'on'))
  continued = ('--set', f'continue_from={paxml_job}')
  evaluate, averaged = (*given, '--mode', 'eval', '--job_log_dir'), ('--set', 'eval_with_ema=true')
  train = (*given, '--mode', 'train', '--job_log_dir', on, *continued, '--set', 'eval_every_steps=1')
  train += ('--set', 'log_every_steps=1', '--set', 'trackers=()', '--num_train_steps')
  commands |= {
    'eval of paxml': (*evaluate, own.with_name('given'), '--set', f'init_from={paxml_job}'),
    'eval of averages of paxml': (*evaluate, ema, *continued, *averaged),
    'eval in paxml': (*evaluate, paxml_job),
    'continue to 3': (*train, 3),
    'continue to 3 again': (*train, 3),
    'eval of averages at 3': (*evaluate, on, *averaged),
    'continue to 5': (*train, 5),
  }
  ends = dict(zip(commands, run_pax_together(*commands.values()), strict=True))
  directories = {'first': first, 'second': second, 'resumed': resumed, 'own': own, 'places': places}
  assert binary.checkpoint_names(paxml_job) == before
  directories |= {'by paxml': by_paxml, 'given': own.with_name('given'), 'ema': ema, 'on': on}
  return directories, ends


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
  first, second, ends = runs[0]['first'], runs[0]['second'], runs[1]
  code, stderr = ends['in training']
  assert code == exit_codes.OK, stderr
  assert list(binary.column(first / 'eval' / 'valid', 'loss')) == [10, STEPS]
  assert outputs(first) == outputs(second)  # only of the last step
  assert 'task.train.max_inflight_steps = 5 (one step is dispatched ahead)' in stderr
  _, stderr = ends['train']
  assert 'eval valid' not in stderr
  assert 'decode prompts' not in stderr
  assert 'task.train.eval_interval_steps = 10 (evals in training need --eval_on_test)' in stderr


def test_losses_equal_paxml(runs):
  np.testing.assert_allclose(
    list(binary.column(runs[0]['first'], 'loss').values()), LOSSES['pax_lab.dense_lm.DenseLm'], rtol=1e-6
  )


@pytest.mark.filterwarnings('ignore:Sharding info not provided when restoring')
def test_a_job_resumes_bit_for_bit(runs):
  """The input has no state, so its batches are counted."""
  second, resumed = runs[0]['second'], runs[0]['resumed']
  code, stderr = runs[1]['resume']
  assert code == exit_codes.OK, stderr
  assert 'resuming after step 10' in stderr
  for name in ('loss', 'weight_norm', 'grad_norm'):
    assert binary.column(resumed, name) == binary.column(second, name)
  states = [
    ocp.PyTreeCheckpointHandler().restore(job / 'checkpoints' / f'checkpoint_{STEPS:08d}' / 'state')
    for job in (resumed, second)
  ]
  assert jax.tree.all(jax.tree.map(np.array_equal, *states))


def test_an_eval_job_equals_evals_in_training(runs):
  """The averaged weights are in the checkpoint's optimizer state."""
  (_, averaged), (_, own) = (runs[1][name] for name in ('eval', 'eval of own weights'))
  recorded = binary.column(runs[0]['first'] / 'eval' / 'valid', 'loss')[STEPS]
  assert f'loss {recorded:.4f}' in averaged
  assert f'loss {recorded:.4f}' not in own
  assert 'loss ' in own


def test_a_job_continues_from_a_checkpoint_of_paxml(runs, paxml_job):
  """With its optimizer state, without writing to Paxml's job; Paxml evaluated 4.2121453.

  A job whose last step is the checkpoint's step saves it in our format, and goes on from there.
  """
  directories, ends = runs
  refused = ends['eval in paxml']
  codes = {name: code for name, (code, _) in ends.items() if name.endswith('of paxml') or 'continue' in name}
  assert set(codes.values()) == {exit_codes.OK}, codes
  (line,), (averaged,) = (binary.metric_lines(directories[name] / 'eval' / 'given') for name in ('given', 'ema'))
  assert (line['step'], line['weights_from']) == (3, f'{paxml_job}/checkpoints/checkpoint_00000003')
  assert line['loss'] == pytest.approx(4.2121453285217285, rel=2e-6)
  assert refused[0] == exit_codes.USAGE
  assert f'--set init_from={paxml_job}' in refused[1]
  assert 'step 3 of 3 is already saved' in ends['continue to 3 again'][1]
  assert 'step 3 of 3 is already saved' not in ends['continue to 3'][1]
  assert 'continuing after step 3' in ends['continue to 3'][1]
  assert f'loss {averaged["loss"]:.4f}' in ends['eval of averages at 3'][1]  # which the new job has saved
  assert averaged['loss'] != pytest.approx(line['loss'], rel=1e-3)
  assert 'resuming after step 3' in ends['continue to 5'][1]
  # These depend on the optimizer state after 3 steps of Paxml.
  on = directories['on']
  assert list(binary.column(on, 'loss').values()) == pytest.approx(CONTINUED, rel=2e-6)
  evaluated = binary.metric_lines(on / 'eval' / 'given')
  assert evaluated[0]['loss'] == line['loss']
  assert [line['step'] for line in evaluated[-2:]] == [4, 5]


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
    ('decoder_out/first/decoder_out_20_shard_0.jsonl', 7),
    ('decoder_out/prompts/decoder_out_20_shard_0.jsonl', 14),
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
  newest = f'{places[0]}/checkpoints/checkpoint_00000020'
  assert f'has outputs of the weights of {newest}, not of {places[1]}' in decoded[1][1]
  assert 'already done' in decoded[2][1]
  assert outputs(own).keys() == expected.keys()
  for name, values in outputs(own).items():
    for our, their in zip(values, expected[name], strict=True):
      np.testing.assert_allclose(our.pop('logprobs'), their.pop('logprobs'), atol=1e-5)
      assert our == their
