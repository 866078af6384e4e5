"""One truth for numbers: the same experiment on any mesh, padded or not, accumulated or not, gives one loss curve.

12 steps in float32 of a model none of whose dims divides an axis of 4 (width 30, 3 heads, 90 hidden, vocabulary 257).
Cases pair a mesh with a setting that is independent of it; `--all` has more pairs.
"""

import jax
import pytest

from tests.runtime.loss_curves import assert_same_run, make_model, reference, runner, table
from tests.runtime.uneven_experiments import Adafactor, AdamW, Muon

DROPOUT = ('task.model.stack.block.dropout_rate=0.1',)
TWO_MICROBATCHES, FOUR_MICROBATCHES = (('task.learner.num_microbatches=2',), ('task.learner.num_microbatches=4',))
REMAT, UNROLLED = ('remat_policy=full',), ('task.model.stack.scan=False',)
CHUNKS = ('num_logit_chunks=4',)
THREE_ROWS, SIX_ROWS = ('batch_size=3',), ('batch_size=6', 'task.learner.num_microbatches=2')
HEADS = ('num_nextn_predict_layers=2',)
SCATTERED = ('scatters_gradients=True',)
FAST = ('data 2 x mdl 4', 'Adafactor, data 2 x mdl 4')
CASES = [
  ('data 2 x mdl 4', AdamW, (1, 2, 4), {}),
  ('mdl 8, 2 microbatches', AdamW, (1, 1, 8), {'overrides': TWO_MICROBATCHES}),
  ('replica 2 x data 2 x mdl 2, full remat, unrolled', AdamW, (2, 2, 2), {'overrides': REMAT + UNROLLED}),
  (
    'two slices of data 2 x mdl 2, 4 microbatches, logits in chunks',
    AdamW,
    (1, 2, 2),
    {'dcn': (1, 2, 1), 'overrides': FOUR_MICROBATCHES + CHUNKS},
  ),
  ('Adafactor, data 2 x mdl 4', Adafactor, (1, 2, 4), {}),
  ('Muon, data 2 x mdl 4, 2 microbatches', Muon, (1, 2, 4), {'overrides': TWO_MICROBATCHES}),
  (
    '2 heads, data 2 x mdl 4, 2 microbatches, full remat, logits in chunks',
    AdamW,
    (1, 2, 4),
    {'overrides': HEADS + TWO_MICROBATCHES + REMAT + CHUNKS, 'reference': HEADS},
  ),
]
ONE_BY_ONE = [  # test_t5_numbers_agree.py has dropout in every run
  ('data 8, dropout', AdamW, (1, 8, 1), {'overrides': DROPOUT, 'reference': DROPOUT}),
  ('4 microbatches on one device', AdamW, (1, 1, 1), {'overrides': FOUR_MICROBATCHES}),
  ('gradients scattered', AdamW, (2, 2, 2), {'overrides': SCATTERED + REMAT}),
  ('gradients scattered, logits in chunks', AdamW, (2, 4, 1), {'overrides': SCATTERED + CHUNKS}),
  ('Adafactor, mdl 8', Adafactor, (1, 1, 8), {}),
  ('3 rows, replica 2 x data 2 x mdl 2', AdamW, (2, 2, 2), {'overrides': THREE_ROWS, 'reference': THREE_ROWS}),
  ('microbatches of 3 rows, data 4 x mdl 2', AdamW, (1, 4, 2), {'overrides': SIX_ROWS, 'reference': ('batch_size=6',)}),
]


@pytest.mark.parametrize('name, experiment, shape, settings', table(CASES, ONE_BY_ONE, fast=FAST))
def test_one_loss_curve_and_one_state(name, experiment, shape, settings):
  other = runner(experiment, shape, dcn=settings.get('dcn'), overrides=settings.get('overrides', ()))

  assert_same_run(other, reference(experiment, settings.get('reference', ())))


@pytest.mark.parametrize('experiment, shape', [(AdamW, (1, 2, 4)), (Adafactor, (1, 2, 4))])
def test_padding_is_reported(experiment, shape):
  """That it stays zero is a part of each comparison."""
  model = runner(experiment, shape).model
  padded, true = jax.tree.leaves(model.padded_state), jax.tree.leaves(model.abstract_state)
  assert sum(a.shape != b.shape for a, b in zip(padded, true)) >= 12  # weights, gradients, both moments, the average
  assert 0.05 < model.padding_waste < 0.15


def test_factored_moments_are_sharded_like_the_weight():
  specs = make_model(Adafactor, (1, 2, 4))[0].state_specs
  assert specs.weights['stack']['layers']['ffn']['up']['kernel'] == jax.P(None, 'data', 'mdl')  # [L, D, F]
  factored = specs.learner.opt_state[0] if isinstance(specs.learner.opt_state, tuple) else specs.learner.opt_state
  rows, columns = (getattr(factored, name)['stack']['layers']['ffn']['up']['kernel'] for name in ('v_row', 'v_col'))
  assert rows == jax.P(None, 'data')  # the mean over F, the larger dim
  assert columns == jax.P(None, 'mdl')
