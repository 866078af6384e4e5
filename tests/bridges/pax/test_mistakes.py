"""Errors in the code of a Pax experiment are reported in one sentence with the file and the line."""

import re

import pytest

from spmd_tasks import exit_codes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = r'mistakes\.py:\d+\)'
TRAIN, EVAL, DECODE = 'train', 'eval', 'decode_once'
# (name of the experiment, the mode, the message)
MISTAKES = [
  ('init', TRAIN, rf'__init__\(\) of pax_cases\.mistakes\.init fails with OSError: no such vocabulary \(.*{HERE}'),
  ('validate', TRAIN, rf'validate\(\) of pax_cases\.mistakes\.validate fails with OSError: .*{HERE}'),
  ('task', TRAIN, rf"task\(\) of pax_cases\.mistakes\.task fails with AttributeError: .*'SinglTask' \(.*{HERE}"),
  ('field', TRAIN, rf"task\(\) of .* fails with AttributeError: No parameter named 'hidden_dims' .*{HERE}"),
  ('mesh', TRAIN, r'task\.model\.ici_mesh_shape = 4 must be a list of integers'),
  ('schedule', TRAIN, r'optimizer\.lr_schedule is None: set it to a config'),
  ('regex', TRAIN, r"bprop_variable_exclusion has '\(', an invalid regular expression"),
  ('datasets', TRAIN, rf"datasets\(\) of .* fails with TypeError: .* argument 'is_trainin' \(.*{HERE}"),
  ('none', TRAIN, r'datasets\(\) of .* returns None: return a list of pax_fiddle\.Config'),
  ('built', EVAL, r'datasets\(\) of .* returns a list with a Rows: return a list of pax_fiddle\.Config'),
  (
    'train__init',
    TRAIN,
    rf"the construction of the input 'train' \(Rows\) fails with OSError: no such shard \(.*{HERE}",
  ),
  ('train__get_next', TRAIN, rf"get_next\(\) of the input 'train' \(Rows\) fails with OSError: .*{HERE}"),
  ('valid__get_next', EVAL, rf"get_next\(\) of the input 'valid' \(Rows\) fails with OSError: .*{HERE}"),
  ('train__kind', TRAIN, r"Rows\.get_next of the input 'train' returns a list: return a NestedMap of arrays"),
  ('decode_datasets', DECODE, rf'decode_datasets\(\) of .* fails with OSError: no such prompts \(.*{HERE}'),
  ('compute_predictions', TRAIN, rf"of Regression fails with AttributeError: .*images.*\['x', 'y'\].*{HERE}"),
  ('compute_loss', TRAIN, rf'the train step of Regression fails with TypeError: .* \(.*{HERE}'),
  ('stop', TRAIN, rf"task\.early_stopping_fn fails with KeyError: 'train/nothing' \(.*{HERE}"),
  ('decode', DECODE, rf'the decode step of Regression fails with TypeError: dot_general .*{HERE}'),
  ('Right', DECODE, r'Regression\.process_decode_out returns a NoneType, .* weighted scalars'),
  ('NoTask', TRAIN, r'NoTask does not define task\(\): define it'),
]


@pytest.fixture(scope='module')
def ends(run_pax_together, tmp_path_factory):
  """Returns the exit code and stderr of each experiment; decode jobs have a checkpoint of the correct experiment."""
  jobs = {mode: tmp_path_factory.mktemp(mode) for mode in (EVAL, DECODE)}
  flags = ('--num_fake_devices', 4, '--set', 'trackers=()', '--accept_config_changes')

  def command(name, mode, directory=None):
    directory = directory or jobs.get(mode) or tmp_path_factory.getbasetemp() / f'no_{name}'
    return '--exp', f'pax_cases.mistakes.{name}', '--mode', mode, '--job_log_dir', directory, *flags

  first, *runs = run_pax_together(
    command('Right', TRAIN, jobs[DECODE]), *(command(name, mode) for name, mode, _ in MISTAKES)
  )
  assert first[0] == exit_codes.OK, first
  return dict(zip((name for name, *_ in MISTAKES), runs, strict=True))


@pytest.mark.parametrize(
  'name, sentence', [(name, sentence) for name, _, sentence in MISTAKES], ids=[name for name, *_ in MISTAKES]
)
def test_a_mistake_is_one_sentence(ends, name, sentence):
  code, stderr = ends[name]
  assert code == exit_codes.USAGE, stderr
  assert re.search(rf'^spmd-tasks: .*{sentence}', stderr, re.MULTILINE), stderr
  assert 'Traceback' not in stderr
