"""One truth for numbers, for encoder-decoders and prefix language models: relative biases, cross-attention, dropout.

Width 30, 3 heads, 45 hidden, vocabulary 67: nothing divides an axis of 4. The losses are means and sums over tokens.
"""

import dataclasses

import jax
import numpy as np
import pytest

from spmd_tasks.decoding import DecodeSettings, DecodeSteps, Request, generate
from spmd_tasks.decoding.generation import search
from spmd_tasks.decoding.scoring import score_texts
from spmd_tasks.experiments import t5
from spmd_tasks.recipes import MoeEncoderDecoderLanguageModel
from tests.runtime.loss_curves import assert_same_run, make_model, reference, runner, table


class Uneven(t5.V10Tiny, t5.UMT5Tiny):
  """Dropout in all places of T5, tied logits, label smoothing, a loss that is a sum, and biases of each layer."""

  model_dims = 30
  dropout_rate = 0.1
  learning_rate = 3e-3


class Prefix(t5.PrefixTiny):
  """One stack."""

  model_dims = 30


class Mixture(Uneven, MoeEncoderDecoderLanguageModel):
  """And ST-MoE's sublayers, with dropout in them and in the experts; 4 experts, split over `data`."""

  num_experts = 4
  num_groups_multiple_of = 4
  max_group_size = 64
  num_selected_experts = 2
  has_extra_ffn = True
  expert_dropout_rate = 0.1


REMAT, UNROLLED = ('remat_policy=full',), ('task.model.stack.scan=False', 'task.model.encoder_stack.scan=False')
CASES = [
  ('a prefix, mdl 8', Prefix, (1, 1, 8), ()),
  ('experts and a dense sublayer, with dropout, full remat, data 4 x mdl 2', Mixture, (1, 4, 2), REMAT),
]
ONE_BY_ONE = [('unrolled, replica 2 x data 2 x mdl 2', Uneven, (2, 2, 2), UNROLLED)]


@pytest.mark.parametrize('name, experiment, shape, overrides', table(CASES, ONE_BY_ONE, fast=CASES[0][:1]))
def test_one_loss_curve_and_one_state(name, experiment, shape, overrides):
  assert_same_run(runner(experiment, shape, overrides=overrides), reference(experiment))


BEAMS = {'num_beams': 3, 'beam_rule': 't5x', 'length_penalty': 0.6, 'min_bucket': 9, 'prefill_chunk': 9}


@pytest.mark.slow
def test_text_is_generated_and_scored_as_on_one_device():
  """Each request of its own length; beams and greedy texts, and the scores of both."""
  settings = DecodeSettings(max_len=9, num_slots=2, prefill_rows=2, min_bucket=4, prefill_chunk=4, eos_ids=(1,))
  rng = np.random.default_rng(3)
  requests = [
    Request(ids=ids, encoder_ids=tuple(rng.integers(2, 67, length).tolist()), max_tokens=4, stop_ids=(1,))
    for length, ids in ((9, (0,)), (20, (0, 5, 6, 7, 8)), (1, (0,)), (7, (0, 9)))
  ]
  found = []
  for shape in ((1, 1, 1), (1, 4, 2)):
    model, _ = make_model(Uneven, shape)
    variables, steps = model.init(0).variables, DecodeSteps(model, settings)
    greedy = dict(generate(steps, variables, requests, decode=lambda tokens: ''))
    beams = DecodeSteps(model, dataclasses.replace(settings, **BEAMS))
    searched = dict(search(beams, variables, requests, decode=lambda tokens: ''))
    texts = [(request.encoder_ids, tuple(greedy[i].ids)) for i, request in enumerate(requests) if len(request.ids) == 1]
    scores = dict(score_texts(steps, variables, texts, num_rows=2))
    found.append((greedy, searched, [scores[i] for i in range(len(texts))]))

  (greedy, searched, scores), others = found[0], found[1]
  assert [greedy[i].ids for i in range(4)] == [others[0][i].ids for i in range(4)]
  assert [[beam.ids for beam in searched[i]] for i in range(4)] == [
    [beam.ids for beam in others[1][i]] for i in range(4)
  ]
  for number, score in zip((0, 2), scores, strict=True):
    assert score.is_greedy
    np.testing.assert_allclose(score.logprobs, greedy[number].logprobs, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose([s.logprob for s in scores], [s.logprob for s in others[2]], rtol=1e-5)
  assert jax.device_count() == 8
