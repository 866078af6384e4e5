"""NgramDrafts: guesses the next tokens of a text by what followed the same tokens before in it (prompt lookup).

    drafts = NgramDrafts(prompt_ids)
    drafts.push(token)               # each generated token
    drafts.guess(4)                  # up to 4 tokens, () where the last two tokens are new together

Speculative decoding: a step computes a text's newest token and its drafts at once, each as a row of its own, and draws
after each one as a step without drafts does, with the noise of its position. It keeps tokens up to the first that
is not the one drafted. So a text has the tokens that it has without drafts, drawn ones too, which are not only of the
same distribution: the draft is accepted with the probability that the model gives it, which is what rejection sampling
of a certain guess does (Leviathan et al., 2023; with shared noise: Daliri et al., 2024).
"""

from collections.abc import Iterable
from typing import Any

from flax import struct
import jax.numpy as jnp
import numpy as np

_SIZES = (3, 2)  # of n-grams, the longest first


class NgramDrafts:
  """A text with the places where each of its n-grams ended last."""

  def __init__(self, ids: Iterable[int]):
    self._ids: list[int] = []
    self._ends: dict[tuple[int, ...], int] = {}
    for token in ids:
      self.push(token)

  def push(self, token: int) -> None:
    """Adds a token: it follows the n-grams that ended the text."""
    for size in _SIZES:
      if len(self._ids) >= size:
        self._ends[tuple(self._ids[-size:])] = len(self._ids)
    self._ids.append(token)

  def guess(self, num: int) -> tuple[int, ...]:
    """What followed the text's last n-gram before; a text that repeats itself is taken to go on so."""
    length = len(self._ids)
    for size in _SIZES:
      end = self._ends.get(tuple(self._ids[-size:]))
      if end is not None:
        return tuple(self._ids[end + i % (length - end)] for i in range(num))
    return ()


class DraftRows(struct.PyTreeNode):
  """The rows of a step that checks drafts: for each of n slots its newest token, then its drafts, one after another.

  Attributes:
    owners: int32 [R], the place among the n of each row's slot; n where a row is not used.
    columns: int32 [R], 0 for the slot's newest token, i for its i-th draft.
    tokens: int32 [R], the drafts; 0 elsewhere.
    earlier: int32 [R, k], the rows of the tokens 1, 2, .. k places before in the same text; R where there is none.
    rows: int32 [n, k + 1], the row of each slot's column; R where there is none.
  """

  owners: Any
  columns: Any
  tokens: Any
  earlier: Any
  rows: Any

  def tables_of_slots(self, tables: np.ndarray, none: int) -> np.ndarray:
    """Returns one block table per slot, int32 [D, n/D, M], on the host; slots without rows get `none`."""
    num_parts, _, size = tables.shape
    of_slots = np.full((num_parts * -(-len(self.rows) // num_parts), size), none, np.int32)
    (busy,) = np.nonzero(self.rows[:, 0] < len(self.owners))
    of_slots[busy] = tables.reshape(-1, size)[self.rows[busy, 0]]
    return of_slots.reshape(num_parts, -1, size)

  def tables_of_texts(self, tables: Any) -> Any:
    """The blocks of the n texts, int32 [D, n/D, M], from those of the rows [D, R/D, M]."""
    num_parts, _, size = tables.shape
    first = jnp.take(tables.reshape(-1, size), self.rows[:, 0], axis=0, mode='fill', fill_value=2**30)
    added = -len(first) % num_parts
    return jnp.pad(first, ((0, added), (0, 0)), constant_values=2**30).reshape(num_parts, -1, size)
