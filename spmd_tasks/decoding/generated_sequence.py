r"""GeneratedSequence: a request, its generated tokens and its growing text.

    text = IncrementalText(tokenizer.decode, stop=('\n\n',))
    for token in tokens:
      print(text.push(token), end='')       # only whole characters, and no part of a stop string
    print(text.finish(), end='')

The scheduler passes the outputs of each step to `GeneratedSequence.take`, which returns a Delta: the new text, its
log-probabilities, and whether the sequence has ended.
"""

from collections.abc import Callable, Collection, Sequence
import dataclasses
from typing import Any, Literal

import numpy as np

from spmd_tasks.decoding.constraints import Matcher, TokenLimits
from spmd_tasks.decoding.decode_state import Outputs
from spmd_tasks.decoding.drafts import NgramDrafts
from spmd_tasks.decoding.requests import Chunk, Request

# `cancelled`: the client is gone. `cut`: the server shut down first. `error`: the engine failed.
FinishReason = Literal['stop', 'length', 'cancelled', 'cut', 'error']

_UNFINISHED = '\ufffd'  # what decoders return for bytes that are not, or not yet, a character
_WINDOW = 8  # how many earlier tokens are decoded again with each new one, at most


class IncrementalText:
  """Decodes a growing list of tokens into pieces of text that never change again.

  Withholds text that may still change: a character whose last bytes are missing, and characters that may begin a stop
  string. The pieces join to `decode` of all tokens, up to the first stop string.

  Attributes:
    text: all pieces so far.
    last_piece: what the last call of `push` or `finish` decoded, before stop strings withhold or cut it.
    stop: the stop string that ended the text; None if none did.
  """

  def __init__(
    self,
    decode: Callable[[Sequence[int]], str],
    stop: Sequence[str] = (),
    *,
    kept_stops: Collection[str | int] = (),
    before: Sequence[int] = (),
  ):
    """Begins an empty text.

    Args:
      decode: turns tokens into text.
      stop: the stop strings.
      kept_stops: the stop strings that stay at the end of the text.
      before: the tokens that the text continues. A token may have another text at the beginning: the decoders of
        SentencePiece models drop a space there.
    """
    self._decode = decode
    self._stops = tuple(stop)
    self._kept_stops = kept_stops
    self._tokens = list(before[-_WINDOW:])  # the window: the last tokens, which the next token's text may depend on
    known = decode(self._tokens)
    if known.endswith(_UNFINISHED):  # half a character, which does not belong to the continuation
      self._tokens, known = [], ''
    self._num_taken = len(known)  # characters of the window that are in earlier pieces
    self._num_waiting = 0  # tokens since a character was completed
    self._withheld = ''
    self._num_exempt = 0  # characters of `_withheld` in which no stop string ends
    self.text = self.last_piece = ''
    self.stop: str | None = None

  def push(self, token: int, *, may_stop: bool = True) -> str:
    """Adds a token; returns the piece of text that it completes, which may be empty.

    A stop string that the token completes ends the text if `may_stop`.
    """
    self._tokens.append(token)
    whole = self._decode(self._tokens)
    # Bytes may still become characters. Decoders of single bytes (ByteFallback) return U+FFFD for each byte of a run,
    # whole characters included, until the run is complete. A character has at most 4 bytes, so after 4 tokens without
    # another character only the last 3 bytes may still begin one.
    stable = whole.rstrip(_UNFINISHED)
    self._num_waiting = self._num_waiting + 1 if len(stable) <= self._num_taken < len(whole) else 0
    if self._num_waiting >= 4:
      stable = whole[: max(len(stable), len(whole) - 3)]
    piece = stable[self._num_taken :]
    self._num_taken = max(self._num_taken, len(stable))
    if len(self._tokens) > _WINDOW and stable == whole:
      # Decoders that join tokens need the previous character, which may consist of several tokens.
      for num_kept in range(1, 5):
        last = self._decode(self._tokens[-num_kept:])
        if last and _UNFINISHED not in last:  # special tokens have no text
          self._tokens, self._num_taken = self._tokens[-num_kept:], len(last)
          break
    return self._release(piece, is_last=False, may_stop=may_stop)

  def push_all(self, tokens: Sequence[int]) -> None:
    """Adds the last tokens, for callers that read `text` only after `finish`."""
    if self._stops:
      for token in tokens:
        self.push(token)
    else:
      self._tokens.extend(tokens)

  @property
  def num_chars(self) -> int:
    """The number of characters so far, with those that may begin a stop string."""
    return len(self.text) + len(self._withheld)

  def finish(self) -> str:
    """Returns the last piece, when no token follows."""
    return self._release(self._decode(self._tokens)[self._num_taken :], is_last=True)

  def _release(self, piece: str, *, is_last: bool, may_stop: bool = True) -> str:
    self.last_piece = piece
    if self.stop is not None:
      return ''
    pending = self._withheld + piece
    if not may_stop:
      self._num_exempt = len(pending)
    places = [(pending.find(stop, max(0, self._num_exempt - len(stop) + 1)), stop) for stop in self._stops]
    places = [(place, stop) for place, stop in places if place >= 0]
    if places:
      end, self.stop = min(places, key=lambda match: (match[0], -len(match[1])))
      end += len(self.stop) if self.stop in self._kept_stops else 0
      released, self._withheld = pending[:end], ''
    else:
      end = len(pending) - (0 if is_last else begun_length(pending, self._stops))
      released, self._withheld = pending[:end], pending[end:]
      self._num_exempt = max(0, self._num_exempt - len(released))
    self.text += released
    return released


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
  """A token, its log-probability, and the likeliest tokens with theirs.

  Fields:
    token: the token.
    offset: the position of the token's text in the generated text; negative for tokens of the prompt.
    text: what the token adds to the text; the last token of a character adds it.
    logprob: its log-probability; None for a prompt's first token.
    top: (token, log-probability) of the likeliest tokens at this position.
  """

  token: int
  offset: int
  text: str
  logprob: float | None
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
  """The text and tokens that one step adds to a sequence.

  Fields:
    sequence: the sequence.
    text: the next characters; empty while they may become a stop string, or a character is incomplete.
    logprobs: log-probabilities of the prompt's tokens, if it is scored, and of the tokens of the text; empty if the
      request wants none.
    tokens: the tokens that were generated since the last delta, a stop token included.
    finish_reason: why the sequence ended; None while more text follows.
  """

  sequence: 'GeneratedSequence'
  text: str
  logprobs: tuple[TokenLogprob, ...] = ()
  tokens: tuple[int, ...] = ()
  finish_reason: FinishReason | None = None


