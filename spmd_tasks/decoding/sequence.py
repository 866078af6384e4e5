"""Sequence: one text that is being generated, and Delta, what a step adds to it."""

from collections.abc import Callable
from collections.abc import Sequence as Many
import dataclasses
from typing import Any, Literal

from spmd_tasks.decoding.incremental_text import IncrementalText
from spmd_tasks.decoding.loop import Outputs
from spmd_tasks.decoding.requests import Chunk, Request

# `cancelled`: nobody waits for it any more. `cut`: the server ends before it does. `error`: the engine failed.
FinishReason = Literal['stop', 'length', 'cancelled', 'cut', 'error']


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
  """A token, its log-probability, and the likeliest tokens with theirs.

  Fields:
    offset: its text's place in the generated text; of a prompt's token, which stands before it, negative.
    logprob: None of a prompt's first token.
  """

  token: int
  offset: int
  logprob: float | None
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
  """What became known of a sequence in one step.

  Fields:
    sequence: whose.
    text: the next characters; empty while they may still become a stop string or are half a character.
    logprobs: of the tokens that this text, and no earlier one, is from, and before them of the prompt's; empty where
      they were not asked for.
    finish_reason: None while more follows.
  """

  sequence: 'Sequence'
  text: str
  logprobs: tuple[TokenLogprob, ...] = ()
  finish_reason: FinishReason | None = None


class Sequence:
  """A request on its way through the scheduler.

  Attributes:
    request, index, owner: as given; nothing here reads the last two.
    num_launched: tokens that were asked of the engine so far.
    num_reused: of the prompt, how many were not read but found.
    num_tokens: those that were generated and read, a stop token included.
    logprobs: of all of these, where asked for; of the prompt's before them, where it is scored.
    finish_reason: None until it is finished.
  """

  def __init__(
    self,
    request: Request,
    decode: Callable[[Many[int]], str],
    *,
    index: int = 0,
    has_logprobs: bool = False,
    owner: Any = None,
  ):
    self.request = request
    self.index = index
    self.owner = owner
    self.num_launched = 0
    self.num_reused = 0
    self.num_tokens = 0
    self.logprobs: list[TokenLogprob] = []
    self.finish_reason: FinishReason | None = None
    self._decode = decode
    self._text = IncrementalText(decode, request.stop)
    self._prompt_text = IncrementalText(decode)
    self._num_prompt_chars = len(decode(request.ids)) if request.score_prompt else 0
    self._has_logprobs = has_logprobs
    self._num_released = 0  # of logprobs: the text of the others is held back
    self._offset = 0

  @property
  def text(self) -> str:
    """What was generated so far, but for what is held back."""
    return self._text.text

  def take(self, outputs: Outputs, row: int, chunk: Chunk | None = None) -> Delta:
    """Row `row` of a step's outputs, or of those of the prefill of a chunk, which are on the host."""
    if chunk is not None and self.request.score_prompt:
      self._take_scores(outputs, row, chunk)
    if chunk is not None and chunk.stop < len(self.request.ids):
      return Delta(sequence=self, text='', logprobs=self._release(len(self.logprobs)))
    if self.request.max_tokens == 0:
      return self._finish('length')
    token = int(outputs.tokens[row])
    self.num_tokens += 1
    if token in self.request.stop_ids:
      delta = self._finish('stop')
      self._take_logprob(outputs, row)  # which belongs to no text
      return delta
    self._take_logprob(outputs, row)
    piece = self._text.push(token)
    if self._text.stop is not None:
      return self._finish('stop', piece)
    if bool(outputs.is_finished[row]):
      return self._finish('length', piece)
    return Delta(sequence=self, text=piece, logprobs=self._release(len(self.logprobs)) if piece else ())

  def end(self, reason: FinishReason) -> Delta:
    """Ends it from outside."""
    return self._finish(reason)

  def _take_logprob(self, outputs: Outputs, row: int) -> None:
    if self._has_logprobs:
      token = int(outputs.tokens[row])
      top = tuple(zip(outputs.top_ids[row].tolist(), outputs.top_logprobs[row].tolist(), strict=True))
      logprob = float(outputs.logprobs[row])
      self.logprobs.append(TokenLogprob(token=token, offset=self._offset, logprob=logprob, top=top))
      self._offset += len(self._decode([token]))

  def _take_scores(self, outputs: Outputs, row: int, chunk: Chunk) -> None:
    """Of the tokens behind those of a chunk; the first chunk's first token comes with none."""
    assert outputs.prompt_logprobs is not None
    assert outputs.prompt_top_ids is not None
    assert outputs.prompt_top_logprobs is not None
    tokens = chunk.request.ids[chunk.start + 1 : chunk.stop + 1]
    columns = slice(len(tokens))
    logprobs: list[float | None] = outputs.prompt_logprobs[row, columns].tolist()
    tops = [
      tuple(zip(*top, strict=True))
      for top in zip(
        outputs.prompt_top_ids[row, columns].tolist(), outputs.prompt_top_logprobs[row, columns].tolist(), strict=True
      )
    ]
    if chunk.start == 0:
      tokens, logprobs, tops = (chunk.request.ids[0], *tokens), [None, *logprobs], [(), *tops]
    for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
      offset = len(self._prompt_text.text) - self._num_prompt_chars
      self.logprobs.append(TokenLogprob(token=token, offset=offset, logprob=logprob, top=top))
      self._prompt_text.push(token)

  def _finish(self, reason: FinishReason, piece: str = '') -> Delta:
    self.finish_reason = reason
    text = piece + self._text.finish()
    end = len(self.logprobs)
    while self._text.stop is not None and end > self._num_released and self.logprobs[end - 1].offset >= len(self.text):
      end -= 1
    return Delta(sequence=self, text=text, logprobs=self._release(end), finish_reason=reason)

  def _release(self, end: int) -> tuple[TokenLogprob, ...]:
    released = tuple(self.logprobs[self._num_released : end])
    self._num_released = end
    return released
