"""Prefix language models: a prompt, or the context of a text that is scored, is the prefix, and nothing else is.

Every number is that of the model's own forward pass over the whole text, with the prefix mask written out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.decoding import DecodeSteps, Request, SamplingParams, generate
from spmd_tasks.decoding.generation import complete_groups, search
from spmd_tasks.decoding.scoring import score_texts
from spmd_tasks.layers import (
  GatedFeedForward,
  LanguageModel,
  LanguageModelLoss,
  RmsNorm,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention
from spmd_tasks.runtime import DecodeSettings, Task, partition_spmd_model
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec

V, MAX_LEN = 23, 24
NAMES = ('ids', 'labels', 'segment_ids', 'segment_pos', 'prefix_mask')
SPEC = {name: jax.ShapeDtypeStruct((2, MAX_LEN), jnp.int32) for name in NAMES}
SPEC['weights'] = jax.ShapeDtypeStruct((2, MAX_LEN), jnp.float32)
# One length of chunks and one number of rows: a program each to read, to read and score, and to generate.
SETTINGS = {'max_len': MAX_LEN, 'num_slots': 2, 'prefill_rows': 2, 'min_bucket': MAX_LEN}
ATOL = 1e-4  # float32


@pytest.fixture(scope='module')
def model():
  block = TransformerBlock(attention=Attention(num_heads=2), ffn=GatedFeedForward(hidden_dim=24), norm=RmsNorm())
  embedding, stack = TokenEmbedding(vocab_size=V, embed_dim=16), TransformerStack(block=block, num_layers=2)
  network = LanguageModel(embedding=embedding, stack=stack, final_norm=RmsNorm())
  task = Task(model=network, loss=LanguageModelLoss(), learner=optax.sgd(0.1))
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 1, 1)).build(jax.devices()[:1])
  return partition_spmd_model(task, mesh, SPEC, axis_rules=DEFAULT_AXIS_RULES)


@pytest.fixture(scope='module')
def variables(model):
  return model.init(3).variables


@pytest.fixture(scope='module')
def log_probs(model, variables):
  """(text, length of its prefix) -> float64 [T, V], of the token that follows each."""
  forward = jax.jit(functools.partial(model.task.model.apply, variables))

  def compute(text, num_prefix):
    ids = np.zeros((1, MAX_LEN), np.int32)
    ids[0, : len(text)] = text
    places = np.arange(MAX_LEN, dtype=np.int32)[None]
    is_text, in_prefix = ((places < num).astype(np.int32) for num in (len(text), num_prefix))
    batch = {'ids': ids, 'segment_ids': is_text, 'segment_pos': places, 'prefix_mask': in_prefix}
    logits = np.asarray(forward(batch)['logits'], np.float64)[0, : len(text)]
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))

  return compute


def texts(*lengths):
  rng = np.random.default_rng(0)
  return [tuple(rng.integers(0, V, length).tolist()) for length in lengths]


def make_steps(model, variables, **settings):
  steps = DecodeSteps(model, DecodeSettings(**SETTINGS | settings))
  return steps, steps.storage.store(variables)


def assert_likely(log_probs, completion):
  """The log-probabilities of a completion are those of its tokens after its prompt."""
  prompt = completion.request.ids
  rows = log_probs([*prompt, *completion.ids], len(prompt))[len(prompt) - 1 : -1]
  np.testing.assert_allclose(completion.logprobs, rows[np.arange(len(rows)), completion.ids], atol=ATOL)
  return rows


def test_the_context_of_a_scored_text_is_its_prefix(model, variables, log_probs):
  """Texts of different lengths are in one batch."""
  steps, stored = make_steps(model, variables)
  contexts, continuations = texts(5, 1, 3, 9, 2), texts(6, 5, 2, 3, 12)
  pairs = [*zip(contexts, continuations, strict=True)]
  for number, score in score_texts(steps, stored, pairs, num_rows=3):
    context, continuation = pairs[number]
    rows = log_probs([*context, *continuation], len(context))[len(context) - 1 : -1]
    np.testing.assert_allclose(score.logprobs, rows[np.arange(len(rows)), continuation], atol=ATOL)
    assert score.is_greedy == (np.argmax(rows, axis=-1).tolist() == [*continuation])


@pytest.mark.parametrize(
  'settings',
  [
    pytest.param({}, id='plain'),
    pytest.param({'num_drafts': 2}, id='drafts', marks=pytest.mark.exhaustive),
    pytest.param({'max_cache_tokens': 32}, id='begun again', marks=pytest.mark.exhaustive),
    pytest.param({'prefill_chunk': 8, 'min_bucket': 8}, id='chunks', marks=pytest.mark.exhaustive),
  ],
)
def test_a_prompt_is_the_prefix_of_what_follows_and_scored_without_it(settings, model, variables, log_probs):
  """A token of a prompt has the log-probability that the tokens before it give, as if none was behind it."""
  steps, stored = make_steps(model, variables, **settings)
  requests = [
    Request(ids=ids, max_tokens=8, score_prompt=number % 2 == 0) for number, ids in enumerate(texts(5, 7, 11, 2, 16))
  ]
  for _, completion in generate(steps, stored, requests, decode=lambda tokens: ''):
    prompt = completion.request.ids
    rows = assert_likely(log_probs, completion)
    assert np.argmax(rows, axis=-1).tolist() == completion.ids
    if completion.request.score_prompt:
      alone = log_probs(prompt, 0)
      scores = [0.0, *(alone[place, token] for place, token in enumerate(prompt[1:]))]
      np.testing.assert_allclose(completion.prompt_logprobs, scores, atol=ATOL)


def test_beams_and_samples_follow_the_prompt_as_prefix(model, variables, log_probs):
  requests = [Request(ids=ids, max_tokens=5, sampling=SamplingParams(temperature=1.5)) for ids in texts(5, 9)]
  steps, stored = make_steps(model, variables, num_slots=4)
  for completions in complete_groups(steps, stored, requests, 2, decode=lambda tokens: ''):
    for completion in completions:
      assert_likely(log_probs, completion)
  steps, stored = make_steps(model, variables, num_beams=2, length_penalty=0.0)
  for number, beams in search(steps, stored, requests, decode=lambda tokens: ''):
    prompt = requests[number].ids
    for beam in beams:
      rows = log_probs([*prompt, *beam.ids], len(prompt))[len(prompt) - 1 : -1]
      np.testing.assert_allclose(beam.score, rows[np.arange(len(rows)), beam.ids].sum(), atol=ATOL)
