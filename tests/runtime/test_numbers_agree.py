"""An experiment has one loss curve on any mesh, padded or not, accumulated or not.

Models train for 12 steps in float32. None of their dims is divisible by an axis of 4 (width 30, 3 heads, 90 or 45
hidden units, vocabulary 257 or 67, 6 experts, 6 layers in a pipeline). There are dense models, long sequences over a
context axis, mixtures of experts with all dispatches and forms, recurrent layers, pipelines with all schedules,
encoder-decoders and prefix models (relative biases, cross-attention, dropout, losses that are sums), and blocks of
published families. Rows pair a mesh with settings that do not depend on it; `--all` has more pairs, and
scripts/number_campaign random ones.
"""

import dataclasses

import jax
import numpy as np
import pytest

from spmd_tasks.decoding import DecodeSettings, DecodeSteps, Request
from spmd_tasks.decoding.generation import search
from spmd_tasks.decoding.scoring import score_texts
from spmd_tasks.experiments import t5
from spmd_tasks.recipes import MoeEncoderDecoderLanguageModel
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, context_axis_rules
from tests.runtime.family_experiments import Families
from tests.runtime.hybrid_experiments import (
  Hybrid,
  HybridContext,
  HybridExperts,
  HybridPipelined,
  RecurrentExpertAxis,
  RecurrentExperts,
)
from tests.runtime.loss_curves import assert_same_run, make_model, random_weights, reference, runner, table
from tests.runtime.moe_experiments import AlongData, ExpertAxis, HiddenSharded, TwoDataAxes
from tests.runtime.pipeline_experiments import PipelinedAdafactor, PipelinedAdamW, PipelinedExperts
from tests.runtime.uneven_experiments import Adafactor, AdamW, Muon


class Context(Adafactor):
  """synthetic.Uneven with context parallelism."""

  mesh_axis_names = ('replica', 'data', 'context', 'mdl')
  ici_mesh_shape = (1, 1, 2, 4)
  axis_rules = context_axis_rules(DEFAULT_AXIS_RULES)


class ContextMup(AdamW):
  """Context parallelism, and learning rates by the fan-in, in which padding must not count."""

  mesh_axis_names, ici_mesh_shape, axis_rules = Context.mesh_axis_names, Context.ici_mesh_shape, Context.axis_rules
  mup_base_width = 15
  learning_rate = 1e-2


class Uneven(t5.V10Tiny, t5.UMT5Tiny):
  """T5's dropout, tied logits, label smoothing, a loss that is a sum, and relative biases per layer."""

  model_dims = 30
  dropout_rate = 0.1
  learning_rate = 3e-3


class Prefix(t5.PrefixTiny):
  """A prefix model with one stack."""

  model_dims = 30


class Mixture(Uneven, MoeEncoderDecoderLanguageModel):
  """Uneven with ST-MoE's sublayers in each block, dropout also in the 4 experts, which are split over `data`."""

  mixture_every = 1
  num_experts = 4
  num_groups_multiple_of = 4
  max_group_size = 64
  num_selected_experts = 2
  has_extra_ffn = True
  expert_dropout_rate = 0.1


SIX = ('num_layers=6', 'batch_size=16')
# The reference of a row on one device: another experiment with overrides, or by default the same experiment.
BASES = {
  Context: (Adafactor, ()),
  ExpertAxis: (AlongData, ()),
  HiddenSharded: (TwoDataAxes, ()),
  PipelinedAdamW: (AdamW, SIX),
  PipelinedAdafactor: (Adafactor, ()),
  PipelinedExperts: (AlongData, SIX),
  HybridContext: (Hybrid, ()),
  RecurrentExpertAxis: (RecurrentExperts, ()),
  HybridPipelined: (Hybrid, ('num_layers=6',)),
}

