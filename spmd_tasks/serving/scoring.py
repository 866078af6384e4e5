"""A model that scores or embeds texts behind HTTP: /v1/embeddings, /v1/score and /v1/rerank.

    scoring = TextScoring(scorer, variables)      # engine and scheduler in one, for run_server
    wanted = score_request('/v1/rerank', fields, model, limits)
    wanted.whole(sequences, deltas)               # the body of the answer

Texts of all requests wait in one queue, and each batch takes the first one and as many of its length as fit. Requests
and answers have the shapes of OpenAI (embeddings), vLLM (score) and Jina (rerank).

Shapes: N labels, or features of a vector.
"""

import base64
from collections import deque
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import secrets
import time
from typing import Any, ClassVar

import numpy as np

from spmd_tasks.decoding import Request
from spmd_tasks.decoding.generated_sequence import Delta, FinishReason
from spmd_tasks.decoding.text_scorer import TextReading, TextScorer
from spmd_tasks.errors import UserError
from spmd_tasks.serving.bodies import EmbeddingBody, PoolingBody, RerankBody, ScoreBody, validate
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.requests import ServedModel, check_model_name
from spmd_tasks.serving.settings import ServerSettings

_MAX_TEXTS = 2048  # of a request, as OpenAI's


class ScoredText:
  """A text that waits for its scores or its vector; what the engine's thread and the service want of a sequence.

  Attributes:
    request: has the text's tokens.
    index, owner: for the caller.
    vector: float32 [N] when the text has ended by `stop`.
    finish_reason: None until then.
  """

  num_tokens = 0  # that were generated
  matcher = None

  def __init__(self, ids: tuple[int, ...], *, index: int, owner: Any):
    self.request = Request(ids=ids, max_tokens=0)
    self.index = index
    self.owner = owner
    self.vector: np.ndarray | None = None
    self.finish_reason: FinishReason | None = None

  def end(self, reason: FinishReason) -> Delta:
    """Ends the text."""
    self.finish_reason = reason
    made: Any = self
    return Delta(sequence=made, text='', finish_reason=reason)


