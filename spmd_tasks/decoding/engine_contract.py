"""Engine: the interface between the scheduler and a model, which tests implement without a model.

    engine.warm_up()
    first = engine.prefill(chunks)    # reads chunks of prompts into slots; launches the computation and returns at once
    tokens = engine.step(keep)        # generates the next token of every slot; launches too
    first.read().tokens               # waits for the device

Computations run in the order of their launches. The first chunk of a prompt replaces the contents of its slot, and
steps leave the slot unchanged until the prompt's last chunk was read. One thread makes all calls.

The caller allocates the blocks of the KV cache: the chunks of a prefill name all blocks of their texts, and a step
names new blocks. The mesh splits slots and blocks into parts: the first N/D slots, rounded up, have the first B/D
blocks, and so on.

Prompts are cut at multiples of C, so that the same program always computes a whole chunk from the same numbers. A
prompt that continues after another prompt's chunks has the same bits as if it were alone. Only whole chunks that a
prefill read may be reused, not generated tokens.

Shapes: N slots, R rows of a prefill (or N of a step), C tokens of a whole chunk, B blocks in D parts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from spmd_tasks.decoding.decode_state import Outputs
from spmd_tasks.decoding.requests import Chunk

# Row or slot -> the tokens that it may take, uint32 [W], see constraints.py.
TokenMasks = Mapping[int, np.ndarray]


class Launched(Protocol):
  """Outputs of a launched computation, which may still be running."""

  def read(self) -> Outputs:
    """Waits for the device; returns the outputs as host arrays of at least R rows, or raises the device's error."""


class Engine(Protocol):
  """A model with N slots.

  Attributes:
    num_slots: N.
    prefill_chunk: C.
    num_drafts: k, how many drafts of a slot a step may check; 0 for none.
    has_draft_model: whether the engine guesses the drafts itself, so that the caller only says how many it wants.
    can_reuse: whether a prompt may continue after chunks that were read for another prompt.
    num_snapshots: how many states of prompts' beginnings the engine keeps, in D equal parts as slots; 0 if its layers
      have no state beside the blocks. With snapshots, a prompt continues after another one's chunks only from the
      snapshot of the state after them.
    max_len: positions of a slot, for prompt and generated tokens.
    block_tokens, num_blocks, num_parts: positions of a block, B and D; a part has blocks for at least max_len
      positions.
    weights: the model's weights; may be replaced only while no slot is in use.
    cache_epoch: a number that changes when the contents of blocks become invalid: after `reset`, and with new weights.
  """

  num_slots: int
  prefill_chunk: int
  num_drafts: int
  has_draft_model: bool
  can_reuse: bool
  num_snapshots: int
  max_len: int
  block_tokens: int
  num_blocks: int
  num_parts: int
  weights: Any

  @property
  def cache_epoch(self) -> int: ...

  def warm_up(self) -> None:
    """Compiles every program that a request may need, and runs each once; empties all slots."""

  def reset(self) -> None:
    """Empties all slots, also after a failure."""

  def prefill_shape(self, chunk: Chunk) -> tuple[int, int]:
    """Returns how many tokens of this chunk a prefill computes, with padding, and how many such chunks it may read."""

  def prefill(
    self, chunks: Sequence[Chunk], *, score_prompts: bool = False, masks: TokenMasks | None = None
  ) -> Launched:
    """Reads chunks into their slots; row i of the outputs is the token after chunk i, valid if its prompt ends.

    Args:
      chunks: chunks in different slots, all of one `prefill_shape`, so that each has the same bits as alone. Either all
        are first chunks of their prompts, or none is. The tokens before `start` have been read into their blocks.
        Snapshots are restored before others are saved, so that a chunk may save to one that another chunk restores.
      score_prompts: whether to return the log-probabilities of the prompts' tokens after each of the chunks' tokens.
      masks: the token masks of rows whose first token is constrained.
    """

  def step(
    self,
    keep: np.ndarray,
    masks: TokenMasks | None = None,
    grown: Sequence[tuple[int, int]] = (),
    drafts: Mapping[int, Sequence[int]] | None = None,
  ) -> Launched:
    """Computes the next token of every slot.

    Args:
      keep: bool [N]; abandons the sequences of slots with False.
      masks: the token masks of slots whose token is constrained.
      grown: (slot, block) of the slots whose text continues in a new block from this step on.
      drafts: up to k tokens of some slots that may come next; not together with masks. The outputs are then [k + 1, N],
        and `is_valid` says how many tokens of each slot there are.
    """
