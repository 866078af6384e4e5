"""One truth for numbers, with long sequences: tokens split over a context axis give the one-device loss curve."""

import pytest

from spmd_tasks.sharding import DEFAULT_AXIS_RULES, context_axis_rules, stage_axis_rules
from tests.runtime.loss_curves import assert_same_run, reference, runner, table
from tests.runtime.moe_experiments import AlongData
from tests.runtime.pipeline_experiments import PipelinedAdamW
from tests.runtime.uneven_experiments import AdamW

ATTENTION = 'task.model.stack.block.attention'
RING, BLOCKWISE = (f'{ATTENTION}.implementation=ring',), (f'{ATTENTION}.implementation=blockwise',)
CHUNKS = ('num_logit_chunks=4',)
WINDOW, REMAT = (f'{ATTENTION}.window=5',), ('remat_policy=full',)
FEW = ('batch_size=3', 'seq_len=15')
TEN = ('num_layers=10', 'batch_size=16')


class Context(AdamW):
  """synthetic.Uneven with its sequences over an axis, too."""

  mesh_axis_names = ('replica', 'data', 'context', 'mdl')
  ici_mesh_shape = (1, 1, 2, 4)
  axis_rules = context_axis_rules(DEFAULT_AXIS_RULES)


class ContextExperts(AlongData):
  """Experts along `data`, sequences along `context`."""

  mesh = None
  mesh_axis_names = ('replica', 'data', 'context', 'mdl')
  ici_mesh_shape = (1, 2, 2, 2)
  axis_rules = context_axis_rules(DEFAULT_AXIS_RULES)


class PipelinedContext(PipelinedAdamW):
  """Stages, and sequences along `context`."""

  mesh_axis_names = ('replica', 'stage', 'data', 'context', 'mdl')
  ici_mesh_shape = (1, 2, 1, 4, 1)
  axis_rules = context_axis_rules(stage_axis_rules(DEFAULT_AXIS_RULES))


BASES = {Context: (AdamW, ()), ContextExperts: (AlongData, ()), PipelinedContext: (AdamW, TEN)}

# name, experiment, mesh, overrides, those of them that change the numbers
CASES = [('context 4 x mdl 2, ring, logits in chunks', Context, (1, 1, 4, 2), (*RING, *CHUNKS), ())]
ONE_BY_ONE = [
  ('data 2 x context 2 x mdl 2, window', Context, (1, 2, 2, 2), (*BLOCKWISE, *WINDOW, *REMAT), WINDOW),
  ('context 2 x mdl 4, ring, window, remat', Context, (1, 1, 2, 4), (*RING, *WINDOW, *REMAT), WINDOW),
  ('experts, data 2 x context 2 x mdl 2', ContextExperts, (1, 2, 2, 2), (), ()),
  ('3 rows of 15 tokens, data 2 x context 2 x mdl 2', Context, (1, 2, 2, 2), FEW, FEW),
  ('3 rows of 15 tokens, ring, data 2 x context 4', Context, (1, 2, 4, 1), (*RING, *FEW), FEW),
  ('stage 2 x context 4', PipelinedContext, (1, 2, 1, 4, 1), (), ()),
]


@pytest.mark.parametrize('name, experiment, shape, overrides, same', table(CASES, ONE_BY_ONE, fast=()))
def test_one_loss_curve_and_one_state(name, experiment, shape, overrides, same):
  base, base_overrides = BASES[experiment]
  other = runner(experiment, shape, overrides=overrides)

  assert_same_run(other, reference(base, (*base_overrides, *same)))
