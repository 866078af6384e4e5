"""Service: the state that the routes share: the served model, access to the engine, and the metrics.

    answer = service.begin(wanted, request)   # queues the sequences, or raises a RequestError
    deltas = await answer.next()              # of each step that brought something
    service.end(answer)                       # frees the slots

Everything here runs on the event loop's thread. The engine's thread posts each step's deltas with
`loop.call_soon_threadsafe(service.dispatch, deltas)`.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import time
from typing import Any

from starlette.requests import Request

from spmd_tasks.decoding.generated_sequence import Delta
from spmd_tasks.serving.engine_thread import EngineThread
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.metrics import ServerMetrics
from spmd_tasks.serving.requests import GenerationRequest, ServedModel
from spmd_tasks.serving.scoring import ScoreRequest
from spmd_tasks.serving.settings import ClientKey, ServerSettings
from spmd_tasks.serving.tracing import RequestTracer

# (metric, attribute of the scheduler, text); a scheduler that lacks the attribute has no such metric.
_OF_SCHEDULER = (
  ('active_slots', 'num_active', 'Slots in use.'),
  ('used_cache_blocks', 'num_used_blocks', 'Blocks of the KV cache of running sequences.'),
  ('cache_blocks', 'num_blocks', 'Blocks of the KV cache.'),
  ('preemptions_total', 'num_preemptions', 'Sequences that had to begin again for want of blocks.'),
  ('decode_steps_total', 'num_steps', 'Decode steps.'),
  ('slot_steps_total', 'num_slot_steps', 'Slots in use, summed over decode steps.'),
  ('prefills_total', 'num_prefills', 'Prefills.'),
  ('prefill_chunks_total', 'num_chunks', 'Chunks of prompts that prefills read.'),
  ('prompt_tokens_total', 'num_prompt_tokens', 'Tokens of prompts that prefills read.'),
  ('reused_prompt_tokens_total', 'num_reused_tokens', 'Tokens that the cache held already.'),
  ('drafted_tokens_total', 'num_drafted_tokens', 'Tokens that were guessed ahead.'),
  ('accepted_draft_tokens_total', 'num_accepted_tokens', 'Those that were right.'),
  ('generated_tokens_total', 'num_generated_tokens', 'Tokens generated.'),
)


class Answer:
  """The sequences of one HTTP request, and their deltas for the request's handler.

  Attributes:
    sequences: in the order of the choices.
    client: the name of the client's key; None where it has none of its own.
    request: the HTTP request.
    num_prompt_tokens: of all sequences.
    begun: when the request was queued, in seconds of the monotonic clock, as are the next.
    admitted: when the first of the sequences got a slot, or None; the engine's thread says it.
    first_text, last_token: when the first and the last text came, or None.
  """

  def __init__(
    self, wanted: GenerationRequest | ScoreRequest, model: ServedModel, request: Request, client: str | None = None
  ):
    self.sequences: list[Any] = wanted.sequences(model, self)
    self.client = client
    self.request = request
    self.num_prompt_tokens = wanted.num_prompt_tokens
    self.begun = time.monotonic()
    self.admitted: float | None = None
    self.first_text: float | None = None
    self.last_token: float | None = None
    self._deltas: list[Delta] = []
    self._num_ended = 0
    self._has_news, self._has_ended = asyncio.Event(), asyncio.Event()

  @property
  def is_finished(self) -> bool:
    return all(sequence.finish_reason is not None for sequence in self.sequences)

  def note_admission(self) -> None:
    """Called when one of the sequences gets a slot, by the engine's thread."""
    if self.admitted is None:
      self.admitted = time.monotonic()

  def add(self, delta: Delta) -> None:
    """Adds a delta for the handler."""
    self._deltas.append(delta)
    self._num_ended += delta.finish_reason is not None
    self._has_news.set()
    if self._num_ended == len(self.sequences):
      self._has_ended.set()

  async def next(self) -> list[Delta]:
    """Waits for deltas and returns all since the last call, at least one."""
    await self._has_news.wait()
    self._has_news.clear()
    deltas, self._deltas = self._deltas, []
    return deltas

  async def all(self) -> list[Delta]:
    """Waits for the end of all sequences and returns their deltas; wakes once."""
    if self._num_ended < len(self.sequences):
      await self._has_ended.wait()
    return self._deltas


