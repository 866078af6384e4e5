"""Runs unmodified Pax experiments: Paxml's losses, layouts, kill and resume, checkpoints of Paxml, and overrides.

tests/data/pax_lab has two experiments and the results of Paxml 1.4.0 on 8 devices.
"""

import json
import tarfile

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.bridges.pax.conftest import PAX_EXPERIMENTS

DENSE, EMA, MOE = 'pax_lab.dense_lm.DenseLm', 'pax_lab.dense_lm.DenseLmEma', 'pax_lab.moe_lm.MoeLm'
LOSSES = json.loads((PAX_EXPERIMENTS / 'pax_lab' / 'expected_losses.json').read_text())['losses']
# Losses of steps 4 and 5, computed by Paxml's step function on one device from Paxml's checkpoint.
CONTINUED = [4.193216800689697, 4.155379295349121]
TRAIN = ('--mode', 'train', '--set', 'log_every_steps=1', '--set', 'trackers=()')
EIGHT, FOUR = (('--num_fake_devices', number) for number in (8, 4))
SAVED = ('--set', 'checkpoint_every=5', '--set', 'eval_every_steps=10')

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def dense_runs(run_pax_together, tmp_path_factory):
  """Trains DenseLmEma for 20 steps on 8 devices, and evaluates its averaged and its trained weights.

  A copy of the job, made after step 10, resumes with its saved config. Returns both directories, and the stderr of each
  run. DenseLmEma has the loss of DenseLm.
  """
  directory = tmp_path_factory.mktemp('dense')
  resumed = directory.with_name('resumed')
  flags = ('--job_log_dir', directory, *EIGHT)
  own = ('--mode', 'eval', '--set', 'eval_with_ema=false', '--accept_config_changes')
  runs = run_pax_together(
    ('--exp', EMA, *TRAIN, *SAVED, '--set', 'eval_with_ema=true', *flags),
    ('tests.binary:copy_at', directory, 10, resumed),
    ('--mode', 'train', '--job_log_dir', resumed, *EIGHT),
    ('--mode', 'eval', *flags),
    (*own, *flags),
  )
  return directory, resumed, runs


@pytest.fixture
def dense_job(dense_runs):
  return dense_runs[0]


def test_losses_equal_paxml(dense_job):
  np.testing.assert_allclose(list(binary.column(dense_job, 'loss').values()), LOSSES[DENSE], rtol=1e-6)


@pytest.mark.exhaustive  # its experts are Praxis's code, like the layers of the dense model
def test_losses_of_a_mixture_of_experts_equal_paxml(run_pax, tmp_path):
  finished = run_pax('--exp', MOE, *TRAIN, '--job_log_dir', tmp_path, *EIGHT)
  assert finished.returncode == 0, finished.stderr
  np.testing.assert_allclose(list(binary.column(tmp_path, 'loss').values()), LOSSES[MOE], rtol=1e-6)


@pytest.mark.filterwarnings('ignore:Sharding info not provided when restoring')
def test_a_job_resumes_bit_for_bit(dense_runs):
  """The input has no state, so its batches are counted."""
  dense_job, resumed, (_, _, (code, stderr), *_) = dense_runs
  assert code == 0, stderr
  assert 'resuming after step 10' in stderr
  for name in ('loss', 'weight_norm', 'grad_norm'):
    assert binary.column(resumed, name) == binary.column(dense_job, name)
  states = [
    ocp.PyTreeCheckpointHandler().restore(job / 'checkpoints' / 'checkpoint_00000020' / 'state')
    for job in (resumed, dense_job)
  ]
  assert jax.tree.all(jax.tree.map(np.array_equal, *states))


def test_an_eval_job_equals_evals_in_training(dense_runs):
  """The averaged weights are in the checkpoint's optimizer state."""
  directory, _, (*_, (_, averaged), (_, own)) = dense_runs
  recorded = next(line for line in binary.metric_lines(directory / 'eval' / 'valid') if line['step'] == 20)
  assert f'loss {recorded["loss"]:.4f}' in averaged
  assert f'loss {recorded["loss"]:.4f}' not in own
  assert 'loss ' in own


