"""What the binary prints: lists, configs, and one sentence for each mistake of a user."""

import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from spmd_tasks import exit_codes, main
from spmd_tasks.errors import UserError
from spmd_tasks.flags import all_modes, check_flags_of_mode, make_parser
from spmd_tasks.programs.job_directory import claim
from tests import binary

TINY = ('--exp', 'synthetic.Tiny', '--ici_mesh_shape', '1,8,1')
SENTENCE = 'spmd-tasks: '


# --- output ---


def test_list_is_quick_and_imports_no_jax():
  program = 'import sys; from spmd_tasks import main; main.run(["--list"]); print(*sys.modules, file=sys.stderr)'
  started = time.monotonic()
  ended = binary.run_binary(command=('-c', program), fresh=True)
  assert time.monotonic() - started < 3
  assert ended.returncode == 0, ended.stderr
  (imported,) = ended.stderr.splitlines()  # and nothing else
  assert 'argparse' in imported.split()
  assert not {'jax', 'fiddle', 'flax', 'numpy', 'tensorflow', 'clu', 'orbax'} & set(imported.split())
  lines = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
  assert {'lm.StdlibTiny', 'lm.StdlibSmall', 'lm.UnevenTiny', 'lm.Dense1B', 'synthetic.Tiny'} <= set(lines)
  assert lines['lm.StdlibTiny'].startswith('The quickstart')


def test_print_config_shows_every_field_with_its_overrides(capsys, tmp_path):
  flags = ('--num_train_steps', 7, '--ici_mesh_shape', '1,2,4', '--seed', 5, '--set', 'task.learner.ema_decay=0.5')
  directory = tmp_path / 'job'
  code = binary.run_in_process('--exp', 'synthetic.Tiny', *flags, '--job_log_dir', directory, '--print_config')
  assert code == exit_codes.OK
  shown = capsys.readouterr()
  assert shown.err == ''
  fields = dict(line.split(' = ', 1) for line in shown.out.splitlines() if line)
  assert fields['experiment'] == 'synthetic.Tiny'
  assert fields['num_train_steps'] == '7'
  assert fields['ici_mesh_shape'] == '(1, 2, 4)'
  assert fields['seed'] == fields['train_input.seed'] == '5'
  assert fields['task.learner.ema_decay'] == '0.5'
  assert fields['task.learner.optimizer.learning_rate.total_steps'] == '7'
  assert not directory.exists()


@pytest.mark.parametrize('flags', [('--list',), ('--exp', 'synthetic.Tiny', '--print_config')], ids=str)
def test_a_closed_pipe_is_not_an_error(flags):
  read_end, write_end = os.pipe()
  os.close(read_end)  # as `head` does after enough lines
  ended = binary.finish(binary.start_binary(*flags, stdout=write_end))
  os.close(write_end)
  assert (ended.returncode, ended.stderr) == (exit_codes.OK, '')


# --- mistakes of users ---


@pytest.fixture
def broken_files(tmp_path):
  """The files and directories that the commands below name."""
  (tmp_path / 'file').write_text('not a directory')
  (tmp_path / 'cut.json').write_text('{"experiment": "synthetic.Tiny", "overr')
  (tmp_path / 'other.json').write_text('{"loss": 1.5}')
  (tmp_path / 'empty').mkdir()
  another = {'experiment': 'lm.StdlibTiny', 'overrides': {}, 'config': {'seed': 1}}
  claim(tmp_path / 'of_another', experiment_name='lm.StdlibTiny').lock.release()
  (tmp_path / 'of_another' / 'config.json').write_text(json.dumps(another))
  claim(tmp_path / 'broken_config', experiment_name='synthetic.Tiny').lock.release()
  (tmp_path / 'broken_config' / 'config.json').write_text('{"experiment": "synth')
  (tmp_path / 'broken_config' / 'checkpoints' / 'checkpoint_00000001').mkdir(parents=True)
  return tmp_path