class Service:
  """One served model, alone and with each of its adapters.

  Attributes:
    model: the served model; the publisher replaces it.
    settings: the server's limits.
    thread: the engine's thread.
    metrics: what the server counts.
    is_draining: whether the server refuses new requests because it will end.
    is_published: whether there are weights to serve.
  """

  def __init__(
    self,
    model: ServedModel,
    settings: ServerSettings,
    thread: EngineThread,
    num_slots: int,
    num_compilations: Callable[[], int] = lambda: 0,
    tracer: RequestTracer | None = None,
  ):
    """Counts `num_compilations` of this process, and says that the engine has `num_slots`."""
    self.model = model
    self.settings = settings
    self.thread = thread
    self.metrics = ServerMetrics(self._metrics_to_read())
    self.is_draining = False
    self.is_published = True
    self._tracer = tracer
    self._num_slots = num_slots
    self._num_compilations = num_compilations
    self._num_expected = 0

  @property
  def is_ready(self) -> bool:
    return self.thread.is_ready and self.is_published and not self.is_draining

  @property
  def is_healthy(self) -> bool:
    """Whether the engine works; if not, the process needs a restart."""
    return self.thread.error is None and self.thread.stuck_s <= self.settings.stuck_s

  @contextlib.contextmanager
  def uncounted_compilations(self) -> Iterator[None]:
    """Does not count compilations of the body as late."""
    before = self._num_compilations()
    try:
      yield
    finally:
      self._num_expected += self._num_compilations() - before

  def count_late_compilations(self) -> None:
    """Counts compilations from now on as late."""
    self._num_expected = self._num_compilations()

  def begin(self, wanted: GenerationRequest | ScoreRequest, request: Request, key: ClientKey | None = None) -> Answer:
    """Queues the sequences of a request, or raises a RequestError; `key` is that of a client who has one."""
    if not self.is_ready:
      raise RequestError(f'the server {self.state}.', status=503, code='not_ready', retry_after_s=5)
    if isinstance(wanted, GenerationRequest):
      salted = (dataclasses.replace(each, cache_key=_cache_key(key, each.cache_key)) for each in wanted.requests)
      wanted = dataclasses.replace(wanted, requests=tuple(salted))
    answer = Answer(wanted, self.model, request, None if key is None else key.name)
    if key is not None and isinstance(wanted, GenerationRequest) and (priority := wanted.requests[0].priority) < 0:
      raise RequestError(f'priority must be at least 0 with the key of a client, not {priority}.', param='priority')
    self.thread.submit(answer.sequences)
    self._count_tokens(answer.client, wanted.num_prompt_tokens)
    return answer

  def _count_tokens(self, client: str | None, number: int) -> None:
    if client is not None:
      self.metrics.tokens_of_client.labels(client).inc(number)

  def end(self, answer: Answer) -> None:
    """Cancels what is unfinished of an answer, and records its time; called once when its handler is done."""
    if not answer.is_finished:
      self.thread.cancel(answer.sequences)
    self._count_tokens(answer.client, sum(sequence.num_tokens for sequence in answer.sequences))
    self.metrics.request_s.observe(time.monotonic() - answer.begun)
    if self._tracer is not None:
      self._tracer.record(answer, self.model.names[answer.sequences[0].request.adapter])

  def dispatch(self, deltas: list[Delta]) -> None:
    """Gives one step's deltas to the handlers that wait for them."""
    now = time.monotonic()
    seen: set[int] = set()
    for delta in deltas:
      answer: Answer = delta.sequence.owner
      answer.add(delta)
      if delta.finish_reason is not None:
        name = self.model.names[delta.sequence.request.adapter]
        self.metrics.sequences.labels(delta.finish_reason, name).inc()
        self.metrics.tokens_of.labels(name).inc(delta.sequence.num_tokens)
      if delta.text and id(answer) not in seen:
        seen.add(id(answer))
        if answer.last_token is None:
          answer.first_text = now
          self.metrics.first_token_s.observe(now - answer.begun)
        else:
          self.metrics.between_tokens_s.observe(now - answer.last_token)
        answer.last_token = now

  def _metrics_to_read(self) -> Mapping[str, tuple[str, Callable[[], float]]]:
    thread, scheduler = self.thread, self.thread.scheduler
    own = {
      name: (text, functools.partial(getattr, scheduler, each))
      for name, each, text in _OF_SCHEDULER
      if hasattr(scheduler, each)
    }
    num_late = lambda: self._num_compilations() - self._num_expected if thread.is_ready else 0
    return {
      'ready': ('Whether the server takes requests.', lambda: self.is_ready),
      'queued_sequences': ('Sequences that wait for a slot.', lambda: thread.num_queued),
      'slots': ('Sequences that can be generated at once.', lambda: self._num_slots),
      'weights_step': ('Training step of the weights.', lambda: self.model.step),
      'late_compilations': ('Compilations after the warm-up; above 0 is a bug.', num_late),
      **own,
    }

  @property
  def state(self) -> str:
    """Why the server takes no requests, as the end of a sentence: 'is warming up'."""
    if self.is_draining:
      return 'is going down'
    if self.thread.error is not None:
      return 'has failed'
    return 'has no model now' if self.thread.is_ready else 'is warming up'


def _cache_key(key: ClientKey | None, salt: str) -> str:
  """Returns what prompts must have in common to share cached chunks; no salt makes that of another client's key."""
  owner = key.name if key is not None and (key.own_cache or salt) else None
  return repr((owner, salt))
