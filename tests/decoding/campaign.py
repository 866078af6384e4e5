"""scripts/decode_campaign: random requests in random mixtures, each text judged by forward passes without a cache.

    scripts/decode_campaign --requests 300 --seed 0          # exits with 1 if a text is wrong or a block leaked
    scripts/decode_campaign --requests 300 --seed 0 --only 3 # one world of these again

A world is a model on a mesh with settings of its own (slots, chunks, a pool that is too small for all texts, drafts by
n-grams, heads or a model, prompts beside steps, a cache of 8 bits), and its share of the requests: prompts that begin
alike, samples, penalties, biases, cuts, forms, allowed tokens, bad words, least numbers of tokens, stop strings,
scores, adapters, priorities, cache keys. They come while others run; some are cancelled, the engine sleeps and fails.
Then come the cancellations, and the first texts again.
World w of a seed is a function of (seed, w, requests), and runs in a process of its own.

Each token must be the one that the logits of a full forward pass over the text before it give, with the request's own
noise; float64 on the host applies penalties, cuts and masks. A token whose score is within rounding of that is counted
as close. With a cache of 8 bits, which rounds keys and values, texts are those of each request alone, without drafts.
Processes that are killed are faults: scripts/fault_campaign --kinds decode/,serving/.
"""

import argparse
import collections
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
import dataclasses
import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from typing import Any
from unittest import mock

from tests import xla_settings

if __name__ == '__main__':
  os.environ.update({k: v for k, v in xla_settings.ENVIRONMENT.items() if 'CACHE' not in k} | os.environ)

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.adapters import adapted_weights
from spmd_tasks.adapters.choices import AdapterChoices
from spmd_tasks.decoding import DecodeSteps, Request, SamplingParams, cached_attention
from spmd_tasks.decoding.constraints import BadWords, Grammars, TokenLimits, Vocabulary
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.experiments import t5
from spmd_tasks.experiments.synthetic import Uneven
from spmd_tasks.inputs import ByteTokenizer
from spmd_tasks.layers.adapter import map_adapters
from spmd_tasks.runtime import DecodeSettings
from spmd_tasks.runtime.compilation import CompilationCounter
from tests.decoding import runs

MAX_LEN = 32
LIMIT_S = 600  # of one world; more is a hang
TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_id
# How far logits of rounded keys and values may be; where they choose other experts there is no bound.
LOOSE, OTHER_EXPERTS = {None: 0.0, 'int8': 0.2, 'float8_e4m3fn': 1.0}, 30.0
SCHEMA = {'type': 'object', 'properties': {'a': {'type': 'integer'}}, 'required': ['a'], 'additionalProperties': False}
FORMS = (
  ('regex', '[a-c]{2,9}d'),
  ('choice', '["the cat", "a dog", "mat"]'),
  ('json_schema', json.dumps(SCHEMA)),
)


class Pipelined(runs.Staged):
  """In float32, so that few draws are close."""

  dtype = 'float32'


class Adapted(Uneven):
  """With two adapters beside some kernels."""

  def task(self):
    task = super().task()
    adapter = AdapterChoices(rank=3, choices=('one', 'two'))
    adapted_weights.add_adapters(task.model, ['attention/(query|value)', 'ffn'], adapter)
    return task


class Prefixes(t5.PrefixTiny):
  """A prefix language model: a prompt sees itself in both directions."""

  vocab_size = Uneven.vocab_size
  seq_len = MAX_LEN


class TwoTexts(t5.V11Tiny):
  """An encoder-decoder; prompts are what its decoder begins with, and its encoder reads a text of its own."""

  vocab_size = Uneven.vocab_size
  seq_len = MAX_LEN


