"""Engine: what the scheduler needs of a model, small enough for a fake to stand in for it.

    engine.warm_up()
    first = engine.prefill(requests, slots)    # prompts into slots; launched, not waited for
    tokens = engine.step(keep)                 # the next token of every slot; launched too
    first.read().tokens                        # waits

What is launched runs in that order. A prefill takes its slots over, whatever was in them. All calls are made by one
thread.

Shapes: N slots, R rows: those of a prefill, or N.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from spmd_tasks.decoding.loop import Outputs
from spmd_tasks.decoding.requests import Request


class Launched(Protocol):
  """Outputs that may not be there yet."""

  def read(self) -> Outputs:
    """The outputs as host arrays [R]; waits for the device, and raises what went wrong there."""
    ...


class Engine(Protocol):
  """A model with N slots.

  Attributes:
    num_slots: N.
    prefill_rows: how many prompts one prefill takes at most.
    max_len: positions of a slot, for prompt and generated tokens.
    weights: what the tokens are computed from; replaced only while no slot is in use.
  """

  weights: Any

  @property
  def num_slots(self) -> int: ...
  @property
  def prefill_rows(self) -> int: ...
  @property
  def max_len(self) -> int: ...

  def warm_up(self) -> None:
    """Compiles all that any request may need, and runs it once. Slots are empty afterwards."""
    ...

  def reset(self) -> None:
    """Empties all slots, also after a failure."""
    ...

  def prefill_cost(self, request: Request) -> int:
    """How many tokens a prefill computes for this prompt, padding included."""
    ...

  def prefill(self, requests: Sequence[Request], slots: Sequence[int]) -> Launched:
    """Reads at most `prefill_rows` prompts into as many slots; row i of the outputs is the first token of request i."""
    ...

  def step(self, keep: np.ndarray) -> Launched:
    """The next token of every slot; `keep` bool [N] is False where what is in the slot is given up."""
    ...
