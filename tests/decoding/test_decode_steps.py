"""Generation on meshes: the tokens of a full forward pass without a cache, whatever runs beside a request and wherever.

Dense, a pipeline in bfloat16, and recurrent layers with attention windows and experts, with dims that the mesh does not
divide; 3 slots over a data axis of 2; prompts of up to three chunks, one of them of 2.5.
"""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.decoding import DecodeSteps, Request, SamplingParams, generate, weight_storage
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.generation import can_sample, complete_groups, search
from spmd_tasks.decoding.requests import chunk_prompt
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.layers import transformer
from spmd_tasks.runtime.compilation import CompilationCounter
from tests.decoding.runs import CHUNK, MAX_LEN, MESHES, SETTINGS, draw, make_run, place, short_blocks  # noqa: F401

LENGTHS = (3, 1, 10, 5, 12, 4, 2)
exhaustive = pytest.mark.exhaustive
slow = pytest.mark.slow
# By default one model has windows, experts and recurrent layers together, on a mesh of three axes.
MARKS = {
  'mdl 4': exhaustive,
  'windows': exhaustive,
  'data 2 x expert 4': exhaustive,
  'layers 2 x data 2': slow,
  'recurrent layers on data 2 x mdl 4': exhaustive,
  'recurrent layers, windows and experts on data 2 x expert 2 x mdl 2': slow,
  'windows on data 2 x mdl 4': exhaustive,
  'latent attention, then windows and experts, on data 2 x mdl 4': exhaustive,
  'latent attention, then windows and experts': exhaustive,
}
ALL_MESHES = [pytest.param(name, marks=MARKS.get(name, ())) for name in MESHES if 'heads' not in name]


def make_requests(**fields) -> list[Request]:
  rng = np.random.default_rng(3)
  return [
    Request(ids=tuple(rng.integers(1, 257, length).tolist()), max_tokens=min(6, MAX_LEN - length), **fields)
    for length in LENGTHS
  ]


@pytest.mark.parametrize('name', ALL_MESHES)
def test_greedy_batched_is_alone_is_the_full_forward_pass(name):
  run = make_run(name)
  assert run.steps.layout.can_reuse == ('windows' not in name)
  requests = make_requests(score_prompt=run.scores_prompts)
  with CompilationCounter() as compilations:
    together = run.generate(requests)
    alone = [run.generate([request])[0] for request in requests[:3]]
  assert compilations.num_programs == 0
  assert [c.ids for c in alone] == [c.ids for c in together[:3]]
  for request, completion in zip(requests, together, strict=True):
    assert len(completion.ids) == request.max_tokens
    text = list(request.ids) + completion.ids
    logprobs = run.logprobs(text)
    predicted = logprobs[len(request.ids) - 1 : -1]
    np.testing.assert_allclose(completion.logprobs, np.max(predicted, axis=-1), atol=run.atol)
    likely = [np.flatnonzero(row >= row.max() - 2 * run.atol).tolist() for row in predicted]
    assert all(token in tokens for token, tokens in zip(completion.ids, likely, strict=True))
    if run.atol < 0.01:
      assert completion.ids == np.argmax(predicted, axis=-1).tolist()
      for top, row in zip(completion.top_logprobs, predicted, strict=True):
        assert list(top) == np.argsort(-row)[:2].tolist()
    if not run.scores_prompts:
      continue
    scores = [0.0, *(logprobs[i, token] for i, token in enumerate(request.ids[1:]))]
    np.testing.assert_allclose(completion.prompt_logprobs, scores, atol=1e-4)


def test_kernels_of_each_layer_give_the_bits_of_their_stacks(monkeypatch):
  run, requests = make_run('one device'), make_requests()[:4]
  expected = run.generate(requests)
  monkeypatch.setattr(weight_storage, '_LEAST', 1)
  steps = run.few_programs(SETTINGS)
  kernel = run.variables['params']['stack']['layers']['ffn']['up']['kernel']
  *_, last = steps.model.arrange(run.variables)[weight_storage.LAYER_KERNELS]['stack']['layers']['ffn']['up']['kernel']
  np.testing.assert_array_equal(last, kernel[-1])
  program = steps.step.lower().as_text()
  num_kernels = len(jax.tree.leaves(steps.model.arrange(run.variables)[weight_storage.LAYER_KERNELS]))
  assert program.count('stablehlo.case') == num_kernels // len(kernel) + 1
  done = dict(generate(steps, run.variables, requests, decode=lambda tokens: ''))
  assert [(done[index].ids, done[index].logprobs) for index in range(4)] == [(e.ids, e.logprobs) for e in expected]


