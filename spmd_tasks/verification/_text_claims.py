"""The claims about generated text: its log-probabilities are those of a forward pass over the whole of it.

`decode`: prompts are read in chunks, and texts grow greedily, token by token. Then one forward pass over the whole
texts, on one device and without a cache, gives the log-probabilities of all tokens at every position.

`sampler`: a rollout is sampled as in a job, at its temperature and with its cuts, and scored by the trainer.

Shapes: N texts, S positions, V vocabulary.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from spmd_tasks.decoding import DecodeSettings, DecodeSteps, Request
from spmd_tasks.decoding.requests import chunk_prompt
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.layers.adapter import map_parts
from spmd_tasks.layers.moe import CapacityComputation, Dropless
from spmd_tasks.runtime import TrainState
from spmd_tasks.verification._agreement import FURTHER, ROUNDINGS, SPREADS, Difference, distance, largest, moved
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken, held, not_applicable, reduced
from spmd_tasks.verification._runner import Runner
from spmd_tasks.verification._settings import Setting

_MAX_POSITIONS = 24
_NUM_TEXTS = 3


def decode_cases(bench: Bench) -> Iterator[Case]:
  """Yields a case on one device and one on the experiment's mesh."""
  yield from _cases(bench, 'decode', _compare_decoding)


def sampler_cases(bench: Bench) -> Iterator[Case]:
  """Yields the same two cases of an experiment that samples rollouts."""
  if getattr(bench.source.base.train_input, 'kind', '') == 'rollouts':
    yield from _cases(bench, 'sampler', _compare_log_probs)
  else:
    yield not_applicable('sampler', 'rollouts', 'the experiment samples none')


def _cases(bench: Bench, claim: str, decide: Callable[..., Verdict]) -> Iterator[Case]:
  for setting in dict.fromkeys((Setting(), Setting(mesh=bench.own_mesh))):
    own = functools.partial(decide, setting=setting)
    yield Case(claim=claim, subject=str(setting), settings=(Setting(), setting), decide=own)


def _judged(
  bench: Bench,
  leaf: str,
  difference: float,
  log_probs: Callable[[TrainState], np.ndarray],
  state: TrainState,
  epsilon: float,
  seed: int,
) -> Difference:
  """Returns a difference from `log_probs(state)`, with what rounding of the weights lets expect.

  Raises a UserError: rounding alone makes the log-probabilities jump.
  """
  expected, rng = log_probs(state), np.random.default_rng((bench.seed, seed))

  def spread(units: float) -> float:
    samples = [moved(state, units * epsilon, rng) for _ in range(3)]
    return max(distance(expected, log_probs(sample)) for sample in samples)

  allowed = SPREADS * spread(1.0) + ROUNDINGS * epsilon * largest(expected)
  if difference > allowed and spread(FURTHER) > difference / 4:
    raise UserError('rounding alone makes the forward pass jump, as at a tie between experts.')
  return Difference(step=bench.num_steps - 1, leaf=leaf, difference=difference, allowed=allowed)


def _compare_decoding(bench: Bench, setting: Setting) -> Verdict:
  state, full = bench.trajectory(Setting()).state(bench.num_steps - 1), _FullForward(bench)

  def find(setting: Setting) -> Difference:
    return full.difference(state, *_decode(bench.runner(setting), state, bench.seed))

  first = find(setting)
  if first.difference <= first.allowed:
    return held(first, 1)

  def find_broken(smaller: Setting) -> Difference | None:
    found = find(smaller)
    return found if found.difference > found.allowed else None

  smallest, first = reduced(setting, first, find_broken)
  return broken(bench, 'decode', setting, first, smallest)


