"""All modes run a Pax experiment or raise a UserError, and decode jobs have the outputs of Paxml."""

import json
from pathlib import Path
import pickle
import re

from etils import epath
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.flags import all_modes
from tests import binary

DECODE = 'pax_lab.decode_lm.DecodeLm'
SCRIPT = Path(__file__).with_name('paxml_decoding.py')
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

  The first job evaluates and decodes in training. Returns the job directories, and the exit code and stderr of each
  command.
  """
  first, second, empty = (tmp_path_factory.mktemp(name) for name in ('first', 'second', 'empty'))

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
  return first, second, dict(zip(commands, run_pax_together(*commands.values()), strict=True))


@pytest.fixture
def job(runs):
  return runs[1]


@pytest.mark.parametrize('case', CASES)
def test_modes_run_or_raise_user_errors(runs, case):
  code, stderr = runs[2][case]
  assert code in (exit_codes.OK, exit_codes.USAGE), stderr
  assert len(re.findall('^spmd-tasks: ', stderr, re.MULTILINE)) == (code == exit_codes.USAGE), stderr
  assert 'Traceback' not in stderr
  if case in WORDS:
    assert (code == exit_codes.USAGE) == (case in REFUSED), stderr
    assert WORDS[case] in stderr


def test_training_evaluates_and_decodes_with_switches(runs):
  """With averaged weights, like a decode job; ignored settings are listed."""
  first, second, ends = runs
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


def test_decode_jobs_equal_paxmls_decode_program(job, run_pax, tmp_path):
  """With averaged weights, strings, a dataset that is reset for eval, and another of one batch; ours on 8 devices."""
  finished = run_pax(job, tmp_path, command=[SCRIPT])
  assert finished.returncode == 0, finished.stderr
  ours, theirs = outputs(job), outputs(tmp_path)
  assert [(name, len(values)) for name, values in ours.items()] == [
    ('decoder_out/first/decoder_out_3_shard_0.jsonl', 7),
    ('decoder_out/prompts/decoder_out_3_shard_0.jsonl', 14),
  ]
  for name, values in theirs.items():
    for our, their in zip(ours[name], values, strict=True):
      np.testing.assert_allclose(our.pop('logprobs'), their.pop('logprobs'), atol=1e-5)
      assert our == their
    pickled = [pickle.loads((root / name).with_suffix('.pickle').read_bytes()) for root in (job, tmp_path)]
    assert [key for key, _ in pickled[0]] == [key for key, _ in pickled[1]]
  for dataset in ('prompts', 'first'):
    assert scalars(job / 'summaries' / f'decode_test_{dataset}') == pytest.approx(
      scalars(tmp_path / 'summaries' / f'decode_test_{dataset}')
    )


@pytest.mark.filterwarnings('ignore:Sharding info not provided when restoring')
def test_a_checkpoint_of_paxml_decodes_to_the_same_text(job, run_pax_together, tmp_path):
  """The job's checkpoint in Paxml's format is decoded on 2 devices; a checkpoint of another path is refused."""
  places = [tmp_path / name for name in ('paxml', 'copy')]
  for place in places:
    write_as_paxml(job / 'checkpoints' / 'checkpoint_00000003', place / 'checkpoints' / 'checkpoint_00000003')
  own = ('--exp', DECODE, '--num_fake_devices', 2, '--set', 'ici_mesh_shape=1,1,2', '--job_log_dir', tmp_path / 'own')
  decode = (
    ('--mode', mode, *own, '--set', f'init_from={place}') for mode in ('decode', 'decode_once') for place in places
  )
  runs = run_pax_together(*decode)
  assert [code for code, _ in runs] == [0, exit_codes.USAGE, 0, exit_codes.USAGE], runs
  assert f'has outputs of the weights of {places[0]}/checkpoints/checkpoint_00000003, not of {places[1]}' in runs[1][1]
  assert 'already done' in runs[2][1]
  for name, values in outputs(tmp_path / 'own').items():
    for our, expected in zip(values, outputs(job)[name], strict=True):
      np.testing.assert_allclose(our.pop('logprobs'), expected.pop('logprobs'), atol=1e-5)
      assert our == expected
  assert outputs(tmp_path / 'own').keys() == outputs(job).keys()


def write_as_paxml(checkpoint: Path, path: Path) -> None:
  """Writes one of our checkpoints in Paxml's format with `tensorstore_use_ocdbt`."""
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
  state = handler.restore(checkpoint / 'state')
  variables = {'params': state['weights'], **(state.get('non_trainable') or {})}
  (path / 'metadata').mkdir(parents=True)
  (path / 'metadata/metadata').write_text('{"version": 1.2, "train_state_metadata": {}}')
  paxml = {'step': np.uint32(3), 'mdl_vars': variables, 'opt_states': state['learner']['opt_state']}
  handler.save(epath.Path(path / 'state'), args=ocp.args.PyTreeSave(paxml))
  handler.finalize(epath.Path(path / 'state'))
  handler.close()
