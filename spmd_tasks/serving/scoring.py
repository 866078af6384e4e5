"""Serves a model that scores or embeds texts: /v1/embeddings, /v1/score and /v1/rerank.

    engine = ScoringEngine(scorer, variables)     # engine and scheduler in one, for run_server
    parsed = score_request('/v1/rerank', fields, model, limits)
    parsed.whole(sequences, deltas)               # the body of the answer

The texts of all requests wait in one queue. A batch takes the first text and further texts of its length bucket, as
many as fit. Requests and answers follow OpenAI (embeddings), vLLM (score) and Jina (rerank).

Shapes: N labels, or the embedding dimension.
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
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.request_bodies import EmbeddingBody, PoolingBody, RerankBody, ScoreBody, validate
from spmd_tasks.serving.requests import ServedModel, check_model_name
from spmd_tasks.serving.settings import ServerSettings

_MAX_TEXTS = 2048  # per request, OpenAI's limit


class ScoredText:
  """A text to score or embed, with the attributes of a GeneratedSequence that the engine's thread and service.py use.

  Attributes:
    request: a request with the text's tokens.
    index: the text's position in its HTTP request.
    owner: the Answer that gets its deltas.
    vector: float32 [N], once finish_reason is `stop`.
    finish_reason: None until the text has ended.
  """

  num_tokens = 0  # generated tokens
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
    sequence: Any = self
    return Delta(sequence=sequence, text='', finish_reason=reason)


class ScoringEngine:
  """Scores queued texts batch by batch; the engine and the scheduler of server.py and engine_thread.py in one object.

  Attributes:
    weights: the model's variables; may be replaced between batches.
    num_steps: number of batches so far.
    num_slot_steps: number of texts in these batches.
    num_prompt_tokens: number of tokens of these texts, without padding.
  """

  num_active = 0  # no text is active between batches

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
    """Compiles and runs the program of each length bucket."""
    for bucket in self._scorer.buckets:
      self._scorer.run(self.weights, [(0,) * bucket])

  def submit(self, texts: Iterable[Any]) -> None:
    self._queue.extend(texts)

  def end(self, texts: Iterable[Any], reason: FinishReason) -> None:
    """Ends all given texts that have not ended yet."""
    self._outbox += [text.end(reason) for text in texts if text.finish_reason is None]
    self._queue = deque(text for text in self._queue if text.finish_reason is None)

  def end_all(self, reason: FinishReason) -> list[Delta]:
    self.end(list(self._queue), reason)
    return self._take_outbox()

  def advance(self, *, admit: bool = True) -> list[Delta]:
    """Scores one batch of queued texts if `admit`; returns the deltas of all texts that ended since the last call."""
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
  """One HTTP request, validated and tokenized.

  Fields:
    texts: the tokens of each text.
    format_answer: returns the body of the answer, given the vectors, float64 [len(texts), N], and the number of tokens.
  """

  texts: tuple[tuple[int, ...], ...]
  format_answer: Callable[[np.ndarray, int], dict[str, Any]]
  stream: ClassVar[bool] = False

  @property
  def num_prompt_tokens(self) -> int:
    """Number of tokens of all texts."""
    return sum(map(len, self.texts))

  def sequences(self, model: ServedModel, owner: Any) -> list[Any]:
    """Returns the texts, for the engine; `owner` gets their deltas."""
    return [ScoredText(ids, index=index, owner=owner) for index, ids in enumerate(self.texts)]

  def whole(self, sequences: Sequence[Any], deltas: Iterable[Delta]) -> dict[str, Any]:
    """Formats the body of the answer once all texts have their vectors."""
    vectors = np.stack([text.vector for text in sequences]).astype(np.float64)
    return self.format_answer(vectors, self.num_prompt_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RequestReader:
  """Tokenizes and checks the texts of one body; raises a RequestError that names the invalid field."""

  body: Any
  model: ServedModel
  limits: ServerSettings

  @property
  def reading(self) -> TextReading:
    assert self.model.reading is not None
    return self.model.reading

  def inputs(self, prompt: str = '') -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each text of `input`, with `prompt` before texts that are strings."""
    self.check_count('input', len(self.body.input))
    return tuple(
      self.truncate(f'input[{index}]', self.encode(prompt + item) if isinstance(item, str) else tuple(item))
      for index, item in enumerate(self.body.input)
    )

  def pairs(
    self, firsts: list[str], seconds: list[str], names: tuple[str, str]
  ) -> tuple[tuple[tuple[int, ...], ...], Callable[[np.ndarray], list[float]]]:
    """Returns the tokens of the texts to run, and the function that computes the pairs' scores from their vectors.

    A classifier reads both texts of a pair together. An embedding model reads each text alone, and the score of a pair
    is the cosine similarity of the two vectors.
    """
    labels, prompt = self.reading.labels, self.reading.prompt
    if len(labels) > 1:
      raise RequestError(
        f'this model has {len(labels)} labels, but a score needs exactly one: serve a model with one label.'
      )
    self.check_count(names[1], len(seconds) if labels else len(firsts) + len(seconds))
    if labels:
      repeated = firsts * len(seconds) if len(firsts) == 1 else firsts
      tokens = tuple(
        self.truncate(f'{names[1]}[{index}]', self.encode(*pair))
        for index, pair in enumerate(zip(repeated, seconds, strict=True))
      )
      return tokens, lambda vectors: self.activate(vectors)[:, 0].tolist()
    tokens = tuple(
      self.truncate(f'{name}[{index}]', self.encode(prompt + text))
      for name, texts in zip(names, (firsts, seconds), strict=True)
      for index, text in enumerate(texts)
    )

    def cosines(vectors: np.ndarray) -> list[float]:
      vectors = _normalized(vectors)
      return np.sum(vectors[: len(firsts)] * vectors[len(firsts) :], axis=-1).tolist()

    return tokens, cosines

  def check_count(self, name: str, count: int) -> None:
    max_texts = min(_MAX_TEXTS, self.limits.max_queued)  # more would not fit in an empty queue
    if not 0 < count <= max_texts:
      raise RequestError(f'{name} must have 1 to {max_texts} texts, not {count}: send several requests.', param=name)

  def encode(self, *texts: str) -> tuple[int, ...]:
    try:
      return self.reading.encode(self.model.tokenizer, *texts)
    except UserError as error:
      raise RequestError(f'{error}') from error

  def truncate(self, name: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Truncates the tokens of a text to `truncate_prompt_tokens`, and checks them."""
    max_len, limit = self.model.max_len, self.body.truncate_prompt_tokens
    if limit is not None:
      ids = self.reading.cut(self.model.tokenizer, ids, max_len if limit == -1 else min(limit, max_len))
    if not ids or not all(0 <= token < self.model.vocab_size for token in ids):
      raise RequestError(f'{name} must have at least one token, all below {self.model.vocab_size}.', param=name)
    if len(ids) > max_len:
      raise RequestError(
        f'{name} has {len(ids)} tokens, more than {max_len}: shorten it, or set truncate_prompt_tokens to -1.',
        param=name,
      )
    return ids

  def activate(self, vectors: np.ndarray) -> np.ndarray:
    return vectors if self.body.use_activation is False else self.reading.activate(vectors)

  def answer(self, kind: str, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """Returns the body of an answer, with `fields` in addition to those that all routes have."""
    head = {'id': f'{kind}-{secrets.token_hex(12)}', 'created': int(time.time()), 'model': self.model.name}
    return head | fields | {'usage': {'prompt_tokens': num_tokens, 'total_tokens': num_tokens}}


def _normalized(vectors: np.ndarray) -> np.ndarray:
  return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def _embedding(reader: _RequestReader) -> ScoreRequest:
  """/v1/embeddings."""
  body, reading = reader.body, reader.reading
  if reading.labels:
    raise RequestError(
      f'this model computes scores ({", ".join(reading.labels)[:100]}), not embeddings: call /v1/score.'
    )

  def format_answer(vectors: np.ndarray, num_tokens: int) -> dict[str, Any]:
    if body.dimensions is not None:
      if body.dimensions > vectors.shape[1]:
        raise RequestError(f'dimensions must be at most {vectors.shape[1]}, not {body.dimensions}.', param='dimensions')
      vectors = vectors[:, : body.dimensions]
      vectors = _normalized(vectors) if reading.normalize else vectors
    embeddings: Any = vectors.tolist()
    if body.encoding_format == 'base64':
      embeddings = [base64.b64encode(vector.tobytes()).decode() for vector in vectors.astype('<f4')]
    data = [{'object': 'embedding', 'index': index, 'embedding': item} for index, item in enumerate(embeddings)]
    return reader.answer('embd', num_tokens, object='list', data=data)

  return ScoreRequest(texts=reader.inputs(reading.prompt), format_answer=format_answer)


def _score(reader: _RequestReader) -> ScoreRequest:
  """/v1/score: scores pairs of texts, or one text against several."""
  firsts, seconds = reader.body.text_1, reader.body.text_2
  if len(firsts) not in (1, len(seconds)):
    raise RequestError(f'text_1 has {len(firsts)} texts, but text_2 has {len(seconds)}: give one text, or as many.')
  texts, score = reader.pairs(firsts, seconds, ('text_1', 'text_2'))

  def format_answer(vectors: np.ndarray, num_tokens: int) -> dict[str, Any]:
    data = [{'index': index, 'object': 'score', 'score': value} for index, value in enumerate(score(vectors))]
    return reader.answer('score', num_tokens, object='list', data=data)

  return ScoreRequest(texts=texts, format_answer=format_answer)


def _rerank(reader: _RequestReader) -> ScoreRequest:
  """/v1/rerank: sorts documents by their scores against a query, highest first."""
  body = reader.body
  texts, score = reader.pairs([body.query], body.documents, ('query', 'documents'))

  def format_answer(vectors: np.ndarray, num_tokens: int) -> dict[str, Any]:
    scores = score(vectors)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
      {'index': index, 'relevance_score': scores[index]}
      | ({'document': {'text': body.documents[index]}} if body.return_documents else {})
      for index in order
    ]
    return reader.answer('rerank', num_tokens, results=results)

  return ScoreRequest(texts=texts, format_answer=format_answer)


def score_request(path: str, fields: dict[str, Any], model: ServedModel, limits: ServerSettings) -> ScoreRequest:
  """Validates the body of a request to one of ROUTES. Raises a RequestError that names the invalid field."""
  check_model_name(fields, model)
  kind, read = ROUTES[path]
  return read(_RequestReader(body=validate(kind, fields), model=model, limits=limits))


ROUTES: dict[str, tuple[type[PoolingBody], Callable[[_RequestReader], ScoreRequest]]] = {
  '/v1/embeddings': (EmbeddingBody, _embedding),
  **dict.fromkeys(('/v1/score', '/score'), (ScoreBody, _score)),
  **dict.fromkeys(('/v1/rerank', '/v2/rerank', '/rerank'), (RerankBody, _rerank)),
}
