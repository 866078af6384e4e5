"""BlockPool: allocates blocks of the KV cache to texts, shares the beginnings of prompts, and evicts.

    pool = BlockPool(engine)
    text = pool.open(part=0, keys=keys)            # begins with chunks of earlier prompts
    pool.grow(text, num_tokens=300)                # False if too few blocks are free
    pool.share(text, key, chunk)                   # lets later prompts use a whole chunk
    pool.close(text)

Prompts that begin alike share the blocks of whole chunks. The key of a chunk is a hash of all tokens up to its end (as
in vLLM: Kwon et al., 2023), of the low-rank adapter, with which the same tokens have other keys and values, and of the
request's `cache_key`. Shared chunks outlive their texts. When blocks are needed, the least recently used chunks are
evicted. The last chunks of a prompt count as less recently used than its first ones, without which they are of no use.

A model whose layers have states continues a prompt only from a snapshot of the states after the chunks that it reuses.
Snapshots are few, and large, so not every chunk has one. Two are taken of a prompt, if they do not exist yet: after the
last whole chunk before its last token, for the next turn of a conversation and further samples; and where the chunks
that it has in common with earlier prompts end, for a beginning that many prompts have, such as a system prompt. (So has
SGLang.) A snapshot is dropped with its chunk, or if it is the least recently used when another one is taken.

All state is on the host and depends only on the calls, so that all processes agree.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import itertools
from typing import Any

import numpy as np

from spmd_tasks.decoding.requests import Chunk, Request


@dataclasses.dataclass(eq=False)
class SharedChunk:
  """The blocks of a whole chunk of prompts, the number of texts that use it now, and the snapshot after it, if any."""

  key: bytes
  blocks: tuple[int, ...]
  num_users: int = 0
  snapshot: int | None = None


@dataclasses.dataclass(eq=False)
class Text:
  """The blocks of a text in order, the shared chunks that some of them belong to, and its borders.

  At a border, a position of the prompt, a snapshot is taken. `snapshot` is the one that the text continues.
  """

  part: int
  blocks: list[int]
  chunks: list[SharedChunk]
  borders: frozenset[int] = frozenset()
  snapshot: int | None = None


def chunk_keys(request: Request, size: int) -> list[bytes]:
  """Returns a key for each whole chunk of a prompt: a hash of all tokens up to its end."""
  key, keys = repr((request.adapter, request.cache_key)).encode(), []
  for stop in range(size, len(request.ids) + 1, size):
    tokens = np.asarray(request.ids[stop - size : stop], np.int32).tobytes()
    key = hashlib.blake2b(key + tokens, digest_size=32).digest()
    keys.append(key)
  return keys


class BlockPool:
  """The blocks of an engine, in the parts into which its mesh splits them.

  Attributes:
    num_blocks: the number of blocks of all parts.
  """

  def __init__(self, engine: Any):
    """Begins with all blocks free; `engine` has the sizes, see engine_contract.py."""
    self.num_blocks = engine.num_blocks
    self._block_tokens = engine.block_tokens
    size = engine.num_blocks // engine.num_parts
    self._free = [list(range(part * size, (part + 1) * size))[::-1] for part in range(engine.num_parts)]
    self._chunks: list[dict[bytes, SharedChunk]] = [{} for _ in self._free]
    self._unused: list[dict[SharedChunk, None]] = [{} for _ in self._free]  # least recently used first
    self._num_unused = [0 for _ in self._free]  # their blocks
    self._chunk_tokens, self._has_snapshots = engine.prefill_chunk, engine.num_snapshots > 0
    of_part = engine.num_snapshots // engine.num_parts
    self._free_snapshots = [list(range(part * of_part, (part + 1) * of_part))[::-1] for part in range(engine.num_parts)]
    self._with_snapshots: list[dict[SharedChunk, None]] = [{} for _ in self._free]  # least recently used first

  @property
  def num_used(self) -> int:
    """The number of blocks of open texts."""
    return self.num_blocks - sum(self.num_available(part) for part in range(len(self._free)))

  def num_available(self, part: int) -> int:
    """Returns how many blocks of a part new texts can have, if all unused chunks are evicted."""
    return len(self._free[part]) + self._num_unused[part]

  def longest(self, keys: Sequence[bytes], part: int) -> list[SharedChunk]:
    """Returns the part's chunks from which a text with these keys continues: up to the first key without one.

    With snapshots, up to the last snapshot among them.
    """
    chunks = self._known(keys, part)
    while self._has_snapshots and chunks and chunks[-1].snapshot is None:
      chunks.pop()
    return chunks

  def _known(self, keys: Sequence[bytes], part: int) -> list[SharedChunk]:
    known = itertools.takewhile(self._chunks[part].__contains__, keys)
    return [self._chunks[part][key] for key in known]

  def num_needed(self, num_tokens: int, chunks: Sequence[SharedChunk]) -> int:
    """Returns how many available blocks a text of `num_tokens` tokens takes that begins with these chunks."""
    num_in_use = sum(len(chunk.blocks) for chunk in chunks if chunk.num_users)
    return -(-num_tokens // self._block_tokens) - num_in_use

  def open(self, part: int, keys: Sequence[bytes]) -> Text:
    """Begins a text that has the blocks of the `longest` chunks with these keys, of those that it may reuse."""
    chunks = self.longest(keys, part)
    for chunk in chunks:
      if not chunk.num_users:
        self._take_unused(part, chunk)
      chunk.num_users += 1
    text = Text(part, [block for chunk in chunks for block in chunk.blocks], chunks)
    if self._has_snapshots:
      text.borders = frozenset(num * self._chunk_tokens for num in (len(keys), len(self._known(keys, part))))
      if chunks:
        self._with_snapshots[part][chunks[-1]] = self._with_snapshots[part].pop(chunks[-1])  # used last
        text.snapshot = chunks[-1].snapshot
    return text

  def grow(self, text: Text, num_tokens: int) -> bool:
    """Gives a text the blocks for its first `num_tokens` tokens; returns False, and changes nothing, without enough."""
    missing = -(-num_tokens // self._block_tokens) - len(text.blocks)
    free = self._free[text.part]
    if missing > self.num_available(text.part):
      return False
    while missing > len(free):
      chunk = self._take_unused(text.part, next(iter(self._unused[text.part])))
      del self._chunks[text.part][chunk.key]
      self._drop_snapshot(text.part, chunk)
      free.extend(reversed(chunk.blocks))
    text.blocks += [free.pop() for _ in range(missing)]
    return True

  def share(self, text: Text, key: bytes, chunk: Chunk) -> int | None:
    """Lets later texts use a whole chunk of a text's prompt, unless its tokens are shared already.

    Returns the snapshot that is to be taken after the chunk; None for none. A later call may return the same one.
    """
    shared = self._chunks[text.part].get(key)
    if shared is None:
      blocks = text.blocks[chunk.start // self._block_tokens : chunk.stop // self._block_tokens]
      self._chunks[text.part][key] = shared = SharedChunk(key, tuple(blocks), num_users=1)
      text.chunks.append(shared)
    if chunk.stop not in text.borders or shared.snapshot is not None:
      return None
    if not self._free_snapshots[text.part]:
      self._drop_snapshot(text.part, next(iter(self._with_snapshots[text.part])))
    shared.snapshot = self._free_snapshots[text.part].pop()
    self._with_snapshots[text.part][shared] = None
    return shared.snapshot

  def close(self, text: Text) -> None:
    """Frees the blocks of a text, except its shared chunks."""
    own = dict.fromkeys(text.blocks)
    for chunk in reversed(text.chunks):
      chunk.num_users -= 1
      is_kept = self._chunks[text.part].get(chunk.key) is chunk
      if chunk.num_users == 0 and is_kept:
        self._unused[text.part][chunk] = None
        self._num_unused[text.part] += len(chunk.blocks)
      if chunk.num_users or is_kept:
        for block in chunk.blocks:
          del own[block]
    self._free[text.part] += reversed(own)

  def forget(self) -> None:
    """Drops all shared chunks, when their keys and values are no longer valid."""
    for part, unused in enumerate(self._unused):
      for chunk in list(unused):
        self._free[part] += self._take_unused(part, chunk).blocks
      for chunk in list(self._with_snapshots[part]):
        self._drop_snapshot(part, chunk)
      self._chunks[part].clear()

  def _drop_snapshot(self, part: int, chunk: SharedChunk) -> None:
    if chunk.snapshot is not None:
      del self._with_snapshots[part][chunk]
      self._free_snapshots[part].append(chunk.snapshot)
      chunk.snapshot = None

  def _take_unused(self, part: int, chunk: SharedChunk) -> SharedChunk:
    del self._unused[part][chunk]
    self._num_unused[part] -= len(chunk.blocks)
    return chunk