@pytest.fixture(scope='module')
def paxml_job(tmp_path_factory):
  """Returns a job of Paxml with the checkpoint of step 3."""
  directory = tmp_path_factory.mktemp('paxml')
  with tarfile.open(PAX_EXPERIMENTS / 'paxml_1_4_0' / 'dense_lm_ema.tar.xz') as archive:
    archive.extractall(directory, filter='data')
  return directory


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  'num_devices, mesh',
  [
    (6, '1,2,3'),
    (8, '1,4,2'),
    (1, '1,1,1'),
  ],
)
def test_a_job_continues_on_any_mesh(run_pax, paxml_job, tmp_path, num_devices, mesh):
  """The two steps behind the checkpoint, by one process."""
  before = sorted(path.name for path in (paxml_job / 'checkpoints').iterdir())
  flags = ('--exp', 'pax_lab.restored.Restored', *TRAIN, '--set', f'ici_mesh_shape={mesh}')
  flags += ('--num_fake_devices', num_devices)
  flags += ('--set', 'num_train_steps=5', '--set', 'eval_every_steps=1', '--job_log_dir', tmp_path)
  finished = run_pax(*flags, '--set', f'continue_from={paxml_job}')
  assert finished.returncode == 0, finished.stderr
  assert 'continuing after step 3' in finished.stderr
  evaluated = {line['step']: line['loss'] for line in binary.metric_lines(tmp_path / 'eval' / 'given')}
  assert list(evaluated) == [3, 4, 5]
  assert evaluated[3] == pytest.approx(4.2121453285217285, rel=2e-6)
  # These depend on the optimizer state after 3 steps of Paxml.
  assert list(binary.column(tmp_path, 'loss').values()) == pytest.approx(CONTINUED, rel=2e-6)
  assert sorted(path.name for path in (paxml_job / 'checkpoints').iterdir()) == before


def test_a_job_continues_from_a_checkpoint_of_paxml(run_pax_together, paxml_job, tmp_path):
  """With its optimizer state, on three devices, without writing to Paxml's job; Paxml evaluated 4.2121453.

  A job whose last step is the checkpoint's step saves it in our format, and goes on from there.
  """
  before = sorted(path.name for path in (paxml_job / 'checkpoints').iterdir())
  flags = ('--exp', 'pax_lab.restored.Restored', '--num_fake_devices', 3, '--set', 'ici_mesh_shape=1,1,3')
  evaluate = (*flags, '--mode', 'eval', '--job_log_dir', tmp_path / 'own', '--set')
  on = (*flags, *TRAIN, '--set', f'continue_from={paxml_job}', '--set', 'eval_every_steps=1')
  on += ('--job_log_dir', tmp_path / 'on', '--num_train_steps')
  runs = run_pax_together(
    (*evaluate, f'init_from={paxml_job}'),
    (*evaluate, f'continue_from={paxml_job}', '--set', 'eval_with_ema=true', '--job_log_dir', tmp_path / 'ema'),
    (*flags, '--mode', 'eval', '--job_log_dir', paxml_job),
    (*on, 3),
    (*on, 3),
    (*flags, '--mode', 'eval', '--job_log_dir', tmp_path / 'on', '--set', 'eval_with_ema=true'),
    (*on, 5),
  )
  assert [code for code, _ in runs] == [0, 0, exit_codes.USAGE, 0, 0, 0, 0], runs
  (line,), (averaged,) = (binary.metric_lines(tmp_path / name / 'eval' / 'given') for name in ('own', 'ema'))
  assert (line['step'], line['weights_from']) == (3, f'{paxml_job}/checkpoints/checkpoint_00000003')
  assert line['loss'] == pytest.approx(4.2121453285217285, rel=2e-6)
  assert f'--set init_from={paxml_job}' in runs[2][1]
  assert 'step 3 of 3 is already saved' in runs[4][1]
  assert 'step 3 of 3 is already saved' not in runs[3][1]
  assert 'continuing after step 3' in runs[3][1]
  assert f'loss {averaged["loss"]:.4f}' in runs[5][1]  # from the checkpoint that the new job has saved
  assert averaged['loss'] != pytest.approx(line['loss'], rel=1e-3)
  assert 'resuming after step 3' in runs[6][1]
  # These depend on the optimizer state after 3 steps of Paxml.
  assert list(binary.column(tmp_path / 'on', 'loss').values()) == pytest.approx(CONTINUED, rel=2e-6)
  evaluated = binary.metric_lines(tmp_path / 'on' / 'eval' / 'given')
  assert evaluated[0]['loss'] == line['loss']
  assert [line['step'] for line in evaluated[-2:]] == [4, 5]
  assert sorted(path.name for path in (paxml_job / 'checkpoints').iterdir()) == before


