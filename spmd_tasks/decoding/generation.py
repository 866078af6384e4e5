"""generate, search and complete_groups: complete the requests of a batch job.

    for number, completion in generate(steps, variables, requests, decode=tokenizer.decode):
      print(number, completion.text)

`generate` runs requests through the scheduler, and `search` through beam search; both yield completions in the order in
which requests finish. `complete_groups` draws many samples of prompts that all fit at once, by one program
(group_sampling.py). The server calls the scheduler itself, and sends every Delta on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools
from typing import Any

import jax

from spmd_tasks.decoding.constraints import Matcher
from spmd_tasks.decoding.decode_steps import DecodeSteps
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.generated_sequence import FinishReason, GeneratedSequence, IncrementalText
from spmd_tasks.decoding.group_sampling import make_groups, sample
from spmd_tasks.decoding.requests import Request, chunk_prompt
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.runtime import SamplingParams
from spmd_tasks.runtime.task import Variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """The finished result of a request.

  Fields:
    request: the request.
    ids: the generated tokens, a stop token included.
    logprobs, top_logprobs: the log-probability of each of `ids`, and the likeliest tokens with theirs.
    prompt_logprobs: log-probabilities of the prompt's tokens, 0 for the first one; None if the prompt is not scored.
    text: the generated text; it ends before a stop token or stop string.
    finish_reason: why the sequence ended.
    num_drafted, num_accepted: how many drafts were checked, and how many of them were right.
    expert_ids: from `complete_groups`, [T, n], see Samples; None if they are not recorded.
    logprob, score: from beam search, instead of `logprobs`: the log-probability of the whole text, and its score.
  """

  request: Request
  ids: list[int]
  logprobs: list[float] = dataclasses.field(default_factory=list)
  top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
  prompt_logprobs: list[float] | None = None
  text: str
  finish_reason: FinishReason
  num_drafted: int = 0
  num_accepted: int = 0
  expert_ids: list[list[int]] | None = None
  logprob: float | None = None
  score: float | None = None


def generate(
  steps: DecodeSteps,
  variables: Variables,
  requests: Iterable[Request],
  *,
  decode: Callable[[Sequence[int]], str],
  matchers: Sequence[Matcher | None] | None = None,
  on_step: Callable[[], None] = lambda: None,
  keep_cache: bool = True,
) -> Iterator[tuple[int, Completion]]:
  """Yields (number of the request, completion) in the order in which requests finish.

  Args:
    steps: the compiled programs.
    variables: the model's variables, padded arrays on the mesh.
    requests: must fit `steps`: prompt and max_tokens at most max_len, at most max_stop_ids stop tokens.
    decode: turns tokens into text.
    matchers: the matcher of each request's text, at its beginning, or None; None if no request is constrained.
    on_step: called after each step.
    keep_cache: whether the cache stays in the device's memory for the next `generate` of these steps; False frees it,
      for example for training.
  """
  engine = ModelEngine(steps, variables, constrain=matchers is not None)
  engine.take_kept()
  # Nobody waits for the next token of a sequence: fill all free slots before each step.
  scheduler = Scheduler(engine, prefill_budget=engine.num_slots * engine.max_len)
  waiting = (
    GeneratedSequence(
      request, decode, index=index, has_logprobs=True, matcher=None if matchers is None else matchers[index]
    )
    for index, request in enumerate(requests)
  )
  while True:
    scheduler.submit(itertools.islice(waiting, engine.num_slots - scheduler.num_queued))
    if not scheduler.has_work:
      if keep_cache:
        engine.keep()
      return
    for delta in scheduler.advance():
      if delta.finish_reason is not None:
        yield delta.sequence.index, _completion(delta.sequence)
    on_step()


def _completion(sequence: GeneratedSequence) -> Completion:
  assert sequence.finish_reason is not None
  num_prompt = len(sequence.request.ids) if sequence.request.score_prompt else 0
  prompt, generated = sequence.logprobs[:num_prompt], sequence.logprobs[num_prompt:]
  return Completion(
    request=sequence.request,
    ids=[entry.token for entry in generated],
    logprobs=[entry.logprob or 0.0 for entry in generated],
    top_logprobs=[dict(entry.top) for entry in generated if entry.top],
    prompt_logprobs=[entry.logprob or 0.0 for entry in prompt] if num_prompt else None,
    text=sequence.text,
    finish_reason=sequence.finish_reason,
    num_drafted=sequence.num_drafted,
    num_accepted=sequence.num_accepted,
  )


def can_sample(steps: DecodeSteps, requests: Sequence[Request], num_samples: int) -> bool:
  """Returns whether `complete_groups` can take the requests: all fit at once, and none depends on its own text."""
  plain = SamplingParams()

  def is_plain(request: Request) -> bool:
    names = ('repetition_penalty', 'frequency_penalty', 'presence_penalty')
    has_penalties = any(getattr(request.sampling, name) != getattr(plain, name) for name in names)
    return not (request.stop or request.logit_bias or request.score_prompt or request.adapter or has_penalties)

  fits = len(requests) * num_samples <= steps.settings.num_slots and steps.encoder_len is None
  return fits and all(map(is_plain, requests))


def complete_groups(
  steps: DecodeSteps,
  variables: Variables,
  requests: Sequence[Request],
  num_samples: int,
  *,
  decode: Callable[[Sequence[int]], str],
  num_prompts: int | None = None,
  max_tokens: int | None = None,
) -> list[list[Completion]]:
  """Returns samples 0 to n - 1 of each request; see `can_sample`.

  Args:
    steps, variables, requests, decode: as for `generate`.
    num_samples: n.
    num_prompts, max_tokens: P and M of the program, if calls with fewer requests or tokens should run the same one;
      None: as many as the requests have.
  """
  sizes = {'max_len': steps.max_len, 'num_stop_ids': steps.settings.max_stop_ids}
  groups = make_groups(requests, num_prompts or len(requests), **sizes)
  longest = max_tokens or max(request.max_tokens for request in requests)
  samples = jax.device_get(sample(steps.programs, variables, groups, num_samples=num_samples, max_new_tokens=longest))
  completions = []
  for row, length in enumerate(samples.lengths[: len(requests) * num_samples].tolist()):
    request = requests[row // num_samples].as_sample(row % num_samples)
    completion = _completion_of_ids(
      request,
      samples.tokens[:length, row].tolist(),
      decode,
      logprobs=samples.logprobs[:length, row].tolist(),
      expert_ids=None if samples.expert_ids is None else samples.expert_ids[row, : len(request.ids) + length].tolist(),
    )
    completions.append(completion)
  return [completions[start : start + num_samples] for start in range(0, len(completions), num_samples)]


def complete_all(
  steps: DecodeSteps,
  variables: Variables,
  requests: Sequence[Request],
  *,
  decode: Callable[[Sequence[int]], str],
  on_step: Callable[[], None] = lambda: None,
) -> list[Completion]:
  """Returns the completion of each request, in order; from beam search, the best one. Keeps no cache."""
  if steps.settings.num_beams > 1:
    beams = search(steps, variables, requests, decode=decode, on_step=on_step)
    by_number = {number: completions[0] for number, completions in beams}
  else:
    by_number = dict(generate(steps, variables, requests, decode=decode, on_step=on_step, keep_cache=False))
  return [by_number[number] for number in range(len(requests))]


def search(
  steps: DecodeSteps,
  variables: Variables,
  requests: Iterable[Request],
  *,
  decode: Callable[[Sequence[int]], str],
  on_step: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, list[Completion]]]:
  """Yields (number of the request, its beams, best first). A stop string cuts a text but does not end the search."""
  waiting = list(requests)
  num_rows = steps.settings.prefill_rows or 1
  for start in range(0, len(waiting), num_rows):
    batch = waiting[start : start + num_rows]
    chunks = [chunk for row, request in enumerate(batch) for chunk in chunk_prompt(request, row, steps.max_len)]
    beams = jax.device_get(steps.search(variables, steps.prefill.make_batch(chunks)))
    for row, request in enumerate(batch):
      completions = []
      for beam, length in enumerate(beams.lengths[row].tolist()):
        if length == 0:
          continue
        ids = beams.tokens[row, beam, :length].tolist()
        score, logprob = float(beams.scores[row, beam]), float(beams.logprobs[row, beam])
        completions.append(_completion_of_ids(request, ids, decode, score=score, logprob=logprob))
      yield start + row, completions
    on_step()


def _completion_of_ids(
  request: Request, ids: list[int], decode: Callable[[Sequence[int]], str], **fields: Any
) -> Completion:
  """Returns the completion of a request by all of its tokens."""
  is_stopped = bool(ids) and ids[-1] in request.stop_ids
  text = IncrementalText(decode, request.stop, before=request.ids)
  text.push_all(ids[:-1] if is_stopped else ids)
  text.finish()
  reason: FinishReason = 'stop' if is_stopped else 'length'
  return Completion(request=request, ids=ids, text=text.text, finish_reason=reason, **fields)