@exhaustive  # by default test_kernels_of_each_layer_give_the_bits_of_their_stacks
@pytest.mark.parametrize('name, dtype', [('data 2 x mdl 4', 'int8'), ('layers 2 x data 2', 'bfloat16')])
def test_layers_apart_give_the_text_of_their_stacks(name, dtype, monkeypatch):
  run, requests = make_run(name), make_requests()[:4]
  settings = dataclasses.replace(SETTINGS, weights_dtype=dtype)
  texts = []
  for platform in ('cpu', 'gpu'):
    for module in (weight_storage, transformer):
      monkeypatch.setattr(module, 'current_platform', lambda platform=platform: platform)
    steps = run.few_programs(settings)
    steps.model.platform = platform
    steps.compile()
    held = steps.storage.store(run.variables, free=False)
    assert jax.tree.structure(held) == jax.tree.structure(steps.storage.padded)
    texts.append(dict(generate(steps, held, requests, decode=lambda tokens: '')))
  is_apart = [isinstance(each, tuple) for each in jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, tuple))]
  assert any(is_apart) == ('layers' not in name)  # stages keep their stacks
  for index in range(4):
    stacked, apart = (each[index] for each in texts)
    assert apart.ids == stacked.ids
    np.testing.assert_allclose(apart.logprobs, stacked.logprobs, atol=max(run.atol, 1e-3))


def test_a_job_of_few_short_texts_compiles_few_programs(monkeypatch):
  settings = dataclasses.replace(
    SETTINGS, num_slots=9, max_cache_tokens=None, prefill_rows=None, prefill_chunk=8, min_bucket=2
  )

  def needed(name='one device', sizes=(), **texts):
    """The rows of steps; the rows and columns of prefills, and whether they continue a prompt."""
    steps = DecodeSteps(make_run(name).model, dataclasses.replace(settings, **dict(sizes)))
    names = []
    monkeypatch.setattr(steps.programs, '_compile', lambda name, lower: names.append(name) or (lambda: None))
    steps.compile(**texts)
    prefills = {(rows, columns, not is_first) for kind, rows, columns, is_first, *_ in names[1:] if kind == 'prefill'}
    return {rows for kind, rows, *_ in names[1:] if kind == 'step'}, prefills

  every = {(rows, columns, True) for rows, columns in ((1, 2), (1, 4), (1, 8), (2, 4), (4, 2))}
  assert needed() == needed(num_texts=99, longest=16) == ({2, 8, 9}, every)
  assert needed(num_texts=3, longest=16) == ({2, 8}, every)
  assert needed(num_texts=1, longest=3) == ({2}, {(1, 2, True), (1, 4, True)})
  assert needed(num_texts=1, longest=3, sizes={'max_cache_tokens': 32}) == (
    {2},
    {each for each in every if each[0] == 1},
  )
  # On a mesh that splits slots, first chunks have programs of their own.
  on_mesh = [needed('data 2 x mdl 4', {'num_slots': 8}, longest=longest)[1] for longest in (8, 9)]
  assert on_mesh[1] - on_mesh[0] == {(rows, columns, True) for rows, columns, _ in on_mesh[0]}


def test_a_step_may_have_more_rows_than_slots():
  run, requests = make_run('one device'), make_requests()[:4]
  steps = run.few_programs(SETTINGS)
  steps.step.row_counts = (SETTINGS.num_slots + 3,)
  done = dict(generate(steps, run.variables, requests, decode=lambda tokens: ''))
  for index, expected in enumerate(run.generate(requests)):
    assert done[index].ids == expected.ids
    np.testing.assert_allclose(done[index].logprobs, expected.logprobs, atol=max(run.atol, 1e-4))