def _decode(runner: Runner, state: TrainState, seed: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
  """Returns the texts, int32 [N, S], and the log-probabilities of what follows each token but the last, [N, S - 1, V].

  The third value holds what the model reads beside the texts, by the names of the batch: an encoder's texts, and which
  tokens were the prompt, of a model that has prefixes.

  Raises a UserError: the model cannot generate text.
  """
  element_spec = runner.job.train_input.element_spec()
  ids = element_spec.get('ids')
  if ids is None or len(ids.shape) != 2 or ids.shape[1] < 2:
    raise UserError('the training input has no ids [B, T], so this is no model of texts.')
  length = min(ids.shape[1], _MAX_POSITIONS)
  chunk = max(length // 4, 1)
  settings = DecodeSettings(max_len=length, num_slots=_NUM_TEXTS, prefill_chunk=chunk, min_bucket=chunk)
  vocab_size = DecodeSteps(runner.model, settings).vocab_size
  steps = DecodeSteps(runner.model, dataclasses.replace(settings, num_top_logprobs=vocab_size))
  variables, decode_state = runner.place(state).variables, steps.init()
  rng = np.random.default_rng((seed, 40))
  texts, table = [], np.zeros((_NUM_TEXTS, length, vocab_size))
  others: dict[str, np.ndarray] = {}
  encoder_ids = np.zeros((_NUM_TEXTS, 0), np.int32)
  if steps.encoder_len is not None:
    encoder_ids = rng.integers(1, vocab_size, (_NUM_TEXTS, steps.encoder_len), np.int32)
    columns = np.broadcast_to(np.arange(steps.encoder_len, dtype=np.int32), encoder_ids.shape)
    others = {'ids': encoder_ids, 'segment_ids': np.ones_like(encoder_ids), 'segment_pos': np.array(columns)}
    others = {f'encoder_{name}': values for name, values in others.items()}
  elif 'prefix_mask' in element_spec:
    others = {'prefix_mask': np.zeros((_NUM_TEXTS, length), np.int32)}
  outputs: Any
  for slot, prompt_length in enumerate((min(2 * chunk + 1, length - 1), 1, chunk)):
    text = rng.integers(1, vocab_size, prompt_length).tolist()
    if 'prefix_mask' in others:
      others['prefix_mask'][slot, :prompt_length] = 1
    request = Request(ids=tuple(text), encoder_ids=tuple(encoder_ids[slot].tolist()), max_tokens=length - prompt_length)
    for part in chunk_prompt(request, slot, steps.prefill_chunk):
      decode_state, outputs = steps.prefill(variables, decode_state, steps.make_batch([part], score_prompts=True))
      for column, position in enumerate(range(part.start, part.stop)):
        table[slot, position, outputs.prompt_top_ids[0, column]] = outputs.prompt_top_logprobs[0, column]
    table[slot, prompt_length - 1, outputs.top_ids[0]] = outputs.top_logprobs[0]  # by which the first token is drawn
    texts.append([*text, int(outputs.tokens[0])])
  while any(len(text) < length for text in texts):
    decode_state, outputs = steps.step(variables, decode_state, np.ones(_NUM_TEXTS, np.bool_))
    outputs = jax.device_get(outputs)
    for slot, text in enumerate(texts):
      if outputs.is_valid[slot]:
        table[slot, len(text) - 1, outputs.top_ids[slot]] = outputs.top_logprobs[slot]
        text.append(int(outputs.tokens[slot]))
  return np.array(texts, np.int32), table[:, :-1], others


class _FullForward:
  """One forward pass over whole texts, on one device, in which experts drop no token, as in decoding."""

  def __init__(self, bench: Bench):
    self._bench = bench
    self._runner = Runner(bench.source, Setting(change=_without_drops))
    self._step: Any = None

  def difference(
    self, state: TrainState, texts: np.ndarray, decoded: np.ndarray, others: dict[str, np.ndarray]
  ) -> Difference:
    """Returns the largest difference of log-probabilities [N, S - 1, V] at a position, with what is allowed."""
    log_probs = functools.partial(self._log_probabilities, texts=texts, others=others)
    expected = log_probs(state)
    sizes = np.max(np.abs(expected - decoded), axis=-1)
    text, position = np.unravel_index(np.argmax(np.nan_to_num(sizes, nan=np.inf)), sizes.shape)
    difference = distance(expected[text, position], decoded[text, position])
    leaf = f'log-probabilities of text {text + 1} after {position + 1} tokens'
    return _judged(self._bench, leaf, difference, log_probs, state, self._bench.runner(Setting()).epsilon, 41)

  def _log_probabilities(self, state: TrainState, texts: np.ndarray, others: dict[str, np.ndarray]) -> np.ndarray:
    positions = np.array(np.broadcast_to(np.arange(texts.shape[1], dtype=np.int32), texts.shape))
    batch = {'ids': texts, 'segment_ids': np.ones_like(texts), 'segment_pos': positions, **others}
    if self._step is None:
      spec = {name: jax.ShapeDtypeStruct(values.shape, values.dtype) for name, values in batch.items()}
      self._step = self._runner.model.forward_step(spec)
    variables = self._runner.place(state).variables

    def of(batch: dict[str, np.ndarray]) -> np.ndarray:
      logits = np.asarray(self._step(variables, self._step.place(batch))['logits'], np.float64)[:, :-1]
      logits = logits - logits.max(axis=-1, keepdims=True)
      return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))

    prefix = others.get('prefix_mask')
    if prefix is None:
      return of(batch)
    # The tokens of a prompt are scored as if it had no prefix: a token would see those that it predicts.
    return np.where(prefix[:, 1:, None] > 0, of(batch | {'prefix_mask': np.zeros_like(prefix)}), of(batch))


