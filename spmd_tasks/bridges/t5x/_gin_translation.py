"""Translates a gin setup of T5X to the fields of a T5xExperiment, and lists what is not supported.

    translation = translate(read_setup(files, bindings))
    translation.fields      # fields of T5xExperiment
    translation.missing     # unsupported settings that affect numbers, with the reason; such a setup is an error
    translation.notes       # differences that do not affect numbers

Fields without a binding have T5X's defaults.
"""

from collections.abc import Mapping
import dataclasses
import itertools
import math
from pathlib import Path
import pprint
import re
from typing import Any

from spmd_tasks.bridges.t5x._gin import MISSING, Node, Setup
from spmd_tasks.bridges.t5x.experiments import t5x_axis_rules
from spmd_tasks.errors import UserError
from spmd_tasks.layers.feed_forward import ACTIVATIONS
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, AxisRules
from spmd_tasks.sharding.specs import SplitDim

_NUMBER = (int, float)
_UNBOUND: Any = object()
_RUNS = {'train': 'train', 'evaluate': 'eval', 'infer': 'decode'}
_OTHER_RUNS = {
  '__main__.precompile': 'use the setup of the training with --mode plan, which compiles the step',
  't5x.export_lib.save': '--mode export writes checkpoints of T5X and Hugging Face, but no SavedModel',
}
# contrib/gpu has the network of examples.t5, with a setting to scale attention.
_NETWORK = re.compile(
  r't5x\.(?:examples|contrib\.gpu)\.(t5|scalable_t5|decoder_only)\.network\.(Transformer|DecoderWrapper)'
)
NORMALIZATIONS = {
  None: 'sum',
  'NUM_REAL_TARGET_TOKENS': 'tokens',
  'NUM_TOTAL_TARGET_TOKENS': 'all_tokens',
  'AVERAGE_PER_SEQUENCE': 'sequences',
}
_MODELS = (
  't5x.models.EncoderDecoderModel',
  't5x.models.DecoderOnlyModel',
  't5x.contrib.moe.models.MoeEncoderDecoderModel',
)
_TRAINERS = ('t5x.trainer.Trainer', 't5x.contrib.moe.trainer.MoeTrainer')
_FLAXFORMER = 'flaxformer.architectures.t5.t5_architecture.EncoderDecoder'
_REMAT = {None: 'none', 'none': 'none', 'minimal': 'dots_no_batch', 'full': 'full'}
# T5X's name -> our name, and T5X's default or MISSING.
_SIZES = {
  'vocab_size': ('vocab_size', MISSING),
  'emb_dim': ('model_dims', 512),
  'num_heads': ('num_heads', 8),
  'head_dim': ('head_dim', 64),
  'mlp_dim': ('hidden_dims', 2048),
  'dropout_rate': ('dropout_rate', 0.1),
  'logits_via_embedding': ('ties_embedding', False),
}
ADAFACTOR = {
  'beta1': 'momentum',
  'decay_rate': 'decay_exponent',
  'weight_decay_rate': 'weight_decay',
  'epsilon1': 'epsilon',
  'epsilon2': 'min_parameter_scale',
  'weight_decay_rate_lr_exponent': 'weight_decay_exponent',
}
_SAME = 'step_offset clipping_threshold min_dim_size_to_factor multiply_by_parameter_scale max_parameter_scale'
ADAFACTOR |= {name: name for name in _SAME.split()}
_RATE = {'base_learning_rate': 'base', 'min_learning_rate': 'minimum'}
_SAME = 'factors warmup_steps decay_factor steps_per_decay steps_per_cycle step_offset'
_RATE |= {name: name for name in _SAME.split()}
# Bindings that do not affect numbers, by the last part of the selector.
_IGNORED = {
  'train': 'summarize_config_fn use_hardware_rng gc_period use_orbax concurrent_metrics stats_period use_jax_array',
  'evaluate': 'output_dir inference_evaluator_cls summarize_config_fn',
  'infer': 'output_dir mode checkpoint_period shard_id num_shards',
  'DatasetConfig': 'use_memory_cache num_workers num_prefetch_threads',
  'PjitPartitioner': 'backend use_cpu_pjit',
  'SaveCheckpointConfig': 'save_dataset keep_dataset_checkpoints dtype checkpointer_cls',
  'RestoreCheckpointConfig': 'mode dtype strict restore_dataset checkpointer_cls',
  'T5Config': 'param_scan_axis float32_attention_logits',
  'MoePjitPartitioner': 'num_expert_partitions num_experts state_filter_fn backend',
  'MoeTrainer': 'expert_grad_scale',
  'predict_batch_with_aux': 'return_all_decodes',
  'DecoderParams': 'return_all_decodes',
  'create_task_from_tfexample_file': 'features targets_key task_id',
}
# T5X's mesh axes -> ours. Our `data` axis also shards experts.
_AXES = {'data': 'data', 'model': 'mdl', 'expert': 'data'}
_DROPOUTS = ('dropout_factory', 'input_dropout_factory', 'output_dropout_factory')
# Bindings of Flaxformer's layers that do not affect numbers, or that are read from another module.
_IGNORED_IN_FLAXFORMER = (
  'kernel_init bias_init embedding_init dtype attend_dtype cast_input_dtype one_hot name layer_norm_factory '
  'activation_partitioning_dims scanned input_axis_name output_axis_name router intermediate_axis_name '
  'data_sharding_constraints num_model_partitions broadcast_dropout num_heads encoder_decoder_attention '
  'router_weights broadcast_dims position_bias_factory split_params precision dropout_rate attention_fn'
)