def test_a_sample_is_of_weights_prompt_and_seed():
  sampling = SamplingParams(temperature=1.5, top_p=0.95)
  requests = make_requests(seed=5) + make_requests(seed=5)[:1] + make_requests(seed=6)[:1]
  requests = [dataclasses.replace(r, sampling=sampling) for r in requests]
  requests.append(dataclasses.replace(requests[0], sample=1))
  drawn = [[c.ids for c in make_run(name).generate(requests)] for name in ('one device', 'data 2 x mdl 4')]
  assert drawn[0] == drawn[1]
  backwards = make_run('data 2 x mdl 4').generate(requests[::-1])
  assert [c.ids for c in backwards[::-1]] == drawn[0]
  again, other_seed, other_sample = drawn[0][-3:]
  assert drawn[0][0] == again
  assert drawn[0][0] != other_seed != other_sample != drawn[0][0]


# On a mesh the jobs of tests/tuning sample by it, of whose tokens the trainer computes the same log-probabilities.
@pytest.mark.parametrize(
  'name',
  [
    'recurrent layers',
    *(pytest.param(name, marks=exhaustive) for name in ('windows', 'data 2 x mdl 4', 'data 2 x expert 4')),
  ],
)
def test_samples_by_one_program_are_those_of_the_engine(name):
  run = make_run(name)
  sampling = SamplingParams(temperature=1.5, top_p=0.95)
  requests = [dataclasses.replace(each, sampling=sampling) for each in make_requests(seed=5)[:3]]
  assert not can_sample(run.steps, requests, 2)  # there are 3 slots
  assert can_sample(run.steps, requests[:1], 3)
  assert not can_sample(run.steps, [dataclasses.replace(requests[0], stop=('a',))], 1)
  stop_id = run.generate(requests[:1])[0].ids[1]
  requests = [dataclasses.replace(each, stop_ids=(stop_id,)) for each in requests]
  samples = [request.as_sample(sample) for request in requests for sample in range(2)]

  def decode(tokens):
    return ''.join(f'<{token}>' for token in tokens)

  groups = complete_groups(run.steps, run.variables, requests, 2, decode=decode, num_prompts=4)
  expected = dict(generate(run.steps, run.variables, samples, decode=decode))
  for index, found in enumerate(each for group in groups for each in group):
    for field in ('request', 'ids', 'text', 'finish_reason'):
      assert getattr(found, field) == getattr(expected[index], field), (index, field)
    np.testing.assert_allclose(found.logprobs, expected[index].logprobs, atol=1e-5)
  assert groups[0][0].finish_reason == 'stop'


def test_stop_tokens_and_strings_end_a_sequence_and_free_its_slot():
  run = make_run('one device')
  requests = make_requests()
  whole = run.generate(requests)
  stop_ids = [c.ids[2] for c in whole]
  stopped = run.generate([dataclasses.replace(r, stop_ids=(i,)) for r, i in zip(requests, stop_ids, strict=True)])
  for before, after, stop_id in zip(whole, stopped, stop_ids, strict=True):
    assert after.ids == before.ids[: before.ids.index(stop_id) + 1]
    assert after.finish_reason == 'stop'

  def decode(tokens):
    return ''.join(f'<{token}>' for token in tokens)

  by_text = [dataclasses.replace(r, stop=(f'<{i}>',)) for r, i in zip(requests, stop_ids, strict=True)]
  done = dict(generate(run.steps, run.variables, by_text, decode=decode))
  for index, before in enumerate(whole):
    end = before.ids.index(stop_ids[index])
    assert done[index].text == decode(before.ids[:end])
    assert (done[index].ids, done[index].finish_reason) == (before.ids[: end + 1], 'stop')


def _read(engine, chunks, *, num_steps=0, **flags):
  """Outputs of the chunks' prefills, one after another, and of the steps behind them."""
  launched = [engine.prefill([chunk], **flags) for chunk in chunks]
  launched += [engine.step(np.ones(engine.num_slots, np.bool_)) for _ in range(num_steps)]
  return [outputs.read() for outputs in launched]


@pytest.mark.parametrize('name', ['one device', 'data 2 x mdl 4'])
def test_an_engine_that_had_no_weights_gives_the_same_tokens(name):
  run = make_run(name)
  request = make_requests()[0]
  engine = ModelEngine(run.steps, jax.tree.map(jnp.copy, run.variables))

  def tokens():
    return [each.tokens.tolist() for each in _read(engine, chunk_prompt(request, 0, CHUNK), num_steps=3)]

  engine.reset()
  expected = tokens()
  weak = weakref.ref(jax.tree.leaves(engine.weights)[0])
  with CompilationCounter() as compilations:
    engine.weights = None
    assert weak() is None  # freed
    engine.weights = run.variables
    assert tokens() == expected
  assert compilations.num_programs == 0