def _without_drops(job: Job) -> Job:
  """Returns the job with experts that compute every token."""

  def change(part: CapacityComputation | Dropless) -> Any:
    if isinstance(part, Dropless):
      return dataclasses.replace(part, capacity_factor=None, overflow='drop')
    return dataclasses.replace(part, capacity_factor=0.0, eval_capacity_factor=None)

  model = map_parts(job.task.model, (CapacityComputation, Dropless), change)
  return dataclasses.replace(job, task=dataclasses.replace(job.task, model=model))


@functools.lru_cache(maxsize=2)
def _programs(runner: Any) -> Any:
  """Settings of rollouts, what samples and what scores them, compiled once."""
  from spmd_tasks.tuning.rollout_sampler import RolloutSampler, RolloutScorer

  settings = dataclasses.replace(runner.job.train_input, environment=None, rewards={'no:rewards': 1.0})
  sampler = RolloutSampler(settings, runner.model, seed=runner.job.experiment.seed)
  return settings, sampler, RolloutScorer(settings, runner.model)


def _compare_log_probs(bench: Bench, setting: Setting) -> Verdict:
  runner, state = bench.runner(setting), bench.trajectory(Setting()).state(bench.num_steps - 1)
  settings, sampler, scorer = _programs(runner)
  prompts = settings.make_iterator().take(settings.num_rows // settings.group_size)
  groups = sampler.complete(runner.place(state).variables, prompts, settings.group_size)
  rollout = settings.rollout_of([each for group in groups for each in group], settings.num_rows)

  def log_probs(state: TrainState) -> np.ndarray:
    return scorer.score(runner.place(state).variables, rollout)[0]

  sizes = np.nan_to_num(np.abs(log_probs(state) - rollout['sampler_log_probs']), nan=np.inf)
  row, column = np.unravel_index(np.argmax(sizes), sizes.shape)
  is_sampled = rollout['weights'] > 0
  place = column - int(np.argmax(is_sampled[row])) + 1
  mean = float(sizes[is_sampled].mean())
  leaf = f'log-probability of token {place} of completion {row + 1} (the mean of all differs by {mean:.2g})'
  if settings.exact:
    found = Difference(step=bench.num_steps - 1, leaf=leaf, difference=float(sizes.max()))
  else:
    found = _judged(bench, leaf, float(sizes.max()), log_probs, state, runner.epsilon, 42)
  return held(found, 1) if found.difference <= found.allowed else broken(bench, 'sampler', setting, found)
