"""One truth for numbers, with experts: any mesh, dispatch and form of computation gives the one-device loss curve.

The table of test_numbers_agree.py for mixtures of experts: 6 experts over an axis of 4, every other dim uneven too.
Cases pair settings that are independent of each other; `--all` has more pairs, and scripts/number_campaign draws any.
"""

import jax
import numpy as np
import pytest

from spmd_tasks.checkpoints import Checkpointer
from tests.runtime.loss_curves import assert_same_run, make_model, reference, runner, table
from tests.runtime.moe_experiments import AlongData, ExpertAxis, HiddenSharded, TwoDataAxes

FFN = 'task.model.stack.block.ffn'
ALL_TO_ALL = (f'{FFN}.computation.dispatch=padded_all_to_all',)
PASSES = (*ALL_TO_ALL, f'{FFN}.computation.capacity_factor=0.7', f'{FFN}.computation.overflow=passes')
REMAT = ('remat_policy=full',)
# A balance loss is a product of two means: over microbatches apart it is another loss. A router's z-loss is a mean over
# real tokens, which the learner weighs by those that are learnt.
MICROBATCHES = ('load_balance_weight=0', 'router_z_weight=0')
BIAS = (f'{FFN}.router.score_function=sigmoid', f'{FFN}.router.balance_bias=True')
EINSUM, GATHER = ('form=einsum',), ('form=gather',)
# Of gpt-oss; they begin at zero. A token that is dropped gets no bias either.
BIASES = (f'{FFN}.experts.use_bias=True', f'{FFN}.router.use_bias=True')
NEVER_DROP = ('capacity_factor=0',)
THREE_ROWS = ('batch_size=3',)
HEAD = ('num_nextn_predict_layers=1',)
FAST = ('data 2 x expert 4',)

TWO = 'task.learner.num_microbatches=2'

# name, experiment, mesh, overrides, overrides of the reference on one device
CASES = [('data 2 x expert 4', ExpertAxis, (1, 2, 4, 1), (), ())]
ONE_BY_ONE = [
  ('two data axes, einsum, never drop', TwoDataAxes, (1, 4, 2), (*EINSUM, *NEVER_DROP), ()),
  (
    'expert 2 x mdl 4, 2 microbatches, bias balancing',
    ExpertAxis,
    (1, 1, 2, 4),
    (*MICROBATCHES, *BIAS, TWO),
    (*MICROBATCHES, *BIAS),
  ),
  ('hidden sharding', HiddenSharded, (1, 2, 4, 1), (), ()),
  ('einsum with biases, data 2 x expert 4', ExpertAxis, (1, 2, 4, 1), (*EINSUM, *BIASES), (*EINSUM, *BIASES)),
  ('gather with biases, data 2 x expert 4', ExpertAxis, (1, 2, 4, 1), (*GATHER, *BIASES), (*EINSUM, *BIASES)),
  ('data 2 x expert 2 x mdl 2, all-to-all', ExpertAxis, (1, 2, 2, 2), ALL_TO_ALL, ()),
  ('experts along data 4 x mdl 2', AlongData, (1, 4, 2), (), ()),
  ('expert 8, remat', ExpertAxis, (1, 1, 8, 1), REMAT, ()),
  ('a head, data 2 x expert 4', ExpertAxis, (1, 2, 4, 1), HEAD, HEAD),
  ('gather, never drop, expert 4', ExpertAxis, (1, 1, 4, 1), (*GATHER, *NEVER_DROP), ()),
  ('data 2 x expert 4, all-to-all in passes', ExpertAxis, (1, 2, 4, 1), PASSES, ()),
  ('3 rows, data 2 x expert 2 x mdl 2, all-to-all', ExpertAxis, (1, 2, 2, 2), (*ALL_TO_ALL, *THREE_ROWS), THREE_ROWS),
  ('3 rows, two data axes, gather', TwoDataAxes, (1, 4, 2), (*GATHER, *THREE_ROWS), (*EINSUM, *THREE_ROWS)),
]


@pytest.mark.parametrize('name, experiment, shape, overrides, same', table(CASES, ONE_BY_ONE, fast=FAST))
def test_one_loss_curve_and_one_state(name, experiment, shape, overrides, same):
  base = TwoDataAxes if experiment is HiddenSharded else AlongData if experiment is ExpertAxis else experiment
  # What layers report of a microbatch is weighed by its tokens.
  metrics = ('loss', 'loss_weight', 'cross_entropy', 'accuracy') if TWO in overrides else None
  assert_same_run(runner(experiment, shape, overrides=overrides), reference(base, same), metrics)


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