@dataclasses.dataclass(kw_only=True)
class Translation:
  """A translated setup.

  Attributes:
    mode: the mode that the setup runs.
    experiment: the name of the experiment class.
    fields: the fields of the experiment.
    missing: settings that are not supported and affect numbers.
    notes: differences that do not affect numbers.
    model_dir: T5X's MODEL_DIR.
    relative_steps: the number of steps after the initial checkpoint.
    has_causal_inputs: whether a decoder-only model has causal attention in the inputs.
    generates: whether the run generates texts, also in evals of a training.
  """

  mode: str = 'train'
  experiment: str = 'T5xExperiment'
  fields: dict[str, Any] = dataclasses.field(default_factory=dict)
  missing: list[str] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)
  model_dir: str | None = None
  relative_steps: int | None = None
  has_causal_inputs: bool = True
  generates: bool = True

  def add_missing(self, setting: str, reason: str) -> None:
    self.missing.append(f'{setting}: {reason}')


def translate(setup: Setup) -> Translation:
  """Translates a setup.

  Raises a UserError if it does not train, evaluate or infer, or lacks a value that T5X requires.
  """
  root = next((node for name in _RUNS if (node := setup.node(f'__main__.{name}'))), None)
  root = root or next((node for name in _RUNS if (node := setup.node(f't5x.{name}.{name}'))), None)
  for name, remedy in _OTHER_RUNS.items():
    if root is None and setup.node(name):
      raise UserError(f'the gin setup runs {name}, which is not supported: {remedy}.')
  if root is None:
    raise UserError(
      f'the gin setup ({", ".join(setup.files)}) does not bind train, evaluate or infer: include '
      "'t5x/configs/runs/pretrain.gin' or another run of T5X."
    )
  translation = Translation(mode=_RUNS[root.name])
  translation.generates = translation.mode != 'train' or root.get_node('infer_eval_dataset_cfg', None) is not None
  _translate_model(root.get_node('model'), translation)
  if translation.mode == 'train':
    _translate_training(root, translation)
  else:
    dataset = _dataset_fields(root.get_node('dataset_cfg'), translation, root.get_node('model'))
    dataset |= {'num_epochs': 1, 'packing': False}
    translation.fields |= {'train_data': dataset, 'eval_data' if translation.mode == 'eval' else 'decode_data': dataset}
    translation.fields |= _size_fields(dataset) | _init_fields(root.get_node('restore_checkpoint_cfg'), translation)
    if root.get('mode', 'predict') != 'predict':
      translation.notes.append('infer.mode: --mode decode_once predicts, --mode eval --write_examples scores')
    _translate_evaluator(root, translation)
  _translate_partitioner(root.get_node('partitioner', None), translation)
  _report_unread(root, translation)
  translation.notes += [f'{name}: has no effect, because nothing that runs refers to it' for name in setup.unused(root)]
  return translation


def _translate_model(model: Node, translation: Translation) -> None:
  """Translates the model, its loss and its optimizer."""
  if model.selector not in _MODELS:
    names = ', '.join(name.rpartition('.')[2] for name in _MODELS)
    translation.add_missing(f'model = @{model}', f'only {names} of T5X are supported')
    return
  module = model.get_node('module')
  network = _NETWORK.fullmatch(module.selector)
  if module.selector == _FLAXFORMER:
    _translate_flaxformer(module, model, translation)
  elif network is None:
    reason = 'only networks of t5x.examples and EncoderDecoder of Flaxformer are supported'
    translation.add_missing(f'{model}.module = @{module}', reason)
  else:
    _translate_network(module.get_node('config'), network[1], model.name == 'DecoderOnlyModel', translation)
    _report_unread(module, translation)
  normalization = model.get('loss_normalizing_factor', None, (str, *_NUMBER))
  if isinstance(normalization, str) and normalization not in NORMALIZATIONS:
    names = ', '.join(map(str, NORMALIZATIONS))
    translation.add_missing(f'{model}.loss_normalizing_factor = {normalization!r}', f'must be one of {names}')
  translation.fields |= {
    'z_loss': model.get('z_loss', 0.0) or 0.0,
    'label_smoothing': model.get('label_smoothing', 0.0),
    'normalization': NORMALIZATIONS.get(normalization, normalization),
  }
  for name in ('vocabulary', 'input_vocabulary', 'output_vocabulary'):  # the vocabularies of the data are used
    model.get(name, None)
  if (converter := model.get('feature_converter_cls', None)) is not None:
    translation.add_missing(f'{model}.feature_converter_cls = @{converter}', "only the model's default is supported")
  translation.has_causal_inputs = not model.get('inputs_bidirectional_attention', False)
  _translate_decoding(model, translation)
  optimizer = model.get_node('optimizer_def')
  if optimizer.selector != 't5x.adafactor.Adafactor':
    translation.add_missing(f'{model}.optimizer_def = @{optimizer}', 'only t5x.adafactor.Adafactor is supported')
  else:
    is_flat = module.selector == _FLAXFORMER and translation.experiment == 'T5xExperiment'
    _translate_adafactor(optimizer, translation, is_flat=is_flat)
  _report_unread(model, translation)


