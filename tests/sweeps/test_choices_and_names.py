"""The jobs of a sweep: their settings, names and overrides, and one sentence for each mistake."""

import enum

import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.config.resolution import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.sweeps import drawn, product, zipped
from spmd_tasks.sweeps.jobs import jobs_of
from tests import binary
from tests.sweeps.small_sweeps import SHAPES, Shapes


class Color(enum.Enum):
  RED = 1


def jobs_of_sweep(sweep):
  return jobs_of(type('Own', (Shapes,), {'sweep': lambda self: sweep})())


def names_of(sweep):
  return [job.name for job in jobs_of_sweep(sweep)]


def test_product_has_every_combination_and_zipped_every_row():
  values = {'a': (1, 2), 'b': range(2)}
  assert product(values) == [{'a': 1, 'b': 0}, {'a': 1, 'b': 1}, {'a': 2, 'b': 0}, {'a': 2, 'b': 1}]
  assert zipped(values) == [{'a': 1, 'b': 0}, {'a': 2, 'b': 1}]
  with pytest.raises(UserError, match=r"not \{'a': 2, 'b': 1\}"):
    zipped({'a': (1, 2), 'b': (1,)})


def test_drawn_settings_follow_from_the_seed_alone_and_stay_when_there_are_more():
  values = {'rate': lambda rng: 10 ** rng.uniform(-4, -2), 'width': (8, 16)}
  few, many = drawn(values, 5, seed=3), drawn(values, 50, seed=3)
  assert few == many[:5]
  assert few != drawn(values, 5, seed=4)
  assert {each['width'] for each in many} == {8, 16}
  assert all(1e-4 <= each['rate'] <= 1e-2 and float(f'{each["rate"]:.4g}') == each['rate'] for each in many)


@pytest.mark.parametrize(
  'sweep, names',
  [
    (product({'learning_rate': (0.1, 1e-5), 'seed': (0,)}), ['learning_rate=0.1', 'learning_rate=1e-05']),
    ([{'learning_rate': 0.1, 'seed': 1}], ['learning_rate=0.1,seed=1']),
    ([{}, {'seed': 1}], ['default', 'seed=1']),
    (
      zipped({'task.learner.a.rate': (1, 2), 'task.b.rate': (3, 4), 'task.b.x': (5, 6)}),
      ['task.learner.a.rate=1,task.b.rate=3,x=5', 'task.learner.a.rate=2,task.b.rate=4,x=6'],
    ),
    (product({'ici_mesh_shape': ((1, 2, 4), (1, 8, 1))}), ['ici_mesh_shape=1_2_4', 'ici_mesh_shape=1_8_1']),
    (product({'init_from': ('gs://b/x', None)}), ['init_from=gs_b_x', 'init_from=None']),
    ({'small': {'seed': 1}, 'large': {'seed': 1}}, ['small', 'large']),
  ],
)
def test_names_are_made_of_what_differs(sweep, names):
  assert names_of(sweep) == names


@pytest.mark.parametrize(
  'value, text',
  [
    (1e-4, '0.0001'),
    (np.float32(0.5), '0.5'),
    (np.int64(3), '3'),
    ((1, 2), '(1, 2)'),
    (None, 'None'),
    (True, 'True'),
    ('bfloat16', 'bfloat16'),
    (np.dtype('float16'), 'float16'),
    (Color.RED, 'RED'),
  ],
)
def test_values_become_the_text_of_set(value, text):
  assert jobs_of_sweep([{'x.y': value}])[0].overrides == (f'x.y={text}',)


def test_overrides_set_the_values_of_the_sweep():
  settings = {'learning_rate': np.float32(0.25), 'dims': (3, 4), 'init_from': None, 'note': 'a, b = c', 'seed': 5}
  (job,) = jobs_of_sweep([settings])
  experiment = resolve(Shapes, job.overrides).experiment
  assert {name: getattr(experiment, name) for name in settings} == settings


