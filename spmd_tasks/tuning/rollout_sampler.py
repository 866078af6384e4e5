"""RolloutSampler completes prompts with the weights on the training mesh; RolloutScorer scores the completions.

    sampler = RolloutSampler(settings, model, seed=0)
    rollout = settings.rollout_of(episodes_of(sampler.complete(variables, prompts, 8)), num_rows)
    log_probs, _ = RolloutScorer(settings, model).score(variables, rollout)       # by the forward pass of training

Shapes: R rows of a rollout, B rows of a batch, T tokens of a row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from spmd_tasks.decoding import DecodeSteps, Prompt, generate
from spmd_tasks.decoding.generation import can_sample, complete_groups
from spmd_tasks.decoding.prompts import PromptTokenizer
from spmd_tasks.errors import UserError
from spmd_tasks.inputs.base import shard_rows
from spmd_tasks.learning.accumulation import compute_in_parts
from spmd_tasks.runtime import BaseTask, PartitionedModel
from spmd_tasks.runtime.compilation import CompiledStep
from spmd_tasks.tuning.conversations import tools_of
from spmd_tasks.tuning.environments import Episode, Turns, stop_strings
from spmd_tasks.tuning.preference_loss import answer_log_probs
from spmd_tasks.tuning.rollout_input import RewardPrompt, Rollout, RolloutInput

# An environment's answers: (record, texts of the model, state) -> (messages, reward, done, state), or None if it fails.
Answer = Callable[[Sequence[tuple[Mapping[str, Any], Sequence[str], Any]]], Sequence[Any]]


def episodes_of(groups: Iterable[Sequence[Episode]]) -> list[Episode]:
  return [episode for group in groups for episode in group]


class RolloutSampler:
  """Samples completions, or, with an environment, episodes of several turns.

  Attributes:
    steps: the compiled programs.
    stop: the environment's stop strings.
  """

  def __init__(
    self,
    settings: RolloutInput,
    model: PartitionedModel,
    *,
    seed: int,
    answer: Answer | None = None,
    environment: Any = None,
    allow: Callable[[str, float], contextlib.AbstractContextManager[None]] = lambda *_: contextlib.nullcontext(),
    beat: Callable[[], None] = lambda: None,
    report: Callable[[str], None] = print,
  ):
    """Initializes the sampler; programs are compiled on first use.

    Args:
      settings: the settings of the rollouts.
      model: the partitioned model; the DecodeSettings of its task are adapted.
      seed: the experiment's seed.
      answer, environment: the function that answers completions, and the class of the environment, or None.
      allow: (activity, seconds) -> a context in which the watchdog allows that much longer than a step.
      beat: called after each step of the scheduler.
      report: shows a message.
    """
    decode = model.task.as_task('sampling').decode
    overrides: dict[str, Any] = {'num_top_logprobs': 0, 'num_beams': 1, 'weights_dtype': None}
    overrides |= {'max_len': settings.seq_len, 'num_slots': min(settings.num_slots, settings.num_rows)}
    overrides['prefill_rows'] = decode.prefill_rows and min(decode.prefill_rows, settings.num_rows)
    self.steps = DecodeSteps(
      model,
      dataclasses.replace(decode, **overrides),
      temperature=settings.temperature,
      records_routing=settings.num_choices > 0,
    )
    self.stop = stop_strings(environment)
    self._settings = settings
    self._tokenizer = PromptTokenizer(steps=self.steps, tokenizer=settings.tokenizer, seed=seed, len_setting='seq_len')
    self._answer, self._tools = answer, getattr(environment, 'tools', None)
    self._allow, self._beat, self._report = allow, beat, report

  def complete(self, variables: Any, prompts: Sequence[RewardPrompt], number: int, **draws: Any) -> list[list[Episode]]:
    """Returns `number` episodes of each prompt; they are empty if the environment fails to begin them.

    Args:
      variables: the model's variables, padded arrays on the mesh.
      prompts: from PromptIterator; samples depend only on the epoch, the record and the seed.
      draws: fields of the requests, such as `temperature`.
    """
    groups = [[Episode() for _ in range(number)] for _ in prompts]
    requests, begun = [], []
    records: Sequence[Any] = self._begin([record for *_, record in prompts])
    for (epoch, index, _), record, group in zip(prompts, records, groups, strict=True):
      try:
        if record is not None:
          requests.append(self._request(record, index, (epoch, index), **draws))
          begun += [(epoch, index, record, episode) for episode in group]
      except UserError as error:
        if self._answer is None:
          raise
        self._report(f'the environment returned {record["prompt"]!r:.200}: {error}')
    completions = [completion for group in self._generate(variables, requests, number) for completion in group]
    if self._answer is None:
      for (*_, episode), completion in zip(begun, completions, strict=True):
        episode.add(completion)
      return groups

    def complete(turn: int, wanted: Any) -> list[Any]:
      requests = []
      for place, ids, max_tokens in wanted:
        epoch, index, record, _ = begun[place]
        fields = {'prompt_ids': ids, 'max_tokens': max_tokens, **draws}
        requests.append(self._request(record, index, (epoch, index, turn, place % number), **fields))
      return [completion for (completion,) in self._generate(variables, requests, 1)]

    for *_, record, episode in begun:
      if not isinstance(record['prompt'], str):
        episode.messages, episode.tools = record['prompt'], tools_of(record, 'tools')
    turns = Turns(
      tokenizer=self._settings.tokenizer,
      template=self._settings.template,
      stop=self.stop,
      max_tokens=self._settings.max_tokens,
      max_turns=self._settings.max_turns,
      report=self._report,
      answer=self._answer,
      complete=complete,
    )
    turns.play([record for *_, record, _ in begun], [episode for *_, episode in begun], completions)
    return groups

  def _begin(self, records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any] | None]:
    """Returns the records with the environment's first messages as their prompts, and its tools; None if it fails."""
    if self._answer is None:
      return records
    tools = {} if self._tools is None else {'tools': self._tools}
    answers = self._answer([(record, (), None) for record in records])
    return [
      None if answer is None else {**record, **tools, 'prompt': answer[0]}
      for record, answer in zip(records, answers, strict=True)
    ]

  def _request(self, record: Mapping[str, Any], index: int, place: tuple[int, ...], **given: Any) -> Any:
    """Returns the request for a record's prompt, without penalties; `given` overrides its fields."""
    settings, is_text = self._settings, isinstance(record['prompt'], str)
    if 'prompt_ids' not in given:
      text = settings.prompt_of(record)
      has_bos = not is_text and settings.template.writes_bos
      ids = tuple(settings.tokenizer.encode(text)) if has_bos else None
      given |= {'prompt_ids': ids} if ids else {'prompt': text}
    penalties: dict[str, Any] = {'repetition_penalty': 1.0, 'frequency_penalty': 0.0, 'presence_penalty': 0.0}
    draws = {'temperature': 1.0, 'top_k': settings.top_k, 'top_p': settings.top_p, 'min_p': 0.0}
    own = {'max_tokens': settings.max_tokens, 'stop': self.stop if is_text else (*settings.template.stop, *self.stop)}
    own['seed'] = int(np.random.SeedSequence((settings.seed, *place)).generate_state(1)[0])
    return self._tokenizer.request(Prompt(**penalties | draws | own | given), f'record {index}')[0]

  def _generate(self, variables: Any, requests: Sequence[Any], number: int) -> list[list[Any]]:
    """Returns `number` Completions of each request."""
    if not requests:
      return []
    texts: dict[str, Any] = {'decode': self._tokenizer.decode}
    if can_sample(self.steps, requests, number):
      if number > 1 or self._answer is not None:
        texts |= {'num_prompts': self.steps.settings.num_slots // number, 'max_tokens': self._settings.max_tokens}
      with self._allow('rollout', self._settings.max_tokens):  # one program generates all tokens, without beats
        return complete_groups(self.steps, variables, requests, number, **texts)
    samples = [request.as_sample(sample) for request in requests for sample in range(number)]
    made: list[Any] = [None] * len(samples)
    for place, completion in generate(self.steps, variables, samples, on_step=self._beat, keep_cache=False, **texts):
      made[place] = completion
    return [made[start : start + number] for start in range(0, len(made), number)]


class RolloutScorer:
  """Computes log-probabilities, and values if the model has them, by the forward pass of training."""

  def __init__(self, settings: RolloutInput, model: PartitionedModel):
    self._settings, self._num_parts = settings, model.task.num_microbatches
    score = functools.partial(_score, model.task, settings.temperature, self._num_parts)
    self._step = model.batch_step('score_rollouts', settings.text_spec(), score)

  def score(self, variables: Any, rollout: Rollout) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the log-probabilities of sampled tokens, and 0 elsewhere, and the values, float32 [R, T] each.

    The texts are packed as in an update, so that little padding is computed.
    """
    settings, names = self._settings, self._step.layout.spec
    cells = np.arange(rollout['ids'].size).reshape(rollout['ids'].shape)
    batches = [
      settings.batch_of({name: rollout[name][rows] for name in names} | {'cells': cells[rows]}, self._num_parts)
      for rows in np.split(np.arange(settings.num_rows), settings.num_minibatches)
    ]
    outputs = [self._step(variables, place(self._step, batch, np.arange(settings.batch_size))) for batch in batches]
    masks = [(batch['segment_ids'] > 0) | (batch['weights'] > 0) for batch in batches]
    cells = np.concatenate([batch['cells'][mask] for batch, mask in zip(batches, masks, strict=True)])

    def unpacked(*parts: Any) -> np.ndarray:
      array = np.zeros(rollout['ids'].shape, np.float32)
      array.flat[cells] = np.concatenate([np.asarray(x)[mask] for x, mask in zip(parts, masks, strict=True)])
      return array

    return jax.tree.map(unpacked, *outputs)


def _score(task: BaseTask, temperature: float, num_parts: int, variables: Any, batch: Any) -> Any:
  def of(part: Any) -> Any:
    predictions = task.predict(variables, part)
    return answer_log_probs(predictions, part, temperature), predictions.get('values')

  return compute_in_parts(of, batch, num_parts, skips_empty=True)


def place(step: CompiledStep, rollout: Rollout, rows: np.ndarray) -> dict[str, jax.Array]:
  """Places some rows of a rollout on the mesh, in the arrays that the step reads."""
  own = shard_rows(len(rows), jax.process_index(), jax.process_count())
  return step.place({name: rollout[name][rows[own.start : own.stop]] for name in step.layout.spec})
