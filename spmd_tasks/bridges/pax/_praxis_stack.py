"""Translates Praxis's stacks of transformer layers: plain, repeated, pipelined, and repeated within pipeline stages.

Praxis names the layers of a StackedTransformer `x_layers_0`, `x_layers_1`, ...; a repeated stack stores each of them
[x_times, ...], a pipeline [P, ...], a circular pipeline [V, P, ...]. Ours are [L, ...] in the order in which they run,
or [L / n, ...] for each of the n blocks of a BlockGroup, where n different layers alternate.

Shapes: B batch, T sequence, L layers, P stages, V repeats of a circular pipeline.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from spmd_tasks.bridges._rules import Rule
from spmd_tasks.bridges.pax._praxis_layers import (
  Context,
  Translated,
  Untranslatable,
  translate_attention,
  translate_experts,
  translate_feed_forward,
  translate_norm,
)
from spmd_tasks.bridges.pax._praxis_settings import Settings
from spmd_tasks.layers import BlockGroup, TransformerBlock, TransformerStack
from spmd_tasks.layers.pipeline import PipelinedStack

_REMAT_POLICIES = {
  'save_everything': 'none',
  'save_dot_only': 'dots',
  'save_dot_with_no_batch_dims': 'dots_no_batch',
}  # 'full' for any other


@dataclasses.dataclass(frozen=True)
class _Pipeline:
  """P, V and the number of microbatches."""

  num_stages: int
  num_repeats: int
  num_microbatches: int


def translate_stack(settings: Settings, source: str, target: str, context: Context) -> tuple[Any, list[Rule]]:
  """Translates the whole stack.

  Args:
    settings: of StackedTransformer, StackedTransformerRepeated or PipelinedTransformer.
    source, target: prefixes of the names of the stack's weights.
    context: of the layers.

  Returns:
    (TransformerStack or PipelinedStack, the rules of all layers).
  """
  pipeline, remat_policy = None, 'full'
  stacked_dims: tuple[int, ...] = ()
  if settings.class_name == 'PipelinedTransformer':
    pipeline = _pipeline(settings, context)
    stacked_dims = (pipeline.num_stages,)
    if pipeline.num_repeats > 1:
      stacked_dims = (pipeline.num_repeats, *stacked_dims)
    source += 'pipeline.body.'
    if context.tokens_shape is not None:
      rows, length = context.tokens_shape
      context = dataclasses.replace(context, tokens_shape=(rows // pipeline.num_microbatches, length))
    settings = _child(settings, 'pipeline_stage')
  if settings.class_name in ('StackedTransformerRepeated', 'PipelineCompatibleStackedTransformerRepeated'):
    names = (settings.read('repeat_layer_name'), settings.read('sublayer_name'))
    names = names if settings.class_name == 'StackedTransformerRepeated' else ('pipeline', 'body')
    source += f'{".".join(names)}.'
    stacked_dims += tuple(settings.read('nd_prefix_shape') or (settings.read('x_times'),))
    remat_policy = _REMAT_POLICIES.get(settings.read('checkpoint_policy').value, 'full')
    settings.ignore('x_times', 'unroll_in_decode', 'repeat_optimizer_dims_mapping', 'collect_intermediate_outputs')
    repeated, settings = settings, _child(settings, 'block')
    repeated.finish()
  elif pipeline is None:
    is_remat, policy = settings.read('remat'), settings.read('checkpoint_policy')
    remat_policy = _REMAT_POLICIES.get(policy.value, 'full') if is_remat else 'none'
  blocks = _translate_blocks(settings, context)
  places = [(j, index) for index in np.ndindex(*stacked_dims) for j in range(len(blocks))]  # in order of running
  num_different = _period([blocks[j].layer for j, _ in places])
  rules: list[Rule] = []
  for layer, (j, index) in enumerate(places):
    group, i = divmod(layer, num_different)
    name = f'{target}layers/' + (f'block_{i}/' if num_different > 1 else '')
    rules += blocks[j].placed(f'{source}x_layers_{j}.', name, index, (group,))
  kinds = tuple(blocks[j].layer for j, _ in places[:num_different])
  fields: dict[str, Any] = {
    'block': kinds[0] if num_different == 1 else BlockGroup(blocks=kinds),
    'num_layers': len(places) // num_different,
    'remat_policy': remat_policy,
  }
  if pipeline is None:
    return TransformerStack(**fields), rules
  return (
    PipelinedStack(
      **fields,
      num_microbatches=pipeline.num_microbatches,
      schedule='circular' if pipeline.num_repeats > 1 else 'gpipe',
      num_repeats=pipeline.num_repeats,
    ),
    rules,
  )


def _child(settings: Settings, name: str) -> Settings:
  child = settings.child(name)
  if child is None:
    raise Untranslatable(settings)
  return child


def _pipeline(settings: Settings, context: Context) -> _Pipeline:
  settings.ignore('stream_io', 'pipeline_broadcast_inputs', 'checkpoint_policy', 'enable_async_circular_transfer')
  settings.ignore('bf16_accum_in_fp32', 'pipeline_stage')
  num_microbatches, rows = settings.read('num_pipeline_microbatches'), settings.read('pipeline_microbatch_size')
  if num_microbatches is None:
    num_microbatches = 1 if context.tokens_shape is None else context.tokens_shape[0] // rows
  pipeline = _Pipeline(settings.read('num_pipeline_stages'), settings.read('circular_repeat'), num_microbatches)
  settings.finish()
  return pipeline


def _period(layers: Sequence[Any]) -> int:
  """Returns the smallest n that divides the number of layers, such that layer l equals layer l mod n."""
  num_layers = len(layers)
  divisors = (n for n in range(1, num_layers + 1) if num_layers % n == 0)
  return next(n for n in divisors if all(layers[i] == layers[i % n] for i in range(num_layers)))


def _translate_blocks(stacked: Settings, context: Context) -> list[Translated]:
  """Translates each layer of a StackedTransformer."""
  if stacked.class_name != 'StackedTransformer':
    raise Untranslatable(stacked)
  stacked.ignore('model_dims', 'mask_self_attention', 'packed_input', 'fold_padding_with_segment_mask')
  stacked.ignore('remat', 'checkpoint_policy', 'moe_layer_tpl', 'num_experts', 'num_groups', 'min_group_size')
  stacked.ignore('gating_func', 'unadjusted_expert_capacity_factor', 'hidden_dims', 'num_heads', 'dim_per_head')
  if stacked.read('dropout_prob'):
    stacked.report.training.append(f'{stacked.path}.dropout_prob: inside attention and between the kernels of the ffn')
  stacked.ignore('residual_dropout_prob')
  stacked.training_only('atten_dropout_prob', 'relu_dropout_prob', 'residual_droppath_prob', 'input_dropout_prob')
  num_layers, templates = stacked.read('num_layers'), stacked.read('transformer_layer_params_tpl')
  several = isinstance(templates, list | tuple)
  templates = list(templates) if several else [templates]
  blocks = []
  for i in range(num_layers):
    number = i // (num_layers // len(templates))
    path = f'{stacked.path}.transformer_layer_params_tpl' + (f'[{number}]' if several else '')
    template = Settings(templates[number], path, stacked.report)
    blocks.append(_translate_block(template, stacked, i in (stacked.read('moe_layers') or ()), context))
  stacked.finish()
  return blocks


def _translate_block(settings: Settings, stacked: Settings, has_experts: bool, context: Context) -> Translated:
  """Translates a Transformer, whose sizes and dropout the stack overrides."""
  if settings.class_name != 'Transformer':
    raise Untranslatable(settings)
  settings.ignore('input_dims', 'hidden_dims', 'num_heads', 'dim_per_head', 'dropout_tpl', 'packed_input')
  settings.ignore('atten_dropout_prob', 'residual_dropout_prob', 'relu_dropout_prob', 'residual_droppath_prob')
  settings.ignore('use_cross_attention')
  policy = settings.read('norm_policy')
  if policy not in ('pre', 'primer_hybrid'):
    settings.refuse("only 'pre' and 'primer_hybrid' are known here", 'norm_policy')
  attention = translate_attention(
    _child(settings, 'tr_atten_tpl'), stacked.read('num_heads'), stacked.read('dim_per_head'), context
  )
  norm = translate_norm(_child(settings, 'ln_tpl'), context.dtype)
  hidden_dim = stacked.read('hidden_dims')
  feed_forward = _child(stacked, 'moe_layer_tpl') if has_experts else _child(settings, 'tr_fflayer_tpl')
  settings.ignore('tr_fflayer_tpl')
  ffn_norm = translate_norm(_child(feed_forward, 'ln_tpl'), context.dtype)
  if ffn_norm.layer != norm.layer:
    feed_forward.refuse('both norms of a block are equal here', 'ln_tpl')
  if has_experts:
    ffn = translate_experts(
      feed_forward,
      feed_forward.read('hidden_dims') or hidden_dim,
      num_experts=stacked.read('num_experts'),
      num_groups=stacked.read('num_groups'),
      min_group_size=stacked.read('min_group_size'),
      gating=stacked.read('gating_func'),
      context=context,
    )
  else:
    ffn = translate_feed_forward(feed_forward, hidden_dim, context)
  settings.finish()
  has_post_norms = policy == 'primer_hybrid'
  norms = {'pre_layer_norm': '_norm', 'post_layer_norm': '_post_norm'} if has_post_norms else {'layer_norm': '_norm'}
  rules = [*attention.placed('self_attention.', 'attention/'), *ffn.placed('ff_layer.', 'ffn/')]
  for source, target in norms.items():
    rules += norm.placed(f'{source}.', f'attention{target}/')
    rules += ffn_norm.placed(f'ff_layer.{source}.', f'ffn{target}/')
  block = TransformerBlock(
    attention=attention.layer,
    ffn=ffn.layer,
    norm=norm.layer,
    post_norm=has_post_norms,
    dropout_rate=stacked.read('residual_dropout_prob') or stacked.read('dropout_prob'),
  )
  return Translated(block, tuple(rules))
