"""PrefixTable: finds the slots whose KV caches hold the beginning of a new prompt.

    length, slots = table.longest(request)  # these slots hold the prompt's first `length` tokens: they need no prefill
    table.note(chunk)                       # after a prefill of the chunk was launched

The table is a tree of whole chunks, keyed by all of their tokens, so that no prompt is mistaken for another (as in the
radix tree of SGLang: Zheng et al., 2024; here cut at multiples of C). Each low-rank adapter has a tree of its own,
because it gives the same tokens other keys and values. An entry lasts until its slot's next prefill,
also after the slot's sequence has ended.
"""

from collections.abc import Set

from spmd_tasks.decoding.engine_contract import Engine
from spmd_tasks.decoding.requests import Chunk, Request


class _Node:
  """A chunk that follows its parent's chunk; `slots` hold this chunk and all before it."""

  def __init__(self, parent: '_Node | None' = None, tokens: tuple[int, ...] = ()):
    self.parent = parent
    self.tokens = tokens
    self.children: dict[tuple[int, ...], _Node] = {}
    self.slots: set[int] = set()


class PrefixTable:
  """The chunks in an engine's slots; a new cache_epoch of the engine empties the table."""

  def __init__(self, engine: Engine):
    self._engine = engine
    self._size = engine.prefill_chunk
    self._clear()

  def longest(self, request: Request) -> tuple[int, Set[int]]:
    """Returns (length of the longest held beginning, the slots that hold it); at least one token is left to read."""
    self._check()
    ids, node, length = request.ids, self._roots.get(request.adapter, _Node()), 0
    for stop in range(self._size, len(ids), self._size):
      child = node.children.get(ids[length:stop])
      if child is None:
        break
      node, length = child, stop
    return length, node.slots

  def num_held(self, slot: int) -> int:
    """The number of a prompt's tokens that a slot holds."""
    self._check()
    return len(self._paths[slot]) * self._size

  def can_be_reused(self, chunk: Chunk) -> bool:
    """Whether other prompts may continue after this chunk."""
    # Scored prompts are read by different programs, whose numbers may differ in the last bits.
    is_whole = chunk.stop - chunk.start == self._size
    return self._engine.can_reuse and is_whole and not chunk.request.score_prompt

  def note(self, chunk: Chunk) -> None:
    """Records that the chunk's slot now holds its source's tokens before `start`, and the chunk if it is whole."""
    self._check()
    old, path = self._paths[chunk.slot], self._paths[chunk.source][: chunk.start // self._size]
    if self.can_be_reused(chunk):
      parent = path[-1] if path else self._roots.setdefault(chunk.request.adapter, _Node())
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
    self._roots: dict[int, _Node] = {}  # by the adapter's number
    self._paths: list[list[_Node]] = [[] for _ in range(self._engine.num_slots)]
