"""The claims about generated text: its log-probabilities agree with a forward pass over the whole text.

`decode`: prompts are prefilled in chunks, and texts are generated greedily, token by token. All log-probabilities are
compared with one forward pass over the whole texts, on one device and without a cache. Scores of texts, as evaluations
compute them, are compared with such a pass too; for a prefix model their contexts are the prefixes.

`sampler`: a rollout is sampled as in a job, with its temperature and truncation, and scored by the trainer.

Shapes: N texts, S positions, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from spmd_tasks.decoding import DecodeSettings, DecodeSteps, Request
from spmd_tasks.decoding.requests import chunk_prompt
from spmd_tasks.decoding.scoring import score_texts
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.layers.adapter import map_parts
from spmd_tasks.layers.moe import CapacityGather, Dropless
from spmd_tasks.runtime import TrainState
from spmd_tasks.runtime.compilation import StepsByShape
from spmd_tasks.tuning.rollout_sampler import RolloutSampler, RolloutScorer
from spmd_tasks.verification._agreement import (
  FURTHER,
  ROUNDINGS,
  SPREADS,
  Difference,
  max_abs,
  max_difference,
  perturb_weights,
)
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken_verdict, held_verdict, reduce_mesh, skipped_case
from spmd_tasks.verification._runner import Runner
from spmd_tasks.verification._settings import Setting

_MAX_POSITIONS = 24
_NUM_TEXTS = 3


def decode_cases(bench: Bench) -> Iterator[Case]:
  """Yields a case on one device, a case on the experiment's mesh, and a case for scores."""
  yield from _cases(bench, 'decode', _compare_decoding)
  yield Case(claim='decode', subject='scores, one device', settings=(Setting(),), decide=_compare_scores)


def sampler_cases(bench: Bench) -> Iterator[Case]:
  """Yields a case on one device and a case on the experiment's mesh, if the experiment samples rollouts."""
  if getattr(bench.source.base.train_input, 'kind', '') == 'rollouts':
    yield from _cases(bench, 'sampler', _compare_log_probs)
  else:
    yield skipped_case('sampler', 'rollouts', 'the experiment samples none')


def _cases(bench: Bench, claim: str, decide: Callable[..., Verdict]) -> Iterator[Case]:
  for setting in dict.fromkeys((Setting(), Setting(mesh=bench.own_mesh))):
    yield Case(
      claim=claim,
      subject=str(setting),
      settings=(Setting(), setting),
      decide=functools.partial(decide, setting=setting),
    )


def _verdict(bench: Bench, claim: str, setting: Setting, difference: Difference) -> Verdict:
  if difference.difference <= difference.allowed:
    return held_verdict(difference, 1)
  return broken_verdict(bench, claim, setting, difference)


def _bounded_difference(
  bench: Bench,
  leaf: str,
  difference: float,
  log_probs: Callable[[TrainState], np.ndarray],
  state: TrainState,
  epsilon: float,
  seed: int,
) -> Difference:
  """Returns a difference from `log_probs(state)` with its allowance for rounding errors.

  Raises a UserError if rounding alone makes the log-probabilities jump.
  """
  expected, rng = log_probs(state), np.random.default_rng((bench.seed, seed))

  def spread(units: float) -> float:
    samples = [perturb_weights(state, units * epsilon, rng) for _ in range(3)]
    return max(max_difference(expected, log_probs(sample)) for sample in samples)

  allowed = SPREADS * spread(1.0) + ROUNDINGS * epsilon * max_abs(expected)
  if difference > allowed and spread(FURTHER) > difference / 4:
    raise UserError('rounding alone makes the forward pass jump, as at a tie between experts.')
  return Difference(step=bench.num_steps - 1, leaf=leaf, difference=difference, allowed=allowed)


