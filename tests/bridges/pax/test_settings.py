"""All flags of Paxml have a hint, which the docs show, and all its fields are read or listed as ignored."""

import dataclasses
import importlib.util
from pathlib import Path
import re

import pytest

from spmd_tasks.bridges.pax._flags import FLAGS
from spmd_tasks.experiment import Experiment
from spmd_tasks.flags import all_modes, make_parser

PAGE = Path(__file__).parents[3] / 'docs' / 'coming_from_pax.md'
# Modules that define the flags of `paxml.main`.
SOURCES = ('paxml.main', 'paxml.summary_utils', 'paxml.tf_data_service_lib', 'praxis.py_utils')
SOURCES += ('fiddle._src.absl_flags.legacy_flags',)
PARSER = make_parser(all_modes())
OWN = {flag.removeprefix('--') for action in PARSER._actions for flag in action.option_strings}


def flags_defined_in(module: str) -> list[str]:
  """Returns the names of the flags that a module defines, without importing it."""
  package, _, name = module.rpartition('.')
  top, *inner = package.split('.')
  spec = importlib.util.find_spec(top)
  source = Path(spec.submodule_search_locations[0], *inner, f'{name}.py').read_text()
  return re.findall(r"DEFINE_\w+\(\s*'(\w+)'", source)


@pytest.mark.parametrize('module', SOURCES)
def test_every_flag_has_a_hint_or_is_ours(module):
  defined = flags_defined_in(module)
  assert defined
  assert [name for name in defined if name not in FLAGS and name not in OWN] == []


def test_hints_name_flags_and_fields_that_exist():
  text = ' '.join(FLAGS.values())
  fields = {field.name for field in dataclasses.fields(Experiment)}
  assert set(re.findall(r'--(\w+)', text)) - OWN == set()
  assert set(re.findall(r'--set (\w+)=', text)) - fields - {'PATH'} == set()
  assert not OWN & set(FLAGS)


@pytest.mark.parametrize(
  'flag, hint',
  [
    ('--server_addr=10.0.0.1:1234', '--coordinator_address HOST:PORT'),
    ('--num_hosts=2', '--num_processes N'),
    ('--host_idx=1', '--process_id I'),
    ('--restore_checkpoint_step=5', '--checkpoint_step N'),
    ('--noenable_checkpoint_saving', 'checkpoint_every=None'),
    ('--mode=infer', '--mode decode_once'),
  ],
)
def test_the_parser_prints_the_hint(flag, hint, capsys):
  with pytest.raises(SystemExit) as end:
    PARSER.parse_args(['--exp', 'a.b.C', '--mode', 'train', flag])
  assert end.value.code == 2
  assert hint in capsys.readouterr().err


@pytest.mark.parametrize('form, value', [('', True), ('=True', True), ('=false', False)])
def test_switches_of_paxml_have_its_forms(form, value):
  flags = PARSER.parse_args(['--mode', 'train', f'--eval_on_test{form}', '--nodecode_during_train'])
  assert (flags.eval_on_test, flags.decode_during_train) == (value, False)


def test_the_docs_have_the_table_of_the_hints():
  names_of: dict[str, list[str]] = {}
  for name, hint in FLAGS.items():
    names_of.setdefault(hint, []).append(f'`--{name}`'.replace('mode=', 'mode '))
  table = '\n'.join(f'| {", ".join(names)} | {hint} |' for hint, names in names_of.items())
  assert table in PAGE.read_text(), table


PROGRAM = """
import dataclasses
import types
from pax_lab import dense_lm
from paxml import tasks_lib
from praxis import base_input
from spmd_tasks.bridges.pax._ignored_settings import IGNORED, describe_ignored_settings

paths = {path: mode for mode, table in IGNORED.items() for path in table}
SingleTask = tasks_lib.SingleTask
READ = {
  'task.train': '''learner num_train_steps save_interval_steps save_keep_interval_duration save_max_to_keep
    log_train_output_interval_steps variable_norm_summary eval_skip_train eval_use_ema_states inputs_split_mapping
    init_from_checkpoint_rules profiler_num_steps profiler_capture_step random_seed apply_mutable_list
    enable_input_checkpointing restore_transformations external_checkpoint_path external_checkpoint_handler''',
  'task.decode': 'prng_key_fold_with_batch_index random_seed apply_mutable_list metrics_prefix',
  'task.evaluate': 'apply_mutable_list',
  'task.infer': '',
  'task.vn': 'vn_scale vn_regex vn_start_step',
  'task': '''name model train decode evaluate infer metrics loss_aggregator vn early_stopping_fn summary_verbosity''',
  'train_input': '''name batch_size num_infeed_hosts infeed_host_index input_random_seed reset_for_eval is_training
    eval_loop_num_batches input_checkpointing_enabled tf_data_service_address''',
}
CLASSES = {'task': SingleTask, 'task.train': SingleTask.Train, 'task.decode': SingleTask.Decode,
  'task.evaluate': SingleTask.Evaluate, 'task.infer': SingleTask.Infer, 'task.vn': SingleTask.VariationalNoise,
  'train_input': base_input.BaseInput}
for owner, cls in CLASSES.items():
  fields = {field.name for field in dataclasses.fields(cls) if field.init and not field.name.startswith('_')}
  ignored = {path.rpartition('.')[2] for path in paths if path.rpartition('.')[0] == owner}
  assert fields == ignored | set(READ[owner].split()), (owner, fields ^ (ignored | set(READ[owner].split())))

experiment = dense_lm.DenseLm()


def job_with(path, value, **switches):
  task, train_input = experiment.task(), experiment.datasets()[0]
  task.train.eval_interval_steps = 100
  task.train.summary_interval_steps, task.train.log_train_output_interval_steps = 100, 10
  owner = {'task': task, 'train_input': train_input}[path.split('.')[0]]
  for part in path.split('.')[1:-1]:
    owner = getattr(owner, part)
  name = path.rpartition('.')[2]
  default = getattr(owner, name)
  setattr(owner, name, value if value is not None else not default if isinstance(default, bool) else (default or 0) + 7)
  switches = {'eval_every_steps': None, 'decode_during_train': False} | switches
  return types.SimpleNamespace(
    experiment=types.SimpleNamespace(**switches), task=types.SimpleNamespace(task=task), eval_inputs=['valid'],
    decode_inputs=['prompts'], train_input=types.SimpleNamespace(config=train_input))


for path, mode in paths.items():
  mode = {'every': 'eval', 'decode': 'decode_once'}.get(mode, mode)
  sentence = describe_ignored_settings(job_with(path, None), mode)
  assert sentence.startswith(f'These settings have no effect: {path} = '), (path, sentence)
  assert sentence.count('(') == 1, sentence
assert describe_ignored_settings(job_with('task.train.random_seed', 5), 'train') == ''
for name in ('decode_interval_steps', 'decode_start_after_n_steps', 'decode_use_ema_states'):
  assert describe_ignored_settings(job_with(f'task.train.{name}', None, decode_during_train=True), 'train') == ''
assert describe_ignored_settings(job_with('task.train.eval_interval_steps', 7, eval_every_steps=7), 'train') == ''
"""


@pytest.mark.slow
def test_all_fields_are_read_or_listed_as_ignored(run_pax):
  finished = run_pax(command=('-c', "import sys; sys.path.append('tests/data')\n" + PROGRAM))
  assert finished.returncode == 0, finished.stderr