@pytest.mark.parametrize(
  'name',
  [
    *('one device', 'data 2 x mdl 4', 'recurrent layers'),
    pytest.param('recurrent layers on data 2 x mdl 4', marks=exhaustive),
  ],
)
def test_reused_chunks_give_the_bits_of_computed_ones(name):
  run = make_run(name)
  first = make_requests()[2]
  prefix = first.ids[: 2 * CHUNK]
  sampling = SamplingParams(temperature=1.5, repetition_penalty=1.5)
  second = Request(ids=(*prefix, 7), max_tokens=5, seed=1, sampling=sampling)
  engine = ModelEngine(run.steps, run.variables)
  assert engine.can_reuse

  def chunks_in(request, slot, blocks):  # both slots are of the first part
    return [dataclasses.replace(each, blocks=blocks) for each in chunk_prompt(request, slot, CHUNK)]

  with CompilationCounter() as compilations:
    engine.reset()
    computed = _read(engine, chunks_in(second, 1, (3, 1, 0, 2)), num_steps=4)[2:]
    engine.reset()
    # A state that follows the shared chunks is restored, before the same prefill saves another one in its place.
    of_first = chunks_in(first, 0, (1, 3, 2))
    _read(engine, [of_first[0], dataclasses.replace(of_first[1], saved=0), *of_first[2:]], num_steps=2)
    last = dataclasses.replace(chunks_in(second, 1, (1, 3, 0))[-1], restored=0, saved=0)
    reused = _read(engine, [last], num_steps=4)
  assert compilations.num_programs == 0
  for row, (one, other) in zip((0, 1, 1, 1, 1), zip(computed, reused, strict=True), strict=True):
    assert one.is_valid[row]
    for field in ('tokens', 'logprobs', 'top_ids', 'top_logprobs', 'is_valid', 'is_finished'):
      np.testing.assert_array_equal(getattr(one, field)[row], getattr(other, field)[row])


def _advance_all(scheduler, *sequences):
  scheduler.submit(sequences)
  while scheduler.has_work:
    scheduler.advance()


def test_a_random_mix_of_200_requests_gives_the_bits_of_each_one_alone(rng):
  """Prompts that begin alike, samples, scores, cancels and other weights, over reuse and prefills of two rows."""
  run = make_run('one device')
  engine = ModelEngine(run.steps, run.variables, score_prompts=True)
  document = rng.integers(1, 257, 12).tolist()
  requests = []
  for number in range(16):
    ids = document[: rng.integers(1, 12)] + rng.integers(1, 257, int(rng.integers(2))).tolist()
    sampling = SamplingParams(
      temperature=1.5 * (number % 3 > 0), repetition_penalty=1.0 + number % 2, presence_penalty=number % 4 / 2
    )
    length = int(rng.integers(1, MAX_LEN + 1 - len(ids)))
    requests.append(Request(ids=tuple(ids), max_tokens=length, score_prompt=number % 5 == 0, sampling=sampling))
  requests[1] = dataclasses.replace(requests[1], logit_bias=((7, 2.5),))
  requests += [request.as_sample(sample) for request in requests[:4] for sample in (1, 2)]

  def sequence_of(kind):
    return GeneratedSequence(requests[kind], lambda tokens: '', index=kind, has_logprobs=True)

  def alone(kind):
    engine.reset()
    _advance_all(Scheduler(engine), each := sequence_of(kind))
    assert each.num_reused == 0
    return each.logprobs

  with CompilationCounter() as compilations:
    expected = [alone(kind) for kind in range(len(requests))]
    engine.reset()
    scheduler, mixed = Scheduler(engine), []
    while len(mixed) < 200 or scheduler.has_work:
      if len(mixed) < 200:
        new = [sequence_of(int(kind)) for kind in rng.integers(len(requests), size=int(rng.integers(1, 3)))]
        scheduler.submit(new)
        mixed += new
      if rng.random() < 0.2:
        scheduler.end([mixed[int(rng.integers(len(mixed)))]], 'cancelled')
      scheduler.advance()
  assert compilations.num_programs == 0
  for each in mixed:
    whole = expected[each.index]
    assert each.logprobs == (whole if each.finish_reason == 'length' else whole[: len(each.logprobs)])
  for completion, whole in zip(run.generate(requests), expected, strict=True):
    generated = whole[-len(completion.ids) :]
    assert (completion.ids, completion.logprobs) == ([e.token for e in generated], [e.logprob for e in generated])
  assert sum(each.finish_reason == 'length' for each in mixed) > 100
  assert scheduler.num_reused_tokens > 100
  assert scheduler.num_preemptions > 10
  assert scheduler.num_used_blocks == 0

  long = next(kind for kind, r in enumerate(requests) if len(r.ids) > CHUNK and not r.score_prompt)
  for weights in (place(run.model, draw(run.model, 1)), run.variables):
    engine.weights = weights
    first, second = sequence_of(long), sequence_of(long)
    _advance_all(scheduler, first, second)
    assert first.num_reused == 0 < second.num_reused
    assert first.logprobs == second.logprobs
    assert (first.logprobs == expected[long]) == (weights is run.variables)


