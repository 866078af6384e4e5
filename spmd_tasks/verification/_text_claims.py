"""The claims about generated text: its log-probabilities are those of a forward pass over the whole of it.

`decode`: prompts are read in chunks, and texts grow greedily, token by token. Then one forward pass over the whole
texts, on one device and without a cache, gives the log-probabilities of all tokens at every position. Texts that are
scored, as evaluations do, are compared with such a pass too; their contexts are the prefixes of a model that has some.

`packing`: a row of several documents gives each the log-probabilities that it has alone. The batches of a TextInput
count positions within each document, and their labels are the tokens that follow.

`sampler`: a rollout is sampled as in a job, at its temperature and with its cuts, and scored by the trainer.

Shapes: N texts, S positions, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np

from spmd_tasks.decoding import DecodeSettings, DecodeSteps, Request
from spmd_tasks.decoding.requests import chunk_prompt
from spmd_tasks.decoding.scoring import score_texts
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.inputs import TextInput
from spmd_tasks.layers import LanguageModel
from spmd_tasks.layers.adapter import map_parts
from spmd_tasks.layers.moe import CapacityGather, Dropless
from spmd_tasks.runtime import TrainState
from spmd_tasks.runtime.compilation import StepsByShape
from spmd_tasks.tuning.rollout_sampler import RolloutSampler, RolloutScorer
from spmd_tasks.verification._agreement import FURTHER, ROUNDINGS, SPREADS, Difference, distance, largest, moved
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken, held, reduced, skipped
from spmd_tasks.verification._runner import Runner
from spmd_tasks.verification._settings import Setting

_MAX_POSITIONS = 24
_NUM_TEXTS = 3


def decode_cases(bench: Bench) -> Iterator[Case]:
  """Yields a case on one device and one on the experiment's mesh, and one of scores."""
  yield from _cases(bench, 'decode', _compare_decoding)
  yield Case(claim='decode', subject='scores, one device', settings=(Setting(),), decide=_compare_scores)


def sampler_cases(bench: Bench) -> Iterator[Case]:
  """Yields the same two cases of an experiment that samples rollouts."""
  if getattr(bench.source.base.train_input, 'kind', '') == 'rollouts':
    yield from _cases(bench, 'sampler', _compare_log_probs)
  else:
    yield skipped('sampler', 'rollouts', 'the experiment samples none')


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
    texts, decoded, others = _decode(bench.runner(setting), state, bench.seed)
    leaf = 'log-probabilities of text {} after {} tokens'
    return full.difference(state, texts, others, lambda expected: decoded, leaf)

  first = find(setting)
  if first.difference <= first.allowed:
    return held(first, 1)

  def find_broken(smaller: Setting) -> Difference | None:
    found = find(smaller)
    return found if found.difference > found.allowed else None

  smallest, first = reduced(setting, first, find_broken)
  return broken(bench, 'decode', setting, first, smallest)


def _length_of_texts(runner: Runner) -> int:
  """Returns how many tokens texts have here. Raises a UserError: the experiment has none."""
  ids = runner.job.train_input.element_spec().get('ids')
  if ids is None or len(ids.shape) != 2 or ids.shape[1] < 2:
    raise UserError('the training input has no ids [B, T], so this is no model of texts.')
  return min(ids.shape[1], _MAX_POSITIONS)


