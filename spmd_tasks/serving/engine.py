"""ModelEngine: the engine of a PartitionedModel, through its compiled decode steps.

Weights and cache are on the model's mesh, padded and split over experts as in training. Nothing is compiled after
`warm_up`: slots, lengths, stop tokens and sampling are numbers in arrays of fixed shapes.

Shapes: N slots, P rows of a prefill.
"""

from collections.abc import Sequence
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from spmd_tasks.decoding.loop import Outputs
from spmd_tasks.decoding.requests import Request, make_requests
from spmd_tasks.runtime.decode_steps import DecodeSteps


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
  """

  def __init__(self, steps: DecodeSteps, weights: Any):
    self._steps = steps
    self._state: Any = None
    self.weights = weights

  @property
  def num_slots(self) -> int:
    return self._steps.settings.num_slots

  @property
  def prefill_rows(self) -> int:
    return self._steps.settings.prefill_rows

  @property
  def max_len(self) -> int:
    return self._steps.max_len

  def warm_up(self) -> None:
    started = time.monotonic()
    self._steps.compile()
    self.reset()
    for bucket in self._steps.buckets:
      nobody = Request(ids=(0,) * bucket, max_tokens=1)
      self.prefill([nobody], [self.num_slots]).read()
    self.step(np.zeros(self.num_slots, np.bool_)).read()
    self.reset()
    logging.info('compiled %d prompt lengths in %.1f s', len(self._steps.buckets), time.monotonic() - started)

  def reset(self) -> None:
    self._state = None  # first: there may be no room for two
    self._state = self._steps.init()

  def prefill_cost(self, request: Request) -> int:
    return self._steps.bucket(len(request.ids)) * self.prefill_rows

  def prefill(self, requests: Sequence[Request], slots: Sequence[int]) -> _OnDevice:
    batch = make_requests(self._steps, requests, slots)
    self._state, outputs = self._steps.prefill(self.weights, self._state, batch)
    return _OnDevice(outputs)

  def step(self, keep: np.ndarray) -> _OnDevice:
    self._state, outputs = self._steps.step(self.weights, self._state, keep)
    return _OnDevice(outputs)