def _translate_decoding(model: Node, translation: Translation) -> None:
  """Translates beam search or sampling, and the number of texts per prompt."""
  default = 'temperature_sample' if model.name == 'DecoderOnlyModel' else 'beam_search'
  default_function = dataclasses.replace(model, scope='', selector=f't5x.decoding.{default}')
  function = model.get_node('decode_fn', None) or default_function
  predict = dataclasses.replace(model, selector=f'{model.selector}.predict_batch_with_aux')
  params = model.get_node('default_decoder_params', None)
  number = predict.get('num_decodes', params.get('num_decodes', 1, int) if params else 1, int)
  if function.selector == 't5x.decoding.beam_search':
    translation.fields['decoding'] = {'num_beams': number, 'length_penalty': function.get('alpha', 0.6)}
  elif function.selector == 't5x.decoding.temperature_sample':
    temperature, top_k = function.get('temperature', 1.0), function.get('topk', 1)
    translation.fields['decoding'] = {'temperature': 0.0 if top_k == 1 else temperature, 'top_k': top_k}
    translation.fields['decoding'] |= {'top_p': function.get('topp', 0.0) or 1.0}
    if number > 1 and translation.mode == 'decode':
      translation.fields['num_samples'] = number
      note = f'{predict}.num_decodes = {number}: all samples are written, with their log-probabilities'
      translation.notes.append(note)
    elif number > 1 and translation.generates:
      translation.add_missing(f'{predict}.num_decodes = {number}', 'evals draw one sample per prompt')
  else:
    reason = 'only beam_search and temperature_sample of t5x.decoding are supported'
    translation.add_missing(f'{model}.decode_fn = @{function}', reason)
  for node in (function, predict, *([params] if params else [])):
    _report_unread(node, translation)


def _translate_network(config: Node, example: str, is_decoder: bool, translation: Translation) -> None:
  """Translates the config of a network of t5x.examples."""
  for theirs, (ours, default) in _SIZES.items():
    translation.fields[ours] = config.get(theirs, default)
  translation.fields['num_layers'] = config.get('num_layers' if is_decoder else 'num_decoder_layers', 6)
  translation.fields['num_encoder_layers'] = 0 if is_decoder else config.get('num_encoder_layers', 6)
  if config.get('scale_attn_logits', False):
    translation.add_missing(f'{config}.scale_attn_logits = True', 'attention of T5 models is not scaled')
  dtype = config.get('dtype', 'float32')
  translation.fields['dtype'] = dtype.name if isinstance(dtype, Node) else str(dtype)
  translation.fields |= _activation_fields(config, translation, 'mlp_activations')
  is_scalable = example == 'scalable_t5'
  is_scanned = is_scalable and config.get('scan_layers', True)
  translation.fields |= {'has_bias_per_layer': is_scalable, 'scanned': is_scanned}
  translation.fields['heads_apart'] = is_scalable and not is_scanned
  remat = config.get('remat_policy', None, str)
  if remat not in _REMAT:
    translation.notes.append(f'{config}.remat_policy = {remat!r}: all activations are saved; set remat_policy')
  translation.fields['remat_policy'] = _REMAT.get(remat, 'none')
  _report_unread(config, translation)