class EvenTokens:
  """A matcher that allows half of the tokens."""

  mask = np.full(-(-257 // 32), 0x55555555, np.uint32)
  is_over, is_free, failure = False, False, None

  def take(self, token):
    assert token % 2 == 0


def test_the_repetition_penalty_is_of_the_whole_prompt():
  run, penalty = make_run('one device'), 2.0

  def likeliest(ids, repeated):
    logits = run.logits(ids)[-1].astype(np.float64)
    is_repeated = np.isin(np.arange(len(logits)), repeated)
    return int(np.argmax(np.where(is_repeated, logits * penalty ** -np.sign(logits), logits)))

  rest = make_requests()[2].ids[1:]
  # A first chunk that makes unlikely what would follow if only the last chunks were seen.
  ids = next((first, *rest) for first in range(257) if likeliest((first, *rest), rest) == first)
  (completion,) = run.generate([Request(ids=ids, max_tokens=4, sampling=SamplingParams(repetition_penalty=penalty))])
  text = list(ids)
  for token in completion.ids:
    assert token == likeliest(text, text)
    text.append(token)


@pytest.mark.parametrize('name', ['one device', 'data 2 x mdl 4'])
def test_penalties_count_what_was_generated_and_biases_are_of_their_request(name):
  """Greedy tokens of a batch against float64, from logits of full forward passes."""
  run = make_run(name)
  settings = [{}, {'frequency_penalty': 2.0}, {'presence_penalty': 2.0}, {'frequency_penalty': -1.5}, {}]
  bias = ((5, 100.0), (6, 99.5))
  requests = [
    dataclasses.replace(request, sampling=SamplingParams(**each), logit_bias=bias if number in (1, 4) else ())
    for number, (request, each) in enumerate(zip(make_requests(), settings, strict=False))
  ]
  together = run.generate(requests)
  for request, completion in zip(requests, together, strict=True):
    text = list(request.ids)
    for token in completion.ids:
      logits = run.logits(text)[-1].astype(np.float64)
      counts = np.bincount(text[len(request.ids) :], minlength=len(logits))
      sampling = request.sampling
      logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
      for biased, value in request.logit_bias:
        logits[biased] += value
      assert logits[token] >= logits.max() - 2 * run.atol
      text.append(token)
  (alone,) = run.generate(requests[1:2])
  assert alone.ids == together[1].ids
  assert set(alone.ids) == {5, 6}  # by their biases, in turn once the penalty weighs more


@pytest.mark.parametrize(
  'name', ['one device', *(pytest.param(name, marks=exhaustive) for name in ('windows', 'data 2 x mdl 4'))]
)
def test_beams_have_true_scores_and_beat_greedy(name):
  run = make_run(name)
  settings = dataclasses.replace(SETTINGS, num_beams=3, prefill_chunk=MAX_LEN, min_bucket=MAX_LEN, length_penalty=0.0)
  requests = make_requests()[1:4]
  steps = DecodeSteps(run.model, settings)
  greedy = run.generate(requests)
  for index, beams in search(steps, run.variables, requests, decode=lambda tokens: ''):
    ids = requests[index].ids
    assert len({tuple(beam.ids) for beam in beams}) == 3
    for beam in beams:
      rows = run.logprobs([*ids, *beam.ids])[len(ids) - 1 : -1]
      np.testing.assert_allclose(beam.score, rows[np.arange(len(beam.ids)), beam.ids].sum(), atol=1e-3)
    assert beams[0].score >= sum(greedy[index].logprobs) - 1e-3