# Flags (HERE is the directory above), and parts of the sentence: the value, the constraint, the remedy.
TRAIN = ('--mode', 'train', '--job_log_dir', 'HERE/job')
BAD_INPUT = {
  'no experiment': (
    TRAIN,
    ['HERE/job/config.json does not exist', 'start a job with --exp NAME'],
  ),
  'unknown experiment': (
    ('--exp', 'synthetic.Tniy', *TRAIN),
    ["unknown experiment 'synthetic.Tniy'", 'Nearest:', 'synthetic.Tiny', '--list'],
  ),
  'no mode': ((*TINY, '--job_log_dir', 'HERE/job'), ['give --mode (train, eval, decode, decode_once, export, ']),
  'no such host': (
    ('--exp', 'lm.StdlibTiny', '--mode', 'serve', '--job_log_dir', 'HERE/job', '--host', '192.0.2.1'),
    ['cannot listen on 192.0.2.1:8000', 'Set another --host or --port'],
  ),
  'more ids than the vocabulary': (
    ('--exp', 'lm.StdlibTiny', '--set', 'vocab_size=258', *TRAIN),
    ['train_input.tokenizer has 259 ids', 'vocab_size=258', 'set vocab_size to 259'],
  ),
  'no directory': ((*TINY, '--mode', 'train'), ['give --job_log_dir']),
  'mesh against devices': (
    (*TINY, *TRAIN, '--ici_mesh_shape', '1,4,4'),
    ['needs 16 devices but there are 8', '--ici_mesh_shape', '--num_fake_devices 16'],
  ),
  'batch against microbatches': (
    (*TINY, *TRAIN, '--set', 'task.learner.num_microbatches=3'),
    ['num_microbatches', '3', '8'],
  ),
  'cache in a file': ((*TINY, *TRAIN, '--compilation_cache', 'HERE/file'), ['HERE/file is not a directory']),
  'too many fake devices': ((*TINY, *TRAIN, '--num_fake_devices', '1000000000'), ['must be in [1, 10,000]']),
  'devices of one process': ((*TINY, *TRAIN, '--local_device_ids', '0'), ['are for jobs of several processes']),
  'eval without batches': ((*TINY, *TRAIN, '--set', 'eval_batches=0'), ['num_batches 0 must be at least 1']),
  'experts in no block': (
    ('--exp', 't5.SwitchTiny', *TRAIN, '--set', 'mixture_every=0'),
    ['2 layers are not divisible by mixture_every=0'],
  ),
  'no directory to write': (
    (*TINY, '--mode', 'train', '--job_log_dir', 'HERE/file/job'),
    ['HERE/file/job', 'Choose a directory that this user can create and write'],
  ),
  'directory of another experiment': (
    (*TINY, '--mode', 'train', '--job_log_dir', 'HERE/of_another'),
    ["belongs to experiment 'lm.StdlibTiny', not to 'synthetic.Tiny'", 'choose another job_log_dir'],
  ),
  'directory with a broken config': (
    (*TINY, '--mode', 'train', '--job_log_dir', 'HERE/broken_config'),
    ['HERE/broken_config/config.json', 'put the original back', '--accept_config_changes'],
  ),
  'eval without a checkpoint': (
    (*TINY, '--mode', 'eval', '--job_log_dir', 'HERE/job'),
    ['HERE/job/checkpoints has no checkpoint', 'correct the path, train first, or name weights'],
  ),
  'config that is cut off': (
    ('--config', 'HERE/cut.json', *TRAIN),
    ['config HERE/cut.json cannot be read', 'Give the config.json of a job_log_dir'],
  ),
  # Origins, paths and numbers.
  'origin that is no model': (
    (*TINY, *TRAIN, '--set', 'init_from=hf:HERE/empty'),
    ['HERE/empty/config.json does not exist: give a Hugging Face model folder'],
  ),
  'origin without a checkpoint': (
    (*TINY, *TRAIN, '--set', 'init_from=HERE/none'),
    ['HERE/none', 'name the --job_log_dir of a job that has saved one'],
  ),
  'origin at a URL': ((*TINY, *TRAIN, '--set', 'init_from=hf:ftp://b/m'), ["'ftp://b/m' is a URL", 'give gs://']),
  'vocabulary beyond memory': (
    (*TINY, *TRAIN, '--set', f'vocab_size={2**31 - 8}'),
    ['the training state needs', 'GB of memory', 'lower'],
  ),
  'batch beyond memory': ((*TINY, *TRAIN, '--set', f'batch_size={2**31 - 8}'), ['a batch needs', 'lower batch_size']),
  'no hidden dims': ((*TINY, *TRAIN, '--set', 'hidden_dims=0'), ['a weight of shape (32, 0)', 'raise the size']),
  'integers for activations': ((*TINY, *TRAIN, '--set', 'dtype=int32'), ['dtype = int32', 'set float32']),
  'float64 without x64': ((*TINY, *TRAIN, '--set', 'dtype=float64'), ['set float32, bfloat16', 'JAX_ENABLE_X64=1']),
}


