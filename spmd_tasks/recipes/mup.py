"""muP, the maximal update parametrization: settings found for a narrow model suit a wide one.

    class Wide(DenseLanguageModel):
      model_dims = 1024
      mup_base_width = 128    # with the learning rate that was best at width 128

`with_mup` sets fields of the layers and of the optimizer; no layer knows of muP. With the width D, the base width B,
n inputs of a kernel (heads merged), K features of a head and L layers:

| | without muP | with muP |
|---|---|---|
| variance of a kernel at the start | 1 / n | 1 / n |
| learning rate of a kernel, AdamW | rate | rate * B / n |
| direction of a kernel, Muon | `scale` | 'spectral_unclamped', sqrt(outputs / inputs) |
| variance of the embedding table, and of the output kernel | 1 / D | 1 / B |
| factor of looked-up rows (`scale_sqrt_depth`) | sqrt(D) | sqrt(B) |
| factor of the logits, tied or not | 1 | B / D |
| variance of a router's kernel | 1 / D | B / D^2 |
| factor of attention's logits | 1 / sqrt(K) | sqrt(64) / K |
| AdamW's epsilon | epsilon | epsilon * B / D |
| factor of a sublayer's output, with `mup_base_depth` L0 | 1 | L0 / L |

Tables, the output kernel, norms and biases keep the learning rate. All weights keep the weight decay, whose product
with the learning rate does not depend on the width. Experts are kernels, and a router is an output that learns like a
kernel. Padding for a mesh does not count as inputs.

Sources: Yang et al., "Tensor Programs V" (arXiv 2203.03466), table 8, and 8 / K in microsoft/mup; for depth and epsilon
CompleteP with alpha 1 (Dey et al., arXiv 2505.01618), which also keeps the product of decay and rate; for Muon and for
one constant of all kernels, Yang et al., "A Spectral Condition for Feature Learning" (arXiv 2310.17813); for routers
and experts Malasnicki et al. (arXiv 2508.09752).
"""

import math
from typing import Any

import fiddle as fdl
from fiddle import daglish
import flax.linen as nn

from spmd_tasks.errors import UserError
from spmd_tasks.layers import FanInNormal, TokenEmbedding, TransformerBlock
from spmd_tasks.layers.attention import Attention, LatentAttention
from spmd_tasks.layers.moe import MixtureOfExperts, Router
from spmd_tasks.layers.recurrent import GatedDeltaNet
from spmd_tasks.learning import AdamW, Muon
from spmd_tasks.runtime import Task

_BASE_HEAD_DIM = 64  # where sqrt(64) / K is 1 / sqrt(K)
_LAYERS = (TokenEmbedding, Attention, LatentAttention, TransformerBlock, MixtureOfExperts, Router)


def with_mup(task: fdl.Config[Task], *, base_width: int, residual_multiplier: float = 1.0) -> fdl.Config[Task]:
  """Returns a task in the maximal update parametrization; the module's docstring has the rules.

  Args:
    task: the config of a task whose model has a TokenEmbedding, and whose optimizer is AdamW or Muon.
    base_width: B, the width at which the learning rate was found.
    residual_multiplier: factor of each sublayer's output, the base depth divided by the depth for CompleteP.

  Raises:
    UserError: a part of the task has no rule, or is built.
  """
  task = fdl.deepcopy_with(task)
  parts = [value for value, _ in daglish.iterate(task)]
  for part in parts:
    if isinstance(part, nn.Module) and isinstance(part, _LAYERS):
      raise UserError(f'mup_base_width cannot change a {type(part).__name__} that is built: give its fdl.Config.')

  def configs(layer: Any) -> list[Any]:
    return [part for part in parts if isinstance(part, fdl.Config) and issubclass(_class_of(part), layer)]

  embeddings = configs(TokenEmbedding)
  widths = {embedding.embed_dim for embedding in embeddings}
  if len(widths) != 1 or base_width < 1:
    raise UserError(f'mup_base_width = {base_width} must be at least 1, for a model with a TokenEmbedding.')
  [width] = widths
  ratio = base_width / width
  for embedding in embeddings:
    _set_embedding(embedding, base_width)
  for attention in configs((Attention, LatentAttention)):
    if attention.softmax_scale is not None:
      raise UserError(f'softmax_scale = {attention.softmax_scale} of attention and mup_base_width exclude each other.')
    attention.softmax_scale = math.sqrt(_BASE_HEAD_DIM) / _head_dim(attention, width)
  for block in configs(TransformerBlock):
    block.residual_multiplier *= residual_multiplier
  for router in configs(Router):
    router.init_scale *= ratio
  if configs(GatedDeltaNet) or any(mixture.shared_gate for mixture in configs(MixtureOfExperts)):
    raise UserError(f'mup_base_width = {base_width} has no rule for recurrent layers and shared_gate: set None.')
  optimizer = task.learner.optimizer
  if not isinstance(optimizer, fdl.Config) or not issubclass(_class_of(optimizer), AdamW | Muon):
    raise UserError(f'mup_base_width needs the fdl.Config of AdamW or Muon, not {optimizer}.')
  optimizer.base_width = base_width
  optimizer.epsilon *= ratio * residual_multiplier
  if issubclass(_class_of(optimizer), Muon):
    optimizer.scale = 'spectral_unclamped'
  return task


def _class_of(config: fdl.Config) -> type:
  target = fdl.get_callable(config)
  return target if isinstance(target, type) else object


def _set_embedding(embedding: fdl.Config[TokenEmbedding], base_width: int) -> None:
  if embedding.table_init is not None or embedding.softmax_init is not None or embedding.scale_logits:
    raise UserError('mup_base_width sets the sizes of the embedding: unset table_init, softmax_init and scale_logits.')
  embedding.table_init = fdl.Config(FanInNormal, scale=1 / base_width, num_input_dims=0)
  if not embedding.tied:
    embedding.softmax_init = fdl.Config(FanInNormal, scale=1 / base_width, num_input_dims=0)
  if embedding.scale_sqrt_depth:
    embedding.scale_sqrt_depth = False
    embedding.embedding_multiplier *= math.sqrt(base_width)
  embedding.logits_multiplier *= base_width / embedding.embed_dim


def _head_dim(attention: fdl.Config, width: int) -> int:
  if issubclass(_class_of(attention), LatentAttention):
    return attention.nope_head_dim + attention.rope_head_dim
  return attention.head_dim or width // attention.num_heads
