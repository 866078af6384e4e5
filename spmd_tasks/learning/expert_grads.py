"""Scales the gradients of experts' weights: 1 is right here, T5X's factor is offered for parity.

Shapes: E experts.

An expert's weights see only the tokens that are routed to it, and their gradient is the sum over these tokens of what
the mean loss passes down. T5X multiplies it by E "to account for implicit averaging". There is none under `jax.jit`
with a loss that is a mean over the global batch: dense, router and expert gradients all come out as those of that mean,
whatever the mesh. E times the gradient is then the wrong step for SGD, the wrong share of the norm that is clipped and
reported, and no difference at all to Adam and Adafactor, which divide it away again; that is how it goes unnoticed. A
factor does arise inside `jax.shard_map`, where each device takes the gradient of its own part's mean:
`tests/learning/test_expert_grads.py` has the table. Nothing here takes gradients so.
"""

from typing import Any, Literal

import jax

from spmd_tasks.errors import UserError

EXPERT_TAG = 'expert'

ExpertGradScale = float | Literal['t5x']


def check_expert_grad_scale(scale: ExpertGradScale) -> None:
  """Raises a ValueError if the scale is neither a number above 0 nor 't5x'."""
  if scale != 't5x' and not (isinstance(scale, int | float) and scale > 0):
    raise UserError(
      f"learner.expert_grad_scale is {scale!r}; it must be a number larger than 0 (1: the loss's own gradient), or "
      "'t5x' for T5X's factor, the number of experts."
    )


def scale_expert_grads(grads: Any, weight_specs: Any, scale: ExpertGradScale) -> Any:
  """Multiplies the gradients of weights tagged `expert`; the others, and all of them at scale 1, stay as they are.

  Args:
    grads: congruent to the weights, float32.
    weight_specs: tree of WeightSpec congruent to the weights.
    scale: a number, or 't5x': the number of experts, which is the weight's first dim after its `stacked` ones (T5X
      contrib/moe, `MoeTrainer`).
  """
  if scale == 1:
    return grads

  def scaled(spec, grad):
    if EXPERT_TAG not in spec.tags:
      return grad
    return grad * float(spec.shape[spec.stacked] if scale == 't5x' else scale)

  return jax.tree.map(scaled, weight_specs, grads)