def _translate_flaxformer(module: Node, model: Node, translation: Translation) -> None:
  """Translates Flaxformer's encoder-decoder, which may have mixtures of experts."""
  translation.notes.append(f'@{module}: kernel_init is ignored; weights have the initializers of T5')
  embed = module.get_node('shared_token_embedder_factory')
  dtype = module.get('dtype', 'float32')
  translation.fields |= {'vocab_size': embed.get('num_embeddings'), 'model_dims': embed.get('features'), 'dtype': dtype}
  sides = {'encoder': 'attention', 'decoder': 'self_attention'}
  stacks = {side: module.get_node(f'{side}_factory') for side in sides}
  layers = {side: stack.get_node('layer_factory') for side, stack in stacks.items()}
  visited, fields = [module, embed, *stacks.values(), *layers.values()], {}
  for side, attention in sides.items():
    layer_bias = layers[side].get_node('relative_position_bias_factory', None)
    bias = stacks[side].get_node('shared_relative_position_bias_factory', None) or layer_bias
    attention, mlp = layers[side].get_node(attention), layers[side].get_node('mlp')
    dropouts = [node.get_node(name, None) for node in (layers[side], stacks[side]) for name in _DROPOUTS]
    rates = {attention.get('dropout_rate', 0.0, _NUMBER), mlp.get('intermediate_dropout_rate', 0.1, _NUMBER)}
    rates |= {dropout.get('rate', kind=_NUMBER) for dropout in dropouts if dropout}
    if len(rates) > 1:
      translation.add_missing(f'@{layers[side]}', f'only one dropout rate is supported, but it has {sorted(rates)}')
    fields[side] = {
      'num_heads': attention.get('num_heads'),
      'head_dim': attention.get('head_dim'),
      'hidden_dims': mlp.get('intermediate_dim', 2048),
      'dropout_rate': max(rates),
      'has_bias_per_layer': layer_bias is not None,
      'num_buckets': bias.get('num_buckets') if bias else None,
      'max_distance': bias.get('max_distance') if bias else None,
      **_activation_fields(mlp, translation),
    }
    num_layers = 'num_layers' if side == 'decoder' else 'num_encoder_layers'
    translation.fields[num_layers] = stacks[side].get('num_layers', kind=int)
    _check_no_biases(translation, attention, mlp)
    if stacks[side].get('position_embedder_factory', None) is not None or bias is None:
      translation.add_missing(f'@{stacks[side]}', 'only relative position biases are supported')
    visited += [attention, mlp, *[node for node in (*dropouts, bias) if node]]
  translation.fields |= _common_fields(fields, f'@{module}', translation)
  logits = stacks['decoder'].get('output_logits_factory', None)
  translation.fields['ties_embedding'] = logits is None
  if any(stack.get('num_sparse_layers', 0) for stack in stacks.values()):
    visited += _translate_mixtures(stacks, fields['decoder'], model, translation)
  for node in visited:
    _report_unread(node, translation, _IGNORED_IN_FLAXFORMER)


def _translate_mixtures(
  stacks: Mapping[str, Node], ffn: Mapping[str, Any], model: Node, translation: Translation
) -> list[Node]:
  """Translates the mixtures of experts of both stacks; returns the nodes that it has read."""
  translation.experiment, visited, fields, density = 'T5xMoeExperiment', [], {}, {}
  for side, stack in stacks.items():
    layer, num_sparse = stack.get_node('sparse_layer_factory'), stack.get('num_sparse_layers', kind=int)
    density[side] = stack.get('num_layers', kind=int) // max(num_sparse, 1)
    if num_sparse == 0 or stack.get('num_layers') % num_sparse:
      reason = 'must divide the number of layers, in both stacks'
      translation.add_missing(f'{stack}.num_sparse_layers = {num_sparse}', reason)
    layout = str(stack.get('sparse_layout', 'MIXED'))
    if not layout.endswith('MIXED') and density[side] > 1:
      translation.add_missing(f'{stack}.sparse_layout = {layout}', 'only LayerLayout.MIXED is supported')
    mixture = layer.get_node('mlp')
    partitions = mixture.get('num_expert_partitions')
    router, expert = mixture.get_node('router'), mixture.get_node('expert')
    by_experts = router.name == 'ExpertsChooseMaskedRouter'
    if not (by_experts and side == 'encoder') and not router.name.startswith('TokensChoose'):
      reason = 'only routers in which tokens choose, and in the encoder experts choose, are supported'
      translation.add_missing(f'{mixture}.router = @{router}', reason)
    extra = layer.get_node('extra_mlp', None)
    dense = [expert, extra] if extra else [expert]
    for node in dense:
      node_fields = {'hidden_dims': node.get('intermediate_dim', 2048)}
      node_fields |= _activation_fields(node, translation)
      if node is extra:
        node_fields['dropout_rate'] = node.get('intermediate_dropout_rate', 0.1)
      if different := [name for name, value in node_fields.items() if ffn[name] != value]:
        translation.add_missing(f'@{node}', f'must equal the dense layers, but differs in {", ".join(different)}')
    _check_no_biases(translation, *dense)
    layer.get('dropout_factory', None)  # checked for the dense layers
    jitter = router.get('jitter_noise', 0.0)
    if by_experts and jitter:
      translation.add_missing(f'{router}.jitter_noise', 'must be 0.0 if experts choose: bind JITTER_NOISE = 0.0')
    fields[side] = {
      'num_experts': mixture.get('num_experts'),
      'num_groups_multiple_of': mixture.get('num_experts'),
      'max_group_size': mixture.get('max_group_size'),
      'capacity_factor': mixture.get('train_capacity_factor'),
      'eval_capacity_factor': mixture.get('eval_capacity_factor'),
      'min_capacity': mixture.get('min_expert_capacity', 4),
      'expert_dropout_rate': expert.get('intermediate_dropout_rate', 0.1),
      'has_extra_ffn': extra is not None,
      'ignores_padding': router.get('ignore_padding_tokens'),
    }
    prioritizes = router.get('batch_prioritized_routing', False)
    if side == 'encoder':
      translation.fields['prioritizes_batch'] = prioritizes
    elif prioritizes:
      reason = 'must be False in the decoder, which would look ahead'
      translation.add_missing(f'{router}.batch_prioritized_routing', reason)
    if by_experts:
      translation.fields['experts_choose'] = True
    else:
      fields[side] |= {'num_selected_experts': router.get('num_selected_experts'), 'jitter_eps': jitter}
    visited += [layer, mixture, router, *dense, layer.get_node('attention' if side == 'encoder' else 'self_attention')]
  translation.notes.append(
    f'groups of tokens: their number is a multiple of {fields["decoder"]["num_experts"]}, the number of experts, as in '
    f'T5X on up to {partitions} times its model partitions devices; for more devices, set num_groups_multiple_of'
  )
  weights = {'load_balance_weight': 'aux_loss_factor', 'router_z_weight': 'router_z_loss_factor'}
  encoder, decoder = density.values()
  translation.fields['mixture_every'] = encoder if encoder == decoder else (encoder, decoder)
  translation.fields |= _common_fields(fields, 'sparse layers', translation)
  translation.fields |= {ours: model.get(theirs, 0.0) for ours, theirs in weights.items()}
  return visited


