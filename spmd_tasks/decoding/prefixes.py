"""PrefixTable: which beginnings of prompts the slots' caches hold, chunk by chunk.

    length, slots = table.longest(ids)    # so many tokens of a prompt need not be read: these slots hold them
    table.note(chunk)                     # once its prefill is launched

A tree of whole chunks, each a tuple of its tokens, so that no prompt is ever taken for another one (as in the radix
tree of SGLang: Zheng et al., 2024; here cut at multiples of C). What a slot holds counts until its next prefill, also
when its sequence has ended.
"""

from collections.abc import Set
from typing import Protocol

from spmd_tasks.decoding.requests import Chunk


class Caches(Protocol):
  """What the table needs of an Engine."""

  @property
  def num_slots(self) -> int: ...
  @property
  def prefill_chunk(self) -> int: ...
  @property
  def can_reuse(self) -> bool: ...
  @property
  def cache_epoch(self) -> int: ...


class _Node:
  """A chunk behind its parent's; `slots` hold it and all before it."""

  def __init__(self, parent: '_Node | None' = None, tokens: tuple[int, ...] = ()):
    self.parent = parent
    self.tokens = tokens
    self.children: dict[tuple[int, ...], _Node] = {}
    self.slots: set[int] = set()


class PrefixTable:
  """Empty again whenever the engine's cache_epoch is another: nothing that was computed before it is ever found."""

  def __init__(self, engine: Caches):
    self._engine = engine
    self._size = engine.prefill_chunk
    self._clear()

  def longest(self, ids: tuple[int, ...]) -> tuple[int, Set[int]]:
    """(number of a prompt's leading tokens that slots hold, those slots); one token at least is left to read."""
    self._check()
    node, length = self._root, 0
    for stop in range(self._size, len(ids), self._size):
      child = node.children.get(ids[length:stop])
      if child is None:
        break
      node, length = child, stop
    return length, node.slots

  def num_held(self, slot: int) -> int:
    """How many tokens of a prompt a slot holds."""
    self._check()
    return len(self._paths[slot]) * self._size

  def can_be_reused(self, chunk: Chunk) -> bool:
    """Whether other prompts may go on behind a chunk."""
    # Prompts are scored by programs of their own, whose numbers may differ in the last bits.
    is_whole = chunk.stop - chunk.start == self._size
    return self._engine.can_reuse and is_whole and not chunk.request.score_prompt

  def note(self, chunk: Chunk) -> None:
    """The chunk's slot holds now what its source held before `start`, and the chunk, if it is a whole one."""
    self._check()
    old, path = self._paths[chunk.slot], self._paths[chunk.source][: chunk.start // self._size]
    if self.can_be_reused(chunk):
      parent = path[-1] if path else self._root
      tokens = chunk.request.ids[chunk.start : chunk.stop]
      path.append(parent.children.setdefault(tokens, _Node(parent, tokens)))
    self._paths[chunk.slot] = path
    for node in path:
      node.slots.add(chunk.slot)
    for node in set(old).difference(path):
      node.slots.remove(chunk.slot)
      if not node.slots and node.parent is not None:
        del node.parent.children[node.tokens]

  def _check(self) -> None:
    if self._epoch != self._engine.cache_epoch:
      self._clear()

  def _clear(self) -> None:
    self._epoch = self._engine.cache_epoch
    self._root = _Node()
    self._paths: list[list[_Node]] = [[] for _ in range(self._engine.num_slots)]
