"""One truth for numbers, pipelined: any schedule on any number of stages gives the loss curve of the plain stack.

The table of test_numbers_agree.py for pipelines of 10 or 6 layers, which 4 stages do not divide. Cases pair settings
that are independent of each other; `--all` has more pairs, and scripts/number_campaign draws any.
"""

import itertools

import jax
import numpy as np
import pytest

from spmd_tasks.checkpoints import Checkpointer
from tests.runtime.loss_curves import assert_same_run, make_model, reference, runner, table
from tests.runtime.moe_experiments import AlongData
from tests.runtime.pipeline_experiments import PipelinedAdafactor, PipelinedAdamW, PipelinedExperts
from tests.runtime.uneven_experiments import Adafactor, AdamW

TEN, SIX = ('num_layers=10', 'batch_size=16'), ('num_layers=6', 'batch_size=16')
PLAIN = {PipelinedAdamW: (AdamW, TEN), PipelinedAdafactor: (Adafactor, SIX), PipelinedExperts: (AlongData, SIX)}
CIRCULAR = ('schedule=circular', 'num_repeats=2')
ONE_F_ONE_B = ('schedule=one_forward_one_backward',)
FOUR = ('num_microbatches=4',)
HEAD = ('num_nextn_predict_layers=1',)
SIXTEEN, DOTS = ('num_microbatches=16',), ('remat_policy=dots_no_batch',)
FAST = ('circular, stage 2 x data 2 x mdl 2',)

FFN = 'task.model.stack.block.ffn'
# What is taken over parts of a batch, whose rows have different lengths: the balance loss over shards; biases, which
# follow the load by its sign; tokens dropped from groups of two rows.
SHARDS, BIAS = (
  (f'{FFN}.load_balance_shards=4',),
  tuple(f'{FFN}.router.{setting}' for setting in ('score_function=sigmoid', 'balance_bias=True')),
)
GROUPS = (f'{FFN}.computation.group_size=32',)
GATHER = ('form=gather', *GROUPS, *BIAS, *SHARDS)
EINSUM = ('form=einsum', *GROUPS, *SHARDS)
DROPLESS = (*BIAS, *SHARDS)

# name, experiment, mesh, overrides, those of them that the plain stack has too
TWO = 'task.learner.num_microbatches=2'
CASES = [
  ('circular, stage 2 x data 2 x mdl 2', PipelinedAdamW, (1, 2, 2, 2), CIRCULAR, ()),
  ('one forward, one backward, stage 8', PipelinedAdamW, (1, 8, 1, 1), (*ONE_F_ONE_B, 'remat_policy=full'), ()),
]
# Of what is left out by default, experts in a pipeline are compared in tests/layers/pipeline too, the plain schedule
# in tests/tuning/test_rewards.py.
ONE_BY_ONE = [
  ('stage 4 x data 2', PipelinedAdamW, (1, 4, 2, 1), (), ()),
  ('experts, one forward, one backward', PipelinedExperts, (1, 4, 1, 2, 1), (*ONE_F_ONE_B, *DROPLESS), DROPLESS),
  ('experts by einsum, circular', PipelinedExperts, (1, 2, 2, 2, 1), (*CIRCULAR, *EINSUM), EINSUM),
  ('stage 2 x mdl 4, remat', PipelinedAdamW, (1, 2, 1, 4), ('remat_policy=full', 'num_microbatches=2'), ()),
  ('circular, 16 microbatches, remat', PipelinedAdamW, (1, 4, 2, 1), (*CIRCULAR, *SIXTEEN, *DOTS), ()),
  ('one forward, one backward, 2 microbatches of the learner', PipelinedAdamW, (1, 4, 2, 1), (*ONE_F_ONE_B, TWO), ()),
  ('Adafactor, circular, stage 2 x data 2 x mdl 2', PipelinedAdafactor, (1, 2, 2, 2), CIRCULAR, ()),
  ('experts by gather, stage 2 x data 4', PipelinedExperts, (1, 2, 4, 1, 1), (*FOUR, *GATHER), GATHER),
  ('a head, one forward, one backward', PipelinedAdamW, (1, 2, 2, 2), (*ONE_F_ONE_B, *HEAD), HEAD),
  ('experts, stage 2 x data 2 x expert 2', PipelinedExperts, (1, 2, 2, 2, 1), (), ()),
  ('experts by gather, stage 4 x data 2', PipelinedExperts, (1, 4, 2, 1, 1), (*FOUR, *ONE_F_ONE_B, *GATHER), GATHER),
]


@pytest.mark.parametrize('name, experiment, shape, overrides, same', table(CASES, ONE_BY_ONE, fast=FAST))
def test_one_loss_curve_and_one_state(name, experiment, shape, overrides, same):
  plain, sizes = PLAIN[experiment]
  assert_same_run(runner(experiment, shape, overrides=overrides), reference(plain, (*sizes, *same)))


MOVES = {
  'stage 4': (PipelinedAdamW, (1, 4, 1, 1), ()),
  'stage 2': (PipelinedAdamW, (1, 2, 2, 1), ONE_F_ONE_B),
  'circular 2 x 2': (PipelinedAdamW, (1, 2, 2, 2), CIRCULAR),
  'plain': (AdamW, (1, 2, 2), TEN),
}
ADAFACTOR_MOVES = {
  'stage 4': (PipelinedAdafactor, (1, 4, 1, 1), ()),
  'circular 4 x 2': (PipelinedAdafactor, (1, 4, 2, 1), CIRCULAR),
  'plain': (Adafactor, (1, 1, 1), SIX),
}


@pytest.mark.parametrize('moves', [MOVES, pytest.param(ADAFACTOR_MOVES, marks=pytest.mark.slow)])
def test_a_checkpoint_moves_between_stages_and_schedules_bit_exactly(moves, tmp_path):
  """From each to the next: every restored state, optimizer state included, is the first one's, bit for bit."""
  models = [make_model(experiment, shape, overrides=overrides)[0] for experiment, shape, overrides in moves.values()]
  models.append(models[0])
  state = models[0].init(0)
  state = jax.jit(_fill, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, models[0].padded_state))(state)
  first = jax.device_get(models[0].to_canonical(state))
  for step, (model, following) in enumerate(itertools.pairwise(models), 1):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(step, model.to_canonical(state), input_state={})
    checkpointer.close()
    state = following.from_canonical(Checkpointer(tmp_path).restore(following.canonical_state).state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, state, following.padded_state))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape, state, following.padded_state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(following.to_canonical(state)), first)


def _fill(state):
  """The state with another number in each element, for a fresh optimizer's zeros would agree in any order."""

  def fill(leaf):
    return leaf + jax.numpy.arange(leaf.size, dtype='int32').reshape(leaf.shape).astype(leaf.dtype)

  return jax.tree.map(fill, state)
