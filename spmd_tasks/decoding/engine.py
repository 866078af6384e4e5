"""ModelEngine: the engine of a model, through its compiled decode steps.

Weights and cache are on the model's mesh, padded and split over experts as in training. Nothing is compiled after
`warm_up`: slots, lengths, stop tokens and sampling are numbers in arrays of fixed shapes.

Shapes: N slots, P rows of a prefill.
"""

from collections.abc import Sequence
import time
from typing import Any, Protocol

from absl import logging
import jax
import numpy as np

from spmd_tasks.decoding.loop import Outputs, Requests
from spmd_tasks.decoding.requests import Chunk, make_requests
from spmd_tasks.runtime.decode_settings import DecodeSettings


class Steps(Protocol):
  """runtime.decode_steps.DecodeSteps, as far as it matters here."""

  settings: DecodeSettings
  max_len: int
  prefill_chunk: int
  can_copy: bool

  def compile(self, *, score_prompts: bool = False) -> None: ...

  def any_chunks(self) -> list[Chunk]: ...

  def bucket(self, length: int) -> int: ...

  def init(self) -> Any: ...

  def prefill(self, weights: Any, state: Any, requests: Requests) -> tuple[Any, Outputs]: ...

  def copy(self, state: Any, sources: Sequence[int], slots: Sequence[int]) -> Any: ...

  def step(self, weights: Any, state: Any, keep: np.ndarray) -> tuple[Any, Outputs]: ...

  def search(self, weights: Any, requests: Requests) -> Any: ...


class _OnDevice:
  """Outputs on their way to the host."""

  def __init__(self, outputs: Outputs):
    self._outputs = outputs
    for leaf in jax.tree.leaves(outputs):
      leaf.copy_to_host_async()

  def read(self) -> Outputs:
    return jax.device_get(self._outputs)


class ModelEngine:
  """Slots of one model; see engine_contract.py for what each method promises.

  Attributes:
    weights: padded, as they live on the mesh.
    cache_epoch: another one after `reset`, and with other weights.
  """

  def __init__(self, steps: Steps, weights: Any, *, score_prompts: bool = False):
    """Takes the steps for its own; `score_prompts` says whether prefills that do so are needed."""
    self._steps = steps
    self._score_prompts = score_prompts
    self._state: Any = None
    self._weights = weights
    self.cache_epoch = 0

  @property
  def weights(self) -> Any:
    return self._weights

  @weights.setter
  def weights(self, weights: Any) -> None:
    self._weights = weights
    self.cache_epoch += 1

  @property
  def num_slots(self) -> int:
    return self._steps.settings.num_slots

  @property
  def prefill_rows(self) -> int:
    return self._steps.settings.prefill_rows

  @property
  def max_len(self) -> int:
    return self._steps.max_len

  @property
  def prefill_chunk(self) -> int:
    return self._steps.prefill_chunk

  @property
  def can_reuse(self) -> bool:
    return self._steps.can_copy

  def warm_up(self) -> None:
    started = time.monotonic()
    scoring = (False, True) if self._score_prompts else (False,)
    self._steps.compile(score_prompts=self._score_prompts)
    self.reset()
    chunks = self._steps.any_chunks()
    for chunk in chunks:
      for score in scoring:
        self.prefill([chunk], score_prompts=score).read()
    self.step(np.zeros(self.num_slots, np.bool_)).read()
    self.reset()
    logging.info('compiled %d prefills in %.1f s', len(chunks) * len(scoring), time.monotonic() - started)

  def reset(self) -> None:
    self.cache_epoch += 1
    self._state = None  # first: there may be no room for two
    self._state = self._steps.init()

  def prefill_cost(self, chunk: Chunk) -> int:
    return self._steps.bucket(chunk.stop - chunk.start) * self.prefill_rows

  def prefill(self, chunks: Sequence[Chunk], *, score_prompts: bool = False) -> _OnDevice:
    moved = [chunk for chunk in chunks if chunk.source != chunk.slot]
    if moved:
      self._state = self._steps.copy(self._state, [c.source for c in moved], [c.slot for c in moved])
    requests = make_requests(self._steps, chunks, score_prompts=score_prompts)
    self._state, outputs = self._steps.prefill(self._weights, self._state, requests)
    return _OnDevice(outputs)

  def step(self, keep: np.ndarray) -> _OnDevice:
    self._state, outputs = self._steps.step(self._weights, self._state, keep)
    return _OnDevice(outputs)
