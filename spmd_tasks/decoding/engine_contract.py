"""Engine: the interface between the scheduler and a model; tests put a fake engine in the model's place.

    engine.warm_up()
    first = engine.prefill(chunks)    # chunks of prompts into slots: launches the computation and returns at once
    tokens = engine.step(keep)        # the next token of every slot: launches too
    first.read().tokens               # waits for the device

Computations run in the order of their launches. A prompt's first chunk replaces what its slot held; steps leave the
slot unchanged until the prompt's last chunk was read. One thread makes all calls.

The keys and values of a text are in blocks, which the caller hands out: a prefill's chunks name all blocks of their
texts so far, and a step those that it begins. Blocks are in parts, as slots are: the first N/D slots, rounded up, have
theirs in the first B/D blocks, and so on.

Prompts are cut at multiples of C, so that one program computes a whole chunk from the same numbers every time: a prompt
that continues after another prompt's chunks has the bits that it would have alone. Only whole chunks that a prefill
read may be reused, not generated tokens.

Shapes: N slots, R rows of a prefill (or N of a step), C tokens of a whole chunk, B blocks in D parts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from spmd_tasks.decoding.decode_state import Outputs
from spmd_tasks.decoding.requests import Chunk

# Which tokens a row or slot may take: uint32 [W], see constraints.py.
TokenMasks = Mapping[int, np.ndarray]


class Launched(Protocol):
  """Outputs of a launched computation, which may still be running."""

  def read(self) -> Outputs:
    """Waits for the device; returns the outputs as host arrays [R] or longer, or raises the device's error."""


class Engine(Protocol):
  """A model with N slots.

  Attributes:
    num_slots: N.
    prefill_chunk: C.
    num_drafts: k, see `step`; 0 for none.
    has_draft_model: whether the engine itself guesses the drafts, of which the caller says how many it wants.
    can_reuse: whether a prompt may continue after chunks that were read for another prompt.
    max_len: positions of a slot, for prompt and generated tokens.
    block_tokens, num_blocks, num_parts: positions of a block, B and D; a part has blocks for max_len positions or more.
    weights: of the model; may be replaced only while no slot is in use.
    cache_epoch: a number that changes when what is in the blocks becomes unusable: by `reset`, and by new weights.
  """

  num_slots: int
  prefill_chunk: int
  num_drafts: int
  has_draft_model: bool
  can_reuse: bool
  max_len: int
  block_tokens: int
  num_blocks: int
  num_parts: int
  weights: Any

  @property
  def cache_epoch(self) -> int: ...

  def warm_up(self) -> None:
    """Compiles every program that a request may need and runs each once. Slots are empty afterwards."""

  def reset(self) -> None:
    """Empties all slots; works after a failure too."""

  def prefill_shape(self, chunk: Chunk) -> tuple[int, int]:
    """How many tokens, padding included, a prefill of this chunk computes, and how many such chunks it may read."""

  def prefill(
    self, chunks: Sequence[Chunk], *, score_prompts: bool = False, masks: TokenMasks | None = None
  ) -> Launched:
    """Reads chunks into their slots; row i of the outputs is the token after chunk i, valid where its prompt ends.

    Args:
      chunks: in different slots and of one `prefill_shape`, so that each has the bits that it would have alone; either
        all are the first ones of their prompts or none is. The blocks of the tokens before `start` hold these tokens,
        by whomever they were read.
      score_prompts: whether the outputs have the log-probabilities of the tokens that follow the chunks' tokens.
      masks: of the rows whose first token is constrained.
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
      keep: bool [N]; where it is False, the slot's sequence is abandoned.
      masks: of the slots whose token is constrained.
      grown: (slot, block) of the slots whose text goes on in a new block from this step on.
      drafts: of some slots, without masks: up to k tokens that may come next. Outputs are then [k + 1, N]: of each
        slot as many tokens, from the first one on, as `is_valid` says.
    """
