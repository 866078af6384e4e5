"""Sequence: one text that is being generated, and Delta, what a step adds to it."""

from collections.abc import Callable
from collections.abc import Sequence as Many
import dataclasses
from typing import Any, Literal

from spmd_tasks.decoding.incremental_text import IncrementalText
from spmd_tasks.decoding.loop import Outputs
from spmd_tasks.decoding.requests import Request

# `cancelled`: nobody waits for it any more. `cut`: the server ends before it does. `error`: the engine failed.
FinishReason = Literal['stop', 'length', 'cancelled', 'cut', 'error']


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
  """A token, its text's place in the generated text, its log-probability, and the likeliest tokens with theirs."""

  token: int
  offset: int
  logprob: float
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
  """What became known of a sequence in one step.

  Fields:
    sequence: whose.
    text: the next characters; empty while they may still become a stop string or are half a character.
    logprobs: of the tokens that this text, and no earlier one, is from; empty where they were not asked for.
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
    num_tokens: those that were read, a stop token included.
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
    self.num_tokens = 0
    self.finish_reason: FinishReason | None = None
    self._decode = decode
    self._text = IncrementalText(decode, request.stop)
    self._has_logprobs = has_logprobs
    self._logprobs: list[TokenLogprob] = []  # of tokens whose text is held back
    self._offset = 0

  def take(self, outputs: Outputs, row: int) -> Delta:
    """Row `row` of a step's outputs, which are on the host."""
    token = int(outputs.tokens[row])
    self.num_tokens += 1
    if token in self.request.stop_ids:
      return self._finish('stop')
    if self._has_logprobs:
      ids, logprobs = outputs.top_ids[row].tolist(), outputs.top_logprobs[row].tolist()
      top = tuple(zip(ids, logprobs, strict=True))
      self._logprobs.append(
        TokenLogprob(token=token, offset=self._offset, logprob=float(outputs.logprobs[row]), top=top)
      )
      self._offset += len(self._decode([token]))
    piece = self._text.push(token)
    if self._text.stop is not None:
      return self._finish('stop', piece)
    if bool(outputs.is_finished[row]):
      return self._finish('length', piece)
    return Delta(sequence=self, text=piece, logprobs=self._release_logprobs() if piece else ())

  def end(self, reason: FinishReason) -> Delta:
    """Ends it from outside."""
    return self._finish(reason)

  def _finish(self, reason: FinishReason, piece: str = '') -> Delta:
    self.finish_reason = reason
    text = piece + self._text.finish()
    if self._text.stop is not None:
      self._logprobs = [entry for entry in self._logprobs if entry.offset < len(self._text.text)]
    return Delta(sequence=self, text=text, logprobs=self._release_logprobs(), finish_reason=reason)

  def _release_logprobs(self) -> tuple[TokenLogprob, ...]:
    released, self._logprobs = tuple(self._logprobs), []
    return released