class TextScoring:
  """Scores the texts of a queue, batch by batch: an engine and a scheduler, as server.py and engine_thread.py use them.

  Attributes:
    weights: variables of the model; may be replaced between batches.
    num_steps, num_slot_steps: batches so far, and the texts in them.
    num_prompt_tokens: of these texts, without padding.
  """

  num_active = 0  # between batches

  def __init__(self, scorer: TextScorer, weights: Any):
    self._scorer = scorer
    self.weights = weights
    self._queue: deque[ScoredText] = deque()
    self._outbox: list[Delta] = []
    self.num_steps = self.num_slot_steps = self.num_prompt_tokens = 0

  @property
  def num_slots(self) -> int:
    return self._scorer.num_rows(self._scorer.buckets[0])

  @property
  def num_queued(self) -> int:
    return len(self._queue)

  @property
  def has_work(self) -> bool:
    return bool(self._queue or self._outbox)

  def warm_up(self) -> None:
    """Compiles the program of each bucket and runs it."""
    for bucket in self._scorer.buckets:
      self._scorer.run(self.weights, [(0,) * bucket])

  def submit(self, texts: Iterable[Any]) -> None:
    self._queue.extend(texts)

  def end(self, texts: Iterable[Any], reason: FinishReason) -> None:
    """Ends those of the texts that have not ended."""
    self._outbox += [text.end(reason) for text in texts if text.finish_reason is None]
    self._queue = deque(text for text in self._queue if text.finish_reason is None)

  def end_all(self, reason: FinishReason) -> list[Delta]:
    self.end(list(self._queue), reason)
    return self._take_outbox()

  def advance(self, *, admit: bool = True) -> list[Delta]:
    """Scores a batch of the waiting texts, unless others than those that have begun are to wait."""
    if admit and self._queue:
      bucket = self._scorer.bucket(len(self._queue[0].request.ids))
      fitting = (text for text in self._queue if self._scorer.bucket(len(text.request.ids)) == bucket)
      texts = [text for text, _ in zip(fitting, range(self._scorer.num_rows(bucket)), strict=False)]
      try:
        vectors = self._scorer.run(self.weights, [text.request.ids for text in texts])
      except Exception:
        self.end(texts, 'error')
        raise
      self.num_steps += 1
      self.num_slot_steps += len(texts)
      for text, vector in zip(texts, vectors, strict=True):
        text.vector = vector
        self.num_prompt_tokens += len(text.request.ids)
      self.end(texts, 'stop')
    return self._take_outbox()

  def recover(self) -> list[Delta]:
    return self._take_outbox()

  def _take_outbox(self) -> list[Delta]:
    deltas, self._outbox = self._outbox, []
    return deltas


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRequest:
  """One HTTP request, checked and tokenized.

  Fields:
    texts: tokens.
    make: the fields of the answer, made of the vectors, float64 [len(texts), N], and the number of tokens.
  """

  texts: tuple[tuple[int, ...], ...]
  make: Callable[[np.ndarray, int], dict[str, Any]]
  stream: ClassVar[bool] = False

  @property
  def num_prompt_tokens(self) -> int:
    """Of all texts."""
    return sum(map(len, self.texts))

  def sequences(self, model: ServedModel, owner: Any) -> list[Any]:
    """The texts, for the engine."""
    return [ScoredText(ids, index=index, owner=owner) for index, ids in enumerate(self.texts)]

  def whole(self, sequences: Sequence[Any], deltas: Iterable[Delta]) -> dict[str, Any]:
    """The body of the answer, when all texts have their vectors."""
    vectors = np.stack([text.vector for text in sequences]).astype(np.float64)
    return self.make(vectors, self.num_prompt_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
  """A body with the model that it asks; each text that it reads is refused by a RequestError that names its field."""

  body: Any
  model: ServedModel
  limits: ServerSettings

  @property
  def reading(self) -> TextReading:
    assert self.model.reading is not None
    return self.model.reading

  def inputs(self, prompt: str = '') -> tuple[tuple[int, ...], ...]:
    """The texts of `input`, after the prompt that stands before texts."""
    self.check_number('input', len(self.body.input))
    return tuple(
      self.fitting(f'input[{index}]', self.encode(prompt + item) if isinstance(item, str) else tuple(item))
      for index, item in enumerate(self.body.input)
    )

  def pairs(
    self, firsts: list[str], seconds: list[str], names: tuple[str, str]
  ) -> tuple[tuple[tuple[int, ...], ...], Callable[[np.ndarray], list[float]]]:
    """The texts that pairs are scored by, and what makes the scores of their vectors."""
    labels, prompt = self.reading.labels, self.reading.prompt
    if len(labels) > 1:
      raise RequestError(
        f'this model has {len(labels)} labels, and a score needs one: ask /v1/embeddings, with one value per label.'
      )
    self.check_number(names[1], len(seconds) if labels else len(firsts) + len(seconds))
    if labels:
      many = firsts * len(seconds) if len(firsts) == 1 else firsts
      texts = tuple(
        self.fitting(f'{names[1]}[{index}]', self.encode(*pair))
        for index, pair in enumerate(zip(many, seconds, strict=True))
      )
      return texts, lambda vectors: self.activated(vectors)[:, 0].tolist()
    texts = tuple(
      self.fitting(f'{name}[{index}]', self.encode(prompt + text))
      for name, each in zip(names, (firsts, seconds), strict=True)
      for index, text in enumerate(each)
    )

    def cosines(vectors: np.ndarray) -> list[float]:
      vectors = _normalized(vectors)
      return np.sum(vectors[: len(firsts)] * vectors[len(firsts) :], axis=-1).tolist()

    return texts, cosines

  def check_number(self, name: str, number: int) -> None:
    most = min(_MAX_TEXTS, self.limits.max_queued)  # even an empty queue has no room for more
    if not 0 < number <= most:
      raise RequestError(f'{name} must have 1 to {most} texts, not {number}: send several requests.', param=name)

  def encode(self, *texts: str) -> tuple[int, ...]:
    try:
      return self.reading.encode(self.model.tokenizer, *texts)
    except UserError as error:
      raise RequestError(f'{error}') from error

  def fitting(self, name: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens of a text, cut where the request wants that."""
    longest, most = self.model.max_len, self.body.truncate_prompt_tokens
    if most is not None:
      ids = self.reading.cut(self.model.tokenizer, ids, longest if most == -1 else min(most, longest))
    if not ids or not all(0 <= token < self.model.vocab_size for token in ids):
      raise RequestError(f'{name} must have tokens below {self.model.vocab_size}, at least one.', param=name)
    if len(ids) > longest:
      raise RequestError(
        f'{name} has {len(ids)} tokens, more than {longest}: shorten it, or set truncate_prompt_tokens to -1.',
        param=name,
      )
    return ids

  def activated(self, vectors: np.ndarray) -> np.ndarray:
    return vectors if self.body.use_activation is False else self.reading.activate(vectors)

  def answer(self, kind: str, num_tokens: int, **fields: Any) -> dict[str, Any]:
    head = {'id': f'{kind}-{secrets.token_hex(12)}', 'created': int(time.time()), 'model': self.model.name}
    return head | fields | {'usage': {'prompt_tokens': num_tokens, 'total_tokens': num_tokens}}


def _normalized(vectors: np.ndarray) -> np.ndarray:
  return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def _embedding(asked: _Asked) -> ScoreRequest:
  """/v1/embeddings."""
  body, reading = asked.body, asked.reading
  if reading.labels:
    raise RequestError(f'this model gives scores ({", ".join(reading.labels)[:100]}) and no vectors: ask /v1/score.')

  def make(vectors: np.ndarray, num_tokens: int) -> dict[str, Any]:
    if body.dimensions is not None:
      if body.dimensions > vectors.shape[1]:
        raise RequestError(f'dimensions must be at most {vectors.shape[1]}, not {body.dimensions}.', param='dimensions')
      vectors = vectors[:, : body.dimensions]
      vectors = _normalized(vectors) if reading.normalize else vectors
    found: Any = vectors.tolist()
    if body.encoding_format == 'base64':
      found = [base64.b64encode(vector.tobytes()).decode() for vector in vectors.astype('<f4')]
    data = [{'object': 'embedding', 'index': index, 'embedding': each} for index, each in enumerate(found)]
    return asked.answer('embd', num_tokens, object='list', data=data)

  return ScoreRequest(texts=asked.inputs(reading.prompt), make=make)


def _score(asked: _Asked) -> ScoreRequest:
  """/v1/score: pairs of texts, or one text and several others."""
  firsts, seconds = asked.body.text_1, asked.body.text_2
  if len(firsts) not in (1, len(seconds)):
    raise RequestError(f'text_1 has {len(firsts)} texts, but text_2 {len(seconds)}: give one, or as many.')
  texts, score = asked.pairs(firsts, seconds, ('text_1', 'text_2'))

  def make(vectors: np.ndarray, num_tokens: int) -> dict[str, Any]:
    data = [{'index': index, 'object': 'score', 'score': each} for index, each in enumerate(score(vectors))]
    return asked.answer('score', num_tokens, object='list', data=data)

  return ScoreRequest(texts=texts, make=make)


def _rerank(asked: _Asked) -> ScoreRequest:
  """/v1/rerank: a query, and documents that are put in the order of their scores."""
  body = asked.body
  texts, score = asked.pairs([body.query], body.documents, ('query', 'documents'))

  def make(vectors: np.ndarray, num_tokens: int) -> dict[str, Any]:
    scores = score(vectors)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
      {'index': index, 'relevance_score': scores[index]}
      | ({'document': {'text': body.documents[index]}} if body.return_documents else {})
      for index in order
    ]
    return asked.answer('rerank', num_tokens, results=results)

  return ScoreRequest(texts=texts, make=make)


def score_request(path: str, fields: dict[str, Any], model: ServedModel, limits: ServerSettings) -> ScoreRequest:
  """Reads the body of a request to one of ROUTES. Raises a RequestError: names the field that is wrong."""
  check_model_name(fields, model)
  kind, read = ROUTES[path]
  return read(_Asked(body=validate(kind, fields), model=model, limits=limits))


ROUTES: dict[str, tuple[type[PoolingBody], Callable[[_Asked], ScoreRequest]]] = {
  '/v1/embeddings': (EmbeddingBody, _embedding),
  **dict.fromkeys(('/v1/score', '/score'), (ScoreBody, _score)),
  **dict.fromkeys(('/v1/rerank', '/v2/rerank', '/rerank'), (RerankBody, _rerank)),
}