class GeneratedSequence:
  """A request, with its generated tokens and text so far.

  Attributes:
    request: the request.
    matcher: says which tokens may come next; None if the request is not constrained.
    index, owner: for the caller; this class does not use them.
    num_launched: how many tokens were launched.
    num_drafted, num_accepted: how many drafts were checked, and how many of them were right.
    num_reused: how many of the prompt's tokens were in the cache already when the sequence was first admitted.
    chunk_keys: the keys of the prompt's chunks, for the scheduler.
    num_tokens: how many generated tokens were fetched, a stop token included.
    logprobs: log-probabilities of the prompt's tokens, if it is scored, and of the fetched tokens, if wanted.
    finish_reason: why the sequence ended; None until it ends.
  """

  def __init__(
    self,
    request: Request,
    decode: Callable[[Sequence[int]], str],
    *,
    index: int = 0,
    has_logprobs: bool = False,
    matcher: Matcher | TokenLimits | None = None,
    owner: Any = None,
  ):
    self.request = request
    self.matcher = matcher
    self.index = index
    self.owner = owner
    self.num_launched = 0
    self.num_reused = 0
    self.num_drafted = self.num_accepted = 0
    self.chunk_keys: list[bytes] | None = None
    self.num_tokens = 0
    self.logprobs: list[TokenLogprob] = []
    self.finish_reason: FinishReason | None = None
    self._text = IncrementalText(decode, request.stop, kept_stops=request.kept_stops, before=request.ids)
    self._prompt_text = IncrementalText(decode)
    self._num_prompt_chars = len(decode(request.ids)) if request.score_prompt else 0
    self._has_logprobs = has_logprobs
    self._tokens: list[int] = []
    self._drafts: NgramDrafts | None = None
    self._num_known = 0  # how many tokens are still to be computed again, after `begin_again`
    self._num_scored = 0  # tokens of the prompt
    self._num_released = 0  # how many logprobs are in earlier deltas; the text of the others is withheld
    self._num_reported = 0  # how many of `_tokens` are in earlier deltas

  @property
  def text(self) -> str:
    """The generated text so far, without the part that is withheld."""
    return self._text.text

  def take(self, outputs: Outputs, row: int, chunk: Chunk | None = None) -> Delta:
    """Takes row `row` of the outputs (host arrays) of a step, or of the prefill that read `chunk`."""
    if chunk is not None and self.request.score_prompt and chunk.stop > self._num_scored:
      self._take_scores(outputs, row, chunk)
      self._num_scored = chunk.stop
    if chunk is not None and chunk.stop < len(self.request.ids):
      return Delta(sequence=self, text='', logprobs=self._release(len(self.logprobs)))
    if self.request.max_tokens == 0:
      return self._finish('length')
    if self._num_known:
      self._num_known -= 1
      return Delta(sequence=self, text='')
    token = int(outputs.tokens[row])
    self._tokens.append(token)
    self.num_tokens += 1
    if self._drafts is not None:
      self._drafts.push(token)
    if token in self.request.stop_ids:
      if token in self.request.kept_stops:
        return self._finish('stop', self._push(outputs, row))
      if self.request.score_prompt:
        # Clients that score a prompt ask for one more token and drop the last entry, which must exist.
        self._take_logprob(outputs, row, self._text.num_chars)
        return self._finish('stop')
      delta = self._finish('stop')
      self._take_logprob(outputs, row, self._text.num_chars)  # after the release, as a stop token has no text
      return delta
    piece = self._push(outputs, row)
    if self._text.stop is not None:
      return self._finish('stop', piece)
    if self.matcher is not None:
      self.matcher.take(token)
      if self.matcher.is_over:
        return self._finish('error' if self.matcher.failure else 'stop', piece)
    if bool(outputs.is_finished[row]):
      return self._finish('length', piece)
    return self._delta(piece, self._release(len(self.logprobs))) if piece else Delta(sequence=self, text='')

  @property
  def is_constrained(self) -> bool:
    """Whether the next token must be one of a mask, which depends on all tokens so far."""
    return self.matcher is not None and (self._num_known > 0 or not self.matcher.is_free)

  @property
  def mask(self) -> np.ndarray | None:
    """The tokens that may come next, uint32 [W]; None if the request is not constrained."""
    if self.matcher is None or not self.is_constrained:
      return None
    if not self._num_known:
      return self.matcher.mask
    token, mask = self._tokens[-self._num_known], np.zeros_like(self.matcher.mask)
    mask[token // 32] = 1 << token % 32
    return mask

  def may_draft(self, num_drafts: int) -> bool:
    """Returns whether the sequence may have drafts, on an engine that checks so many; a constrained one has none."""
    wanted = self.request.num_drafts
    return self.matcher is None and min(num_drafts, num_drafts if wanted is None else wanted) > 0

  def draft(self, num_drafts: int, *, by_model: bool = False) -> tuple[int, ...]:
    """Guesses the tokens that the next step samples, except the last one; all launched tokens are fetched.

    With `by_model` the engine guesses, and zeros say how many drafts it should have.
    """
    num = min(num_drafts if self.request.num_drafts is None else self.request.num_drafts, num_drafts)
    num = min(num, self.request.max_tokens - self.num_launched - 1)
    if num <= 0:
      return ()
    if by_model:
      return (0,) * num
    if self._num_known:
      return tuple(self._tokens[-self._num_known :][:num])
    if self._drafts is None:
      self._drafts = NgramDrafts((*self.request.prediction, *self.request.ids, *self._tokens))
    return self._drafts.guess(num)

  def begin_again(self) -> None:
    """Starts again from the prompt, after a preemption; `take` skips the outputs up to here."""
    self.num_launched, self._num_known = 0, self.num_tokens

  def end(self, reason: FinishReason) -> Delta:
    """Ends the sequence for the given reason."""
    return self._finish(reason)

  def _push(self, outputs: Outputs, row: int) -> str:
    """Adds the token of a row, and its log-probability; returns the piece of text that it completes."""
    offset = self._text.num_chars
    piece = self._text.push(int(outputs.tokens[row]), may_stop=self.num_tokens > self.request.min_tokens)
    self._take_logprob(outputs, row, offset, self._text.last_piece)
    return piece

  def _take_logprob(self, outputs: Outputs, row: int, offset: int, text: str = '') -> None:
    if self._has_logprobs:
      token = int(outputs.tokens[row])
      top = tuple(zip(outputs.top_ids[row].tolist(), outputs.top_logprobs[row].tolist(), strict=True))
      logprob = float(outputs.logprobs[row])
      self.logprobs.append(TokenLogprob(token=token, offset=offset, text=text, logprob=logprob, top=top))

  def _take_scores(self, outputs: Outputs, row: int, chunk: Chunk) -> None:
    """Adds the scores of the tokens after each of the chunk's tokens; the prompt's first token has none."""
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
      self._prompt_text.push(token)
      text = self._prompt_text.last_piece
      self.logprobs.append(TokenLogprob(token=token, offset=offset, text=text, logprob=logprob, top=top))

  def _finish(self, reason: FinishReason, piece: str = '') -> Delta:
    self.finish_reason = reason
    text = piece + self._text.finish()
    end = len(self.logprobs)
    while self._text.stop is not None and end > self._num_released and self.logprobs[end - 1].offset >= len(self.text):
      end -= 1
    if end > self._num_released and self.logprobs[end - 1].offset >= 0:
      last = self.logprobs[end - 1]
      # Text that no token completed, such as half a character, is the last token's; a stop string cuts it.
      whole = (last.text + self._text.last_piece)[: len(self.text) - last.offset]
      self.logprobs[end - 1] = dataclasses.replace(last, text=whole)
    return self._delta(text, self._release(end), reason)

  def _delta(self, text: str, logprobs: tuple[TokenLogprob, ...], reason: FinishReason | None = None) -> Delta:
    tokens, self._num_reported = tuple(self._tokens[self._num_reported :]), len(self._tokens)
    return Delta(sequence=self, text=text, logprobs=logprobs, tokens=tokens, finish_reason=reason)

  def _release(self, end: int) -> tuple[TokenLogprob, ...]:
    released = tuple(self.logprobs[self._num_released : end])
    self._num_released = end
    return released


def begun_length(text: str, stops: Collection[str]) -> int:
  """Returns how many characters at the end of `text` begin a stop string, 0 if none; a whole one does not count."""
  if not stops:
    return 0
  longest = max(len(stop) for stop in stops)
  lengths = range(min(len(text), longest - 1), 0, -1)
  return next((n for n in lengths if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)), 0)
