"""Service: what the routes share: the model, the door to the engine, and what is counted.

All of it lives on the event loop's thread. Deltas come from the engine's thread once per step, by
`call_soon_threadsafe(service.dispatch, deltas)`.
"""

import asyncio
from collections.abc import Callable, Iterator
import contextlib
import math
import time

from spmd_tasks.decoding import Delta, GeneratedSequence
from spmd_tasks.serving.engine_thread import EngineEndedError, EngineThread, QueueFullError
from spmd_tasks.serving.generation_request import GenerationRequest, ServedModel
from spmd_tasks.serving.json_fields import RequestError
from spmd_tasks.serving.prometheus import Histogram, LabelledCounter, exposition, single
from spmd_tasks.serving.settings import ServerSettings


class Answer:
  """The sequences of one HTTP request, as its handler waits for them.

  Attributes:
    sequences: in the order of their choices.
  """

  def __init__(self, wanted: GenerationRequest, model: ServedModel):
    self.sequences = [
      GeneratedSequence(request, model.decode, index=index, has_logprobs=wanted.num_logprobs is not None, owner=self)
      for index, request in enumerate(wanted.requests)
    ]
    self.begun = time.monotonic()
    self.last_token: float | None = None
    self._deltas: list[Delta] = []
    self._has_news = asyncio.Event()
    self._is_abandoned = False

  @property
  def is_finished(self) -> bool:
    return all(sequence.finish_reason is not None for sequence in self.sequences)

  def put(self, delta: Delta) -> None:
    self._deltas.append(delta)
    self._has_news.set()

  def abandon(self) -> None:
    """The client is gone: `next` returns None from now on."""
    self._is_abandoned = True
    self._has_news.set()

  async def next(self) -> list[Delta] | None:
    """What has come since the last call, at least one delta; None where nobody listens any more."""
    await self._has_news.wait()
    if self._is_abandoned:
      return None
    self._has_news.clear()
    deltas, self._deltas = self._deltas, []
    return deltas


