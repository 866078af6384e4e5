"""translate_language_model: a Praxis language model as one of ours, with the rules between their weights.

    translation = translate_language_model(task.model, tokens_shape=(16, 32))
    translation.model            # LanguageModel(...), unbound
    translation.missing          # settings that ours cannot express: with any, outputs differ
    weights = dict(translation.table.convert(praxis_weights.__getitem__, abstract_weights))

Dense and MoE layers, in one StackedTransformer, repeated, pipelined, or both. Praxis's weights have names with dots,
below the collection `params` (`lm.softmax.logits_ffn.linear.w`), ours with slashes (`embedding/table`).

Shapes: B batch, T sequence, D model, V vocab, L layers, P stages.
"""

import dataclasses
from typing import Any

import numpy as np

from spmd_tasks.bridges._operations import Transpose
from spmd_tasks.bridges._rules import Rule, RuleTable
from spmd_tasks.bridges.pax._praxis_layers import Context, Translated, Untranslatable, translate_norm
from spmd_tasks.bridges.pax._praxis_settings import Report, Settings
from spmd_tasks.bridges.pax._praxis_stack import translate_stack
from spmd_tasks.errors import UserError
from spmd_tasks.layers import BlockGroup, LanguageModel, LanguageModelLoss, TokenEmbedding
from spmd_tasks.layers.attention import LearnedPositions, SinusoidalPositions
from spmd_tasks.layers.moe import MixtureOfExperts


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
  settings.finish()

  context = Context(
    model_dim=lm.read('model_dims'), dtype=dtype, causal=model_type == 'causal', tokens_shape=tokens_shape
  )
  lm.ignore('packed_input', 'model_type', 'skip_aux_loss', 'record_activations_in_xent_output')
  lm.training_only('entropy_loss_weight')
  softmax = _required(lm, 'softmax_tpl')
  embedding, positions = _translate_embedding(lm, softmax, context), _translate_positions(lm, dtype)
  stack, stack_rules = translate_stack(_required(lm, 'stacked_transformer_tpl'), 'lm.transformer.', 'stack/', context)
  final_norm = translate_norm(_required(lm, 'final_ln_tpl'), dtype)
  lm.finish()
  model = LanguageModel(
    embedding=embedding.layer,
    stack=stack,
    final_norm=final_norm.layer,
    positions=None if positions is None else positions.layer,
  )
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


def _required(settings: Settings, name: str) -> Settings:
  child = settings.child(name)
  if child is None:
    settings.refuse('ours needs one', name)
    raise Untranslatable(settings)
  return child


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
    feed_forward = _required(softmax, 'feed_forward_tpl')
    weight, bias, is_transposed = 'logits_ffn.linear.w', 'logits_ffn.bias.b', True
    has_bias = feed_forward.read('has_bias')
    feed_forward.check_untouched(('input_dims', 'output_dims', 'activation_tpl', 'bias_init'))
    scale_logits = softmax.read('scale_before_logits')
  elif name == 'NClassMajorSharedEmbeddingSoftmax':
    softmax.ignore('feed_forward_tpl', 'scale_before_logits')  # which this class does not use
    weight, bias, is_transposed = 'w', 'bias.b', False
    has_bias, scale_logits = softmax.read('use_bias'), False
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
  softmax.finish()
  if separate is not None:
    separate.finish()
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
  positions.finish()
  return Translated(layer, rules)
