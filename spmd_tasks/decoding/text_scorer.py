"""TextScorer: computes scores of texts, by a model with a head for scores, or their vectors, by a model without a head.

    scorer = TextScorer(partitioned_model, reading, max_len=512)
    scorer.run(variables, [(1, 17, 34), (1, 8)])     # float32 [2, N]; compiled once for each length of a batch

Shapes: B rows of a batch, T tokens of a row, N labels, or features of a vector.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import FolderTokenizer, Tokenizer
from spmd_tasks.inputs.base import language_model_spec
from spmd_tasks.inputs.tokenizers import encode_prompt
from spmd_tasks.runtime import DecodeSettings, PartitionedModel
from spmd_tasks.runtime.compilation import CompiledStep
from spmd_tasks.runtime.input_layout import InputSpec

_MAX_ROWS, _BATCH_TOKENS = 16, 1024  # of a batch, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextReading:
  """How to tokenize texts, and how to pool the vectors of their tokens.

  Fields:
    labels: the names of the N scores; () for vectors.
    pooling: 'last' takes the vector of the last token, 'mean' the mean of all.
    normalize: whether to scale vectors to length 1.
    ends: whether the end of text follows a text, as in training; False tokenizes as the folder's own tokenizer does.
    prompt: the beginning of each text that gets a vector.
    activation: what is applied to scores, unless clients ask for the raw ones.
  """

  labels: tuple[str, ...] = ()
  pooling: Literal['last', 'mean'] = 'last'
  normalize: bool = False
  ends: bool = True
  prompt: str = ''
  activation: Literal['none', 'sigmoid', 'softmax'] = 'none'

  def encode(self, tokenizer: Tokenizer, text: str, second: str | None = None) -> tuple[int, ...]:
    """Returns the tokens of a text, or of a pair, in which `second`, such as an answer, is scored."""
    if not self.ends and isinstance(tokenizer, FolderTokenizer):
      return tokenizer.encode_whole(text, second)
    ids = encode_prompt(tokenizer, text + (second or ''))
    return (*ids, tokenizer.eos_id) if tokenizer.eos_id not in ids[-2:] else ids

  def cut(self, tokenizer: Tokenizer, ids: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Cuts the tokens of a text to a length; the special tokens at its end stay."""
    end = self.encode(tokenizer, 'a')[len(encode_prompt(tokenizer, 'a')) :]
    end = end if len(end) < length and ids[len(ids) - len(end) :] == end else ()
    return ids if len(ids) <= length else (*ids[: length - len(end)], *end)

  def activate(self, scores: np.ndarray) -> np.ndarray:
    """Applies the activation to scores, float64 [..., N]."""
    if self.activation == 'sigmoid':
      return np.exp(-np.logaddexp(0.0, -scores))
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True)) if self.activation == 'softmax' else None
    return scores if exp is None else exp / exp.sum(axis=-1, keepdims=True)


def text_reading(job: Any) -> TextReading | None:
  """Returns the TextReading of a job whose model computes scores or vectors; None if it generates text."""
  return job.experiment.text_reading() if hasattr(job.experiment, 'text_reading') else None


def text_batch(spec: InputSpec, texts: Sequence[Sequence[int]], pooling: str = 'last') -> dict[str, np.ndarray]:
  """Returns a batch with one text per row; `weights` [B, T] are the weights of its tokens in the pooled vector.

  The row of a text that is empty, or longer than a row, is empty.
  """
  batch = {name: np.zeros(entry.shape, entry.dtype) for name, entry in spec.items()}
  for row, ids in enumerate(texts):
    if 0 < (size := len(ids)) <= spec['ids'].shape[1]:
      batch['ids'][row, :size], batch['segment_ids'][row, :size] = ids, 1
      batch['segment_pos'][row, :size] = np.arange(size)
      batch['weights'][row, size - 1] = 1
      if pooling == 'mean':
        batch['weights'][row, :size] = 1 / size
  return batch


def pooled(task: Any, variables: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the pooled vectors of the rows of a batch, float32 [B, N]."""
  weights = batch['weights'].astype(jnp.float32)[..., None]
  return jnp.sum(jnp.where(weights > 0, task.predict(variables, batch)['logits'] * weights, 0.0), axis=1)


class TextScorer:
  """Computes scores or vectors, by one compiled program for each length of a batch.

  Attributes:
    buckets: the lengths T, up to the length of the longest text.
    num_labels: N for scores, or 0 for vectors.
  """

  def __init__(self, model: PartitionedModel, reading: TextReading, *, max_len: int):
    """Compiles nothing yet. Raises a UserError if the model does not score texts."""
    num_labels = getattr(getattr(model.task.model, 'embedding', None), 'num_labels', None)
    if num_labels is None or len(reading.labels) != num_labels:
      raise UserError(
        f'the model has num_labels={num_labels}, but there are {len(reading.labels)} labels: set num_labels.'
      )
    self.buckets = DecodeSettings(min_bucket=min(16, max_len)).buckets(max_len)
    self.num_labels = num_labels
    self._model = model
    self._reading = reading
    self._steps: dict[int, CompiledStep] = {}

  def num_rows(self, bucket: int) -> int:
    """Returns B, the number of rows of a batch of this length."""
    return max(1, min(_MAX_ROWS, _BATCH_TOKENS // bucket))

  def bucket(self, length: int) -> int:
    """Returns the shortest bucket for a text of `length` tokens."""
    return next(bucket for bucket in self.buckets if bucket >= length)

  def run(self, variables: Any, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns float32 [len(texts), N], for at most B texts.

    Args:
      variables: the model's variables, padded arrays on the mesh.
      texts: the tokens of each text. The results depend on the bucket of the longest text, not on the other texts.
    """
    step = self._step(self.bucket(max(map(len, texts))))
    batch = text_batch(step.layout.spec, texts, self._reading.pooling)
    return np.asarray(step(variables, step.place(step.layout.own_rows(batch))))[: len(texts)]

  def _step(self, bucket: int) -> CompiledStep:
    if bucket not in self._steps:
      spec = language_model_spec(self.num_rows(bucket), bucket)
      self._steps[bucket] = self._model.batch_step(f'score_texts_{bucket}', spec, self._score)
    return self._steps[bucket]

  def _score(self, variables: Any, batch: Any) -> jax.Array:
    vectors = pooled(self._model.task, variables, batch)
    if not self._reading.normalize:
      return vectors
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(vectors), axis=-1, keepdims=True), 1e-24))
