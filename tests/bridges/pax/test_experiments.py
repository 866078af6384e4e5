"""Runs unmodified Pax experiments: a mixture of experts, checkpoints of Paxml, overrides, and what is refused.

tests/data/pax_lab has two experiments and the results of Paxml 1.4.0 on 8 devices; test_modes.py runs the dense one.
"""

import json

import numpy as np
import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.bridges.pax.conftest import CONTINUED, PAX_EXPERIMENTS

DENSE, MOE = 'pax_lab.dense_lm.DenseLm', 'pax_lab.moe_lm.MoeLm'
LOSSES = json.loads((PAX_EXPERIMENTS / 'pax_lab' / 'expected_losses.json').read_text())['losses']
TRAIN = ('--mode', 'train', '--set', 'log_every_steps=1', '--set', 'trackers=()')
EIGHT, FOUR = (('--num_fake_devices', number) for number in (8, 4))

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive  # its experts are Praxis's code, like the layers of the dense model
def test_losses_of_a_mixture_of_experts_equal_paxml(run_pax, tmp_path):
  finished = run_pax('--exp', MOE, *TRAIN, '--job_log_dir', tmp_path, *EIGHT)
  assert finished.returncode == 0, finished.stderr
  np.testing.assert_allclose(list(binary.column(tmp_path, 'loss').values()), LOSSES[MOE], rtol=1e-6)


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
