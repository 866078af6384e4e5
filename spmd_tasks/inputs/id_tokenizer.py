"""IdTokenizer, for a model whose tokenizer is elsewhere."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdTokenizer:
  """Ids written as numbers: '5 17 3'. Generated ids begin with a space each, so that texts can be joined."""

  vocab_size: int
  eos_id: int
  pad_id: int = 0
  bos_id: int | None = None

  def encode(self, text: str) -> list[int]:
    """Raises UserError where the text holds anything but ids of the vocabulary."""
    words = text.split()
    for word in words:
      if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
        raise UserError(
          f'{word[:40]!r} is no id: this model has no tokenizer; write its ids, below {self.vocab_size}, with spaces '
          'between them.'
        )
    return [int(word) for word in words]

  def encode_array(self, text: str) -> np.ndarray:
    return np.array(self.encode(text), np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    return ''.join(f' {token}' for token in ids if token != self.eos_id)

  def fingerprint(self) -> str:
    return f'ids {self.vocab_size}'
