"""Paxml's own experiments for cloud machines, scaled down by overrides: train, evaluate, go on."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests import binary

SMALL = {'MAX_SEQ_LEN': 16, 'VOCAB_SIZE': 64, 'HIDDEN_DIMS': 48}
SMALL_SPMD = SMALL | {'MODEL_DIMS': 32, 'DIMS_PER_HEAD': 16, 'PERCORE_BATCH_SIZE': 2}
# Class of paxml.tasks.lm.params.lm_cloud: devices, overrides.
CASES = {
  'LmCloudSpmd2B': (4, SMALL_SPMD | {'NUM_LAYERS': 2}),  # mesh 1 x 4 x 1, bfloat16, Adam
  # Two slices: 2 stages over the data center's network, 4 replicas in each slice.
  'LmCloudSpmdPipelineMultislice2B': (8, SMALL_SPMD | {'NUM_LAYERS': 4, 'MICROBATCH_SIZE': 4}),
  'LmCloudSpmdTest': (1, SMALL_SPMD),
  # For pmap.
  'LmCloudTransformerAdamTest': (2, SMALL | {'MODEL_DIMS': 32, 'NUM_HEADS': 2, 'ici_mesh_shape': 2}),
}
LENGTH = {
  'num_train_steps': 12,
  'log_every_steps': 1,
  'checkpoint_every_steps': 3,
  'eval_every_steps': 6,
  'tensorboard': 'false',
}

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.filterwarnings('ignore:Sharding info not provided when restoring')
@pytest.mark.parametrize('name', CASES)
def test_a_cloud_experiment_trains_and_goes_on_bit_for_bit(run_pax, name, tmp_path):
  num_devices, overrides = CASES[name]
  settings = [flag for item in (overrides | LENGTH).items() for flag in ('--set', '{}={}'.format(*item))]
  flags = ('--exp', f'tasks.lm.params.lm_cloud.{name}', '--mode', 'train', '--num_fake_devices', num_devices, *settings)
  whole, parted = tmp_path / 'whole', tmp_path / 'in two parts'
  finished = run_pax(*flags, '--job_log_dir', whole)
  assert finished.returncode == 0, finished.stderr
  losses = list(binary.column(whole, 'loss').values())
  assert losses[-1] < losses[0]  # the input is the same token again and again
  evals = binary.metric_lines(whole / 'eval' / 'input')
  assert [line['step'] for line in evals] == [6, 12]

  for num_steps in (6, 12):
    finished = run_pax(*flags, '--set', f'num_train_steps={num_steps}', '--job_log_dir', parted)
    assert finished.returncode == 0, finished.stderr
  assert 'resuming after step 6' in finished.stderr

  for column in ('loss', 'grad_norm', 'weight_norm'):
    assert binary.column(parted, column) == binary.column(whole, column)
  again = {line['step']: line['loss'] for line in binary.metric_lines(parted / 'eval' / 'input')}
  assert again == {line['step']: line['loss'] for line in evals}
  states = [
    ocp.PyTreeCheckpointHandler().restore(job / 'checkpoints' / 'checkpoint_00000012' / 'state')
    for job in (whole, parted)
  ]
  assert jax.tree.all(jax.tree.map(np.array_equal, *states))
