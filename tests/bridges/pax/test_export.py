"""--mode export: a job's checkpoint in Paxml's format has the arrays that real Paxml has for the same experiment."""

from etils import epath
import numpy as np
import pytest
import tensorstore as ts

from spmd_tasks.bridges.pax import open_pax_checkpoint
from tests.bridges.pax.test_checkpoints import real  # noqa: F401  a fixture

pytestmark = pytest.mark.exhaustive  # two processes; what is written is tested in test_checkpoints.py


def read(path: epath.Path, name: str) -> np.ndarray:
  spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{path}/state/{name}/'}}
  return ts.open(spec).result().read().result()


def test_a_checkpoint_is_exported_to_paxml(run_pax, real, tmp_path):  # noqa: F811
  job, target = tmp_path / 'job', tmp_path / 'pax'
  flags = ('--exp', 'pax_lab.dense_lm.DenseLmEma', '--job_log_dir', job, '--num_fake_devices', 8)
  finished = run_pax(*flags, '--mode', 'train', '--num_train_steps', 2, '--set', 'eval_every_steps=9')
  assert finished.returncode == 0, finished.stderr
  export = ('--mode', 'export', '--job_log_dir', job, '--num_fake_devices', 8, '--out', target)
  finished = run_pax(*export)
  assert finished.returncode == 0, finished.stderr
  exported, by_paxml = (open_pax_checkpoint(directory) for directory in (target / 'checkpoints', real))
  assert finished.stdout.splitlines()[-1] == f'exported step 2 to {exported.path}'
  assert {name: (array.shape, array.dtype) for name, array in exported.arrays.items()} == {
    name: (array.shape, array.dtype) for name, array in by_paxml.arrays.items()
  }
  assert read(exported.path, 'step') == read(exported.path, 'opt_states_0.no_prefix_2.count') == 2
  name = 'params.lm.softmax.logits_ffn.linear.w'
  weights, average = (read(exported.path, prefix + name) for prefix in ('mdl_vars.', 'opt_states_0.no_prefix_4.ema.'))
  assert 0 < np.abs(weights - average).max() < 0.1
  assert run_pax(*export).returncode == 2  # the checkpoint exists
