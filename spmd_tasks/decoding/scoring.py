"""score_texts: computes log-probabilities of given texts, for evaluations and for the choice among answers.

    texts = [((1, 17, 34), (5, 6)), ((1, 17, 34), (7,))]              # (context, continuation)
    for number, score in score_texts(steps, variables, texts, num_rows=8):
      print(number, score.logprob, score.is_greedy)

Texts are sorted by length and padded to few shapes: T is min_bucket or a power of two above it, at most max_len, and C,
the number of scored tokens, is 8 or a larger power of two. Each pair of T and C is compiled once. Scores do not depend
on padding or on the other rows of a batch: experts drop no tokens, as in generation. The encoder of an encoder-decoder
reads the context, and its decoder reads the continuation after `start_id`. The context is the prefix of a prefix
language model.

Shapes: B rows, T tokens, C scored tokens.
"""

from collections import deque
from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.decoding.decode_state import Forward, encoder_entries, target_logprobs, text_entries
from spmd_tasks.decoding.decode_steps import DecodeSteps
from spmd_tasks.decoding.requests import filled_rows
from spmd_tasks.errors import UserError
from spmd_tasks.runtime.task import Variables

_MIN_COLUMNS = 8

Text = tuple[Sequence[int], Sequence[int]]  # the tokens of a context and of its continuation


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextScore:
  """The log-probabilities that a model gives to a continuation.

  Fields:
    logprobs: the log-probability of each of its tokens, given all tokens before.
    is_greedy: whether each of its tokens is the likeliest one, as greedy decoding would sample.
  """

  logprobs: tuple[float, ...]
  is_greedy: bool

  @property
  def logprob(self) -> float:
    """The log-probability of the whole continuation."""
    return sum(self.logprobs)


class ScoreBatch(struct.PyTreeNode):
  """B texts whose last tokens are scored, as the arrays that `score` takes.

  Attributes:
    ids: int32 [B, T], each text without its last token, padded at the end.
    lengths: int32 [B], at least 1.
    columns: int32 [B, C], the columns of T before each scored token, in order; the first is the context's last token.
    targets: int32 [B, C], the scored tokens, padded with -1.
    adapters: int32 [B], the low-rank adapter of each row; 0 for none.
    encoder_ids, encoder_lengths: int32 [B, E] and [B], the encoder's texts; None if the model has no encoder.
  """

  ids: Any
  lengths: Any
  columns: Any
  targets: Any
  adapters: Any
  encoder_ids: Any = None
  encoder_lengths: Any = None


class Scores(struct.PyTreeNode):
  """The log-probabilities that the model gives to the tokens of a ScoreBatch.

  Attributes:
    logprobs: float32 [B, C], the log-probability of each target given the tokens before it; 0 for padding.
    are_likeliest: bool [B, C], whether no other token is likelier.
  """

  logprobs: jax.Array
  are_likeliest: jax.Array


def score(forward: Forward, variables: Any, batch: ScoreBatch) -> Scores:
  """Computes the log-probabilities of given tokens, with the logits of their columns only; uses no slots."""
  model_batch: dict[str, Any] = text_entries(batch.ids, batch.lengths)
  is_context = jnp.arange(batch.ids.shape[1])[None, :] <= batch.columns[:, :1]
  model_batch |= {'prefix_mask': is_context.astype(jnp.int32)}
  model_batch |= {'logit_columns': batch.columns, 'adapters': batch.adapters}
  model_batch |= encoder_entries(batch.encoder_ids, batch.encoder_lengths)
  logits, _ = forward(variables, None, model_batch)
  logprobs, logprobs_of_targets = target_logprobs(logits, batch.targets)
  are_likeliest = (jnp.argmax(logprobs, axis=-1) == batch.targets) | (batch.targets < 0)
  return Scores(logprobs=logprobs_of_targets, are_likeliest=are_likeliest)


