"""A checkpoint moves between meshes, expert-parallel degrees, stages and schedules, bit for bit."""

import itertools

import jax
import numpy as np
import pytest

from spmd_tasks.checkpoints import Checkpointer
from tests.runtime.loss_curves import make_model
from tests.runtime.moe_experiments import AlongData, ExpertAxis
from tests.runtime.pipeline_experiments import PipelinedAdafactor
from tests.runtime.uneven_experiments import Adafactor

SIX = ('num_layers=6', 'batch_size=16')
CIRCULAR = ('schedule=circular', 'num_repeats=2')

# With factored moments and averaged weights.
MOVES = {
  'stage 4': (PipelinedAdafactor, (1, 4, 1, 1), ()),
  'stage 2': (PipelinedAdafactor, (1, 2, 2, 1), ('schedule=one_forward_one_backward',)),
  'plain': (Adafactor, (1, 2, 2), SIX),
  'circular 4 x 2': (PipelinedAdafactor, (1, 4, 2, 1), CIRCULAR),
}
EXPERT_MOVES = {
  'data 2 x expert 4': (ExpertAxis, (1, 2, 4, 1), ()),
  'expert 2 x mdl 2': (ExpertAxis, (1, 1, 2, 2), ()),
  'one device': (AlongData, (1, 1, 1), ()),
}


@pytest.mark.parametrize('moves', [MOVES, EXPERT_MOVES], ids=['stages', 'experts'])
def test_a_checkpoint_moves_between_meshes_and_schedules_bit_exactly(moves, tmp_path):
  """Saves each model's state and restores it in the next: all states equal the first, including optimizer state."""
  models = [make_model(experiment, shape, overrides=overrides)[0] for experiment, shape, overrides in moves.values()]
  models.append(models[0])
  first = _distinct_values(models[0].canonical_state)
  state = models[0].from_canonical(first)
  for step, (model, following) in enumerate(itertools.pairwise(models), 1):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(step, model.to_canonical(state), input_state={})
    checkpointer.close()
    state = following.from_canonical(Checkpointer(tmp_path).restore(following.canonical_state).state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, state, following.padded_state))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape, state, following.padded_state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(following.to_canonical(state)), first)


def _distinct_values(shapes):
  """A state with distinct elements: a new optimizer's zeros would be equal in any order."""
  return jax.tree.map(lambda leaf: np.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype), shapes)
