"""A checkpoint moves between meshes, expert-parallel degrees, stages and schedules, bit for bit."""

import itertools

import jax
import numpy as np
import pytest

from spmd_tasks.checkpoints import Checkpointer
from tests.runtime.loss_curves import make_model, reference
from tests.runtime.moe_experiments import AlongData, ExpertAxis
from tests.runtime.pipeline_experiments import PipelinedAdafactor, PipelinedAdamW
from tests.runtime.uneven_experiments import Adafactor, AdamW

TEN, SIX = ('num_layers=10', 'batch_size=16'), ('num_layers=6', 'batch_size=16')
CIRCULAR = ('schedule=circular', 'num_repeats=2')

MOVES = {
  'stage 4': (PipelinedAdamW, (1, 4, 1, 1), ()),
  'stage 2': (PipelinedAdamW, (1, 2, 2, 1), ('schedule=one_forward_one_backward',)),
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


@pytest.mark.slow
def test_a_checkpoint_moves_between_expert_parallel_degrees_bit_exactly(tmp_path):
  first, expected = make_model(ExpertAxis, (1, 2, 4, 1))[0], reference(AlongData)
  trained = without_gradients(expected.state(2))
  state = jax.device_put(trained, jax.tree.map(lambda leaf: leaf.sharding, first.canonical_state))
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, first.to_canonical(first.from_canonical(state)), input_state={})
  checkpointer.close()
  for experiment, shape in ((ExpertAxis, (1, 1, 8, 1)), (ExpertAxis, (1, 1, 2, 2)), (AlongData, (1, 1, 1))):
    model, _ = make_model(experiment, shape)
    restored = Checkpointer(tmp_path).restore(model.canonical_state)
    live = model.from_canonical(restored.state)
    assert jax.tree.all(jax.tree.map(lambda leaf, padded: leaf.sharding == padded.sharding, live, model.padded_state))
    back = jax.device_get(model.to_canonical(live))
    jax.tree.map(np.testing.assert_array_equal, back, trained)


def without_gradients(state):
  """The state as a training job has it: that of a comparison has the last gradients too."""
  return state.replace(learner=state.learner.replace(opt_state=state.learner.opt_state['optimizer']))