class Service:
  """One model being served.

  Attributes:
    model, settings: as given.
    thread: the engine's.
    is_draining: whether new work is refused because the server is about to end.
    is_published: whether there are weights to serve.
  """

  def __init__(
    self,
    model: ServedModel,
    settings: ServerSettings,
    thread: EngineThread,
    num_slots: int,
    num_compilations: Callable[[], int] = lambda: 0,
  ):
    self.model = model
    self.settings = settings
    self.thread = thread
    self.is_draining = False
    self.is_published = True
    self._num_slots = num_slots
    self._num_compilations = num_compilations
    self._num_expected = 0
    prefix = 'spmd_tasks_'
    self.http_requests = LabelledCounter(f'{prefix}http_requests_total', 'Answers given.', ('route', 'status'))
    self._finished = LabelledCounter(f'{prefix}sequences_total', 'Sequences that have ended.', ('finish_reason',))
    self._first_token_s = Histogram(f'{prefix}time_to_first_token_seconds', 'From the request to its first text.')
    self._between_tokens_s = Histogram(f'{prefix}inter_token_seconds', 'Between two steps that brought text.')
    self._request_s = Histogram(f'{prefix}request_seconds', 'From the request to its end.')

  @property
  def is_ready(self) -> bool:
    return self.thread.is_ready and self.is_published and not self.is_draining

  @property
  def is_healthy(self) -> bool:
    """Whether starting the process anew would not help."""
    return self.thread.error is None and self.thread.stuck_s <= self.settings.stuck_s

  @property
  def num_late_compilations(self) -> int:
    """Programs that were compiled since it was ready, and should not have been."""
    return self._num_compilations() - self._num_expected if self.thread.is_ready else 0

  @contextlib.contextmanager
  def uncounted_compilations(self) -> Iterator[None]:
    """What is compiled meanwhile is no late compilation."""
    before = self._num_compilations()
    try:
      yield
    finally:
      self._num_expected += self._num_compilations() - before

  def warm(self) -> None:
    """What is compiled from now on is late."""
    self._num_expected = self._num_compilations()

  def begin(self, wanted: GenerationRequest) -> Answer:
    """Puts a request into the queue.

    Raises:
      RequestError: it cannot be served now.
    """
    if not self.is_ready:
      raise RequestError(f'the server {self._state()}.', status=503, code='not_ready', retry_after_s=5)
    answer = Answer(wanted, self.model)
    try:
      self.thread.submit(answer.sequences)
    except QueueFullError:
      raise RequestError(
        f'{self.thread.num_queued} texts are waiting already: try again later.',
        status=429,
        code='queue_full',
        retry_after_s=self._retry_after_s(),
      ) from None
    except EngineEndedError:
      raise RequestError('the server is going down.', status=503, code='not_ready', retry_after_s=5) from None
    return answer

  def end(self, answer: Answer) -> None:
    """Nobody waits for an answer any more, finished or not."""
    if not answer.is_finished:
      self.thread.cancel(answer.sequences)
    self._request_s.observe(time.monotonic() - answer.begun)

  def dispatch(self, deltas: list[Delta]) -> None:
    """Hands one step's deltas to those who wait."""
    now = time.monotonic()
    seen: set[int] = set()
    for delta in deltas:
      answer: Answer = delta.sequence.owner
      answer.put(delta)
      if delta.finish_reason is not None:
        self._finished.add(delta.finish_reason)
      if delta.text and id(answer) not in seen:
        seen.add(id(answer))
        if answer.last_token is None:
          self._first_token_s.observe(now - answer.begun)
        else:
          self._between_tokens_s.observe(now - answer.last_token)
        answer.last_token = now

  def metrics(self) -> str:
    """For Prometheus."""
    scheduler = self.thread.scheduler
    gauges = [
      ('ready', 'Whether requests are taken.', int(self.is_ready)),
      ('queued_sequences', 'Sequences that wait for a slot.', self.thread.num_queued),
      ('slots', 'Sequences that can be generated at once.', self._num_slots),
      ('active_slots', 'Slots in use.', scheduler.num_active),
      ('weights_step', 'The training step of the weights.', self.model.step),
      ('late_compilations', 'Programs compiled after the warm-up; not 0 is a bug.', self.num_late_compilations),
    ]
    counters = [
      ('decode_steps_total', 'Decode steps.', scheduler.num_steps),
      ('slot_steps_total', 'Slots in use, summed over decode steps.', scheduler.num_slot_steps),
      ('prefills_total', 'Prefills.', scheduler.num_prefills),
      ('prefill_chunks_total', 'Chunks of prompts that prefills read.', scheduler.num_chunks),
      ('prompt_tokens_total', 'Tokens of prompts that were read.', scheduler.num_prompt_tokens),
      ('reused_prompt_tokens_total', 'Tokens of prompts that a slot held already.', scheduler.num_reused_tokens),
      ('generated_tokens_total', 'Tokens generated.', scheduler.num_generated_tokens),
    ]
    return exposition(
      [
        *(single(f'spmd_tasks_{name}', text, 'gauge', value) for name, text, value in gauges),
        *(single(f'spmd_tasks_{name}', text, 'counter', value) for name, text, value in counters),
        self.http_requests.lines(),
        self._finished.lines(),
        self._first_token_s.lines(),
        self._between_tokens_s.lines(),
        self._request_s.lines(),
      ]
    )

  def _state(self) -> str:
    if self.is_draining:
      return 'is going down'
    if self.thread.error is not None:
      return 'has failed'
    return 'has no model now' if self.thread.is_ready else 'is warming up'

  def _retry_after_s(self) -> int:
    """Until a queue as long as this one has moved on, by what a request has taken so far; from 1 to 60."""
    mean = self._request_s.mean
    return max(1, min(60, math.ceil(mean * self.thread.num_queued / self._num_slots)))
