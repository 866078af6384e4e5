"""Steps that check drafts: the tokens, to the bit of their logprobs, of steps without, greedy and drawn."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from spmd_tasks.decoding import DecodeSteps, Request, SamplingParams, generate
from spmd_tasks.decoding.constraints import num_words
from spmd_tasks.decoding.drafts import NgramDrafts
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.requests import Chunk
from spmd_tasks.decoding.scheduler import Scheduler
from tests.decoding.runs import CHUNK, MAX_LEN, SETTINGS, draft_of, make_run, short_blocks  # noqa: F401

NUM_DRAFTS = 3
# From jax 0.11 on, XLA compiles steps of other numbers of rows for some CPUs so that the last bits differ.
_TOLERANCE = 0.0 if jax.__version_info__ < (0, 11) else 1e-5


def assert_same_texts(texts, expected, tolerance=_TOLERANCE) -> None:
  """The same tokens, with the bits of their log-probabilities; see _TOLERANCE."""
  tokens = lambda texts: [[token for token, *_ in text] for text in texts]
  logprobs = lambda texts: [logprob for text in texts for _, logprob, *_ in text]
  assert tokens(texts) == tokens(expected)
  np.testing.assert_allclose(logprobs(texts), logprobs(expected), rtol=0, atol=tolerance)
  if not tolerance:
    assert texts == expected


@functools.cache
def steps_of(name, noise=None, **settings) -> DecodeSteps:
  """Only a noisy draft model on one device has programs for fewer busy slots and drafts: each takes time to compile."""
  run = make_run(name)
  draft = None if noise is None else draft_of(run, noise)
  make = functools.partial(DecodeSteps, run.model) if noise and name == 'one device' else run.few_programs
  return make(dataclasses.replace(SETTINGS, **settings), draft=draft)


def test_what_followed_the_same_tokens_before_is_guessed():
  drafts = NgramDrafts([1, 2, 3, 4, 9, 2, 3])
  assert drafts.guess(3) == (4, 9, 2)
  drafts.push(7)
  assert drafts.guess(3) == ()
  for token in (2, 3):
    drafts.push(token)
  assert drafts.guess(2) == (7, 2)  # the last time counts
  assert NgramDrafts([5, 6, 5, 6]).guess(5) == (5, 6, 5, 6, 5)


def test_a_prediction_is_guessed_from():
  for prediction, guessed in (((7, 1, 2, 3, 4), (3, 4)), ((), ())):
    request = Request(ids=(1, 2), max_tokens=9, prediction=prediction)
    assert GeneratedSequence(request, lambda ids: '').draft(2) == guessed


def _run(run, steps, requests, *, one_by_one=False, constrain=False):
  """Returns (tokens and logprobs of each request, the scheduler)."""
  engine = ModelEngine(steps, run.variables, constrain=constrain)
  engine.take_kept()
  scheduler = Scheduler(engine)
  sequences = [GeneratedSequence(request, lambda ids: '', has_logprobs=True) for request in requests]
  for some in [[each] for each in sequences] if one_by_one else [sequences]:
    scheduler.submit(some)
    while scheduler.has_work:
      scheduler.advance()
  engine.keep()
  assert scheduler.num_used_blocks == 0
  assert scheduler.num_accepted_tokens == sum(each.num_accepted for each in sequences)
  return [[(entry.token, entry.logprob, entry.top) for entry in each.logprobs] for each in sequences], scheduler


def make_requests(longest):
  """Greedy, drawn and penalized texts, most of which repeat themselves; one asks for no drafts."""
  rng, requests = np.random.default_rng(0), []
  for number in range(12):
    pattern = rng.integers(1, 257, 2).tolist()
    sampling = SamplingParams(
      temperature=0.05 * (number % 3), repetition_penalty=1.0 + 0.1 * (number % 4 == 1), presence_penalty=number % 2 / 2
    )
    bias = tuple((token, 20.0) for token in pattern) if number % 4 < 3 else ()  # the text goes on with these two
    requests.append(
      Request(
        ids=tuple((pattern * 3)[: longest - number % 2]),
        max_tokens=MAX_LEN - 5,
        seed=number,
        sampling=sampling,
        logit_bias=bias,
        num_drafts=0 if number == 7 else None,
      )
    )
  return requests


slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive


@pytest.mark.parametrize(
  'name, noise',
  [
    pytest.param('one device', None, marks=exhaustive),
    pytest.param('one device', 1.0, marks=exhaustive),
    pytest.param('windows', None, marks=exhaustive),
    pytest.param('recurrent layers', None, marks=exhaustive),
    pytest.param('recurrent layers', 1.0, marks=exhaustive),
    pytest.param('recurrent layers, 2 heads', None, marks=slow),
    pytest.param('recurrent layers on data 2 x mdl 4', None, marks=exhaustive),
    pytest.param('2 heads', None, marks=exhaustive),
    pytest.param('2 heads on data 2 x mdl 4', None, marks=exhaustive),
    pytest.param('data 2 x mdl 4', None, marks=exhaustive),
    pytest.param('data 2 x mdl 4', 1.0, marks=slow),
  ],
)
def test_texts_with_drafts_have_the_bits_of_those_without(name, noise):
  """By n-grams, heads, or a draft model with `noise` in its weights, in a pool in which some texts must begin again.

  Those without are of the same steps, where they are not of steps that know of no drafts.
  """
  run = make_run(name)
  num_drafts = NUM_DRAFTS if 'data' in name or name == 'one device' else 2  # the shortest window has 3 tokens
  slots = {'num_slots': 4} if 'data' in name else {}  # 3 slots are not split, 12 rows are: other sums
  steps = steps_of(name, noise, num_drafts=num_drafts, **slots)
  requests = make_requests(CHUNK if 'data' in name else CHUNK + 1)  # two parts of slots read each chunk by a program
  with_drafts, scheduler = _run(run, steps, requests)
  plain = run.steps if name in ('one device', 'windows') else steps
  without, plain_scheduler = _run(run, plain, [dataclasses.replace(each, num_drafts=0) for each in requests])
  # A device has one recurrent head there, and products with one column have other bits for other numbers of rows.
  assert_same_texts(with_drafts, without, 1e-5 if name == 'recurrent layers on data 2 x mdl 4' else _TOLERANCE)
  assert scheduler.num_drafted_tokens > scheduler.num_accepted_tokens > (10 if 'heads' in name else 20)
  assert scheduler.num_steps < plain_scheduler.num_steps
  assert plain_scheduler.num_drafted_tokens == 0


@exhaustive  # of a folder, tests/test_loading.py has it
@pytest.mark.parametrize('name', ['one device', 'recurrent layers'])
def test_a_draft_model_that_is_the_model_itself_is_right_every_time(name):
  """So it reads what it should, in chunks, after shared beginnings, drawn tokens and steps with token masks."""
  run = make_run(name)
  steps = steps_of(name, 0, num_drafts=NUM_DRAFTS)
  ids = tuple(np.random.default_rng(5).integers(1, 257, 7).tolist())
  requests = [
    Request(ids=ids[:length], max_tokens=9, seed=seed, sampling=SamplingParams(temperature=temperature), num_drafts=num)
    for seed, (length, temperature, num) in enumerate(
      [(7, 0.0, None), (7, 1.0, 1), (6, 2.0, None), (2, 1.0, 2), (7, 0.5, None)]  # with more guesses than are checked
    )
  ]
  texts, scheduler = _run(run, steps, requests, constrain=True)
  assert scheduler.num_reused_tokens > 0
  assert scheduler.num_accepted_tokens == scheduler.num_drafted_tokens > 20
  assert_same_texts(texts, _run(run, run.steps, requests)[0])
  # A slot that may have drafts beside one that is constrained has none, but its model reads on.
  engine = ModelEngine(steps, run.variables, constrain=True)
  engine.reset()
  chunk = Chunk(request=requests[0], slot=0, start=0, stop=CHUNK)
  first = [engine.prefill([chunk]), engine.prefill([dataclasses.replace(chunk, start=CHUNK, stop=7)])][1].read()
  tokens, keep = [int(first.tokens[0])], np.array([True, False, False])
  masks = {1: np.zeros(num_words(steps.vocab_size), np.uint32)}
  for number in range(4):
    given = {'masks': masks, 'drafts': {0: ()}} if number < 2 else {'drafts': {0: (0, 0)}}
    outputs = engine.step(keep, **given).read()
    tokens += (
      outputs.tokens[outputs.is_valid[:, 0], 0].tolist() if outputs.tokens.ndim == 2 else [int(outputs.tokens[0])]
    )
  assert tokens == [token for token, *_ in texts[0]][: len(tokens)]
  assert len(tokens) == 1 + 2 + 3 + 3


@pytest.mark.parametrize(
  'name', [pytest.param('recurrent layers, 2 heads', marks=slow), pytest.param('2 heads', marks=exhaustive)]
)
def test_heads_guess_what_they_predict_of_the_whole_text(name):
  """So as many guesses are right as a full forward pass finds, in chunks, shared beginnings and after wrong ones."""
  run = make_run(name)
  steps = steps_of(name, None, num_drafts=2)
  ids, fields = tuple(np.random.default_rng(5).integers(1, 257, 7).tolist()), {'num_drafts': 1, 'max_tokens': 8}
  requests = [
    Request(ids=(*ids[:length], 11 + n), logit_bias=((20 + 2 * n, 30.0), (21 + 2 * n, 30.0)), **fields)
    for n, length in enumerate((7, 6, 2, 7, 3, 5, 6, 7))
  ]
  texts, scheduler = _run(run, steps, requests, one_by_one=True)
  assert scheduler.num_reused_tokens > 0
  drafted = expected = 0
  for request, text in zip(requests, texts, strict=True):
    tokens = [*request.ids, *(token for token, *_ in text)]
    row = np.zeros((1, MAX_LEN), np.int32)
    row[0, : len(tokens)] = tokens
    predicted = run.apply({'params': run.true_weights}, {'ids': row, 'labels': row})['nextn'][0]['logits'][0]
    newest = len(request.ids)
    while newest + 2 < len(tokens):  # a step may guess one token, but not the last one
      allowed = [token for token, _ in request.logit_bias]
      guess = allowed[np.argmax(predicted[newest - 1, allowed])]
      drafted, expected = drafted + 1, expected + (guess == tokens[newest + 1])
      newest += 1 + (guess == tokens[newest + 1])
  assert (scheduler.num_drafted_tokens, scheduler.num_accepted_tokens) == (drafted, expected)
  assert 4 < expected < drafted - 4


@pytest.mark.parametrize('dtype, error', [('int8', 0.02), pytest.param('float8_e4m3fn', 0.1, marks=exhaustive)])
def test_a_cache_of_8_bits_changes_logprobs_little_and_has_the_same_bits_with_drafts(dtype, error):
  run = make_run('one device')
  steps = steps_of('one device', num_drafts=1, cache_dtype=dtype)
  leaves = jax.tree.leaves(steps.layout.abstract_state.cache)
  full = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.steps.layout.abstract_state.cache))
  head_dim = max(leaf.shape[-1] for leaf in leaves)
  kept = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
  assert kept / full == (head_dim + 4) / (4 * head_dim)  # a byte for each number, and a scale
  rng = np.random.default_rng(1)
  requests = [Request(ids=tuple(rng.integers(1, 257, 2).tolist() * 3), max_tokens=8) for _ in range(6)]
  texts, _ = _run(run, steps, [dataclasses.replace(each, num_drafts=0) for each in requests])
  errors = []
  for request, text in zip(requests, texts, strict=True):
    tokens = [token for token, *_ in text]
    logprobs = run.logprobs([*request.ids, *tokens])[len(request.ids) - 1 : -1]
    errors += [abs(logprob - row[token]) for (token, logprob, _), row in zip(text, logprobs, strict=True)]
  assert 1e-5 < max(errors) < error
  if dtype == 'int8':
    drafted, scheduler = _run(run, steps, requests)
    assert_same_texts(drafted, texts)
    assert scheduler.num_accepted_tokens > 0


@pytest.mark.parametrize(
  'name, noise',
  [
    pytest.param('recurrent layers, 2 heads', None, marks=slow),
    *(pytest.param(*row, marks=exhaustive) for row in (('one device', None), ('one device', 0.5), ('2 heads', None))),
  ],
)
def test_drawn_tokens_behind_drafts_have_the_probabilities_of_the_full_forward_pass(name, noise):
  """Chi-square of the second token, which is drawn beside the check of a draft of the first one.

  Whatever drafts, texts have the bits of those without, as above; so `--all` alone draws with each of them.
  """
  run = make_run(name)
  steps = steps_of(name, noise, num_drafts=2 if 'recurrent' in name else NUM_DRAFTS)
  first, second, other = 11, 12, 13
  ids, sampling = (first, second, first, second, first), SamplingParams(temperature=2.0)
  allowed = (second, first, other)
  requests = [
    Request(ids=ids, max_tokens=3, seed=seed, sampling=sampling, logit_bias=tuple((t, 30.0) for t in allowed))
    for seed in range(500)
  ]
  completions = [done for _, done in generate(steps, run.variables, requests, decode=lambda ids: '')]
  assert 0 < sum(done.num_accepted for done in completions) < sum(done.num_drafted for done in completions)
  texts = [done.ids for done in completions]

  def probabilities(text):
    logits = np.asarray(run.logits(text), np.float64)[-1, list(allowed)] / 2
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()

  statistic, counted = 0.0, 0
  for token in allowed:  # the first drawn; n-grams draft `second`
    drawn = [text[1] for text in texts if text[0] == token]
    expected = len(drawn) * probabilities([*ids, token])
    counted += len(drawn)
    statistic += sum((drawn.count(each) - want) ** 2 / want for each, want in zip(allowed, expected, strict=True))
  assert counted == len(texts)
  assert statistic < 22.46  # the 0.999 quantile for 3 x 2 degrees of freedom


def test_windows_shorter_than_drafts_are_refused():
  with pytest.raises(ValueError, match='num_drafts=3: a model with attention windows'):
    steps_of('windows', num_drafts=3)
  with pytest.raises(ValueError, match='a draft model has no attention windows'):
    steps_of('windows', 0, num_drafts=2)
