"""--mode verify shrinks experiments and scales meshes to the devices."""

import pytest

from spmd_tasks.config import resolve, to_json
from spmd_tasks.verification._settings import scaled_mesh, shrink


def shrunk(name: str, *overrides: str) -> dict[str, str]:
  resolved = resolve(name, overrides)
  job = resolved.build()
  small = shrink(job, to_json(resolved)['config'], dict(scaled_mesh(job.experiment, 8)))
  # The shrunk experiment can be built.
  overrides = [f'{path}={value}' for path, value in small.items()]
  resolve(name, [*overrides, 'ici_mesh_shape=' + ','.join(['1'] * len(job.experiment.mesh_axis_names))]).build()
  return {path: str(value) for path, value in small.items()}


@pytest.mark.parametrize(
  'name, changes',
  [
    ('synthetic.Tiny', {}),
    ('lm.UnevenTiny', {'seq_len': '16', 'eval_batches': '2', 'num_train_steps': '40'}),
    ('lm.Dense1B', {'num_layers': '4', 'num_heads': '4', 'num_kv_heads': '2', 'vocab_size': '259', 'dtype': 'float32'}),
    ('moe.FineGrained16B', {'num_experts': '8', 'num_selected_experts': '2', 'shared_hidden_dims': '32'}),
    ('pipeline.OneForwardOneBackwardTiny', {'num_layers': '5', 'batch_size': '8', 'model_dims': '32'}),
    # seq_len does not shrink, because prompts and completions must fit.
    ('tests.tuning.reward_experiments.Policy', {'batch_size': '8', 'seq_len': None}),
  ],
)
def test_sizes_shrink_and_other_settings_do_not(name, changes):
  new_values = shrunk(name)
  assert {path: new_values.get(path) for path in changes} == changes
  if not changes:
    assert not new_values


@pytest.mark.parametrize(
  'name, mesh',
  [
    ('lm.UnevenTiny', {'replica': 1, 'data': 2, 'mdl': 4}),
    ('lm.Dense70B', {'replica': 2, 'data': 2, 'mdl': 2}),
    ('moe.DeepSeekV3Like', {'replica': 1, 'data': 2, 'expert': 4, 'mdl': 1}),
    ('synthetic.Tiny', {'replica': 1, 'data': 1, 'mdl': 1}),
  ],
)
def test_a_large_mesh_is_scaled_to_the_devices(name, mesh):
  assert dict(scaled_mesh(resolve(name).experiment, 8)) == mesh