@pytest.mark.parametrize('name', BAD_INPUT)
def test_bad_input_gets_one_sentence_and_nothing_is_written(name, broken_files, capfd):
  flags, parts = BAD_INPUT[name]
  here = str(broken_files)
  before = binary.snapshot(broken_files)
  code = binary.run_in_process(*(flag.replace('HERE', here) for flag in flags))
  shown = capfd.readouterr()
  assert code == exit_codes.USAGE == 2
  assert shown.out == ''
  assert shown.err.startswith(SENTENCE)
  assert shown.err.count('\n') == 1  # this sentence, and nothing else
  assert 'Traceback' not in shown.err
  for part in parts:
    assert part.replace('HERE', here) in shown.err
  after = binary.snapshot(broken_files)
  if name.startswith('origin'):  # the job's directory is created before its origin is read, and then removed
    after[here] = before[here]
  assert after == before


@pytest.mark.parametrize(
  'flags, part',
  [
    (('--exp', 'synthetic.Tiny', '--mode', 'serv'), "invalid choice: 'serv'"),
    (('--exp', 'synthetic.Tiny', '--mod', 'train'), '--mod'),
    (('--exp', 'synthetic.Tiny', '--checkpoint_step', 'last'), "invalid int value: 'last'"),
  ],
)
def test_argparse_refuses_wrong_flags(flags, part, capsys):
  with pytest.raises(SystemExit) as left:
    main.run(flags)
  assert left.value.code == exit_codes.USAGE
  assert part in capsys.readouterr().err


def test_the_binary_prints_nothing_but_the_sentence(tmp_path):
  """In a process of its own, where imports and JAX could write to stderr as well."""
  flags = ('--exp', 'synthetic.Tiny', '--num_fake_devices', '2', '--mode', 'train', '--job_log_dir', tmp_path / 'job')
  ended = binary.run_binary(*flags, fresh=True)
  assert ended.returncode == exit_codes.USAGE
  assert ended.stdout == ''
  assert ended.stderr.startswith(SENTENCE)
  assert ended.stderr.count('\n') == 1
  assert 'needs 1 device but there are 2' in ended.stderr
  assert not (tmp_path / 'job').exists()


# --- a user's own experiments ---

OWN_EXPERIMENT = '''
import flax.linen as nn
import numpy as np
import optax

from spmd_tasks import Experiment, Task


def loss(logits, batch):
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch['label']).mean()


class Mine(Experiment):
  """No registration, no package of ours: a class in the current directory."""

  num_train_steps = 3
  log_every_steps = 1
  trackers = ()

  def task(self):
    return Task(model=nn.Dense(2), loss=loss, learner=optax.sgd(0.1))

  def train_input(self):
    for label in np.random.default_rng(self.seed).integers(0, 2, (3, 4)):
      yield {'inputs': np.eye(2)[label], 'label': label}


class Broken(Mine):
  """A bug of the user's own."""

  def train_input(self):
    return undefined_name
'''


@pytest.fixture
def own_directory(tmp_path):
  package = tmp_path / 'mypkg'
  package.mkdir()
  (package / 'mymodule.py').write_text(textwrap.dedent(OWN_EXPERIMENT))
  return tmp_path