def _common_fields(fields: Mapping[str, Mapping[str, Any]], part: str, translation: Translation) -> Mapping[str, Any]:
  """Returns the fields of a part of both stacks, which must be equal in encoder and decoder."""
  if different := [name for name, value in fields['encoder'].items() if fields['decoder'][name] != value]:
    translation.add_missing(part, f'encoder and decoder must be equal, but differ in {", ".join(different)}')
  return fields['decoder']


def _check_no_biases(translation: Translation, *nodes: Node) -> None:
  for node in nodes:
    for name in ('use_bias', 'final_dropout_rate'):
      if node.get(name, False):
        translation.add_missing(f'{node}.{name}', 'is not supported in attention and feed-forward layers')


def _activation_fields(node: Node, translation: Translation, name: str = 'activations') -> dict[str, Any]:
  activations = tuple(node.get(name, ('relu',), (tuple, list)))
  if not activations or activations[1:] not in ((), ('linear',)):
    reason = "must be one activation, or one and 'linear'"
    translation.add_missing(f'{node}: activations = {activations}', reason)
    return {}
  if activations[0] not in ACTIVATIONS:
    reason = f'{activations[0]!r} is not one of {sorted(ACTIVATIONS)}'
    translation.add_missing(f'{node}: activations = {activations}', reason)
  return {'activation': activations[0], 'is_gated': len(activations) == 2}


def _translate_adafactor(optimizer: Node, translation: Translation, *, is_flat: bool) -> None:
  """Translates Adafactor.

  With `is_flat`, all weights are matrices, which are factored in the same way with and without T5X's factor rules.
  """
  settings = {}
  for theirs, ours in ADAFACTOR.items():
    value = optimizer.get(theirs, _UNBOUND)
    if isinstance(value, Node):
      reason = 'a map by names of weights is not supported; set it in a subclass'
      translation.add_missing(f'{optimizer}.{theirs} = @{value}', reason)
    elif value is not _UNBOUND and not (value is None and theirs.startswith('weight_decay')):
      settings[ours] = value
  if optimizer.get('factored', True) is False:
    settings['min_dim_size_to_factor'] = 2**31 - 1
  rules = optimizer.get('logical_factor_rules', None)
  if isinstance(rules, Node) and rules.name not in ('standard_logical_factor_rules', 'logical_factor_rules'):
    reason = 'only the rules of T5X and its contrib/moe are supported'
    translation.add_missing(f'{optimizer}.logical_factor_rules = @{rules}', reason)
  elif rules is None and optimizer.get('factored', True) and not is_flat:
    reason = "is required, because without T5X's rules other dims are factored; set `optimizer`"
    translation.add_missing(f'{optimizer}.logical_factor_rules', reason)
  translation.fields |= {'adafactor': settings, 'clip_global_norm': optimizer.get('global_norm_clip_threshold', None)}
  optimizer.get('learning_rate', None)  # the schedule overrides it
  _report_unread(optimizer, translation)