BLOCK = 'task.model.stack.block'
TWO, FOUR = 'task.learner.num_microbatches=2', 'task.learner.num_microbatches=4'
REMAT, UNROLLED = ('remat_policy=full',), ('task.model.stack.scan=False',)
CHUNKS, SCATTERED, HEAD = ('num_logit_chunks=4',), ('scatters_gradients=True',), ('num_nextn_predict_layers=1',)
THREE_ROWS = ('batch_size=3',)
# Sequences.
BALANCED = ('task.model.balances_tokens=True',)
RING, WINDOW = (f'{BLOCK}.attention.implementation=ring',), (f'{BLOCK}.attention.window=5',)
# Experts. The biases are gpt-oss's, which start at zero; a dropped token gets no bias either.
FFN = f'{BLOCK}.ffn'
ALL_TO_ALL = (f'{FFN}.computation.dispatch=padded_all_to_all',)
PASSES = (*ALL_TO_ALL, f'{FFN}.computation.capacity_factor=0.7', f'{FFN}.computation.overflow=passes')
# A balance loss is a product of two means, so it differs between microbatches and the full batch. A router's z-loss is
# a mean over all tokens, but microbatches are weighted by tokens with a loss.
MICROBATCHES = ('load_balance_weight=0', 'router_z_weight=0')
BIAS = (f'{FFN}.router.score_function=sigmoid', f'{FFN}.router.balance_bias=True')
BIASES = (f'{FFN}.experts.use_bias=True', f'{FFN}.router.use_bias=True')
# Pipelines. Quantities over parts of a batch, whose rows have different lengths: the balance loss over shards, biases
# that follow the sign of the load, and dropped tokens in groups of two rows.
CIRCULAR, ONE_F_ONE_B = ('schedule=circular', 'num_repeats=2'), ('schedule=one_forward_one_backward',)
SHARDS = f'{FFN}.load_balance_shards=4'
BY_GATHER = ('form=capacity', f'{FFN}.computation.group_size=32', *BIAS, SHARDS)

# name, experiment, mesh, overrides, overrides of the reference on one device
# Dense rows of ONE_BY_ONE share a reference with Adafactor and two layers, which fill half of a circular pipeline.
SHARED = ('num_layers=2', 'batch_size=16')
CASES = [
  (
    'muP, two slices of context 2 x mdl 2, ring, balanced, full remat, 4 microbatches, logits in chunks',
    ContextMup,
    (1, 1, 2, 2),
    (*BALANCED, *RING, *REMAT, FOUR, *CHUNKS, *SHARED),
    SHARED,
  ),
  ('recurrent layers and experts, Adafactor, data 2 x expert 2 x mdl 2', RecurrentExpertAxis, (1, 2, 2, 2), (), ()),
]
# The rows above have what only a whole step shows: padding in optimizers and in muP, accumulation, slices.
# Tests that run by default compare these features on a mesh too: tests/bridges/t5x/test_gin.py (an encoder and a
# decoder, with the checkpoints of T5X), tests/learning/test_muon.py (Muon),
# tests/layers/attention (prefixes), tests/layers/moe (capacity), tests/layers/pipeline (schedules, experts), and
# test_checkpoint_moves.py (moments in a pipeline), tests/layers/test_transformer.py (stacks without a scan).
ONE_BY_ONE = [
  (
    'two slices of context 2 x mdl 2, ring, balanced, unrolled',
    Context,
    (1, 1, 2, 2),
    (*BALANCED, *RING, *UNROLLED, *SHARED),
    SHARED,
  ),
  ('data 2 x expert 4', ExpertAxis, (1, 2, 4, 1), (), ()),
  ('recurrent layers, data 2 x mdl 4, 2 microbatches', Hybrid, (1, 2, 4), (TWO,), ()),
  ('recurrent layers, data 2 x mdl 4, full remat', Hybrid, (1, 2, 4), REMAT, ()),
  ('data 2 x mdl 4', Adafactor, (1, 2, 4), SHARED, SHARED),
  ('encoder and decoder, dropout, data 4 x mdl 2', Uneven, (1, 4, 2), (), ()),
  ('circular, stage 2 x data 2 x mdl 2', PipelinedAdafactor, (1, 2, 2, 2), (*CIRCULAR, *SHARED), SHARED),
  ('prefix', Prefix, (1, 1, 8), (), ()),
  ('encoder, experts and a dense sublayer, dropout, data 4 x mdl 2', Mixture, (1, 4, 2), (), ()),
  ('Muon, data 2 x mdl 4, 2 microbatches', Muon, (1, 2, 4), (TWO,), ()),
  ('gradients scattered, logits in chunks', AdamW, (2, 4, 1), SCATTERED + CHUNKS, ()),
  ('context 2 x mdl 4, ring, window, remat', Context, (1, 1, 2, 4), (*RING, *WINDOW, *REMAT), WINDOW),
  ('two data axes, capacity, never drop', TwoDataAxes, (1, 4, 2), ('form=capacity', 'capacity_factor=0'), ()),
  ('expert 2 x mdl 4, 2 microbatches', ExpertAxis, (1, 1, 2, 4), (*MICROBATCHES, *BIAS, TWO), (*MICROBATCHES, *BIAS)),
  ('hidden sharding', HiddenSharded, (1, 2, 4, 1), (), ()),
  (
    'capacity with biases, data 2 x expert 4',
    ExpertAxis,
    (1, 2, 4, 1),
    ('form=capacity', *BIASES),
    ('form=capacity', *BIASES),
  ),
  ('data 2 x expert 4, all-to-all in passes', ExpertAxis, (1, 2, 4, 1), PASSES, ()),
  ('3 rows, data 2 x expert 2 x mdl 2, all-to-all', ExpertAxis, (1, 2, 2, 2), (*ALL_TO_ALL, *THREE_ROWS), THREE_ROWS),
  ('one forward, one backward, stage 8', PipelinedAdamW, (1, 8, 1, 1), (*ONE_F_ONE_B, *REMAT), ()),
  ('a head, one forward, one backward', PipelinedAdamW, (1, 2, 2, 2), (*ONE_F_ONE_B, *HEAD), HEAD),
  ('experts by gather, stage 4', PipelinedExperts, (1, 4, 2, 1, 1), (*ONE_F_ONE_B, *BY_GATHER), BY_GATHER),
  ('experts, stage 2 x data 2 x expert 2', PipelinedExperts, (1, 2, 2, 2, 1), (), ()),
  ('recurrent layers, context 2 x mdl 2, unrolled', HybridContext, (1, 1, 2, 2), UNROLLED, ()),
  ('recurrent layers, stage 2 x mdl 2', HybridPipelined, (1, 2, 1, 2), (), ()),
  ('recurrent layers, circular', HybridPipelined, (1, 2, 2, 1), (*CIRCULAR, 'num_layers=4'), ('num_layers=4',)),
  ('recurrent layers, one forward, one backward', HybridPipelined, (1, 2, 1, 2), ONE_F_ONE_B, ()),
  ('recurrent layers and experts, data 4 x mdl 2', HybridExperts, (1, 4, 2), (), ()),
  # Takes a minute to compile; the families' layers have tests of their own that run by default.
  ('families, stage 2 x data 2 x mdl 2', Families, (1, 2, 2, 2), (), ()),
]


