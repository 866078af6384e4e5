"""Generation: many requests through the slots of compiled steps, on the host.

Whenever a slot is free, the next request takes it. The device is always one step ahead: a step is launched before the
one before it is read, so what was launched for a sequence that turns out to have ended is thrown away.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools
from typing import Any, Literal

import jax
import numpy as np

from spmd_tasks.decoding.engine import Steps
from spmd_tasks.decoding.incremental_text import IncrementalText
from spmd_tasks.decoding.loop import Outputs
from spmd_tasks.decoding.requests import Chunk, Request, chunk_prompt, make_requests

FinishReason = Literal['stop', 'length']


@dataclasses.dataclass(kw_only=True)
class Completion:
  """What became of a request: `ids` and, for each of them, its log-probability and the likeliest tokens with theirs."""

  request: Request
  ids: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
  prompt_logprobs: list[float] | None = None
  text: str = ''
  finish_reason: FinishReason = 'length'
  # Of beam search, which gives no log-probability of each token: the whole text's, and what it ranks by.
  logprob: float | None = None
  score: float | None = None


class _Running:
  """A request in a slot, and its completion as it grows."""

  def __init__(self, request: Request, index: int, decode: Callable[[Sequence[int]], str]):
    self.index = index
    self.completion = Completion(request=request)
    self.is_finished = False
    self._text = IncrementalText(decode, request.stop)

  def take_scores(self, outputs: Outputs, row: int, chunk: Chunk) -> None:
    """The log-probabilities of the tokens behind those of a chunk."""
    assert outputs.prompt_logprobs is not None
    scores = self.completion.prompt_logprobs or [0.0]
    num_scores = min(chunk.stop + 1, len(chunk.request.ids)) - chunk.start - 1
    self.completion.prompt_logprobs = scores + outputs.prompt_logprobs[row, :num_scores].tolist()

  def take(self, outputs: Outputs, row: int) -> None:
    """Row `row` of a step's outputs, on the host."""
    completion, request = self.completion, self.completion.request
    if not outputs.is_valid[row]:
      self.is_finished = True
      return
    token = int(outputs.tokens[row])
    completion.ids.append(token)
    completion.logprobs.append(float(outputs.logprobs[row]))
    if outputs.top_ids.shape[-1]:
      ids, logprobs = outputs.top_ids[row].tolist(), outputs.top_logprobs[row].tolist()
      completion.top_logprobs.append(dict(zip(ids, logprobs, strict=True)))
    self.is_finished = bool(outputs.is_finished[row])
    if token in request.stop_ids:
      completion.finish_reason = 'stop'
    else:
      self._text.push(token)
    if self.is_finished:
      self._text.finish()
    if self._text.stop is not None:
      completion.finish_reason, self.is_finished = 'stop', True
    completion.text = self._text.text


def generate(
  steps: Steps,
  weights: Any,
  requests: Iterable[Request],
  *,
  decode: Callable[[Sequence[int]], str],
  on_step: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Completion]]:
  """(number of the request, completion), as they finish.

  Args:
    steps: compiled for the settings.
    weights: padded, as they live on the mesh.
    requests: that fit `steps`: prompt and max_tokens at most max_len, at most max_stop_ids stop tokens.
    decode: tokens to text.
    on_step: called after each prefill and step.
  """
  num_slots, num_rows = steps.settings.num_slots, steps.settings.prefill_rows
  waiting = ((request, index) for index, request in enumerate(requests))
  running: list[_Running | None] = [None] * num_slots
  in_flight: deque[tuple[Outputs, list[tuple[int, int, _Running, Chunk | None]]]] = deque()
  state = steps.init()
  is_exhausted = False
  while True:
    free = [slot for slot in range(num_slots) if running[slot] is None][:num_rows]
    taken = [] if is_exhausted else [_Running(r, i, decode) for _, (r, i) in zip(free, waiting)]
    is_exhausted = is_exhausted or len(taken) < len(free)
    if taken:
      of_slots = dict(zip(free, taken, strict=False))
      running = [of_slots.get(slot, sequence) for slot, sequence in enumerate(running)]
      score = any(new.completion.request.score_prompt for new in taken)
      prompts = [chunk_prompt(new.completion.request, slot, steps.prefill_chunk) for slot, new in of_slots.items()]
      for column in itertools.zip_longest(*prompts):
        chunks = [chunk for chunk in column if chunk is not None]
        state, outputs = steps.prefill(weights, state, make_requests(steps, chunks, score_prompts=score))
        rows = [(row, chunk.slot, of_slots[chunk.slot], chunk) for row, chunk in enumerate(chunks)]
        in_flight.append((outputs, rows))
    elif any(running):
      keep = np.array([sequence is not None for sequence in running])
      state, outputs = steps.step(weights, state, keep)
      in_flight.append((outputs, [(slot, slot, sequence, None) for slot, sequence in enumerate(running) if sequence]))
    elif not in_flight:
      return
    while len(in_flight) > (1 if any(running) else 0):
      launched, rows = in_flight.popleft()
      outputs = jax.device_get(launched)
      for row, slot, sequence, chunk in rows:
        if sequence.is_finished:
          continue  # launched before its end was known
        if chunk is not None and chunk.request.score_prompt:
          sequence.take_scores(outputs, row, chunk)
        if chunk is not None and chunk.stop < len(chunk.request.ids):
          continue
        sequence.take(outputs, row)
        if sequence.is_finished:
          running[slot] = None
          yield sequence.index, sequence.completion
    on_step()


def search(
  steps: Steps,
  weights: Any,
  requests: Iterable[Request],
  *,
  decode: Callable[[Sequence[int]], str],
  on_step: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, list[Completion]]]:
  """(number of the request, its beams, best first); stop strings end nothing here but cut the text."""
  waiting = list(requests)
  num_rows = steps.settings.prefill_rows
  for start in range(0, len(waiting), num_rows):
    batch = waiting[start : start + num_rows]
    chunks = [chunk for row, request in enumerate(batch) for chunk in chunk_prompt(request, row, steps.max_len)]
    beams = jax.device_get(steps.search(weights, make_requests(steps, chunks)))
    for row, request in enumerate(batch):
      completions = []
      for beam, length in enumerate(beams.lengths[row].tolist()):
        if length == 0:
          continue
        ids = beams.tokens[row, beam, :length].tolist()
        is_stopped = ids[-1] in request.stop_ids
        text = IncrementalText(decode, request.stop)
        for token in ids[:-1] if is_stopped else ids:
          text.push(token)
        text.finish()
        completions.append(
          Completion(
            request=request,
            ids=ids,
            text=text.text,
            finish_reason='stop' if is_stopped else 'length',
            score=float(beams.scores[row, beam]),
            logprob=float(beams.logprobs[row, beam]),
          )
        )
      yield start + row, completions
    on_step()
