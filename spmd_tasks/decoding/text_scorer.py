"""TextScorer: the scores or the vector that a model with a head for scores, or with none, gives to each text.

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

_MAX_ROWS, _BATCH_TOKENS = 16, 1024  # of a batch at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextReading:
  """How texts become tokens, and what their tokens' vectors become.

  Fields:
    labels: names of the N scores; () where a text has a vector.
    pooling: 'last' or 'mean': the vector of the last token, or the mean of all.
    normalize: whether vectors have the length 1.
    ends: whether a text is written as in training here, with the end of text behind it; otherwise as the folder's own
      tokenizer writes it.
    prompt: stands before each text that gets a vector.
    activation: what turns scores into what clients get, if they do not ask for the scores themselves.
  """

  labels: tuple[str, ...] = ()
  pooling: Literal['last', 'mean'] = 'last'
  normalize: bool = False
  ends: bool = True
  prompt: str = ''
  activation: Literal['none', 'sigmoid', 'softmax'] = 'none'

  def encode(self, tokenizer: Tokenizer, text: str, second: str | None = None) -> tuple[int, ...]:
    """The tokens of a text, or of a pair: what is scored, such as an answer, stands behind `text`."""
    if not self.ends and isinstance(tokenizer, FolderTokenizer):
      return tokenizer.encode_whole(text, second)
    ids = encode_prompt(tokenizer, text + (second or ''))
    return (*ids, tokenizer.eos_id) if tokenizer.eos_id not in ids[-2:] else ids

  def cut(self, tokenizer: Tokenizer, ids: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The first tokens of a text, and the special ones that end it."""
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
  """That of a job whose model scores texts or gives them vectors; None of one that generates text."""
  return job.experiment.text_reading() if hasattr(job.experiment, 'text_reading') else None


def text_batch(spec: InputSpec, texts: Sequence[Sequence[int]], pooling: str = 'last') -> dict[str, np.ndarray]:
  """A batch with one text a row; `weights` [B, T] say how its vector is made of those of its tokens.

  A text that is empty, or longer than a row, has an empty row.
  """
  batch = {name: np.zeros(each.shape, each.dtype) for name, each in spec.items()}
  for row, ids in enumerate(texts):
    if 0 < (size := len(ids)) <= spec['ids'].shape[1]:
      batch['ids'][row, :size], batch['segment_ids'][row, :size] = ids, 1
      batch['segment_pos'][row, :size] = np.arange(size)
      batch['weights'][row, size - 1] = 1
      if pooling == 'mean':
        batch['weights'][row, :size] = 1 / size
  return batch


def pooled(task: Any, variables: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
  """The vectors of the rows of a batch, float32 [B, N]."""
  weights = batch['weights'].astype(jnp.float32)[..., None]
  return jnp.sum(jnp.where(weights > 0, task.predict(variables, batch)['logits'] * weights, 0.0), axis=1)


class TextScorer:
  """A partitioned model, and one compiled program for each length of a batch.

  Attributes:
    buckets: these lengths, T; the last one is the longest text's.
    num_labels: N, or 0 where texts have vectors.
  """

  def __init__(self, model: PartitionedModel, reading: TextReading, *, max_len: int):
    """Compiles nothing yet. Raises a UserError if the model does not score texts."""
    num_labels = getattr(getattr(model.task.model, 'embedding', None), 'num_labels', None)
    if num_labels is None or len(reading.labels) != num_labels:
      raise UserError(f'the model has num_labels = {num_labels}, and not {len(reading.labels)}: set num_labels.')
    self.buckets = DecodeSettings(min_bucket=min(16, max_len)).buckets(max_len)
    self.num_labels = num_labels
    self._model = model
    self._reading = reading
    self._steps: dict[int, CompiledStep] = {}

  def num_rows(self, bucket: int) -> int:
    """B, of a batch of this length."""
    return max(1, min(_MAX_ROWS, _BATCH_TOKENS // bucket))

  def bucket(self, length: int) -> int:
    """The shortest bucket for a text of so many tokens."""
    return next(bucket for bucket in self.buckets if bucket >= length)

  def run(self, variables: Any, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns float32 [len(texts), N], for at most B texts.

    Args:
      variables: of the model, padded arrays on the mesh.
      texts: tokens; a text's numbers depend on the bucket of the longest, and not on the other texts.
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
