"""Defines Task: a model with its loss, its learner and its decode settings.

task = Task(model=LanguageModel(...), loss=LanguageModelLoss(), learner=Learner(optimizer=AdamW(learning_rate=0.01)))
variables = task.init_variables(rng, batch)                          # {'params': ..., 'batch_stats': ...}, boxed
output = task.compute_loss(variables, batch, train=True, rng=rng)    # on true shapes, without any mesh
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.linen as nn
import jax

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LossOutput
from spmd_tasks.learning import Learner
from spmd_tasks.runtime.decode_settings import DecodeSettings

Batch = dict[str, jax.Array]
Variables = dict[str, Any]  # Linen's collections by name: 'params', the weights, and others, such as 'batch_stats'


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

  def init_variables(self, rng: jax.Array, batch: Batch) -> Variables:
    """Draws the model's variables, with the boxes of their WeightSpecs. Variables without a box are not split."""
    return dict(self.model.init({'params': rng}, batch, train=False))

  def predict(self, variables: Variables, batch: Batch) -> Any:
    """Returns the model's predictions, without dropout."""
    return self.model.apply(variables, batch, train=False)

  def compute_loss(
    self, variables: Variables, batch: Batch, *, train: bool, rng: jax.Array | None = None
  ) -> LossOutput:
    """Computes the loss of one batch, and when `train` the new values of all variables but the weights.

    `rng` feeds dropout and is needed only when `train`.
    """
    rngs = {} if rng is None else {'dropout': rng}
    if not train or set(variables) == {'params'}:
      return self.loss(self.model.apply(variables, batch, train=train, rngs=rngs), batch)
    names = [name for name in variables if name != 'params']
    predictions, updated = self.model.apply(variables, batch, train=True, rngs=rngs, mutable=names)
    return self.loss(predictions, batch).replace(updated_variables=updated)

  def evaluation_variables(self, state: Any) -> Variables:
    """Returns the variables of a TrainState (or of its shapes) that evaluation uses, with raw or averaged weights."""
    return state.variables | {'params': state.learner.ema_weights if self.eval_with_ema else state.weights}