@pytest.mark.parametrize(
  'sweep, message',
  [
    ((), 'Own has no sweep: define sweep()'),
    ('seed', r"returns seed: return a list of overrides, such as \[\{'seed': 0\}"),
    ([3], r'returns \[3\]: return a list'),
    ([{'seed': 1}, {'seed': 2}, {'seed': 1}], "several jobs of the name 'seed=1': remove all but one"),
    ({'a/b': {}}, "the name 'a/b', which is also a directory: use at most 200 letters"),
    ({'../up': {}}, "the name '../up'"),
    ({'.hidden': {}}, "the name '.hidden'"),
    ({'': {}}, "the name ''"),
    ({3: {}}, "the name '3'"),
    (product({'note': ('x' * 300, 'y')}), 'To choose names, return a dict'),
    ([{'task': object()}], 'of type object for task: use what --set takes'),
  ],
)
def test_a_wrong_sweep_is_one_sentence(sweep, message):
  with pytest.raises(UserError, match=message):
    jobs_of_sweep(sweep)


def test_an_error_in_sweep_names_its_line():
  def fail(self):
    return [{}['no_such_key']]

  with pytest.raises(UserError, match=r"sweep\(\) of Own fails with KeyError: 'no_such_key' \(.*names\.py:\d+\)"):
    jobs_of(type('Own', (Shapes,), {'sweep': fail})())


def test_the_list_has_every_job(capfd):
  assert binary.run_in_process('--exp', SHAPES, '--set', 'note=x', '--sweep_list') == exit_codes.OK
  lines = capfd.readouterr().out.splitlines()
  assert lines[0].split() == ['0', 'learning_rate=0.1,seed=0', 'learning_rate=0.1', 'seed=0']
  assert [line.split()[0] for line in lines] == ['0', '1', '2', '3']


def test_the_index_of_an_array_names_the_job_whose_config_is_printed(monkeypatch, capfd):
  monkeypatch.setenv('SLURM_ARRAY_TASK_ID', '3')
  assert binary.run_in_process('--exp', SHAPES, '--sweep_index', '--print_config') == exit_codes.OK
  assert {'learning_rate = 0.5', 'seed = 1'} <= {*capfd.readouterr().out.splitlines()}


WRONG = 'tests.sweeps.small_sweeps.Wrong'


@pytest.mark.parametrize(
  'flags, environ, message',
  [
    (('--sweep_index', 4), {}, '--sweep_index 4 is not a job of the sweep, which has 4: use 0 to 3.'),
    (('--sweep_index', -1), {}, '--sweep_index -1 is not a job of the sweep'),
    (('--sweep_index',), {}, 'needs SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX in the environment'),
    (('--sweep_index',), {'SLURM_ARRAY_TASK_ID': '4'}, 'SLURM_ARRAY_TASK_ID=4 is not a job of the sweep'),
    (('--sweep_index',), {'JOB_COMPLETION_INDEX': 'x'}, 'JOB_COMPLETION_INDEX=x is not a job'),
    (('--sweep_index', 1, '--seed', 3), {}, 'seed is set by the command, and by the sweep in learning_rate=0.1,seed=0'),
    (('--sweep', 'all', '--num_processes', 2), {}, '--num_processes is 2: give --sweep_index N'),
    (
      ('--sweep', 'all', '--exp', WRONG),
      {},
      'job learning_rate=fast of the sweep: learning_rate=fast is not of type float',
    ),
    (
      ('--sweep_list', '--exp', WRONG),
      {},
      'job learning_rate=fast of the sweep: learning_rate=fast is not of type float',
    ),
    (('--sweep_index', 1, '--exp', WRONG), {}, 'learning_rate=fast is not of type float'),
    (('--sweep_list', '--exp', 'synthetic.Tiny'), {}, 'Tiny has no sweep'),
  ],
)
def test_a_wrong_command_is_one_sentence_and_writes_nothing(flags, environ, message, tmp_path, monkeypatch, capfd):
  for name in ('SLURM_ARRAY_TASK_ID', 'JOB_COMPLETION_INDEX'):
    monkeypatch.delenv(name, raising=False)
  for name, value in environ.items():
    monkeypatch.setenv(name, value)
  directory = tmp_path / 'sweep'
  code = binary.run_in_process('--exp', SHAPES, '--mode', 'train', '--job_log_dir', directory, *flags)
  said = capfd.readouterr().err
  assert code == exit_codes.USAGE
  assert message in said.splitlines()[-1]
  assert not directory.exists()


def test_a_sweep_does_not_start_in_the_directory_of_a_job(tmp_path, capfd):
  (tmp_path / 'config.json').write_text('{}')
  flags = ('--exp', SHAPES, '--mode', 'train', '--job_log_dir', tmp_path)
  assert binary.run_in_process(*flags, '--sweep', 'all') == exit_codes.USAGE
  assert 'is the directory of a job: give another one' in capfd.readouterr().err
