"""Low-rank adapters train with the same numbers on every mesh, padded and pipelined.

The model is the one in test_numbers_agree.py; only its adapters and its embedding are trained.
"""

import jax
import numpy as np
import pytest

from spmd_tasks.runtime.flops import model_flops
from tests.runtime.loss_curves import assert_same_run, make_model, reference, runner, table
from tests.runtime.uneven_experiments import AdamW
from tests.tuning.low_rank_experiments import (
  Dora,
  InFourBits,
  LowRank,
  LowRankExperts,
  PipelinedDora,
  PipelinedInFourBits,
  PipelinedLowRank,
  PipelinedLowRankExperts,
)

CIRCULAR = ('schedule=circular', 'num_repeats=2')
ONE_F_ONE_B = ('schedule=one_forward_one_backward',)
# By default test_rewards.py trains adapters on data 2 x mdl 4.
ONE_BY_ONE = [
  ('data 2 x mdl 4', LowRank, LowRank, (1, 2, 4), ()),
  ('one forward, one backward, stage 4 x data 2', LowRank, PipelinedLowRank, (1, 4, 2, 1), ONE_F_ONE_B),
  ('2 microbatches', LowRank, LowRank, (1, 2, 4), ('task.learner.num_microbatches=2',)),
  ('circular, stage 2 x data 2 x mdl 2', LowRank, PipelinedLowRank, (1, 2, 2, 2), CIRCULAR),
  ('DoRA, stage 4 x data 2', Dora, PipelinedDora, (1, 4, 2, 1), ()),
  ('in 4 bits, one forward', InFourBits, PipelinedInFourBits, (1, 4, 2, 1), ONE_F_ONE_B),
  ('experts, stage 2 x data 2 x expert 2', LowRankExperts, PipelinedLowRankExperts, (1, 2, 2, 2, 1), ()),
]


@pytest.mark.parametrize('name, plain, experiment, shape, overrides', table((), ONE_BY_ONE))
def test_one_loss_curve_and_one_state(name, plain, experiment, shape, overrides):
  assert_same_run(runner(experiment, shape, overrides=overrides), reference(plain))


def leaves(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in jax.tree.leaves_with_path(tree)
  }


def test_frozen_weights_have_no_optimizer_state_and_are_sharded_and_padded_as_before():
  """Kernels are sharded as in the plain model; adapters have the split dims of their kernels."""
  (plain, _), (model, _) = make_model(AdamW, (1, 2, 4), overrides=('num_layers=6',)), make_model(LowRank, (1, 2, 4))
  before, padded = leaves(plain.padded_state.weights), leaves(model.padded_state.weights)
  assert {name: leaf for name, leaf in padded.items() if 'lora_' not in name} == before
  layer = 'stack/layers/attention/query/'
  kernel, a, b = (padded[layer + name] for name in ('kernel', 'lora_a', 'lora_b'))
  assert a.shape == (*kernel.shape[:2], 5)
  assert b.shape == (kernel.shape[0], 5, *kernel.shape[2:])
  assert (*a.sharding.spec[:2], *b.sharding.spec[2:]) == (*kernel.sharding.spec,)
  assert model.abstract_state.weights['stack']['layers']['attention']['query']['lora_a'].shape == (6, 30, 5)
  trained = {name for name in padded if 'lora_' in name or 'embedding' in name}
  state = leaves(model.abstract_state.learner)
  assert len([name for name in state if '/mu/' in name or '/nu/' in name]) == 2 * len(trained)
  assert {name.removeprefix('ema_weights/') for name in state if name.startswith('ema_weights/')} == trained


def test_gradients_of_frozen_weights_are_not_computed():
  """A step has the products of the forward pass, of the inputs' gradients, and of the trained weights."""
  (plain, _), (model, _) = make_model(AdamW, (1, 1, 1), overrides=('num_layers=6',)), make_model(LowRank, (1, 1, 1))
  full, low_rank = model_flops(plain), model_flops(model)
  frozen = sum(
    int(np.prod(leaf.shape)) for name, leaf in leaves(plain.abstract_state.weights).items() if 'kernel' in name
  )
  added = sum(
    int(np.prod(leaf.shape)) for name, leaf in leaves(model.abstract_state.weights).items() if 'lora_' in name
  )
  tokens = int(np.prod(model.input_layout.spec['ids'].shape))
  # The plain model has half the batch.
  assert plain.input_layout.spec['ids'].shape[0] * 2 == model.input_layout.spec['ids'].shape[0]
  assert low_rank == 2 * full - 2 * tokens * frozen + 6 * tokens * added
