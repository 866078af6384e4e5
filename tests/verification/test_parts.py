"""The parts of --mode verify that need no compiled program: shrinking, meshes, batches, what a difference may be."""

import itertools
import math

import numpy as np
import pytest

from spmd_tasks.config import resolve, to_json
from spmd_tasks.verification._agreement import compare
from spmd_tasks.verification._settings import all_meshes, draw_batches, draw_meshes, scaled_mesh, shrink


def shrunk(name: str, *overrides: str) -> dict[str, str]:
  resolved = resolve(name, overrides)
  job = resolved.build()
  small = shrink(job, to_json(resolved)['config'], dict(scaled_mesh(job.experiment, 8)))
  # The shrunk experiment can be built: its sizes fit together.
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
    ('tests.tuning.reward_experiments.Policy', {'batch_size': '8', 'seq_len': None}),  # prompts and completions fit
  ],
)
def test_sizes_shrink_and_settings_stay(name, changes):
  found = shrunk(name)
  assert {path: found.get(path) for path in changes} == changes
  if not changes:
    assert not found


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


def test_drawn_meshes_have_the_sizes_that_are_asked_for_and_do_not_repeat():
  names = ('replica', 'data', 'mdl')
  assert len(all_meshes(names, 8)) == 10
  drawn = list(itertools.islice(draw_meshes(names, [8, 6], np.random.default_rng(0)), 18))
  assert [math.prod(size for _, size in mesh) for mesh in drawn] == [8, 6] * 9
  assert len(set(drawn)) == 18


def test_batches_are_ragged_after_the_first():
  train_input = resolve('synthetic.Tiny').build().train_input
  first, *others = draw_batches(train_input, 4, seed=0)
  assert len(set(first['weights'].sum(axis=1))) == 1
  for batch in others:
    assert len(set(batch['weights'].sum(axis=1))) > 2
    assert batch['weights'].any(axis=1).all()
    assert (batch['segment_ids'] == 0).any()


@pytest.mark.parametrize(
  'off, spread, is_wrong',
  [
    (1e-7, 0.0, False),  # a rounding
    (1e-4, 0.0, True),
    (1e-4, 1e-5, False),  # rounding alone moves the leaf by a tenth of that
    (np.nan, 0.0, True),
  ],
)
def test_a_difference_is_held_against_what_rounding_does(off, spread, is_wrong):
  reference = {'gradients/a': np.array([1.0, 0.5], np.float32)}
  other = {'gradients/a': reference['gradients/a'] + np.float32(off)}
  wrong, _, noise = compare(reference, other, {'gradients/a': spread}, 2.0**-23, step=3)
  assert bool(wrong) == is_wrong
  assert noise == []
  if wrong:
    assert (wrong[0].step, wrong[0].leaf) == (3, 'gradients/a')


def test_noise_is_no_excuse_for_everything():
  reference = {'gradients/a': np.ones(2), 'gradients/zero': np.full(2, 1e-9)}
  spreads = {'gradients/a': 1e-3, 'gradients/zero': 1e-9}
  wrong, every, noise = compare(reference, reference, spreads, 2.0**-23, step=1)
  assert not wrong
  assert noise == ['gradients/a']  # reported as not compared
  assert [each.leaf for each in every] == ['gradients/zero']  # zero but for rounding: any other small value is as good
