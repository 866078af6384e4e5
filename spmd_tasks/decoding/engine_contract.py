"""Engine: what the scheduler needs of a model, small enough for a fake to stand in for it.

    engine.warm_up()
    first = engine.prefill(chunks)    # pieces of prompts into slots; launched, not waited for
    tokens = engine.step(keep)        # the next token of every slot; launched too
    first.read().tokens               # waits

What is launched runs in that order. A prompt's first chunk takes its slot over, whatever was in it; steps pass the slot
by until the last chunk. All calls are made by one thread.

Prompts are cut at multiples of C, so that whole chunks are always computed by one program from the same numbers: a
prompt that goes on behind another slot's chunks has the bits that it would have on its own. What may be reused are
whole chunks that a prefill read, and not tokens that were generated.

Shapes: N slots, R rows: those of a prefill, or N; C tokens of a whole chunk.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from spmd_tasks.decoding.loop import Outputs
from spmd_tasks.decoding.requests import Chunk


class Launched(Protocol):
  """Outputs that may not be there yet."""

  def read(self) -> Outputs:
    """The outputs as host arrays [R], or longer; waits for the device, and raises what went wrong there."""
    ...


class Engine(Protocol):
  """A model with N slots.

  Attributes:
    num_slots: N.
    prefill_rows: how many chunks one prefill takes at most.
    prefill_chunk: C.
    can_reuse: whether a prompt may go on behind chunks that were read for another one.
    max_len: positions of a slot, for prompt and generated tokens.
    weights: what the tokens are computed from; replaced only while no slot is in use.
    cache_epoch: another number whenever no chunk in the slots may be reused any more: after `reset`, and with other
      weights.
  """

  weights: Any

  @property
  def num_slots(self) -> int: ...
  @property
  def prefill_rows(self) -> int: ...
  @property
  def prefill_chunk(self) -> int: ...
  @property
  def can_reuse(self) -> bool: ...
  @property
  def max_len(self) -> int: ...
  @property
  def cache_epoch(self) -> int: ...

  def warm_up(self) -> None:
    """Compiles all that any request may need, and runs it once. Slots are empty afterwards."""
    ...

  def reset(self) -> None:
    """Empties all slots, also after a failure."""
    ...

  def prefill_cost(self, chunk: Chunk) -> int:
    """How many tokens a prefill of this chunk computes, padding and unused rows included."""
    ...

  def prefill(self, chunks: Sequence[Chunk], *, score_prompts: bool = False) -> Launched:
    """Reads chunks into their slots; row i of the outputs is the first token of chunk i, valid where its prompt ends.

    Args:
      chunks: at most `prefill_rows`, in different slots and of one `prefill_cost`, so that the same program reads each
        of them alone; all are the first of their prompts, or none is. Where a chunk's `source` is another slot, that
        one's tokens before `start` are copied first.
      score_prompts: whether the outputs have the log-probabilities of the tokens behind those of the chunks.
    """
    ...

  def step(self, keep: np.ndarray) -> Launched:
    """The next token of every slot; `keep` bool [N] is False where what is in the slot is given up."""
    ...
