"""translate_language_model: a Praxis language model as one of ours, with the rules between their weights.

    translation = translate_language_model(task.model, tokens_shape=(16, 32))
    translation.model            # LanguageModel(...), unbound
    translation.missing          # settings that ours cannot express: with any, outputs differ
    weights = translation.table.convert(praxis_weights, abstract_weights)

Dense and MoE layers, in one StackedTransformer, repeated, pipelined, or both. Praxis's weights have names with dots,
below the collection `params` (`lm.softmax.logits_ffn.linear.w`), ours with slashes (`embedding/table`).

Praxis names the layers of a StackedTransformer `x_layers_0`, `x_layers_1`, ...; a repeated stack stores each of them
[x_times, ...], a pipeline [P, ...], a circular pipeline [V, P, ...]. Ours are [L, ...] in the order in which they run,
or [L / n, ...] for each of the n blocks of a BlockGroup, where n different layers alternate.

Shapes: B batch, T sequence, D model, V vocab or repeats of a circular pipeline, L layers, P stages.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from spmd_tasks.bridges._operations import Transpose
from spmd_tasks.bridges._rules import Rule, RuleTable
from spmd_tasks.bridges.pax._praxis_layers import (
  Context,
  Report,
  Settings,
  Translated,
  Untranslatable,
  translate_attention,
  translate_experts,
  translate_feed_forward,
  translate_norm,
)
from spmd_tasks.errors import UserError
from spmd_tasks.layers import (
  BlockGroup,
  LanguageModel,
  LanguageModelLoss,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import LearnedPositions, SinusoidalPositions
from spmd_tasks.layers.moe import MixtureOfExperts
from spmd_tasks.layers.pipeline import PipelinedStack, ScheduleName

_REMAT_POLICIES = {
  'save_everything': 'none',
  'save_dot_only': 'dots',
  'save_dot_with_no_batch_dims': 'dots_no_batch',
}  # 'full' for any other


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation:
  """A Praxis language model in our terms.

  Attributes:
    model: ours, unbound.
    loss: ours.
    table: from Praxis's weights to ours.
    missing: settings of Praxis that change the outputs and that ours cannot express; () for an exact translation.
    training_only: settings that change training only, and that ours cannot express.
  """

  model: LanguageModel
  loss: LanguageModelLoss
  table: RuleTable
  missing: tuple[str, ...]
  training_only: tuple[str, ...]


def translate_language_model(model: Any, tokens_shape: tuple[int, int] | None = None) -> Translation:
  """Translates a praxis.layers.models.LanguageModel, or the config of one.

  Args:
    model: the model or its config.
    tokens_shape: B and T of the batches, on which the capacity of experts depends; None is for models without.

  Raises:
    UserError: the class of a layer is unknown here, so that its weights cannot be translated.
  """
  report = Report()
  settings = Settings(model, type(model).__name__ if not hasattr(model, 'cls') else model.cls.__name__, report)
  try:
    return _translate(settings, report, tokens_shape)
  except Untranslatable as error:
    raise UserError(
      f'{error} has no counterpart here: run the experiment as it is, or replace this layer by one of Praxis that has.'
    ) from None


def _translate(settings: Settings, report: Report, tokens_shape: tuple[int, int] | None) -> Translation:
  if settings.class_name != 'LanguageModel' or (lm := settings.child('lm_tpl')) is None:
    raise Untranslatable(settings)
  if lm.class_name != 'TransformerLm':
    raise Untranslatable(lm)
  fprop_dtype = settings.read('fprop_dtype')
  dtype = np.dtype(fprop_dtype).name if fprop_dtype is not None else 'float32'
  model_type = settings.read('model_type')
  if model_type not in ('causal', 'bidirectional'):
    settings.refuse("only 'causal' and 'bidirectional' are known here", 'model_type')
  settings.ignore('return_predictions', 'decoder_tpl', 'apply_eval_sample_weights', 'report_strict_acc')

  context = Context(
    model_dim=lm.read('model_dims'), dtype=dtype, causal=model_type == 'causal', tokens_shape=tokens_shape
  )
  lm.ignore('packed_input', 'model_type', 'skip_aux_loss', 'record_activations_in_xent_output')
  lm.training_only('entropy_loss_weight')
  softmax = _child(lm, 'softmax_tpl')
  embedding, positions = _translate_embedding(lm, softmax, context), _translate_positions(lm, dtype)
  stack, stack_rules = _translate_stack(_child(lm, 'stacked_transformer_tpl'), 'lm.transformer.', 'stack/', context)
  final_norm = translate_norm(_child(lm, 'final_ln_tpl'), dtype)
  model = LanguageModel(
    embedding=embedding.layer,
    stack=stack,
    final_norm=final_norm.layer,
    positions=None if positions is None else positions.layer,
  )
  report.finish()
  rules = [
    *embedding.placed('lm.', 'embedding/'),
    *([] if positions is None else positions.placed('lm.position_emb.', 'positions/')),
    *stack_rules,
    *final_norm.placed('lm.final_ln.', 'final_norm/'),
  ]
  return Translation(
    model=model,
    loss=_loss(softmax, model, report),
    table=RuleTable(rules=tuple(rules), source='the Praxis model', target='its translation'),
    missing=tuple(dict.fromkeys(report.outputs)),
    training_only=tuple(dict.fromkeys(report.training)),
  )


def _loss(softmax: Settings, model: LanguageModel, report: Report) -> LanguageModelLoss:
  """Translates the loss, whose settings Praxis keeps in the softmax layer and in the layers with experts."""
  smoothing, vocab_size = softmax.read('label_smoothing_prob'), model.embedding.vocab_size
  if softmax.class_name != 'GShardSharedEmbeddingSoftmax':  # the others spread it over the wrong labels only
    smoothing *= vocab_size / (vocab_size - 1)
  stack: Any = model.stack
  blocks = stack.block.blocks if isinstance(stack.block, BlockGroup) else (stack.block,)
  num_mixtures = stack.num_layers * sum(isinstance(block.ffn, MixtureOfExperts) for block in blocks)
  weights = {'load_balance_loss': report.balance_weights[0] * num_mixtures} if num_mixtures else {}
  return LanguageModelLoss(
    z_loss_weight=softmax.read('z_loss_weight'), label_smoothing=smoothing, aux_loss_weights=weights
  )


def _translate_embedding(lm: Settings, softmax: Settings, context: Context) -> Translated:
  """Translates the softmax layer, and the embedding if it is not the softmax layer's own."""
  separate = lm.child('separate_embedding_tpl')
  softmax.ignore('input_dims', 'num_classes', 'lookup_style', 'bias_init', 'chunk_size', 'array_lookup_tpl')
  softmax.ignore('label_smoothing_prob', 'label_smoothing_apply_for_eval', 'z_loss_weight')  # of the loss
  softmax.ignore('use_tgt_labels_size_as_loss_denominator')
  name = softmax.class_name
  if name in ('SharedEmbeddingSoftmax', 'FullSoftmax'):
    feed_forward = _child(softmax, 'feed_forward_tpl')
    weight, bias, is_transposed = 'logits_ffn.linear.w', 'logits_ffn.bias.b', True
    has_bias = feed_forward.read('has_bias')
    feed_forward.ignore('input_dims', 'output_dims', 'activation_tpl', 'bias_init')
    scale_logits = softmax.read('scale_before_logits')
  elif name == 'GShardSharedEmbeddingSoftmax':
    weight, bias, is_transposed, has_bias, scale_logits = 'embedding.w', '', False, False, True
  else:
    raise Untranslatable(softmax)
  scaled = separate if separate is not None else softmax
  rules, transposed = [], (Transpose((1, 0)),)
  if separate is None:
    if name == 'FullSoftmax':
      raise Untranslatable(softmax)
    rules.append(Rule(f'softmax.{weight}', 'table', *(transposed if is_transposed else ())))
  else:
    if separate.class_name != 'Embedding':
      raise Untranslatable(separate)
    separate.ignore('num_classes', 'input_dims', 'lookup_style', 'set_nan_for_oob_id', 'array_lookup')
    rules.append(Rule('embedding_lookup.emb_var', 'table'))
    rules.append(Rule(f'softmax.{weight}', 'softmax_kernel', *(() if is_transposed else transposed)))
    softmax.ignore('scale_sqrt_depth')
  if has_bias:
    rules.append(Rule(f'softmax.{bias}', 'logits_bias'))
  has_scale = name != 'GShardSharedEmbeddingSoftmax' or separate is not None
  layer = TokenEmbedding(
    vocab_size=lm.read('vocab_size'),
    embed_dim=context.model_dim,
    tied=separate is None,
    scale_sqrt_depth=scaled.read('scale_sqrt_depth') if has_scale else False,
    scale_logits=scale_logits,
    logits_bias=has_bias,
    logits_cap=softmax.read('soft_cap_logits') or None,
    dtype=context.dtype,
  )
  return Translated(layer, tuple(rules))