def score_texts(
  steps: DecodeSteps,
  variables: Variables,
  texts: Sequence[Text],
  *,
  num_rows: int,
  adapter: int = 0,
) -> Iterator[tuple[int, TextScore]]:
  """Yields (number of the text, score), longest texts first.

  Args:
    steps: the model's programs; a text without its last token has at most `max_len` tokens.
    variables: the model's variables, stored by `steps.storage`.
    texts: contexts of at least one token, and continuations; an empty continuation has the log-probability 0.
    num_rows: B, how many texts are read at once.
    adapter: the number of the low-rank adapter; 0 for none.

  Raises:
    UserError: a context is empty, a text is too long, or has tokens outside the vocabulary.
  """
  shapes = [_shape_of(steps, number, text) for number, text in enumerate(texts)]
  for number, (_, continuation) in enumerate(texts):
    if not continuation:
      yield number, TextScore(logprobs=(), is_greedy=True)
  scored = [number for number, (_, continuation) in enumerate(texts) if continuation]
  order = sorted(scored, key=lambda number: shapes[number], reverse=True)
  in_flight: deque[tuple[list[int], Scores]] = deque()
  for shape, group in itertools.groupby(order, key=lambda number: shapes[number]):
    same_shape = list(group)
    for first in range(0, len(same_shape), num_rows):
      numbers = same_shape[first : first + num_rows]
      batch = _make_batch(steps, [texts[number] for number in numbers], num_rows, *shape, adapter=adapter)
      in_flight.append((numbers, _score(steps, variables, batch)))
      if len(in_flight) > 1:  # read a batch after the next one is launched
        yield from _read(texts, *in_flight.popleft())
  while in_flight:
    yield from _read(texts, *in_flight.popleft())


def _shape_of(steps: DecodeSteps, number: int, text: Text) -> tuple[int, int]:
  """Returns T and C of the program that scores a text."""
  context, continuation = text
  if not context:
    raise UserError(f'text {number + 1} to score needs a context of at least one token, such as bos.')
  length = len(context) + max(len(continuation), 1) - 1
  if steps.encoder_len is not None:
    if len(context) > steps.encoder_len:
      raise UserError(
        f'text {number + 1} to score has a context of {len(context)} tokens, more than encoder_len '
        f'{steps.encoder_len}: shorten it, or raise task.decode.encoder_len.'
      )
    length = max(len(continuation), 1)
  if length > steps.max_len:
    raise UserError(
      f'text {number + 1} to score has {length} tokens before its last one, more than max_len {steps.max_len}: shorten '
      'its context, or raise task.decode.max_len.'
    )
  lowest, highest = (find(*context, *continuation, context[0]) for find in (min, max))
  if not 0 <= lowest <= highest < steps.vocab_size:
    raise UserError(
      f'text {number + 1} to score has tokens from {lowest} to {highest}, outside the vocabulary of {steps.vocab_size}.'
    )
  num_tokens = next(bucket for bucket in steps.settings.buckets(steps.max_len) if bucket >= length)
  num_columns = max(_MIN_COLUMNS, 1 << (max(len(continuation), 1) - 1).bit_length())
  return num_tokens, min(num_columns, num_tokens)


def _make_batch(
  steps: DecodeSteps, texts: Sequence[Text], num_rows: int, num_tokens: int, num_columns: int, *, adapter: int
) -> ScoreBatch:
  """Returns the arrays of at most `num_rows` texts; further rows score nothing."""
  rows = functools.partial(filled_rows, num_rows, np.int32)
  contexts, encoded = [context for context, _ in texts], {}
  if steps.encoder_len is not None:
    lengths = rows([len(context) for context in contexts], 0)
    encoded = {'encoder_ids': rows(contexts, 0, steps.encoder_len), 'encoder_lengths': lengths}
    contexts = [(steps.settings.start_id,)] * len(texts)
  read = [[*context, *continuation[:-1]] for context, (_, continuation) in zip(contexts, texts, strict=True)]
  columns = [np.arange(len(context) - 1, len(ids)) for context, ids in zip(contexts, read, strict=True)]
  return ScoreBatch(
    ids=rows(read, 0, num_tokens),
    lengths=rows([len(ids) for ids in read], 1),
    columns=rows(columns, 0, num_columns),
    targets=rows([continuation for _, continuation in texts], -1, num_columns),
    adapters=rows((), adapter),
    **encoded,
  )


def _score(steps: DecodeSteps, variables: Variables, batch: ScoreBatch) -> Scores:
  """Launches the program for batches of this size."""
  name = ('score', *batch.ids.shape, batch.columns.shape[1])
  return steps.programs.compute(name, score, batch)(steps.model.arrange(variables), batch)


def _read(texts: Sequence[Text], numbers: Sequence[int], scores: Scores) -> Iterator[tuple[int, TextScore]]:
  """Waits for a batch, and yields its scores."""
  scores = jax.device_get(scores)
  for row, number in enumerate(numbers):
    size = len(texts[number][1])
    yield (
      number,
      TextScore(
        logprobs=tuple(scores.logprobs[row, :size].tolist()), is_greedy=bool(scores.are_likeliest[row, :size].all())
      ),
    )