def test_a_job_directory_of_paxml_is_refused(paxml_job, capfd):
  before = sorted(path.name for path in (paxml_job / 'checkpoints').iterdir())
  flags = ('--exp', 'synthetic.Tiny', '--ici_mesh_shape', '1,8,1', '--mode', 'train', '--job_log_dir', paxml_job)
  assert binary.run_in_process(*flags) == exit_codes.USAGE
  assert f'--set continue_from={paxml_job}' in capfd.readouterr().err
  assert sorted(path.name for path in (paxml_job / 'checkpoints').iterdir()) == before


OVERRIDES = {
  'NUM_LAYERS=3': ('task.model.lm_tpl.stacked_transformer_tpl.x_times = 3',),
  'ICI_MESH_SHAPE=1,2,1': ('ici_mesh_shape = (1, 2, 1)', 'task.model.ici_mesh_shape = [1, 2, 1]'),
  'task.train.learner.optimizer.beta1=0.5': ('task.train.learner.optimizer.beta1 = 0.5',),
  'num_train_steps=7': ('task.train.num_train_steps = 7', 'checkpoint_every = 10'),
  'train_input.seed=5': ('train_input.seed = 5', 'eval_inputs.valid.seed = 2'),
}


def test_overrides_reach_class_attributes_and_the_config(run_pax):
  finished = run_pax('--exp', DENSE, '--print_config', *(f'--fdl.{override}' for override in OVERRIDES))
  assert finished.returncode == 0, finished.stderr
  printed = set(finished.stdout.splitlines())
  assert [override for override, lines in OVERRIDES.items() if not set(lines) <= printed] == []


REFUSED = [
  (DENSE, ('--set', 'task.train.num_train_steps=3'), 'set num_train_steps itself'),
  (DENSE, ('--set', 'task.train.save_interval_stepz=3'), 'Nearest: task.train.save_interval_steps'),
  ('pax_lab.dense_lm.DenseLn', (), 'pax_lab.dense_lm.DenseLm'),
  ('pax_cases.pipelines.Circular', (), 'stacked_transformer_tpl has circular_repeat = 2, but'),
  ('pax_cases.refused.WithOwnTask', (), 'task() returns a config of OwnTask'),
]
LATE = [
  ('pax_cases.refused.UnknownAxis', (), "map_1d = (('replica', 'dat'),) has the mesh axis 'dat'"),
  # Raised when the step is traced.
  ('pax_cases.refused.UnknownLoss', (), "loss_name = 'nll' must be one of"),
]


@pytest.mark.parametrize('cases', [REFUSED, pytest.param(LATE, marks=pytest.mark.exhaustive)], ids=['early', 'late'])
def test_unsupported_experiments_raise_user_errors(run_pax_together, cases, tmp_path):
  flags = (('--exp', name, *TRAIN, '--job_log_dir', tmp_path / name, *FOUR, *flags) for name, flags, _ in cases)
  for (code, stderr), (name, _, words) in zip(run_pax_together(*flags), cases, strict=True):
    assert code == exit_codes.USAGE, stderr
    assert words in stderr
    assert 'Traceback' not in stderr
    assert cases is LATE or not (tmp_path / name).exists()