@pytest.mark.parametrize('name, experiment, shape, overrides, same', table(CASES, ONE_BY_ONE))
def test_one_loss_curve_and_one_state(name, experiment, shape, overrides, same):
  base, sizes = BASES.get(experiment, (experiment, ()))
  metrics = None
  if experiment is ExpertAxis and TWO in overrides:  # layers' metrics are weighted by the tokens of a microbatch
    metrics = ('loss', 'loss_weight', 'cross_entropy', 'accuracy')
  dcn = (1, 2, 1, 1) if 'two slices' in name else None
  assert_same_run(runner(experiment, shape, dcn=dcn, overrides=overrides), reference(base, (*sizes, *same)), metrics)


def test_padding_is_reported():
  """Each comparison checks that padding stays zero."""
  model, _ = make_model(AdamW, (1, 2, 4))
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


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/decoding has beams, and tests/evaluation scores on a mesh
def test_beam_search_and_scores_agree_with_one_device():
  """Requests have different lengths. The scores of the best texts agree with the search, one token at a time."""
  settings = DecodeSettings(max_len=9, num_slots=2, prefill_rows=2, min_bucket=9, prefill_chunk=9, eos_ids=(1,))
  settings = dataclasses.replace(settings, num_beams=3, beam_rule='t5x', length_penalty=0.6)
  rng = np.random.default_rng(3)
  requests = [
    Request(ids=ids, encoder_ids=tuple(rng.integers(2, 67, length).tolist()), max_tokens=4, stop_ids=(1,))
    for length, ids in ((9, (0,)), (20, (0, 5, 6, 7, 8)), (1, (0,)), (7, (0, 9)))
  ]
  beams = []
  for shape in ((1, 1, 1), (1, 4, 2)):
    model, _ = make_model(Uneven, shape)
    padded = jax.tree.map(
      lambda w, padded: np.pad(w, [(0, size - true) for true, size in zip(w.shape, padded.shape)]),
      random_weights(model.abstract_state.weights),
      model.padded_state.weights,
    )
    variables = {'params': jax.device_put(padded, jax.tree.map(lambda w: w.sharding, model.padded_state.weights))}
    steps = DecodeSteps(model, settings)
    searched = dict(search(steps, variables, requests, decode=lambda tokens: ''))
    best = [searched[0][0], searched[2][0]]  # for requests without a prompt
    texts = [(requests[number].encoder_ids, tuple(beam.ids)) for number, beam in zip((0, 2), best, strict=True)]
    scores = dict(score_texts(steps, variables, texts, num_rows=2))
    for number, beam in enumerate(best):
      np.testing.assert_allclose(scores[number].logprob, beam.logprob, rtol=1e-4)
    beams.append([[beam.ids for beam in searched[i]] for i in range(4)])
  assert beams[0] == beams[1]