def _translate_training(root: Node, translation: Translation) -> None:
  """Translates the data, the trainer, the checkpoints and the intervals of a training."""
  translation.model_dir = root.get('model_dir', None, str)
  data = _dataset_fields(root.get_node('train_dataset_cfg'), translation)
  eval_period = root.get('eval_period', None, int)
  root.get('eval_steps', None)
  translation.fields |= {'train_data': data, **_size_fields(data)}
  if (evaluation := root.get_node('train_eval_dataset_cfg', None)) is not None:
    data, steps = _dataset_fields(evaluation, translation), root.get('eval_steps', kind=int)
    translation.fields['eval_data'] = data | {'num_epochs': steps * data['batch_size'], 'max_batches': steps}
    translation.fields['eval_every_steps'] = eval_period or None
  if (inference := root.get_node('infer_eval_dataset_cfg', None)) is not None:
    translation.fields['infer_data'] = _dataset_fields(inference, translation) | {'num_epochs': 1, 'packing': False}
    translation.fields['eval_every_steps'] = eval_period or None
  _translate_evaluator(root, translation)
  if root.get('run_eval_before_training', False):
    translation.notes.append(f'{root}.run_eval_before_training: --mode eval evaluates the initial weights')
  for action in itertools.chain.from_iterable((root.get('actions', None, Mapping) or {}).values()):
    if isinstance(action, Node) and action.name == 'TerminateOnNanAction':
      translation.notes.append(f'@{action}: steps with a nonfinite loss are skipped, and many in a row end the job')
    else:
      reason = 'is not supported; return a hook such as EvalTarget from hooks() of the experiment'
      translation.add_missing(f'{root}.actions: @{action}', reason)
  _translate_trainer(root.get_node('trainer_cls'), translation)
  checkpoints = root.get_node('checkpoint_cfg')
  save, restore = checkpoints.get_node('save', None), checkpoints.get_node('restore', None)
  if save is not None:
    translation.fields['checkpoint_every'] = save.get('period', None)
    _note_dtype(save, translation)
    keep = save.get('keep', None)
    translation.fields['checkpoint_max_to_keep'] = 1_000_000 if keep is None else keep
    _report_unread(save, translation)
  translation.fields |= _init_fields(restore, translation) if restore is not None else {}
  translation.fields['num_train_steps'] = root.get('total_steps')
  translation.relative_steps = root.get('relative_steps', None, int)
  if translation.relative_steps:
    translation.fields['num_train_steps'] = translation.relative_steps + (translation.fields.get('init_from_step') or 0)
  seed = root.get('random_seed', None)
  if seed is None:
    translation.notes.append('random_seed = None: the seed is 0; T5X derives it from the clock')
  translation.fields['seed'] = seed or 0


def _translate_trainer(trainer: Node, translation: Translation) -> None:
  """Translates the schedule and the microbatches."""
  if trainer.selector not in _TRAINERS:
    translation.add_missing(f'trainer_cls = @{trainer}', f'only {" and ".join(_TRAINERS)} are supported')
    return
  rate = trainer.get_node('learning_rate_fn')
  if rate.selector == 't5x.utils.create_learning_rate_scheduler':
    kinds = {ours: str if ours == 'factors' else _NUMBER for ours in _RATE.values()}
    settings = {ours: rate.get(theirs, None, kinds[ours]) for theirs, ours in _RATE.items()}
    translation.fields['rate'] = {name: value for name, value in settings.items() if value is not None}
    _report_unread(rate, translation)
  else:
    reason = 'only utils.create_learning_rate_scheduler is supported'
    translation.add_missing(f'{trainer}.learning_rate_fn = @{rate}', reason)
  translation.fields['num_microbatches'] = trainer.get('num_microbatches', None) or 1
  if trainer.name == 'MoeTrainer':
    translation.fields['expert_grad_scale'] = trainer.get('num_expert_partitions')
  if trainer.get('weight_metrics_computer', None) is not None:
    note = '--mode replay --step N shows weights, gradients and updates'
    translation.notes.append(f'{trainer}.weight_metrics_computer: {note}')
  _report_unread(trainer, translation)


def _translate_evaluator(root: Node, translation: Translation) -> None:
  evaluator = root.get('inference_evaluator_cls', None)
  if isinstance(evaluator, Node) and evaluator.selector not in ('seqio.Evaluator', 'seqio.evaluation.Evaluator'):
    translation.notes.append(f'{root}.inference_evaluator_cls = @{evaluator}: metrics are computed by seqio.Evaluator')
  if isinstance(evaluator, Node) and evaluator.get('num_examples', None):
    translation.notes.append(f'{evaluator}.num_examples: metrics are computed on all examples of a task')


