"""NgramDrafts: guesses the next tokens of a text by what followed the same tokens before in it (prompt lookup).

    drafts = NgramDrafts(prompt_ids)
    drafts.push(token)               # each generated token
    drafts.guess(4)                  # 4 tokens, or () if the last two tokens have not occurred together before

Speculative decoding: a step computes a text's newest token and its drafts at once, each in a row of its own. It samples
after each row as a step without drafts does, with the noise of its position, and keeps the tokens up to the first one
that differs from its draft. So a text has the same tokens with and without drafts, sampled ones too. The model accepts
a draft with the probability that it gives it, as rejection sampling accepts a deterministic guess (Leviathan et al.,
2023; with shared noise: Daliri et al., 2024).
"""

from collections.abc import Iterable
from typing import Any

from flax import struct
import jax.numpy as jnp
import numpy as np

_SIZES = (3, 2)  # of n-grams, the longest first


class NgramDrafts:
  """A text, and the place at which each of its n-grams ended last."""

  def __init__(self, ids: Iterable[int]):
    self._ids: list[int] = []
    self._ends: dict[tuple[int, ...], int] = {}
    for token in ids:
      self.push(token)

  def push(self, token: int) -> None:
    """Appends a token to the text."""
    for size in _SIZES:
      if len(self._ids) >= size:
        self._ends[tuple(self._ids[-size:])] = len(self._ids)
    self._ids.append(token)

  def guess(self, num: int) -> tuple[int, ...]:
    """Returns the `num` tokens that followed the text's last n-gram before, repeated if there are fewer."""
    length = len(self._ids)
    for size in _SIZES:
      end = self._ends.get(tuple(self._ids[-size:]))
      if end is not None:
        return tuple(self._ids[end + i % (length - end)] for i in range(num))
    return ()


class DraftRows(struct.PyTreeNode):
  """The rows of a step that checks drafts: for each of n slots the newest token, followed by the slot's drafts.

  Attributes:
    owners: int32 [R], the index of the row's slot among the n; n for an unused row.
    columns: int32 [R], 0 for the slot's newest token, i for its i-th draft.
    tokens: int32 [R], the drafts; 0 in other rows.
    earlier: int32 [R, k], the rows of the 1, 2, .. k tokens before in the same text; R if there is none.
    rows: int32 [n, k + 1], the row of each column of a slot; R if there is none.
    slots: int32 [n], the slot of each text, N or more for an unused one; None: text i is in slot i.
  """

  owners: Any
  columns: Any
  tokens: Any
  earlier: Any
  rows: Any
  slots: Any = None

  def by_column(self, x: Any) -> Any:
    """Returns [k + 1, n, ...] from what the rows have, [R, ...]; zeros if there is no row."""
    return jnp.take(x, self.rows.T, axis=0, mode='fill', fill_value=0)

  def tables_of_slots(self, tables: np.ndarray, none: int) -> np.ndarray:
    """Returns the table of each slot, int32 [D, n/D, M], from tables of the rows on the host.

    Slots without rows get blocks `none`.
    """
    num_parts, _, size = tables.shape
    of_slots = np.full((num_parts * -(-len(self.rows) // num_parts), size), none, np.int32)
    (busy,) = np.nonzero(self.rows[:, 0] < len(self.owners))
    of_slots[busy] = tables.reshape(-1, size)[self.rows[busy, 0]]
    return of_slots.reshape(num_parts, -1, size)

  def tables_of_texts(self, tables: Any) -> Any:
    """Returns the tables of the n texts, int32 [D, n/D, M], from the tables of the rows [D, R/D, M]."""
    num_parts, _, size = tables.shape
    first = jnp.take(tables.reshape(-1, size), self.rows[:, 0], axis=0, mode='fill', fill_value=2**30)
    added = -len(first) % num_parts
    return jnp.pad(first, ((0, added), (0, 0)), constant_values=2**30).reshape(num_parts, -1, size)