MESHES = runs.MESHES | {
  'prefixes on data 2 x mdl 4': (Prefixes, (1, 2, 4)),
  'an encoder-decoder on data 2 x mdl 4': (TwoTexts, (1, 2, 4)),
  'layers 2 x data 2 x mdl 2': (Pipelined, (1, 2, 2, 2)),
  'adapters on data 2 x mdl 4': (Adapted, (1, 2, 4)),
}
MODEL_DRAFTS = ('one device', 'data 2 x mdl 4', 'recurrent layers', 'recurrent layers on data 2 x mdl 4')
LATENT = 'latent attention, then windows and experts'
# The model and mesh of each world, and the most drafts that its windows allow.
WORLDS = (
  ('one device', 3),
  ('data 2 x mdl 4', 3),
  ('layers 2 x data 2 x mdl 2', 3),
  (LATENT, 3),
  ('adapters on data 2 x mdl 4', 2),
  ('windows', 2),
  ('data 2 x expert 4', 3),
  ('2 heads', 3),
  ('windows on data 2 x mdl 4', 0),
  ('mdl 4', 3),
  (f'{LATENT}, on data 2 x mdl 4', 0),
  ('2 heads on data 2 x mdl 4', 2),
  ('prefixes on data 2 x mdl 4', 3),
  ('an encoder-decoder on data 2 x mdl 4', 0),
  ('recurrent layers', 3),
  ('recurrent layers on data 2 x mdl 4', 3),
  ('recurrent layers, 2 heads', 3),
)


def draw_settings(rng: random.Random, name: str, most_drafts: int) -> DecodeSettings:
  """Draws a world's settings; the pool has room for a part of the texts that its slots may hold."""
  num_parts = 8 if 'expert 4' in name else 2 if 'data 2' in name else 1
  num_slots, chunk = num_parts * rng.choice((2, 3, 4)) // (1 + num_parts // 8), rng.choice((4, 8))
  return DecodeSettings(
    max_len=MAX_LEN,
    num_slots=num_slots,
    max_cache_tokens=int(num_parts * MAX_LEN * rng.choice((1.0, 1.3, 2.5))),
    prefill_rows=rng.choice((None, 2, 2)),
    prefill_chunk=chunk,
    min_bucket=rng.choice((4, chunk, chunk)),
    num_drafts=rng.randrange(most_drafts + 1),
    cache_dtype=rng.choice((None, None, None, None, 'int8', 'float8_e4m3fn')),
    num_top_logprobs=2,
    num_snapshots=rng.choice((None, 0, 1, 2, 9)),
  )


def draw_request(rng: random.Random, documents: list[list[int]], *, scores: bool, num_adapters: int) -> Any:
  """Draws a request, and what limits its tokens: its form or None, its allowed tokens or None, and its bad words."""
  often = lambda share, one, other: one if rng.random() < share else other
  document = rng.choice(documents)
  ids = document[: rng.randrange(1, 20)] + often(0.5, [], [rng.randrange(3, 257)])
  bias = tuple((token, 6.0) for token in TOKENIZER.encode('abcdest ')) if rng.random() < 0.3 else ()
  if rng.random() < 0.35:  # the text goes on with these two
    ids, bias = (document[:2] * 4)[: rng.randrange(3, 8)], tuple((token, 20.0) for token in document[:2])
  sampling = SamplingParams(
    temperature=rng.choice((0.0, 0.0, 0.05, 0.7, 1.5)),
    repetition_penalty=often(0.2, 1.3, 1.0),
    presence_penalty=often(0.2, 0.5, 0.0),
    frequency_penalty=often(0.2, 1.0, 0.0),
    top_k=often(0.2, 20, 0),
    top_p=often(0.2, 0.9, 1.0),
    min_p=often(0.1, 0.05, 0.0),
  )
  max_tokens, stop = rng.randrange(1, MAX_LEN + 1 - len(ids)), often(0.3, ('e', 'at', ' t'), ())
  stop_ids = (EOS, *often(0.2, tuple(rng.sample(range(3, 257), 3)), ()))
  request = Request(
    ids=tuple(ids),
    max_tokens=max_tokens,
    seed=rng.randrange(1000),
    stop_ids=stop_ids,
    stop=stop,
    kept_stops=often(0.3, (*stop, *stop_ids), ()),
    min_tokens=often(0.3, rng.randrange(max_tokens + 1), 0),
    score_prompt=scores and rng.random() < 0.2,
    sampling=sampling,
    logit_bias=bias,
    adapter=rng.randrange(num_adapters + 1),
    cache_key=often(0.2, 'of another user', ''),
    num_drafts=rng.choice((None, None, 0, 1)),
    priority=rng.choice((0, 0, 0, -1, 2)),
  )
  allowed = often(0.1, sorted(rng.sample(range(257), 80)), None)
  return request, (often(0.2, rng.choice(FORMS), None), allowed, often(0.15, (b'e', b'at', b's t'), ()))