def _compare_decoding(bench: Bench, setting: Setting) -> Verdict:
  state, full = bench.trajectory(Setting()).state(bench.num_steps - 1), _FullForward(bench)

  def compare(setting: Setting) -> Difference:
    texts, log_probs, inputs = _decode(bench.runner(setting), state, bench.seed)
    leaf = 'log-probabilities of text {} after {} tokens'
    return full.compare_texts(state, texts, inputs, lambda expected: log_probs, leaf)

  first = compare(setting)
  if first.difference <= first.allowed:
    return held_verdict(first, 1)

  def compare_smaller(smaller: Setting) -> Difference | None:
    difference = compare(smaller)
    return difference if difference.difference > difference.allowed else None

  smallest, first = reduce_mesh(setting, first, compare_smaller)
  return broken_verdict(bench, 'decode', setting, first, smallest)


def _text_length(runner: Runner) -> int:
  """Returns the number of tokens of the texts to compare. Raises a UserError if the experiment has no texts."""
  ids = runner.job.train_input.element_spec().get('ids')
  if ids is None or len(ids.shape) != 2 or ids.shape[1] < 2:
    raise UserError('the training input has no ids [B, T], so the model is not a language model.')
  return min(ids.shape[1], _MAX_POSITIONS)


def _draw_encoder_texts(steps: DecodeSteps, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Samples encoder texts. Returns (ids [N, E], entries of a batch); empty ones for a model without an encoder."""
  if steps.encoder_len is None:
    return np.zeros((_NUM_TEXTS, 0), np.int32), {}
  ids = rng.integers(1, steps.vocab_size, (_NUM_TEXTS, steps.encoder_len), np.int32)
  positions = np.broadcast_to(np.arange(steps.encoder_len, dtype=np.int32), ids.shape)
  inputs = {'ids': ids, 'segment_ids': np.ones_like(ids), 'segment_pos': np.array(positions)}
  return ids, {f'encoder_{name}': values for name, values in inputs.items()}


def _decode(runner: Runner, state: TrainState, seed: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
  """Generates texts.

  Returns:
    texts: int32 [N, S].
    log_probs: log-probabilities of the tokens after each token except the last, [N, S - 1, V].
    inputs: further entries of a batch with the texts: an encoder's texts, or a prefix model's mask of prompts.

  Raises a UserError if the model cannot generate text.
  """
  element_spec, length = runner.job.train_input.element_spec(), _text_length(runner)
  chunk = max(length // 4, 1)
  settings = DecodeSettings(max_len=length, num_slots=_NUM_TEXTS, prefill_chunk=chunk, min_bucket=chunk)
  vocab_size = DecodeSteps(runner.model, settings).vocab_size
  steps = DecodeSteps(runner.model, dataclasses.replace(settings, num_top_logprobs=vocab_size))
  variables, decode_state = runner.place(state).variables, steps.init()
  rng = np.random.default_rng((seed, 40))
  texts, log_probs = [], np.zeros((_NUM_TEXTS, length, vocab_size))
  encoder_ids, inputs = _draw_encoder_texts(steps, rng)
  if has_prefix := not inputs and 'prefix_mask' in element_spec:
    inputs = {'prefix_mask': np.zeros((_NUM_TEXTS, length), np.int32)}
  outputs: Any
  for slot, prompt_length in enumerate((min(2 * chunk + 1, length - 1), 1, chunk)):
    text = rng.integers(1, vocab_size, prompt_length).tolist()
    if has_prefix:
      inputs['prefix_mask'][slot, :prompt_length] = 1
    request = Request(ids=tuple(text), encoder_ids=tuple(encoder_ids[slot].tolist()), max_tokens=length - prompt_length)
    for part in chunk_prompt(request, slot, steps.layout.prefill_chunk):
      decode_state, outputs = steps.prefill(
        variables, decode_state, steps.prefill.make_batch([part], score_prompts=True)
      )
      for column, position in enumerate(range(part.start, part.stop)):
        log_probs[slot, position, outputs.prompt_top_ids[0, column]] = outputs.prompt_top_logprobs[0, column]
    log_probs[slot, prompt_length - 1, outputs.top_ids[0]] = outputs.top_logprobs[0]  # for the first generated token
    texts.append([*text, int(outputs.tokens[0])])
  while any(len(text) < length for text in texts):
    decode_state, outputs = steps.step(variables, decode_state, steps.step.make_inputs(np.ones(_NUM_TEXTS, np.bool_)))
    outputs = jax.device_get(outputs)
    for slot, text in enumerate(texts):
      if outputs.is_valid[slot]:
        log_probs[slot, len(text) - 1, outputs.top_ids[slot]] = outputs.top_logprobs[slot]
        text.append(int(outputs.tokens[slot]))
  return np.array(texts, np.int32), log_probs[:, :-1], inputs


class _FullForward:
  """A forward pass over whole texts on one device, in which experts do not drop tokens, as in decoding."""

  def __init__(self, bench: Bench):
    self._bench = bench
    self._runner = Runner(bench.source, Setting(change=without_drops))
    self._steps = StepsByShape(self._runner.model.forward_step)

  def compare_texts(
    self,
    state: TrainState,
    texts: np.ndarray,
    inputs: dict[str, np.ndarray],
    replace: Callable[[np.ndarray], np.ndarray],
    leaf: str,
  ) -> Difference:
    """Returns the largest difference of log-probabilities [N, S - 1, V] at a position, with its allowance.

    `replace` gets the log-probabilities of the forward pass, and returns them with those to compare in their place.
    """
    positions = np.array(np.broadcast_to(np.arange(texts.shape[1], dtype=np.int32), texts.shape))
    batch = {'ids': texts, 'segment_ids': np.ones_like(texts), 'segment_pos': positions, **inputs}

    def log_probs(state: TrainState) -> np.ndarray:
      with_prefix, prefix = self.log_probabilities(state, batch)[:, :-1], inputs.get('prefix_mask')
      if prefix is None:
        return with_prefix
      # Score the prompt without a prefix, in which its tokens would see the tokens that they predict.
      without_prefix = self.log_probabilities(state, batch | {'prefix_mask': np.zeros_like(prefix)})[:, :-1]
      return np.where(prefix[:, 1:, None] > 0, without_prefix, with_prefix)

    return self.compare(state, replace(expected := log_probs(state)), expected, log_probs, leaf)

  def compare(
    self,
    state: TrainState,
    actual: np.ndarray,
    expected: np.ndarray,
    log_probs: Callable[[TrainState], np.ndarray],
    leaf: str,
  ) -> Difference:
    """Returns the largest difference of `actual` from `expected = log_probs(state)`, with its allowance."""
    sizes = np.max(np.abs(expected - actual), axis=-1)
    text, position = np.unravel_index(np.argmax(np.nan_to_num(sizes, nan=np.inf)), sizes.shape)
    difference = max_difference(expected[text, position], actual[text, position])
    leaf = leaf.format(text + 1, position + 1)
    return _bounded_difference(
      self._bench, leaf, difference, log_probs, state, self._bench.runner(Setting()).epsilon, 41
    )

  def log_probabilities(self, state: TrainState, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the log-probabilities after every token of a batch, float64 [B, T, V]."""
    step = self._steps.of(batch)
    predictions = step.with_variables(self._runner.place(state).variables, step.place(batch))
    if not isinstance(predictions, Mapping) or 'logits' not in predictions:
      raise UserError('the model does not predict logits, so it is not a language model.')
    logits = np.asarray(predictions['logits'], np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def _compare_scores(bench: Bench) -> Verdict:
  """Compares the scores of texts, given their contexts, with a forward pass over contexts and texts."""
  runner, state = bench.runner(Setting()), bench.trajectory(Setting()).state(bench.num_steps - 1)
  length, rng = _text_length(runner), np.random.default_rng((bench.seed, 43))
  settings = DecodeSettings(max_len=length, num_slots=_NUM_TEXTS, prefill_chunk=length, min_bucket=length)
  steps = DecodeSteps(runner.model, settings)
  encoder_ids, inputs = _draw_encoder_texts(steps, rng)
  texts = rng.integers(1, steps.vocab_size, (_NUM_TEXTS, length), np.int32)
  starts = [1] * _NUM_TEXTS if inputs else [max(length // 2, 1), 1, max(length // 4, 1)]
  contexts = [ids[:start].tolist() for ids, start in zip(texts, starts)]
  if inputs:
    texts[:, 0] = settings.start_id
    contexts = encoder_ids.tolist()
  elif 'prefix_mask' in runner.job.train_input.element_spec():
    inputs = {'prefix_mask': (np.arange(length) < np.array(starts)[:, None]).astype(np.int32)}
  pairs = [(context, ids[start:].tolist()) for context, ids, start in zip(contexts, texts, starts)]
  scores = dict(score_texts(steps, steps.storage.store(runner.place(state).variables), pairs, num_rows=_NUM_TEXTS))

  def replace_by_scores(expected: np.ndarray) -> np.ndarray:
    log_probs = np.array(expected)
    for number, (ids, start) in enumerate(zip(texts, starts)):
      positions = np.arange(start - 1, length - 1)
      log_probs[number, positions, ids[start:]] = scores[number].logprobs
    return log_probs

  leaf = 'score of text {}, its token {}'
  difference = _FullForward(bench).compare_texts(state, texts, inputs, replace_by_scores, leaf)
  return _verdict(bench, 'decode', Setting(), difference)


def without_drops(job: Job) -> Job:
  """Returns the job with experts that do not drop tokens."""

  def change(part: CapacityGather | Dropless) -> Any:
    if isinstance(part, Dropless):
      return dataclasses.replace(part, capacity_factor=None, overflow='drop')
    return dataclasses.replace(part, capacity_factor=0.0, eval_capacity_factor=None)

  task = job.task.as_task('--mode verify')
  model = map_parts(task.model, (CapacityGather, Dropless), change)
  return dataclasses.replace(job, task=dataclasses.replace(task, model=model))


@functools.lru_cache(maxsize=2)
def _compile_rollouts(runner: Any) -> tuple[Any, RolloutSampler, RolloutScorer]:
  """Returns the settings of rollouts, their sampler and their scorer."""
  settings = dataclasses.replace(runner.job.train_input, environment=None, rewards={'no:rewards': 1.0})
  sampler = RolloutSampler(settings, runner.model, seed=runner.job.experiment.seed)
  return settings, sampler, RolloutScorer(settings, runner.model)


def _compare_log_probs(bench: Bench, setting: Setting) -> Verdict:
  runner, state = bench.runner(setting), bench.trajectory(Setting()).state(bench.num_steps - 1)
  settings, sampler, scorer = _compile_rollouts(runner)
  prompts = settings.make_iterator().take(settings.num_rows // settings.group_size)
  groups = sampler.complete(runner.place(state).variables, prompts, settings.group_size)
  rollout = settings.rollout_of([episode for group in groups for episode in group], settings.num_rows)

  def log_probs(state: TrainState) -> np.ndarray:
    return scorer.score(runner.place(state).variables, rollout)[0]

  sizes = np.nan_to_num(np.abs(log_probs(state) - rollout['sampler_log_probs']), nan=np.inf)
  row, column = np.unravel_index(np.argmax(sizes), sizes.shape)
  is_sampled = rollout['weights'] > 0
  token = column - int(np.argmax(is_sampled[row])) + 1
  mean = float(sizes[is_sampled].mean())
  leaf = f'log-probability of token {token} of completion {row + 1} (the mean difference is {mean:.2g})'
  difference = _bounded_difference(bench, leaf, float(sizes.max()), log_probs, state, runner.epsilon, 42)
  return _verdict(bench, 'sampler', setting, difference)
