"""Random experiments have the numbers of one device on random layouts; scripts/number_campaign runs hundreds."""

import json
import random

import pytest

from tests.verification.number_campaign import compare_layouts
from tests.verification.random_experiments import draw_settings, make_job
from tests.verification.random_layouts import draw_layout

# Layouts that once failed, and how.
ONCE_FAILED = [
  pytest.param(
    {
      'seed': 956,
      'vocab_size': 24,
      'model_dims': 8,
      'num_heads': 4,
      'num_kv_heads': 1,
      'num_layers': 4,
      'hidden_dims': 18,
      'batch_size': 16,
      'form': 'packed',
      'norm': 'layer',
      'qk_norm': True,
      'clip_global_norm': 0.1,
      'dropout': 0.0,
      'ffn_kind': 'gated',
    },
    {
      'schedule': 'one_forward_one_backward',
      'num_microbatches': 8,
      'rules': 'dense',
      'mesh_axis_names': ('replica', 'stage', 'data', 'mdl'),
      'ici_mesh_shape': (1, 2, 1, 3),
    },
    id="collectives waited for one another until XLA's timeout",
    marks=pytest.mark.exhaustive,
  )
]


@pytest.mark.parametrize('settings, layout', ONCE_FAILED)
def test_layouts_that_once_failed(settings, layout):
  (result,) = compare_layouts(settings, [layout])
  assert result['verdict'] == 'same', result


def test_every_drawn_experiment_can_be_built_on_every_layout():
  for seed in range(40):
    settings = draw_settings(random.Random(seed))
    for number in range(3):
      layout = draw_layout(random.Random(f'{seed}/{number}'), settings)
      assert json.loads(json.dumps(settings)) == settings
      job = make_job(settings, layout)
      assert job.experiment.mesh_axis_names == layout['mesh_axis_names']