def _dataset_fields(config: Node, translation: Translation, model: Node | None = None) -> dict[str, Any]:
  """Returns the fields of a SeqIoInput, or of a TfExampleInput with the vocabulary of a model."""
  task, module = config.get('mixture_or_task_name'), config.get('module', None)
  source: dict[str, Any] = {'task': task}
  if isinstance(task, Node) and task.name == 'create_task_from_tfexample_file' and model is not None:
    if task.get('file_type') != 'tfrecord':
      translation.add_missing(f'{task}.file_type', "only 'tfrecord' is supported")
    paths = task.get('paths', kind=(str, list, tuple))
    source = {'paths': (paths,) if isinstance(paths, str) else tuple(paths)}
    source |= {'inputs_key': task.get('inputs_key', 'inputs'), **_vocabulary_fields(model, translation)}
    _report_unread(task, translation)
  elif isinstance(task, Node):
    reason = 'must be the name of a task; use --decode_input for prompts in files'
    translation.add_missing(f'{config}.mixture_or_task_name = @{task}', reason)
    source = {'task': task.name}
  if module:
    translation.fields['task_modules'] = tuple(dict.fromkeys((*translation.fields.get('task_modules', ()), module)))
  lengths = config.get('task_feature_lengths', kind=(Mapping, type(None)))
  architecture = 'encoder_decoder'
  if not translation.fields.get('num_encoder_layers', 1):
    architecture = 'prefix_lm' if lengths is None or 'inputs' in lengths else 'decoder_only'
  seed = config.get('seed', None)
  if seed is None and config.get('shuffle', False):
    note = 'the seed is 0, so that a job can resume; T5X derives it from the clock'
    translation.notes.append(f'{config}.seed = None: {note}')
  if config.get('use_custom_packing_ops', False):
    translation.notes.append(f'{config}.use_custom_packing_ops: TensorFlow packs the examples, in another order')
  if config.get('runtime_preprocessors', None):
    translation.add_missing(f'{config}.runtime_preprocessors', 'AirIO is not supported')
  fields = {
    **source,
    'lengths': lengths,
    'split': config.get('split'),
    'batch_size': config.get('batch_size', kind=int),
    'architecture': architecture,
    'packing': config.get('pack', False),
    'shuffle': config.get('shuffle'),
    'seed': seed or 0,
    'use_cached': config.get('use_cached', False),
    'trim_output_features': config.get('trim_output_features', True),
  }
  if architecture == 'prefix_lm' and translation.has_causal_inputs:
    fields['prefix_is_causal'] = True
  _report_unread(config, translation)
  return fields


def _vocabulary_fields(model: Node, translation: Translation) -> dict[str, Any]:
  """Returns the fields of a TfExampleInput with the vocabulary of a model's targets."""
  vocabulary = model.get_node('output_vocabulary', None) or model.get_node('vocabulary')
  extra = {'extra_ids': vocabulary.get('extra_ids', 0)}
  if vocabulary.name == 'ByteVocabulary':
    return extra
  if vocabulary.name != 'SentencePieceVocabulary':
    reason = 'only ByteVocabulary and SentencePieceVocabulary are supported'
    translation.add_missing(f'{model}.output_vocabulary = @{vocabulary}', reason)
    return {}
  return {'sentencepiece_model_file': vocabulary.get('sentencepiece_model_file', None), **extra}


