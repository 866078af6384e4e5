"""The state that all routes share: the served model, access to the engine, and the metrics.

    answer = service.begin(parsed, request)   # queues the sequences, or raises a RequestError
    deltas = await answer.next()              # waits for the next deltas
    service.end(answer)                       # cancels what is unfinished

Everything here runs on the event loop's thread. The engine's thread posts the deltas of each step with
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

# (metric, attribute of the scheduler, help text); metrics of attributes that a scheduler lacks are left out.
_SCHEDULER_METRICS = (
  ('active_slots', 'num_active', 'Slots in use.'),
  ('used_cache_blocks', 'num_used_blocks', 'Blocks of the KV cache of running sequences.'),
  ('cache_blocks', 'num_blocks', 'Blocks of the KV cache.'),
  ('preemptions_total', 'num_preemptions', 'Sequences restarted because the KV cache ran out of blocks.'),
  ('decode_steps_total', 'num_steps', 'Decode steps.'),
  ('slot_steps_total', 'num_slot_steps', 'Slots in use, summed over decode steps.'),
  ('prefills_total', 'num_prefills', 'Prefills.'),
  ('prefill_chunks_total', 'num_chunks', 'Chunks of prompts that were prefilled.'),
  ('prompt_tokens_total', 'num_prompt_tokens', 'Tokens of prompts that were prefilled.'),
  ('reused_prompt_tokens_total', 'num_reused_tokens', 'Tokens of prompts that the KV cache already had.'),
  ('drafted_tokens_total', 'num_drafted_tokens', 'Draft tokens proposed.'),
  ('accepted_draft_tokens_total', 'num_accepted_tokens', 'Draft tokens accepted.'),
  ('generated_tokens_total', 'num_generated_tokens', 'Tokens generated.'),
)


class Answer:
  """The sequences of one HTTP request, and their deltas for the request's handler.

  Times are in seconds of `time.monotonic`, or None before the event.

  Attributes:
    sequences: one per choice, in order.
    client: the name of the client's key; None if the client used the server's key.
    request: the HTTP request.
    num_prompt_tokens: number of prompt tokens, each prompt counted once.
    begun: when the request was queued.
    admitted: when the first sequence got a slot; set by the engine's thread.
    first_text: when the first text was generated.
    last_token: when the last text so far was generated.
  """

  def __init__(
    self, parsed: GenerationRequest | ScoreRequest, model: ServedModel, request: Request, client: str | None = None
  ):
    self.sequences: list[Any] = parsed.sequences(model, self)
    self.client = client
    self.request = request
    self.num_prompt_tokens = parsed.num_prompt_tokens
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
    """Called on the engine's thread when one of the sequences gets a slot."""
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
    """Waits for at least one delta; returns all deltas since the last call."""
    await self._has_news.wait()
    self._has_news.clear()
    deltas, self._deltas = self._deltas, []
    return deltas

  async def all(self) -> list[Delta]:
    """Waits until all sequences have ended, waking only once; returns all their deltas."""
    if self._num_ended < len(self.sequences):
      await self._has_ended.wait()
    return self._deltas


class Service:
  """One served model with its adapters.

  Attributes:
    model: the served model; replaced by the publisher.
    settings: the server's limits.
    thread: the engine's thread.
    metrics: the server's metrics.
    is_draining: whether the server rejects new requests because it is shutting down.
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
    """Initializes the service.

    Args:
      model: the served model.
      settings: the server's limits.
      thread: the engine's thread.
      num_slots: number of slots of the engine, for the metrics.
      num_compilations: returns the number of programs that this process has compiled.
      tracer: records requests, if not None.
    """
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
    """Excludes compilations inside the `with` block from the metric of late compilations."""
    before = self._num_compilations()
    try:
      yield
    finally:
      self._num_expected += self._num_compilations() - before

  def count_late_compilations(self) -> None:
    """Counts every compilation from now on as late; called after the warm-up."""
    self._num_expected = self._num_compilations()

  def begin(self, parsed: GenerationRequest | ScoreRequest, request: Request, key: ClientKey | None = None) -> Answer:
    """Queues the sequences of a request.

    Args:
      parsed: the validated request.
      request: the HTTP request.
      key: the client's key; None if the client used the server's key.

    Raises:
      RequestError: the server is not ready, too many sequences are queued, or the client may not set this priority.
    """
    if not self.is_ready:
      raise RequestError(f'the server {self.state}.', status=503, code='not_ready', retry_after_s=5)
    if isinstance(parsed, GenerationRequest):
      parsed = dataclasses.replace(
        parsed,
        requests=tuple(
          dataclasses.replace(sample, cache_key=_cache_key(key, sample.cache_key)) for sample in parsed.requests
        ),
      )
    answer = Answer(parsed, self.model, request, None if key is None else key.name)
    if key is not None and isinstance(parsed, GenerationRequest) and (priority := parsed.requests[0].priority) < 0:
      raise RequestError(f'priority must be at least 0 with a client key, not {priority}.', param='priority')
    self.thread.submit(answer.sequences)
    self._count_tokens(answer.client, parsed.num_prompt_tokens)
    return answer

  def _count_tokens(self, client: str | None, number: int) -> None:
    if client is not None:
      self.metrics.tokens_of_client.labels(client).inc(number)

  def end(self, answer: Answer) -> None:
    """Cancels the answer's unfinished sequences and records its metrics; called once, when its handler is done."""
    if not answer.is_finished:
      self.thread.cancel(answer.sequences)
    self._count_tokens(answer.client, sum(sequence.num_tokens for sequence in answer.sequences))
    self.metrics.request_s.observe(time.monotonic() - answer.begun)
    if self._tracer is not None:
      self._tracer.record(answer, self.model.names[answer.sequences[0].request.adapter])

  def dispatch(self, deltas: list[Delta]) -> None:
    """Passes the deltas of one step to the handlers that wait for them."""
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
    scheduler_metrics = {
      name: (text, functools.partial(getattr, scheduler, attribute))
      for name, attribute, text in _SCHEDULER_METRICS
      if hasattr(scheduler, attribute)
    }
    num_late = lambda: self._num_compilations() - self._num_expected if thread.is_ready else 0
    return {
      'ready': ('Whether the server accepts requests.', lambda: self.is_ready),
      'queued_sequences': ('Sequences waiting for a slot.', lambda: thread.num_queued),
      'slots': ('Sequences that can be generated at once.', lambda: self._num_slots),
      'weights_step': ('Training step of the weights.', lambda: self.model.step),
      'late_compilations': ('Compilations after the warm-up; above 0 is a bug.', num_late),
      **scheduler_metrics,
    }

  @property
  def state(self) -> str:
    """Why the server rejects requests, as the end of a sentence: 'is warming up'."""
    if self.is_draining:
      return 'is shutting down'
    if self.thread.error is not None:
      return 'has failed'
    return 'has no published model' if self.thread.is_ready else 'is warming up'


def _cache_key(key: ClientKey | None, salt: str) -> str:
  """Returns the key of a prompt in the prefix cache: prompts share cached chunks only if their keys are equal.

  The client's name is part of the key if a salt is given, so no client can construct the key of another.
  """
  owner = key.name if key is not None and (key.own_cache or salt) else None
  return repr((owner, salt))
