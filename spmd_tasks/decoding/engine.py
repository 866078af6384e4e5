"""ModelEngine: implements Engine with the DecodeSteps of a model.

    engine = ModelEngine(DecodeSteps(model), variables)
    engine.warm_up()                      # compiles all programs
    scheduler = Scheduler(engine)

Weights and cache stay on the model's mesh, padded and sharded as in training.
"""

from collections.abc import Mapping, Sequence
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from spmd_tasks.decoding.constraints import num_words
from spmd_tasks.decoding.decode_state import Outputs
from spmd_tasks.decoding.decode_steps import DecodeSteps
from spmd_tasks.decoding.engine_contract import TokenMasks
from spmd_tasks.decoding.requests import Chunk, PrefillBatch


class _OnDevice:
  """Outputs on the device, and their copy to the host, which the constructor starts."""

  def __init__(self, outputs: Outputs):
    self._outputs = outputs
    for leaf in jax.tree.leaves(outputs):
      if leaf.size:
        leaf.copy_to_host_async()

  def read(self) -> Outputs:
    read = lambda leaf: np.asarray(leaf) if leaf.size else np.zeros(leaf.shape, leaf.dtype)
    return jax.tree.map(read, self._outputs)


class ModelEngine:
  """The slots of one model; engine_contract.py documents the methods.

  Attributes:
    weights: the model's variables, padded arrays on the mesh.
    cache_epoch: changes by `reset` and by new weights.
  """

  def __init__(self, steps: DecodeSteps, weights: Any, *, score_prompts: bool = False, constrain: bool = False):
    """Compiles nothing yet.

    Args:
      steps: the compiled programs.
      weights: the model's variables, padded arrays on the mesh.
      score_prompts: whether prompts may be scored.
      constrain: whether sequences may have token masks.
    """
    layout = steps.layout
    self.num_slots, self.max_len, self.prefill_chunk = steps.settings.num_slots, steps.max_len, layout.prefill_chunk
    self.block_tokens, self.num_blocks, self.num_parts = layout.block_tokens, layout.num_blocks, layout.num_parts
    self.can_reuse, self.num_snapshots = layout.can_reuse, layout.num_snapshots
    self.num_drafts = steps.settings.num_drafts
    self.has_draft_model = steps.draft.is_model
    self._steps = steps
    self._score_prompts = score_prompts
    self._constrain = constrain
    self._state: Any = None
    self._blocks: dict[int, list[int]] = {}  # by slot
    self._weights: Any = weights
    self._arranged: Any = steps.model.arrange(weights)
    self.cache_epoch = 0

  @property
  def weights(self) -> Any:
    return self._weights

  @weights.setter
  def weights(self, weights: Any) -> None:
    self._weights, self._arranged = weights, None if weights is None else self._steps.model.arrange(weights)
    self.cache_epoch += 1
    if weights is not None and self._state is None:
      self.reset()

  def warm_up(self) -> None:
    started = time.monotonic()
    scoring = (False, True) if self._score_prompts else (False,)
    self._steps.compile(score_prompts=self._score_prompts, constrain=self._constrain)
    self.reset()
    prefills = [(chunks, score) for score in scoring for chunks in self._steps.prefill.any_chunks(score)]
    for chunks, score in prefills:
      self.prefill(chunks, score_prompts=score).read()
    masks = {0: np.zeros(num_words(self._steps.vocab_size), np.uint32)}
    for num_rows in self._steps.step.row_counts:
      keep = np.arange(self.num_slots) < num_rows  # these slots are not active
      self.step(keep).read()
      if self._constrain:
        may_draft = dict.fromkeys(range(num_rows), ()) if self.has_draft_model else None
        self.step(keep, masks, drafts=may_draft).read()
      for num in {1, self.num_drafts} if self.num_drafts else ():
        self.step(keep, drafts=dict.fromkeys(range(num_rows), (0,) * num)).read()
    self.reset()
    logging.info('compiled %d prefills in %.1f s', len(prefills), time.monotonic() - started)

  def reset(self) -> None:
    self.cache_epoch += 1
    self._state = None  # first: memory may have no room for two states
    self._state = self._steps.init()

  def take_kept(self) -> None:
    """Takes the state that an earlier engine of the same steps left; without one, a new one."""
    self._state, self._steps.kept_state = self._steps.kept_state, None
    if self._state is None:
      self.reset()

  def keep(self) -> None:
    """Leaves the state for the next engine, and ends this one; no slot may have a sequence."""
    self._steps.kept_state, self._state = self._state, None

  def prefill_shape(self, chunk: Chunk) -> tuple[int, int]:
    bucket = self._steps.prefill.bucket(chunk.stop - chunk.start)
    return bucket, self._steps.prefill.num_rows(bucket, 2, chunk.request.score_prompt)

  def prefill(
    self, chunks: Sequence[Chunk], *, score_prompts: bool = False, masks: TokenMasks | None = None
  ) -> _OnDevice:
    batch = self._batch(chunks, masks or {}, score_prompts)
    self._steps.draft.prefill(batch)
    self._state, outputs = self._steps.prefill(self._arranged, self._state, batch)
    return _OnDevice(outputs)

  def _batch(self, chunks: Sequence[Chunk], masks: TokenMasks, score_prompts: bool = False) -> PrefillBatch:
    for chunk in chunks:
      self._blocks[chunk.slot] = list(
        self._steps.layout.own_blocks(chunk.slot) if chunk.blocks is None else chunk.blocks
      )
    return self._steps.prefill.make_batch(chunks, score_prompts=score_prompts, masks=masks if self._constrain else None)

  def step(
    self,
    keep: np.ndarray,
    masks: TokenMasks | None = None,
    grown: Sequence[tuple[int, int]] = (),
    drafts: Mapping[int, Sequence[int]] | None = None,
  ) -> _OnDevice:
    for slot, block in grown:
      self._blocks[slot].append(block)
    inputs = self._steps.step.make_inputs(keep, masks=masks, blocks=self._blocks, drafts=drafts)
    # With token masks there are no drafts, but a draft model must read the tokens.
    if drafts and (masks or inputs.drafts is not None):
      inputs = self._steps.draft.guess(self._state, inputs)
    self._state, outputs = self._steps.step(self._arranged, self._state, inputs)
    return _OnDevice(outputs)