def _translate_positions(lm: Settings, dtype: str) -> Translated | None:
  positions = lm.child('position_emb_tpl')
  if positions is None:
    return None
  positions.ignore('embedding_dims')
  layer: LearnedPositions | SinusoidalPositions
  if positions.class_name == 'TrainablePositionalEmbedding':
    positions.ignore('lookup_style', 'min_timescale', 'max_timescale', 'array_lookup_tpl')
    layer = LearnedPositions(max_len=positions.read('max_seq_length'), dtype=dtype)
    rules: tuple[Rule, ...] = (Rule('emb_var', 'table'),)
  elif positions.class_name == 'PositionalEmbedding':
    layer, rules = SinusoidalPositions(max_timescale=float(positions.read('max_timescale')), dtype=dtype), ()
  else:
    raise Untranslatable(positions)
  return Translated(layer, rules)


def _translate_stack(settings: Settings, source: str, target: str, context: Context) -> tuple[Any, list[Rule]]:
  """Translates the whole stack.

  Args:
    settings: of StackedTransformer, StackedTransformerRepeated or PipelinedTransformer.
    source, target: prefixes of the names of the stack's weights.
    context: of the layers.

  Returns:
    (TransformerStack or PipelinedStack, the rules of all layers).
  """
  remat_policy, num_repeats, num_microbatches = 'full', 1, 0  # of which a pipeline has some
  stacked_dims: tuple[int, ...] = ()
  if settings.class_name == 'PipelinedTransformer':
    num_stages, num_repeats, num_microbatches = _pipeline(settings, context)
    stacked_dims = (num_stages,) if num_repeats == 1 else (num_repeats, num_stages)
    source += 'pipeline.body.'
    if context.tokens_shape is not None:
      rows, length = context.tokens_shape
      context = dataclasses.replace(context, tokens_shape=(rows // num_microbatches, length))
    settings = _child(settings, 'pipeline_stage')
  if settings.class_name == 'StackedTransformerRepeated':
    source += f'{settings.read("repeat_layer_name")}.{settings.read("sublayer_name")}.'
    stacked_dims += (settings.read('x_times'),)
    remat_policy = _REMAT_POLICIES.get(settings.read('checkpoint_policy').value, 'full')
    settings.ignore('unroll_in_decode', 'repeat_optimizer_dims_mapping', 'collect_intermediate_outputs')
    settings = _child(settings, 'block')
  elif not num_microbatches:
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
  if not num_microbatches:
    return TransformerStack(**fields), rules
  schedule: ScheduleName = 'circular' if num_repeats > 1 else 'gpipe'
  return PipelinedStack(**fields, num_microbatches=num_microbatches, schedule=schedule, num_repeats=num_repeats), rules


def _child(settings: Settings, name: str) -> Settings:
  """Returns the settings of a sublayer that ours needs."""
  if (child := settings.child(name)) is None:
    raise Untranslatable(settings)
  return child


def _pipeline(settings: Settings, context: Context) -> tuple[int, int, int]:
  """Returns the numbers of stages, of repeats and of microbatches."""
  settings.ignore('stream_io', 'pipeline_broadcast_inputs', 'checkpoint_policy', 'enable_async_circular_transfer')
  settings.ignore('bf16_accum_in_fp32', 'pipeline_stage')
  num_microbatches, rows = settings.read('num_pipeline_microbatches'), settings.read('pipeline_microbatch_size')
  if num_microbatches is None:
    num_microbatches = 1 if context.tokens_shape is None else context.tokens_shape[0] // rows
  stages, repeats = settings.read('num_pipeline_stages'), settings.read('circular_repeat')
  return stages, repeats, num_microbatches


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
