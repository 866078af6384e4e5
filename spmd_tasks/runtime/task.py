"""Defines Task: a model with its loss, its learner and its decode settings.

task = Task(model=LanguageModel(...), loss=LanguageModelLoss(), learner=Learner(optimizer=AdamW(learning_rate=0.01)))
output = task.compute_loss(weights, batch, train=True, rng=rng)      # on true shapes, without any mesh
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.linen as nn
import jax

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LossOutput
from spmd_tasks.learning import Learner, LearnerState
from spmd_tasks.runtime.decode_settings import DecodeSettings

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What is trained. Frozen; an experiment's `task()` returns a Fiddle config of one.

  Attributes:
    model: a Linen module. `model(batch, train=...)` returns predictions in the form that `loss` reads.
    loss: `loss(predictions, batch) -> LossOutput`, a mean over the batch's loss weights.
    learner: turns gradients into new weights.
    eval_with_ema: evaluate, decode and serve the averaged weights instead of the raw ones.
    decode: how text is generated.

  Raises (on construction):
    UserError: `eval_with_ema` without averaged weights.
  """

  model: nn.Module
  loss: Callable[[Any, Batch], LossOutput]
  learner: Learner
  eval_with_ema: bool = False
  decode: DecodeSettings = dataclasses.field(default_factory=DecodeSettings)

  def __post_init__(self):
    if self.eval_with_ema and self.learner.ema_decay is None:
      raise UserError('eval_with_ema=True needs averaged weights: set task.learner.ema_decay, for example to 0.999.')

  def compute_loss(self, weights: Any, batch: Batch, *, train: bool, rng: jax.Array | None = None) -> LossOutput:
    """Computes the loss of one batch. `rng` feeds dropout and is needed only when `train`."""
    rngs = {} if rng is None else {'dropout': rng}
    predictions = self.model.apply({'params': weights}, batch, train=train, rngs=rngs)
    return self.loss(predictions, batch)

  def evaluation_weights(self, weights: Any, learner_state: LearnerState) -> Any:
    """Returns the weights that evaluation uses: raw or averaged."""
    return learner_state.ema_weights if self.eval_with_ema else weights