def test_an_experiment_of_the_current_directory_runs_by_the_installed_command(own_directory, monkeypatch, capsys):
  command = Path(sys.executable).parent / 'spmd-tasks'
  flags = ('--exp', 'mypkg.mymodule.Mine', '--mode', 'train', '--job_log_dir', 'runs/mine')
  env = {name: value for name, value in os.environ.items() if name not in ('JAX_NUM_CPU_DEVICES', 'PYTHONPATH')}
  ended = subprocess.run([command, *flags], cwd=own_directory, env=env, capture_output=True, text=True, timeout=200)
  assert ended.returncode == exit_codes.OK, ended.stderr
  directory = own_directory / 'runs' / 'mine'
  assert list(binary.column(directory, 'loss')) == [1, 2, 3]
  assert json.loads((directory / 'config.json').read_text())['experiment'] == 'mypkg.mymodule.Mine'
  assert sorted(os.listdir(own_directory)) == ['mypkg', 'runs']

  # A moved directory is no longer signed, so its config alone imports nothing; the error names the remedy.
  monkeypatch.chdir(own_directory)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  directory = directory.rename(own_directory / 'runs' / 'moved')
  again = ('--job_log_dir', directory, '--print_config')
  assert binary.run_in_process(*again) == exit_codes.USAGE
  message = capsys.readouterr().err
  assert 'names the experiment mypkg.mymodule.Mine, which is not registered' in message
  assert f'add --experiment_path {own_directory} ' in message
  assert 'mypkg' not in sys.modules
  assert binary.run_in_process(*again, '--experiment_path', own_directory) == exit_codes.OK
  assert capsys.readouterr().out.startswith('experiment = mypkg.mymodule.Mine')


def test_a_bug_in_the_users_own_experiment_is_reported_with_its_line(own_directory):
  flags = ('--exp', 'mypkg.mymodule.Broken', '--mode', 'train', '--job_log_dir', 'runs/mine')
  ended = binary.run_binary(*flags, cwd=own_directory)
  assert ended.returncode == exit_codes.USAGE
  assert ended.stderr.count('\n') == 1
  assert "NameError: name 'undefined_name' is not defined" in ended.stderr
  assert f'{own_directory}/mypkg/mymodule.py:' in ended.stderr
  assert not (own_directory / 'runs').exists()


def test_a_failed_job_ends_even_if_a_thread_hangs():
  code = f"""if True:
    import threading, time
    from spmd_tasks import main
    main._THREADS_LIMIT_S = 0.2
    main._run = lambda argv, called: {exit_codes.FAILED}
    threading.Thread(target=time.sleep, args=(3600,)).start()
    main.main()
  """
  assert binary.run_binary(command=('-c', code)).returncode == exit_codes.FAILED


def test_sigterm_while_python_ends_does_not_change_the_exit_code():
  code = """if True:
    import atexit, time
    from spmd_tasks import main
    main._run = lambda argv, called: 0
    atexit.register(lambda: (print('ending', flush=True), time.sleep(1)))
    main.main()
  """
  process = binary.start_binary(command=('-c', code))
  assert process.stdout.readline() == 'ending\n'
  process.send_signal(signal.SIGTERM)
  assert binary.finish(process).returncode == exit_codes.OK


# --- flags of other modes ---

REFUSED = {
  'prompts for training': (
    'train --decode_input prompts.jsonl',
    '--decode_input is for --mode decode, decode_once: leave',
  ),
  'a step to train from': ('train --checkpoint_step 4', 'move the later ones out of <job_log_dir>/checkpoints'),
  'one of many checkpoints': (
    'decode --checkpoint_step 5',
    '--mode decode decodes with every new .*; use --mode decode_once',
  ),
  'many checkpoints, one file': ('decode --decode_output out', 'outputs of --mode decode go to <job_log_dir>/decode'),
  'changes of a plan': ('plan --accept_config_changes', '--accept_config_changes is for --mode train, eval'),
  'a plan into a file': ('plan --plan_out /etc/passwd', '/etc/passwd is a file: name a directory'),
  'export to nowhere': ('export', '--mode export needs --out DIR'),
  'fake devices of a plan': ('plan --num_fake_devices 8', 'give --target cpu:8'),
}


def check(flags):
  args = make_parser(all_modes()).parse_args(['--mode', *flags.split()])
  check_flags_of_mode(args, {mode.name: mode for mode in all_modes()}[args.mode], all_modes())


@pytest.mark.parametrize('name', REFUSED)
def test_a_flag_that_the_mode_would_ignore_is_refused(name):
  flags, message = REFUSED[name]
  with pytest.raises(UserError, match=message):
    check(flags)


@pytest.mark.parametrize(
  'flags',
  [
    'eval --watch',
    'decode_once --decode_input prompts.jsonl --decode_output out.jsonl --checkpoint_step 3',
    'export --out model --format hf --checkpoint_step 3',
    'plan --target v5p:4x4x2 --plan_steps train',
  ],
)
def test_a_flag_of_the_mode_is_accepted(flags):
  check(flags)