def _size_fields(data: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the batch size and sequence lengths of the experiment."""
  lengths = data['lengths'] or {}
  sizes = {'batch_size': data['batch_size']}
  if 'targets' in lengths:
    width = sum(lengths.values()) if data['architecture'] == 'prefix_lm' else lengths['targets']
    sizes |= {'seq_len': width, 'encoder_len': lengths.get('inputs', 1)}
  return sizes


def _note_dtype(node: Node, translation: Translation) -> None:
  if (dtype := node.get('dtype', None)) not in (None, 'float32'):
    translation.notes.append(f'{node}.dtype = {dtype!r}: weights stay in float32')


def _init_fields(restore: Node, translation: Translation) -> dict[str, Any]:
  """Returns `init_from` and `init_from_step`, and translates what is restored."""
  _note_dtype(restore, translation)
  path, pairs = restore.get('path', None), list(restore.get('assignment_map', None, (list, tuple)) or ())
  for function in restore.get('state_transformation_fns', None, (list, tuple)) or ():
    if not isinstance(function, Node) or function.name != 'apply_assignment_map':
      reason = 'only state_utils.apply_assignment_map is supported'
      translation.add_missing(f'{restore}.state_transformation_fns = {function}', reason)
      continue
    pairs += function.get('assignment_map')
    if function.get('require_all_rules_match', True) is False:
      translation.add_missing(f'{function}.require_all_rules_match', 'must be True; remove pairs that match no weight')
  checkpointer = restore.get('checkpointer_cls', None)
  if isinstance(checkpointer, Node) and checkpointer.name == 'UpcycleCheckpointer':
    reason = 'start a dense job from this checkpoint, and the mixture with --set init_from=JOB_LOG_DIR of that job, '
    reason += 'which initializes experts from dense layers'
    translation.add_missing(f'{restore}.checkpointer_cls = @{checkpointer}', reason)
  from_scratch = restore.get('fallback_to_scratch', False)
  if pairs or from_scratch:
    states = [pair for pair in pairs if re.match(r'(target\|)?state|\.\*param_states|state', pair[0])]
    if pairs and not any(new is None for _, new in states):
      translation.notes.append(f'{restore}.assignment_map: the optimizer state is new, and the step is restored')
    translation.fields |= {'assignment_map': tuple(tuple(pair) for pair in pairs if pair not in states)}
    translation.fields |= {'from_scratch': bool(from_scratch)}
  _report_unread(restore, translation)
  if not path:
    return {}
  if not isinstance(path, str):
    translation.add_missing(f'{restore}.path = {path!r}', 'must be one checkpoint')
    return {}
  step = re.fullmatch(r'checkpoint_(\d+)', Path(path).name)
  if step is None or not int(step[1]):  # init_from_step cannot be 0
    return {'init_from': f't5x:{path}'}
  return {'init_from': f't5x:{Path(path).parent}', 'init_from_step': int(step[1])}


def _translate_partitioner(partitioner: Node | None, translation: Translation) -> None:
  if partitioner is None:
    return
  submesh = partitioner.get('model_parallel_submesh', None, (tuple, list))
  number = partitioner.get('num_partitions', None, int)
  if number and submesh and number != math.prod(submesh) and partitioner.name == 'MoePjitPartitioner':
    raise UserError(f'num_partitions = {number} and model_parallel_submesh = {submesh} contradict: bind one of them.')
  translation.fields['ici_mesh_shape'] = (1, -1, math.prod(submesh) if submesh else number or 1)
  if not partitioner.get('params_on_devices', True):
    note = 'each process restores its own shards to its devices'
    translation.notes.append(f'{partitioner}.params_on_devices = False: {note}')
  rules, default = partitioner.get('logical_axis_rules', None), 2 if partitioner.name == 'MoePjitPartitioner' else 1
  dims = {'activation_partitioning_dims': default, 'parameter_partitioning_dims': 1}
  additional: AxisRules = ()
  if isinstance(rules, Node) and rules.name == 'standard_logical_axis_rules':
    dims = {name: rules.get(name, value) for name, value in dims.items()}
    additional = _additional_rules(rules, translation)
    _report_unread(rules, translation)
  elif rules is not None:
    translation.notes.append(f'{partitioner}.logical_axis_rules: ignored; axis_rules has its default')
  if additional or set(dims.values()) != {1}:  # our default also shards weights over `data`
    activations, parameters = dims.values()
    translation.fields['axis_rules'] = t5x_axis_rules(
      DEFAULT_AXIS_RULES,
      activation_partitioning_dims=activations,
      parameter_partitioning_dims=parameters,
      additional_rules=additional,
    )
  _report_unread(partitioner, translation)


def _additional_rules(rules: Node, translation: Translation) -> AxisRules:
  """Returns the `additional_rules` of a function of axis rules, with the axes of our mesh."""
  additional: list[tuple[str, SplitDim]] = []
  for rule in rules.get('additional_rules', None, (list, tuple)) or ():
    is_pair = isinstance(rule, (list, tuple)) and len(rule) == 2 and isinstance(rule[0], str)
    target = rule[1] if is_pair else MISSING
    axes = (target,) if isinstance(target, str) else () if target is None else target
    if not isinstance(axes, (list, tuple)) or not all(isinstance(axis, str) and axis in _AXES for axis in axes):
      reason = f'must be a name, and None or axes from {", ".join(_AXES)}'
      translation.add_missing(f'{rules}.additional_rules has {rule!r}', reason)
      continue
    mesh_axes = tuple(dict.fromkeys(_AXES[axis] for axis in axes))
    additional.append((rule[0], mesh_axes if len(mesh_axes) > 1 else next(iter(mesh_axes), None)))
  return tuple(additional)


def _report_unread(node: Node, translation: Translation, also_ignored: str = '') -> None:
  """Adds the bindings of a node that were not read and may affect numbers to `missing`."""
  ignored = f'{_IGNORED.get(node.name, "")} {also_ignored}'.split()
  for text in node.unread():
    if text.partition(' = ')[0].rpartition('.')[2] not in ignored:
      translation.add_missing(text, 'is not supported')


def source_file(name: str, translation: Translation, files: list[str]) -> str:
  """Returns the Python source of a subclass of T5xExperiment."""
  remarks = dict.fromkeys([*translation.missing, *translation.notes] or ['nothing'])
  lines = [f'"""{name}, translated from {", ".join(files)}.', '', 'Not translated, or done differently:', '']
  lines += [f'* {remark}' for remark in remarks]
  base = translation.experiment
  lines += ['"""', '', f'from spmd_tasks.bridges.t5x import {base}', '', '', f'class {name}({base}):']
  lines += [f'  """The setup {Path(files[0]).name} of T5X."""', '']
  for field, value in translation.fields.items():
    text = pprint.pformat(value, width=100, sort_dicts=False, compact=True)
    lines += [f'  {line}' for line in f'{field} = {text}'.splitlines()]
  return '\n'.join(lines) + '\n'
