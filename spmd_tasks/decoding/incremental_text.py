r"""IncrementalText: tokens to text as they come, without half characters, ending at a stop string.

text = IncrementalText(tokenizer.decode, stop=('\n\n',))
for token in tokens:
  print(text.push(token), end='')
print(text.finish(), end='')
"""

from collections.abc import Callable, Sequence

_UNFINISHED = '\ufffd'  # what a decoder gives for bytes that are not, or not yet, a character
_WINDOW = 32  # tokens that are decoded again with each new one


class IncrementalText:
  """The text of a growing list of tokens, in pieces that never change again.

  Held back is what may change: the bytes of a character whose last ones are missing, and what may be the beginning of a
  stop string. All pieces together are `decode` of all tokens, up to the first stop string.

  Attributes:
    text: all pieces so far.
    stop: the stop string that ended the text, None where none did.
  """

  def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
    self._decode = decode
    self._stops = tuple(stop)
    self._tokens: list[int] = []  # the window: those whose text may still matter for that of the next
    self._num_taken = 0  # characters of the window's text that were taken
    self._held = ''
    self.text = ''
    self.stop: str | None = None

  def push(self, token: int) -> str:
    """The piece that a token completes, which may be empty."""
    self._tokens.append(token)
    whole = self._decode(self._tokens)
    # Earlier bytes that are no character stay none, whatever follows: only the last one may yet become one.
    stable = whole[:-1] if whole.endswith(_UNFINISHED) else whole
    piece = stable[self._num_taken :]
    self._num_taken = max(self._num_taken, len(stable))
    if len(self._tokens) > _WINDOW and stable == whole:
      # Decoders that join tokens need the character before, which may be several tokens.
      for num_kept in range(1, 5):
        last = self._decode(self._tokens[-num_kept:])
        if _UNFINISHED not in last:
          self._tokens, self._num_taken = self._tokens[-num_kept:], len(last)
          break
    return self._release(piece, is_last=False)

  def finish(self) -> str:
    """The last piece, when no token follows."""
    return self._release(self._decode(self._tokens)[self._num_taken :], is_last=True)

  def _release(self, piece: str, *, is_last: bool) -> str:
    if self.stop is not None:
      return ''
    held = self._held + piece
    found = [(held.index(stop), stop) for stop in self._stops if stop in held]
    if found:
      end, self.stop = min(found, key=lambda at: (at[0], -len(at[1])))
      released, self._held = held[:end], ''
    else:
      num_held = 0 if is_last else max((_overlap(held, stop) for stop in self._stops), default=0)
      released, self._held = held[: len(held) - num_held], held[len(held) - num_held :]
    self.text += released
    return released


def _overlap(text: str, stop: str) -> int:
  """How many characters at the end of `text` are the beginning of `stop`."""
  return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