def _draw_encoder_texts(steps: DecodeSteps, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Draws the ids of an encoder's texts, [N, E], and returns them with what a batch has of them; of no encoder none."""
  if steps.encoder_len is None:
    return np.zeros((_NUM_TEXTS, 0), np.int32), {}
  ids = rng.integers(1, steps.vocab_size, (_NUM_TEXTS, steps.encoder_len), np.int32)
  columns = np.broadcast_to(np.arange(steps.encoder_len, dtype=np.int32), ids.shape)
  others = {'ids': ids, 'segment_ids': np.ones_like(ids), 'segment_pos': np.array(columns)}
  return ids, {f'encoder_{name}': values for name, values in others.items()}


def _decode(runner: Runner, state: TrainState, seed: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
  """Returns the texts, int32 [N, S], and the log-probabilities of what follows each token but the last, [N, S - 1, V].

  The third value holds what the model reads beside the texts, by the names of the batch: an encoder's texts, and which
  tokens were the prompt, of a model that has prefixes.

  Raises a UserError: the model cannot generate text.
  """
  element_spec, length = runner.job.train_input.element_spec(), _length_of_texts(runner)
  chunk = max(length // 4, 1)
  settings = DecodeSettings(max_len=length, num_slots=_NUM_TEXTS, prefill_chunk=chunk, min_bucket=chunk)
  vocab_size = DecodeSteps(runner.model, settings).vocab_size
  steps = DecodeSteps(runner.model, dataclasses.replace(settings, num_top_logprobs=vocab_size))
  variables, decode_state = runner.place(state).variables, steps.init()
  rng = np.random.default_rng((seed, 40))
  texts, table = [], np.zeros((_NUM_TEXTS, length, vocab_size))
  encoder_ids, others = _draw_encoder_texts(steps, rng)
  if has_prefix := not others and 'prefix_mask' in element_spec:
    others = {'prefix_mask': np.zeros((_NUM_TEXTS, length), np.int32)}
  outputs: Any
  for slot, prompt_length in enumerate((min(2 * chunk + 1, length - 1), 1, chunk)):
    text = rng.integers(1, vocab_size, prompt_length).tolist()
    if has_prefix:
      others['prefix_mask'][slot, :prompt_length] = 1
    request = Request(ids=tuple(text), encoder_ids=tuple(encoder_ids[slot].tolist()), max_tokens=length - prompt_length)
    for part in chunk_prompt(request, slot, steps.layout.prefill_chunk):
      decode_state, outputs = steps.prefill(
        variables, decode_state, steps.prefill.make_batch([part], score_prompts=True)
      )
      for column, position in enumerate(range(part.start, part.stop)):
        table[slot, position, outputs.prompt_top_ids[0, column]] = outputs.prompt_top_logprobs[0, column]
    table[slot, prompt_length - 1, outputs.top_ids[0]] = outputs.top_logprobs[0]  # by which the first token is drawn
    texts.append([*text, int(outputs.tokens[0])])
  while any(len(text) < length for text in texts):
    decode_state, outputs = steps.step(variables, decode_state, steps.step.make_inputs(np.ones(_NUM_TEXTS, np.bool_)))
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
    self._steps = StepsByShape(self._runner.model.forward_step)

  def difference(
    self,
    state: TrainState,
    texts: np.ndarray,
    others: dict[str, np.ndarray],
    made: Callable[[np.ndarray], np.ndarray],
    leaf: str,
  ) -> Difference:
    """Returns the largest difference of log-probabilities [N, S - 1, V] at a position, with what is allowed.

    `made` gets those of the forward pass, and returns them with the ones to compare in their places.
    """
    positions = np.array(np.broadcast_to(np.arange(texts.shape[1], dtype=np.int32), texts.shape))
    batch = {'ids': texts, 'segment_ids': np.ones_like(texts), 'segment_pos': positions, **others}

    def log_probs(state: TrainState) -> np.ndarray:
      whole, prefix = self.log_probabilities(state, batch)[:, :-1], others.get('prefix_mask')
      if prefix is None:
        return whole
      # The tokens of a prompt are scored as if it had no prefix: a token would see those that it predicts.
      bare = self.log_probabilities(state, batch | {'prefix_mask': np.zeros_like(prefix)})[:, :-1]
      return np.where(prefix[:, 1:, None] > 0, bare, whole)

    return self.judged(state, made(expected := log_probs(state)), expected, log_probs, leaf)

  def judged(
    self,
    state: TrainState,
    made: np.ndarray,
    expected: np.ndarray,
    log_probs: Callable[[TrainState], np.ndarray],
    leaf: str,
  ) -> Difference:
    """Returns the largest difference of `made` from `expected`, which `log_probs` gives of the state."""
    sizes = np.max(np.abs(expected - made), axis=-1)
    text, position = np.unravel_index(np.argmax(np.nan_to_num(sizes, nan=np.inf)), sizes.shape)
    difference = distance(expected[text, position], made[text, position])
    leaf = leaf.format(text + 1, position + 1)
    return _judged(self._bench, leaf, difference, log_probs, state, self._bench.runner(Setting()).epsilon, 41)

  def log_probabilities(self, state: TrainState, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the log-probabilities after every token of a batch, float64 [B, T, V]."""
    step = self._steps.of(batch)
    predictions = step.with_variables(self._runner.place(state).variables, step.place(batch))
    if not isinstance(predictions, Mapping) or 'logits' not in predictions:
      raise UserError('the model does not predict logits, so this is no model of texts.')
    logits = np.asarray(predictions['logits'], np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def _compare_scores(bench: Bench) -> Verdict:
  """Compares the scores of texts, given their contexts, with a forward pass over both."""
  runner, state = bench.runner(Setting()), bench.trajectory(Setting()).state(bench.num_steps - 1)
  length, rng = _length_of_texts(runner), np.random.default_rng((bench.seed, 43))
  settings = DecodeSettings(max_len=length, num_slots=_NUM_TEXTS, prefill_chunk=length, min_bucket=length)
  steps = DecodeSteps(runner.model, settings)
  encoder_ids, others = _draw_encoder_texts(steps, rng)
  texts = rng.integers(1, steps.vocab_size, (_NUM_TEXTS, length), np.int32)
  starts = [1] * _NUM_TEXTS if others else [max(length // 2, 1), 1, max(length // 4, 1)]
  contexts = [ids[:start].tolist() for ids, start in zip(texts, starts)]
  if others:
    texts[:, 0] = settings.start_id
    contexts = encoder_ids.tolist()
  elif 'prefix_mask' in runner.job.train_input.element_spec():
    others = {'prefix_mask': (np.arange(length) < np.array(starts)[:, None]).astype(np.int32)}
  pairs = [(context, ids[start:].tolist()) for context, ids, start in zip(contexts, texts, starts)]
  scores = dict(score_texts(steps, steps.storage.store(runner.place(state).variables), pairs, num_rows=_NUM_TEXTS))

  def scored(expected: np.ndarray) -> np.ndarray:
    made = np.array(expected)
    for number, (ids, start) in enumerate(zip(texts, starts)):
      columns = np.arange(start - 1, length - 1)
      made[number, columns, ids[start:]] = scores[number].logprobs
    return made

  found = _FullForward(bench).difference(state, texts, others, scored, 'score of text {}, its token {}')
  return held(found, 1) if found.difference <= found.allowed else broken(bench, 'decode', Setting(), found)


def packing_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case of documents in a row, and of the batches of a TextInput."""
  job = bench.source.base
  spec = job.train_input.element_spec()
  shapes = {spec[name].shape for name in ('ids', 'segment_ids', 'segment_pos') if name in spec}
  if len(shapes) != 1 or 'segment_pos' not in spec or len(shape := shapes.pop()) != 2 or shape[1] < 4:
    yield skipped('packing', 'documents in a row', 'the batches have no ids, segment_ids and segment_pos [B, T]')
    return
  yield Case(claim='packing', subject='three documents in a row', settings=(Setting(),), decide=_compare_packing)
  if isinstance(job.train_input, TextInput):
    yield Case(claim='packing', subject='batches of the input', decide=_check_batches)


def _compare_packing(bench: Bench) -> Verdict:
  trajectory = bench.trajectory(Setting())
  state, full = trajectory.state(bench.num_steps - 1), _FullForward(bench)
  packed, alone, places = _pack(trajectory.batches[0])
  made = full.log_probabilities(state, packed)

  def log_probs(state: TrainState) -> np.ndarray:
    of_documents = [full.log_probabilities(state, batch) for batch in alone]
    return np.concatenate([x[:, : place.stop - place.start] for x, place in zip(of_documents, places)], axis=1)

  if not isinstance(bench.source.base.task.model, LanguageModel):
    ignored = {name: np.ones_like(x) if name.endswith('segment_ids') else x for name, x in packed.items()}
    if np.array_equal(full.log_probabilities(state, ignored), made):
      raise UserError('the model does not read segment_ids, so it does not tell documents apart.')
  leaf = 'log-probabilities of row {} after ' + 'token {}'
  found = full.judged(state, made, log_probs(state), log_probs, leaf)
  return held(found, 1) if found.difference <= found.allowed else broken(bench, 'packing', Setting(), found)


def _pack(batch: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], list[dict[str, Any]], list[slice]]:
  """Returns a batch whose rows are cut into three documents, each of them alone, and its columns in the first one."""
  packed: dict[str, Any] = {}
  alone: list[dict[str, Any]] = [{} for _ in range(3)]
  places: list[slice] = []
  for side in ('encoder_', ''):
    parts = ('ids', 'segment_ids', 'segment_pos', 'prefix_mask')
    if f'{side}ids' not in batch:
      continue
    names = [side + part for part in parts if side + part in batch]
    num_columns = batch[f'{side}ids'].shape[1]
    bounds = [0, max(num_columns // 4, 1), max(num_columns // 4, 1) + max(num_columns // 3, 1), num_columns]
    places = [slice(first, last) for first, last in itertools.pairwise(bounds)]
    lengths = np.array([place.stop - place.start for place in places])
    position = np.concatenate([np.arange(length) for length in lengths])
    known = {
      'segment_ids': np.repeat([1, 2, 3], lengths),
      'segment_pos': position,
      'prefix_mask': position < np.repeat((lengths + 1) // 2, lengths),
    }
    for name in names:
      values = np.maximum(batch[name], 1) if name == f'{side}ids' else known[name.removeprefix(side)]
      packed[name] = np.array(np.broadcast_to(values, batch[name].shape), batch[name].dtype)
      for document, place in zip(alone, places):
        document[name] = np.zeros_like(packed[name])
        document[name][:, : place.stop - place.start] = packed[name][:, place]
        if name == f'{side}segment_ids':
          document[name] = np.minimum(document[name], 1)
  return packed, alone, places


def _check_batches(bench: Bench) -> Verdict:
  """Decides whether positions count within each document of a row, and labels are the tokens that follow."""
  with contextlib.closing(bench.source.base.train_input.make_iterator()) as iterator:
    batches = list(itertools.islice(iterator, bench.num_steps))
  for step, batch in enumerate(batches, 1):
    ids, labels, weights, segments, positions = (
      batch[name] for name in ('ids', 'labels', 'weights', 'segment_ids', 'segment_pos')
    )
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    leaves = {
      'segment_pos': follows & (positions[:, 1:] != positions[:, :-1] + 1),
      'labels': follows & (weights[:, :-1] > 0) & (labels[:, :-1] != ids[:, 1:]),
    }
    for name, is_wrong in leaves.items():
      if count := int(np.sum(is_wrong)):
        leaf = f'batch/{name} of {count} tokens'
        return broken(bench, 'packing', Setting(), Difference(step=step, leaf=leaf))
  verdict = held(Difference(step=1, leaf='labels', difference=0.0), len(batches))
  return dataclasses.replace(verdict, detail=f'{len(batches)} batches')


def _without_drops(job: Job) -> Job:
  """Returns the job with experts that compute every token."""

  def change(part: CapacityGather | Dropless) -> Any:
    if isinstance(part, Dropless):
      return dataclasses.replace(part, capacity_factor=None, overflow='drop')
    return dataclasses.replace(part, capacity_factor=0.0, eval_capacity_factor=None)

  task = job.task.as_task('--mode verify')
  model = map_parts(task.model, (CapacityGather, Dropless), change)
  return dataclasses.replace(job, task=dataclasses.replace(task, model=model))


@functools.lru_cache(maxsize=2)
def _programs(runner: Any) -> Any:
  """Settings of rollouts, what samples and what scores them, compiled once."""
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
  found = _judged(bench, leaf, float(sizes.max()), log_probs, state, runner.epsilon, 42)
  return held(found, 1) if found.difference <= found.allowed else broken(bench, 'sampler', setting, found)