def split(text: GeneratedSequence) -> tuple[list[Any], list[Any]]:
  """The entries of a text's prompt, where it is scored, and of its tokens."""
  num_scored = len(text.request.ids) * text.request.score_prompt
  return text.logprobs[:num_scored], text.logprobs[num_scored:]


class Judge:
  """Says whether texts are right, by a model's full forward pass over each: one row, no cache, no mesh, no neighbours.

  Attributes:
    num_close: tokens that rounding may have decided.
    num_tokens: that were judged.
  """

  def __init__(self, run: runs.Run, loose: float = 0.0):
    """`loose` is how far logits may be from those of the full forward pass, beside rounding of sums."""
    self._weights = run.true_weights
    self._atol = run.atol + loose
    self.num_close = self.num_tokens = 0
    model, self._spec = run.model.task.model, run.model.input_layout.spec

    def logits(weights, batch, adapter):
      chosen = map_adapters(model, lambda each: each.of_rows(adapter))
      return chosen.apply({'params': weights}, batch)['logits'][0]

    def noise(seed, sample, size):
      key = jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), sample)
      draw = lambda position: jax.random.gumbel(jax.random.fold_in(key, position), (size,), jnp.float32)
      return jax.vmap(draw)(jnp.arange(MAX_LEN))

    self._logits, self._noise = jax.jit(logits), jax.jit(noise, static_argnums=2)

  def fault_of(self, text: GeneratedSequence, matcher: Any, alone: list[Any] | None = None) -> str | None:
    """What is wrong with a text that ended, or None; given its form's matcher at the beginning, and itself alone."""
    request, num_prompt = text.request, len(text.request.ids)
    scores, entries = split(text)
    tokens = [entry.token for entry in entries]
    for number, (entry, other) in enumerate(zip(entries, entries if alone is None else alone)):
      if entry.token != other.token or abs(entry.logprob - other.logprob) > 2e-3:
        return f'token {number} is {entry}, and alone {other}'
    row = np.zeros((1, MAX_LEN), np.int32)
    row[0, : num_prompt + len(tokens)] = [*request.ids, *tokens]
    batch = {'ids': row, **self._beside(request)}
    logits = np.asarray(self._logits(self._weights, batch, np.array([request.adapter])), np.float64)
    noise = np.asarray(self._noise(request.seed, request.sample, logits.shape[-1]), np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for at, entry in [*enumerate(scores[1:]), *enumerate(entries, num_prompt - 1)]:
      for token, logprob in ((entry.token, entry.logprob), *entry.top):
        if abs(logprob - logprobs[at, token]) > self._atol:
          return f'position {at + 1}: {token} has the log-probability {logprob}, not {logprobs[at, token]}'
    ended, told = None, ''
    for number, token in enumerate(tokens):
      if ended:
        return f'{len(tokens)} tokens, of which number {number - 1} ends the text ({ended})'
      self.num_tokens += 1
      at = num_prompt + number
      likely = functools.partial(self._scores, logits[at - 1], noise[at], request, tokens[:number], matcher)
      if token != np.argmax(exact := likely(0.0)):
        slack = 4 * self._atol / min(request.sampling.temperature or 1.0, 1.0)
        if not any(found[token] >= np.max(found) - slack for found in (exact, likely(slack), likely(-slack))):
          return f'token {number} is {token}, of score {exact[token]}, not {np.argmax(exact)}, of {np.max(exact)}'
        self.num_close += 1
      is_stop = token in request.stop_ids
      told = TOKENIZER.decode(tokens[: number + (not is_stop or token in request.kept_stops)])
      found, first = [], len(TOKENIZER.decode(tokens[: request.min_tokens]).rstrip('\ufffd'))
      for stop in request.stop if number >= request.min_tokens else ():
        place = told.find(stop, max(0, first - len(stop) + 1))
        found += [(place, -len(stop), stop)] if place >= 0 else []
      if found:
        place, _, stop = min(found)
        told = told[: place + (len(stop) if stop in request.kept_stops else 0)]
      if matcher is not None and not is_stop:
        matcher.take(token)
      ended = 'length' if number + 1 == request.max_tokens else None
      ended = 'stop' if is_stop or found or (matcher is not None and matcher.is_over) else ended
    if text.finish_reason not in ('cancelled', 'error') and (ended, told) != (text.finish_reason, text.text):
      return f'it ended by {text.finish_reason} with {text.text!r}, not by {ended} with {told!r}'
    return None

  def _beside(self, request: Request) -> dict[str, np.ndarray]:
    """What the model reads beside the text: which tokens are the prefix, or the text of an encoder."""
    if 'encoder_ids' in self._spec:
      columns = np.arange(self._spec['encoder_ids'].shape[1], dtype=np.int32)
      is_text = columns < len(request.encoder_ids)
      ids = np.zeros_like(columns)
      ids[is_text] = request.encoder_ids
      text = {'ids': ids, 'segment_ids': is_text.astype(np.int32), 'segment_pos': columns}
      decoder = {'segment_ids': np.ones(MAX_LEN, np.int32), 'segment_pos': np.arange(MAX_LEN, dtype=np.int32)}
      beside = {f'encoder_{name}': values for name, values in text.items()} | decoder  # only segments mask padding
      return {name: values[None] for name, values in beside.items()}
    if 'prefix_mask' in self._spec:
      return {'prefix_mask': (np.arange(MAX_LEN) < len(request.ids)).astype(np.int32)[None]}
    return {}

  def _scores(self, logits, noise, request, before, matcher, slack) -> np.ndarray:
    """What the next token is the largest of, float64 [V]; cuts leave out less, or more, by `slack`."""
    x, sampling = logits.copy(), request.sampling
    if matcher is not None:
      x[np.unpackbits(matcher.mask.view(np.uint8), bitorder='little')[: len(x)] == 0] = -np.inf
    seen, counts = list({*request.ids, *before}), np.bincount(before, minlength=len(x))
    x[seen] = np.where(x[seen] > 0, x[seen] / sampling.repetition_penalty, x[seen] * sampling.repetition_penalty)
    x -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    for token, value in request.logit_bias:
      x[token] += value
    if sampling.temperature == 0:
      return x
    x /= sampling.temperature
    kept = np.sort(x)[::-1][: sampling.top_k or None]
    shares = np.exp(kept - kept[0]) / np.sum(np.exp(kept - kept[0]))
    stays = np.cumsum(shares) - shares < (np.inf if sampling.top_p == 1 else sampling.top_p + slack)
    stays &= shares >= sampling.min_p * shares[0] * (1 - slack)
    stays[0] = True
    return np.where(x >= np.min(kept[stays]) - slack, x, -np.inf) + noise


def play(scheduler: Scheduler, engine: ModelEngine, texts, rng: random.Random, *, cancels: float, faults: float = 0):
  """Submits texts while others run, each of which may be cancelled at a step; returns how often the engine failed."""
  waiting, running, num_failed = collections.deque(texts), [], 0
  while waiting or scheduler.has_work:
    new = [waiting.popleft() for _ in range(min(len(waiting), rng.choice((0, 1, 1, 2, 4))))]
    scheduler.submit(new)
    running = [each for each in [*running, *new] if each.finish_reason is None]
    scheduler.end([each for each in running if rng.random() < cancels], 'cancelled')
    fault = rng.random()
    if fault < faults:
      while scheduler.num_active:
        scheduler.advance(admit=False)
      engine.weights = engine.weights  # published again: the cache is emptied
    elif fault < 2 * faults:
      with mock.patch.object(engine, 'step', side_effect=RuntimeError('drawn')):
        try:
          scheduler.advance()
        except RuntimeError:
          scheduler.recover()
          num_failed += 1
    scheduler.advance()
  return num_failed


def run_world(seed: int, world: int, num_requests: int, num_cancellations: int) -> dict[str, Any]:
  """Runs a world; returns its counts, and under `faults` what is wrong."""
  rng, started = random.Random(f'{seed}/{world}'), time.process_time()
  name, most_drafts = WORLDS[world % len(WORLDS)]
  settings, run = draw_settings(rng, name, most_drafts), runs.Run(name, MESHES)
  has_model = settings.num_drafts and name in MODEL_DRAFTS and rng.random() < 0.5
  has_all = name in ('one device', 'recurrent layers') and rng.random() < 0.5  # also programs for fewer busy slots
  scores, num_adapters = rng.random() < 0.25, 2 if 'adapters' in name else 0
  spec = run.model.input_layout.spec
  if 'prefix_mask' in spec:  # whose tokens see one another, and prompts are read in one piece
    scores = False
  documents = [[rng.randrange(3, 257) for _ in range(20)] for _ in range(2)]
  documents.append([rng.randrange(3, 257), *documents[0][1:]])  # its later chunks have the same tokens
  drawn = []
  for _ in range(num_requests):
    request, limits = draw_request(rng, documents, scores=scores, num_adapters=num_adapters)
    if 'encoder_ids' in spec:
      encoder_ids = tuple(rng.choice(documents)[: rng.randrange(1, spec['encoder_ids'].shape[1] + 1)])
      request = dataclasses.replace(request, encoder_ids=encoder_ids)
    drawn += [(request.as_sample(sample), limits) for sample in range(rng.choice((1, 1, 1, 2, 3)))]
  make = functools.partial(DecodeSteps, run.model) if has_all else run.few_programs
  steps = make(settings, draft=runs.draft_of(run, 0.5) if has_model else None)
  engine = ModelEngine(steps, run.variables, score_prompts=scores, constrain=True)
  with mock.patch.dict(cached_attention._BLOCK, cpu=5):  # entries of the cache that a step reads at a time
    engine.warm_up()
  grammars = Grammars(TOKENIZER, vocab_size=steps.vocab_size, end_ids=(EOS,))
  vocabulary = Vocabulary(TOKENIZER.bytes_of_tokens(range(steps.vocab_size)))

  def matcher_of(request: Request, limits: Any) -> Any:
    form, allowed, words = limits
    matcher = form and grammars.compile(*form, end_ids=request.stop_ids)
    limited = TokenLimits(
      vocab_size=steps.vocab_size,
      min_tokens=request.min_tokens,
      end_ids=request.stop_ids,
      allowed_ids=allowed,
      bad_words=BadWords(words=words, vocabulary=vocabulary) if words else None,
      form=matcher and matcher.copy(),
    )
    # A server refuses a request that no token can begin.
    return matcher if limited.is_free or limited.is_over else limited

  def text_of(index: int, **fields: Any) -> GeneratedSequence:
    request, limits = dataclasses.replace(drawn[index][0], **fields), drawn[index][1]
    given = {'index': index, 'has_logprobs': True, 'matcher': matcher_of(request, limits)}
    return GeneratedSequence(request, TOKENIZER.decode, **given)

  loose = OTHER_EXPERTS if settings.cache_dtype and 'expert' in name else LOOSE[settings.cache_dtype]
  judge, alone, leaked, num_cancelled = Judge(run, loose), {}, 0, 0
  with CompilationCounter() as compilations:
    for index in range(len(drawn) if settings.cache_dtype else 0):
      engine.reset()
      play(Scheduler(engine), engine, [text := text_of(index, num_drafts=0)], rng, cancels=0)
      alone[index] = split(text)[1]
    engine.reset()
    scheduler = Scheduler(engine)
    texts = [text_of(index) for index in range(len(drawn))]
    num_failed = play(scheduler, engine, texts, rng, cancels=0.01, faults=0.005)
    while num_cancelled < num_cancellations:
      leaked += abs(scheduler.num_used_blocks)
      some = [text_of(rng.randrange(len(drawn))) for _ in range(min(100, num_cancellations - num_cancelled))]
      play(scheduler, engine, some, rng, cancels=0.3)
      texts += some
      num_cancelled += sum(each.finish_reason == 'cancelled' for each in some)
    play(scheduler, engine, last := [text_of(index) for index in range(len(drawn))][:8], rng, cancels=0)
    leaked += abs(scheduler.num_used_blocks)
  faults = []
  for text in [*texts, *last]:
    limits = drawn[text.index][1]
    if fault := judge.fault_of(text, matcher_of(text.request, limits), alone.get(text.index)):
      faults.append({'fault': fault, 'limits': str(limits), 'request': dataclasses.asdict(text.request)})
  counted = ('preemptions', 'reused_tokens', 'drafted_tokens', 'accepted_tokens')
  return {
    'world': world,
    'name': name,
    'settings': {each: getattr(settings, each) for each in ('num_slots', 'num_drafts', 'num_snapshots', 'cache_dtype')},
    'requests': num_requests,
    'texts': len(texts) + len(last),
    'tokens': judge.num_tokens,
    'wrong': len(faults),
    'close': judge.num_close,
    'leaked_blocks': leaked + scheduler.num_active,
    'late_compilations': compilations.num_programs,
    'cancelled': sum(text.finish_reason == 'cancelled' for text in texts),
    'engine_failures': num_failed,
    'has_draft_model': bool(has_model),
    'has_all': has_all,
    **{each: getattr(scheduler, f'num_{each}') for each in counted},
    'cpu_seconds': round(time.process_time() - started, 1),
    'faults': faults[:5],
  }


def _in_child(*given: Any) -> dict[str, Any]:
  signal.alarm(LIMIT_S)  # ends the process
  use_fake_devices(8)
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  return run_world(*given)


def main(argv: list[str] | None = None) -> int:
  """Prints a line per world to stderr and the summary to stdout; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--requests', type=int, default=300, help='of all worlds together; some are drawn several times')
  parser.add_argument('--cancellations', type=int, default=2000, help='of all worlds together')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--only', type=int, metavar='W', help=f'only this world, of {len(WORLDS)}')
  args = parser.parse_args(argv)
  started, totals, failed = time.monotonic(), collections.Counter[str](), []
  shares = [-(-number // len(WORLDS)) for number in (args.requests, args.cancellations)]
  for world in range(len(WORLDS)) if args.only is None else [args.only]:
    again = f'scripts/decode_campaign --requests {args.requests} --cancellations {args.cancellations}'
    again += f' --seed {args.seed} --only {world}'
    try:
      with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('fork')) as pool:
        result = pool.submit(_in_child, args.seed, world, *shares).result()
    except Exception as error:
      ended = f'it crashed, or took more than {LIMIT_S} s' if isinstance(error, BrokenProcessPool) else repr(error)
      result = {'world': world, 'name': WORLDS[world % len(WORLDS)][0], 'crashed': 1, 'faults': [ended[:500]]}
    totals.update({name: value for name, value in result.items() if isinstance(value, int | float) and name != 'world'})
    if any(result.get(name) for name in ('wrong', 'leaked_blocks', 'late_compilations', 'crashed')):
      failed.append({'world': world, 'faults': result['faults'], 'again': again})
    print(json.dumps(result), file=sys.stderr, flush=True)
  summary = {'seed': args.seed, **totals, 'crashed': totals['crashed'], 'seconds': round(time.monotonic() - started)}
  print(json.dumps(summary | {'failed': failed}), flush=True)
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
