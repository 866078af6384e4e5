"""Translates a gin setup of T5X to the fields of a T5xExperiment, and says what has no counterpart.

    translation = translate(read_setup(files, bindings))
    translation.fields      # of T5xExperiment
    translation.missing     # what would change numbers, each with the reason; such a setup does not start
    translation.notes       # what is different and changes no number, or none that T5X fixes

A field that no binding names has T5X's default.
"""

from collections.abc import Mapping
import dataclasses
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
_RUNS = {'train': 'train', 'evaluate': 'eval', 'infer': 'decode'}
_OTHER_RUNS = {
  '__main__.precompile': 'give the setup of the training to --mode plan, which compiles its step',
  't5x.export_lib.save': "no SavedModel is written; --mode export writes a folder of transformers or T5X's checkpoints",
}
# contrib/gpu has the network of examples.t5, where attention may be scaled.
_NETWORK = re.compile(
  r't5x\.(?:examples|contrib\.gpu)\.(t5|scalable_t5|decoder_only)\.network\.(Transformer|DecoderWrapper)'
)
NORMALIZATIONS = {
  None: 'sum',
  'NUM_REAL_TARGET_TOKENS': 'tokens',
  'NUM_TOTAL_TARGET_TOKENS': 'all_tokens',
  'AVERAGE_PER_SEQUENCE': 'sequences',
}
_FLAXFORMER = 'flaxformer.architectures.t5.t5_architecture.EncoderDecoder'
_REMAT = {None: 'none', 'none': 'none', 'minimal': 'dots_no_batch', 'full': 'full'}
# T5X's name, ours and T5X's default, if there is one.
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
# Bindings that say where something is computed or written, which no number depends on: by the last part of a selector.
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
# Of T5X's mesh: here `data` splits experts, too.
_AXES = {'data': 'data', 'model': 'mdl', 'expert': 'data'}
_DROPOUTS = ('dropout_factory', 'input_dropout_factory', 'output_dropout_factory')
# Of Flaxformer's layers, which module is built of what: initializers, names, types and layouts, and what is read by
# `_flaxformer` of another module.
_OF_FLAXFORMER = (
  'kernel_init bias_init embedding_init dtype attend_dtype cast_input_dtype one_hot name layer_norm_factory '
  'activation_partitioning_dims scanned input_axis_name output_axis_name router intermediate_axis_name '
  'data_sharding_constraints num_model_partitions broadcast_dropout num_heads encoder_decoder_attention '
  'router_weights broadcast_dims position_bias_factory split_params precision dropout_rate attention_fn'
)


@dataclasses.dataclass(kw_only=True)
class Translation:
  """The fields of an experiment, and what they do not say."""

  mode: str = 'train'
  experiment: str = 'T5xExperiment'
  fields: dict[str, Any] = dataclasses.field(default_factory=dict)
  missing: list[str] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)
  model_dir: str | None = None
  relative_steps: int | None = None
  has_causal_inputs: bool = True  # of a decoder-only model
  generates: bool = True  # whether texts are written, in evals of a training too

  def lacks(self, what: str, why: str) -> None:
    self.missing.append(f'{what}: {why}')


def translate(setup: Setup) -> Translation:
  """Translates a setup.

  Raises a UserError if it is no run of T5X that trains, evaluates or infers, or it lacks a value that T5X requires.
  """
  root = next((node for name in _RUNS if (node := setup.node(f'__main__.{name}'))), None)
  root = root or next((node for name in _RUNS if (node := setup.node(f't5x.{name}.{name}'))), None)
  for name, remedy in _OTHER_RUNS.items():
    if root is None and setup.node(name):
      raise UserError(f'{name} of a gin setup has no counterpart: {remedy}.')
  if root is None:
    raise UserError(
      f'the gin setup ({", ".join(setup.files)}) binds nothing of train, evaluate or infer: include '
      "'t5x/configs/runs/pretrain.gin' or another file of a run of T5X."
    )
  made = Translation(mode=_RUNS[root.name])
  made.generates = made.mode != 'train' or root.part('infer_eval_dataset_cfg', None) is not None
  _model(root.part('model'), made)
  if made.mode == 'train':
    _training(root, made)
  else:
    dataset = _dataset(root.part('dataset_cfg'), made, root.part('model'))
    dataset |= {'num_epochs': 1, 'packing': False}
    made.fields |= {'train_data': dataset, 'eval_data' if made.mode == 'eval' else 'decode_data': dataset}
    made.fields |= _sizes_of(dataset) | _start(root.part('restore_checkpoint_cfg'), made)
    if root.get('mode', 'predict') != 'predict':
      made.notes.append('infer.mode: --mode decode_once predicts, --mode eval --write_examples gives scores')
    _evaluator(root, made)
  _partitioner(root.part('partitioner', None), made)
  _report_rest(root, made)
  made.notes += [
    f'{name}: nothing that runs refers to it, so that its value changes nothing' for name in setup.unused(root)
  ]
  return made


def _model(model: Node, made: Translation) -> None:
  """Translates the model, its loss and its optimizer."""
  models = ('EncoderDecoderModel', 'DecoderOnlyModel', 'MoeEncoderDecoderModel')
  if model.name not in models:
    made.lacks(f'model = @{model}', f'only {", ".join(models)} of T5X are known')
    return
  module = model.part('module')
  known = _NETWORK.fullmatch(module.selector)
  if module.selector == _FLAXFORMER:
    _flaxformer(module, model, made)
  elif known is None:
    made.lacks(f'{model}.module = @{module}', 'only the networks of t5x.examples and EncoderDecoder of Flaxformer are')
  else:
    _network(module.part('config'), known[1], model.name == 'DecoderOnlyModel', made)
    _report_rest(module, made)
  normalization = model.get('loss_normalizing_factor', None, (str, *_NUMBER))
  if isinstance(normalization, str) and normalization not in NORMALIZATIONS:
    known_ones = ', '.join(map(str, NORMALIZATIONS))
    made.lacks(f'{model}.loss_normalizing_factor = {normalization!r}', f'known are {known_ones}')
  made.fields |= {
    'z_loss': model.get('z_loss', 0.0) or 0.0,
    'label_smoothing': model.get('label_smoothing', 0.0),
    'normalization': NORMALIZATIONS.get(normalization, normalization),
  }
  for name in ('vocabulary', 'input_vocabulary', 'output_vocabulary'):  # the data's are read
    model.get(name, None)
  if (converter := model.get('feature_converter_cls', None)) is not None:
    made.lacks(f'{model}.feature_converter_cls = @{converter}', 'the converter is that of the model')
  made.has_causal_inputs = not model.get('inputs_bidirectional_attention', False)
  _decoding(model, made)
  optimizer = model.part('optimizer_def')
  if optimizer.selector != 't5x.adafactor.Adafactor':
    made.lacks(f'{model}.optimizer_def = @{optimizer}', 'only t5x.adafactor.Adafactor is translated')
  else:
    _adafactor(optimizer, made, is_flat=module.selector == _FLAXFORMER and made.experiment == 'T5xExperiment')
  _report_rest(model, made)


def _decoding(model: Node, made: Translation) -> None:
  """Translates the search or the sampling, and how many texts it makes of one prompt."""
  default = 'temperature_sample' if model.name == 'DecoderOnlyModel' else 'beam_search'
  function = model.part('decode_fn', None) or dataclasses.replace(model, scope='', selector=f't5x.decoding.{default}')
  predict = dataclasses.replace(model, selector=f'{model.selector}.predict_batch_with_aux')
  params = model.part('default_decoder_params', None)
  number = predict.get('num_decodes', params.get('num_decodes', 1, int) if params else 1, int)
  if function.selector == 't5x.decoding.beam_search':
    made.fields['decoding'] = {'num_beams': number, 'length_penalty': function.get('alpha', 0.6)}
  elif function.selector == 't5x.decoding.temperature_sample':
    temperature, top_k = function.get('temperature', 1.0), function.get('topk', 1)
    made.fields['decoding'] = {'temperature': 0.0 if top_k == 1 else temperature, 'top_k': top_k}
    made.fields['decoding'] |= {'top_p': function.get('topp', 0.0) or 1.0}
    if number > 1 and made.mode == 'decode':
      made.fields['num_samples'] = number
      made.notes.append(f'{predict}.num_decodes = {number}: all samples are written, with their log-probabilities')
    elif number > 1 and made.generates:
      made.lacks(f'{predict}.num_decodes = {number}', 'evals draw one sample of a prompt')
  else:
    made.lacks(f'{model}.decode_fn = @{function}', 'only beam_search and temperature_sample of t5x.decoding are known')
  for node in (function, predict, *([params] if params else [])):
    _report_rest(node, made)


def _network(config: Node, example: str, is_decoder: bool, made: Translation) -> None:
  for theirs, (ours, default) in _SIZES.items():
    made.fields[ours] = config.get(theirs, default)
  made.fields['num_layers'] = config.get('num_layers' if is_decoder else 'num_decoder_layers', 6)
  made.fields['num_encoder_layers'] = 0 if is_decoder else config.get('num_encoder_layers', 6)
  if config.get('scale_attn_logits', False):
    made.lacks(f'{config}.scale_attn_logits = True', "T5's attention is not scaled")
  dtype = config.get('dtype', 'float32')
  made.fields['dtype'] = dtype.name if isinstance(dtype, Node) else str(dtype)
  made.fields |= _activation(config, made, 'mlp_activations')
  is_scalable = example == 'scalable_t5'
  is_scanned = is_scalable and config.get('scan_layers', True)
  made.fields |= {'has_bias_per_layer': is_scalable, 'scanned': is_scanned, 'heads_apart': is_scalable > is_scanned}
  remat = config.get('remat_policy', None, str)
  if remat not in _REMAT:
    made.notes.append(f'{config}.remat_policy = {remat!r}: everything is kept; set remat_policy')
  made.fields['remat_policy'] = _REMAT.get(remat, 'none')
  _report_rest(config, made)


def _flaxformer(module: Node, model: Node, made: Translation) -> None:
  """Translates Flaxformer's encoder-decoder, whose feed-forward sublayers may be mixtures of experts."""
  made.notes.append(f'@{module}: initial weights are drawn as those of T5, whatever kernel_init says')
  embed = module.part('shared_token_embedder_factory')
  dtype = module.get('dtype', 'float32')
  made.fields |= {'vocab_size': embed.get('num_embeddings'), 'model_dims': embed.get('features'), 'dtype': dtype}
  sides = {'encoder': 'attention', 'decoder': 'self_attention'}
  stacks = {side: module.part(f'{side}_factory') for side in sides}
  layers = {side: stack.part('layer_factory') for side, stack in stacks.items()}
  visited, found = [module, embed, *stacks.values(), *layers.values()], {}
  for side, attention in sides.items():
    own = layers[side].part('relative_position_bias_factory', None)
    bias = stacks[side].part('shared_relative_position_bias_factory', None) or own
    attention, mlp = layers[side].part(attention), layers[side].part('mlp')
    dropouts = [node.part(name, None) for node in (layers[side], stacks[side]) for name in _DROPOUTS]
    rates = {attention.get('dropout_rate', 0.0, _NUMBER), mlp.get('intermediate_dropout_rate', 0.1, _NUMBER)}
    rates |= {dropout.get('rate', kind=_NUMBER) for dropout in dropouts if dropout}
    if len(rates) > 1:
      made.lacks(f'@{layers[side]}', f'one dropout rate is known, and it has {sorted(rates)}')
    found[side] = {
      'num_heads': attention.get('num_heads'),
      'head_dim': attention.get('head_dim'),
      'hidden_dims': mlp.get('intermediate_dim', 2048),
      'dropout_rate': max(rates),
      'has_bias_per_layer': own is not None,
      'num_buckets': bias.get('num_buckets') if bias else None,
      'max_distance': bias.get('max_distance') if bias else None,
      **_activation(mlp, made),
    }
    made.fields['num_layers' if side == 'decoder' else 'num_encoder_layers'] = stacks[side].get('num_layers', kind=int)
    _refuse_biases(made, attention, mlp)
    if stacks[side].get('position_embedder_factory', None) is not None or bias is None:
      made.lacks(f'@{stacks[side]}', 'positions are relative biases, shared or of each layer')
    visited += [attention, mlp, *[each for each in (*dropouts, bias) if each]]
  made.fields |= _same(found, f'@{module}', made)
  logits = stacks['decoder'].get('output_logits_factory', None)
  made.fields['ties_embedding'] = logits is None
  if any(stack.get('num_sparse_layers', 0) for stack in stacks.values()):
    visited += _mixtures(stacks, found['decoder'], model, made)
  for node in visited:
    _report_rest(node, made, _OF_FLAXFORMER)


def _mixtures(stacks: Mapping[str, Node], ffn: Mapping[str, Any], model: Node, made: Translation) -> list[Node]:
  """Translates the mixtures of experts of both stacks; returns what it has read."""
  made.experiment, visited, found, density = 'T5xMoeExperiment', [], {}, {}
  for side, stack in stacks.items():
    layer, num_sparse = stack.part('sparse_layer_factory'), stack.get('num_sparse_layers', kind=int)
    density[side] = stack.get('num_layers', kind=int) // max(num_sparse, 1)
    if num_sparse == 0 or stack.get('num_layers') % num_sparse:
      made.lacks(f'{stack}.num_sparse_layers = {num_sparse}', 'every n-th layer of both stacks has experts')
    layout = str(stack.get('sparse_layout', 'MIXED'))
    if not layout.endswith('MIXED') and density[side] > 1:
      made.lacks(f'{stack}.sparse_layout = {layout}', 'only LayerLayout.MIXED is known')
    mixture = layer.part('mlp')
    partitions = mixture.get('num_expert_partitions')
    router, expert = mixture.part('router'), mixture.part('expert')
    by_experts = router.name == 'ExpertsChooseMaskedRouter'
    if not (by_experts and side == 'encoder') and not router.name.startswith('TokensChoose'):
      made.lacks(f'{mixture}.router = @{router}', 'tokens choose, or in the encoder experts')
    extra = layer.part('extra_mlp', None)
    dense = [expert, extra] if extra else [expert]
    for node in dense:
      own = {'hidden_dims': node.get('intermediate_dim', 2048)}
      own |= _activation(node, made)
      if node is extra:
        own['dropout_rate'] = node.get('intermediate_dropout_rate', 0.1)
      if differ := [name for name, value in own.items() if ffn[name] != value]:
        made.lacks(f'@{node}', f'it must be as the dense layers, and differs in {", ".join(differ)}')
    _refuse_biases(made, *dense)
    layer.get('dropout_factory', None)  # those of all layers are one
    jitter = router.get('jitter_noise', 0.0)
    if by_experts and jitter:
      made.lacks(f'{router}.jitter_noise', 'where experts choose there is no jitter: bind JITTER_NOISE = 0.0')
    found[side] = {
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
      made.fields['prioritizes_batch'] = prioritizes
    elif prioritizes:
      made.lacks(f'{router}.batch_prioritized_routing', 'a decoder would look ahead')
    if by_experts:
      made.fields['experts_choose'] = True
    else:
      found[side] |= {'num_selected_experts': router.get('num_selected_experts'), 'jitter_eps': jitter}
    visited += [layer, mixture, router, *dense, layer.part('attention' if side == 'encoder' else 'self_attention')]
  made.notes.append(
    f"groups of tokens: as many as a multiple of the {found['decoder']['num_experts']} experts, T5X's where it has no "
    f'more devices than {partitions} times its model partitions; else set num_groups_multiple_of'
  )
  weights = {'load_balance_weight': 'aux_loss_factor', 'router_z_weight': 'router_z_loss_factor'}
  encoder, decoder = density.values()
  made.fields['mixture_every'] = encoder if encoder == decoder else (encoder, decoder)
  made.fields |= _same(found, 'sparse layers', made)
  made.fields |= {ours: model.get(theirs, 0.0) for ours, theirs in weights.items()}
  return visited


def _same(found: Mapping[str, Mapping[str, Any]], what: str, made: Translation) -> Mapping[str, Any]:
  """Returns the fields of both stacks, which have one value of each."""
  if differ := [name for name, value in found['encoder'].items() if found['decoder'][name] != value]:
    made.lacks(what, f'encoder and decoder have one value of each field, and differ in {", ".join(differ)}')
  return found['decoder']


def _refuse_biases(made: Translation, *nodes: Node) -> None:
  for node in nodes:
    for name in ('use_bias', 'final_dropout_rate'):
      if node.get(name, False):
        made.lacks(f'{node}.{name}', 'attention and feed-forward layers of T5 have none')


def _activation(node: Node, made: Translation, name: str = 'activations') -> dict[str, Any]:
  activations = tuple(node.get(name, ('relu',), (tuple, list)))
  if not activations or activations[1:] not in ((), ('linear',)):
    made.lacks(f'{node}: activations = {activations}', 'one activation, or one and then linear, is known')
    return {}
  if activations[0] not in ACTIVATIONS:
    made.lacks(f'{node}: activations = {activations}', f'{activations[0]!r} is none of {sorted(ACTIVATIONS)}')
  return {'activation': activations[0], 'is_gated': len(activations) == 2}


def _adafactor(optimizer: Node, made: Translation, *, is_flat: bool) -> None:
  """Translates Adafactor; `is_flat`: all weights are matrices, which T5X's rules factor as no rules do."""
  settings = {}
  for theirs, ours in ADAFACTOR.items():
    value = optimizer.get(theirs, ADAFACTOR)  # the table itself: no binding
    if isinstance(value, Node):
      made.lacks(f'{optimizer}.{theirs} = @{value}', 'a map by name of the weight; set it in a subclass')
    elif value is not ADAFACTOR and not (value is None and theirs.startswith('weight_decay')):
      settings[ours] = value
  if optimizer.get('factored', True) is False:
    settings['min_dim_size_to_factor'] = 2**31 - 1
  rules = optimizer.get('logical_factor_rules', None)
  if isinstance(rules, Node) and rules.name not in ('standard_logical_factor_rules', 'logical_factor_rules'):
    made.lacks(f'{optimizer}.logical_factor_rules = @{rules}', "only T5X's and those of its contrib/moe are known")
  elif rules is None and optimizer.get('factored', True) and not is_flat:
    why = "without T5X's rules the largest dims are factored; set `optimizer`"
    made.lacks(f'{optimizer}.logical_factor_rules', why)
  made.fields |= {'adafactor': settings, 'clip_global_norm': optimizer.get('global_norm_clip_threshold', None)}
  optimizer.get('learning_rate', None)  # which the schedule sets
  _report_rest(optimizer, made)


def _training(root: Node, made: Translation) -> None:
  """Translates the data, the schedule, the checkpoints and the intervals of train()."""
  made.model_dir = root.get('model_dir', None, str)
  data = _dataset(root.part('train_dataset_cfg'), made)
  every = root.get('eval_period', None, int)
  root.get('eval_steps', None)
  made.fields |= {'train_data': data, **_sizes_of(data)}
  if (evaluation := root.part('train_eval_dataset_cfg', None)) is not None:
    data, steps = _dataset(evaluation, made), root.get('eval_steps', kind=int)
    made.fields['eval_data'] = data | {'num_epochs': steps * data['batch_size'], 'max_batches': steps}
    made.fields['eval_every_steps'] = every or None
  if (inference := root.part('infer_eval_dataset_cfg', None)) is not None:
    made.fields['infer_data'] = _dataset(inference, made) | {'num_epochs': 1, 'packing': False}
    made.fields['eval_every_steps'] = every or None
  _evaluator(root, made)
  if root.get('run_eval_before_training', False):
    made.notes.append(f'{root}.run_eval_before_training: --mode eval gives the metrics of the weights at the start')
  for action in [each for some in (root.get('actions', None, Mapping) or {}).values() for each in some]:
    if isinstance(action, Node) and action.name == 'TerminateOnNanAction':
      made.notes.append(f'@{action}: a step whose loss is not finite is left out, and many in a row end the job')
    else:
      made.lacks(f'{root}.actions: @{action}', 'return a hook of the experiment by hooks(), such as EvalTarget')
  trainer = root.part('trainer_cls')
  rate = trainer.part('learning_rate_fn')
  if rate.name == 'create_learning_rate_scheduler':
    bound = {ours: rate.get(theirs, None, str if ours == 'factors' else (int, float)) for theirs, ours in _RATE.items()}
    made.fields['rate'] = {name: value for name, value in bound.items() if value is not None}
    _report_rest(rate, made)
  else:
    made.lacks(f'{trainer}.learning_rate_fn = @{rate}', 'only utils.create_learning_rate_scheduler is known')
  made.fields['num_microbatches'] = trainer.get('num_microbatches', None) or 1
  if trainer.name == 'MoeTrainer':
    made.fields['expert_grad_scale'] = trainer.get('num_expert_partitions')
  if trainer.get('weight_metrics_computer', None) is not None:
    made.notes.append(f'{trainer}.weight_metrics_computer: --mode replay --step N shows weights, gradients and updates')
  _report_rest(trainer, made)
  checkpoints = root.part('checkpoint_cfg')
  save, restore = checkpoints.part('save', None), checkpoints.part('restore', None)
  if save is not None:
    made.fields['checkpoint_every'] = save.get('period', None)
    _note_dtype(save, made)
    keep = save.get('keep', None)
    made.fields['checkpoint_max_to_keep'] = 1_000_000 if keep is None else keep
    _report_rest(save, made)
  made.fields |= _start(restore, made) if restore is not None else {}
  made.fields['num_train_steps'] = root.get('total_steps')
  made.relative_steps = root.get('relative_steps', None, int)
  if made.relative_steps:
    made.fields['num_train_steps'] = made.relative_steps + (made.fields.get('init_from_step') or 0)
  seed = root.get('random_seed', None)
  if seed is None:
    made.notes.append('random_seed = None: T5X draws a seed by the clock; here it is 0')
  made.fields['seed'] = seed or 0


def _evaluator(root: Node, made: Translation) -> None:
  evaluator = root.get('inference_evaluator_cls', None)
  if isinstance(evaluator, Node) and evaluator.get('num_examples', None):
    made.notes.append(f'{evaluator}.num_examples: all examples of a task are judged')


def _dataset(config: Node, made: Translation, model: Node | None = None) -> dict[str, Any]:
  """Returns the fields of a SeqIoInput, or of a TfExampleInput with the vocabulary of a model."""
  task, module = config.get('mixture_or_task_name'), config.get('module', None)
  source: dict[str, Any] = {'task': task}
  if isinstance(task, Node) and task.name == 'create_task_from_tfexample_file' and model is not None:
    if task.get('file_type') != 'tfrecord':
      made.lacks(f'{task}.file_type', "only 'tfrecord' is read")
    paths = task.get('paths', kind=(str, list, tuple))
    source = {'paths': (paths,) if isinstance(paths, str) else tuple(paths)}
    source |= {'inputs_key': task.get('inputs_key', 'inputs'), **_vocabulary(model, made)}
    _report_rest(task, made)
  elif isinstance(task, Node):
    made.lacks(f'{config}.mixture_or_task_name = @{task}', 'name a task; prompts in files are read by --decode_input')
    source = {'task': task.name}
  if module:
    made.fields['task_modules'] = tuple(dict.fromkeys((*made.fields.get('task_modules', ()), module)))
  lengths = config.get('task_feature_lengths', kind=(Mapping, type(None)))
  architecture = 'encoder_decoder'
  if not made.fields.get('num_encoder_layers', 1):
    architecture = 'prefix_lm' if lengths is None or 'inputs' in lengths else 'decoder_only'
  seed = config.get('seed', None)
  if seed is None and config.get('shuffle', False):
    made.notes.append(f'{config}.seed = None: T5X shuffles by the clock; here the seed is 0, so that a job can resume')
  if config.get('use_custom_packing_ops', False):
    made.notes.append(f'{config}.use_custom_packing_ops: packed by the ops of TensorFlow, in another order')
  if config.get('runtime_preprocessors', None):
    made.lacks(f'{config}.runtime_preprocessors', 'AirIO is not read')
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
  if architecture == 'prefix_lm' and made.has_causal_inputs:
    fields['prefix_is_causal'] = True
  _report_rest(config, made)
  return fields


def _vocabulary(model: Node, made: Translation) -> dict[str, Any]:
  """Returns the vocabulary of a model's targets, as fields of a TfExampleInput."""
  vocabulary = model.part('output_vocabulary', None) or model.part('vocabulary')
  extra = {'extra_ids': vocabulary.get('extra_ids', 0)}
  if vocabulary.name == 'ByteVocabulary':
    return extra
  if vocabulary.name != 'SentencePieceVocabulary':
    made.lacks(f'{model}.output_vocabulary = @{vocabulary}', 'bytes and SentencePiece are known')
    return {}
  return {'sentencepiece_model_file': vocabulary.get('sentencepiece_model_file', None), **extra}


def _sizes_of(data: Mapping[str, Any]) -> dict[str, Any]:
  lengths = data['lengths'] or {}
  sizes = {'batch_size': data['batch_size']}
  if 'targets' in lengths:
    width = sum(lengths.values()) if data['architecture'] == 'prefix_lm' else lengths['targets']
    sizes |= {'seq_len': width, 'encoder_len': lengths.get('inputs', 1)}
  return sizes


def _note_dtype(node: Node, made: Translation) -> None:
  if (dtype := node.get('dtype', None)) not in (None, 'float32'):
    made.notes.append(f'{node}.dtype = {dtype!r}: weights stay in float32')


def _start(restore: Node, made: Translation) -> dict[str, Any]:
  """Returns where the weights are from."""
  _note_dtype(restore, made)
  path, pairs = restore.get('path', None), list(restore.get('assignment_map', None, (list, tuple)) or ())
  for function in restore.get('state_transformation_fns', None, (list, tuple)) or ():
    if not isinstance(function, Node) or function.name != 'apply_assignment_map':
      made.lacks(f'{restore}.state_transformation_fns = {function}', 'only state_utils.apply_assignment_map is known')
      continue
    pairs += function.get('assignment_map')
    if function.get('require_all_rules_match', True) is False:
      made.lacks(f'{function}.require_all_rules_match', 'leave out the pairs that match no weight')
  checkpointer = restore.get('checkpointer_cls', None)
  if isinstance(checkpointer, Node) and checkpointer.name == 'UpcycleCheckpointer':
    why = 'begin a dense job from this checkpoint, and give the mixture --set init_from=JOB_LOG_DIR of that job, which '
    made.lacks(f'{restore}.checkpointer_cls = @{checkpointer}', f'{why}makes experts of its dense layers')
  from_scratch = restore.get('fallback_to_scratch', False)
  if pairs or from_scratch:
    states = [pair for pair in pairs if re.match(r'(target\|)?state|\.\*param_states|state', pair[0])]
    if pairs and not any(new is None for _, new in states):
      made.notes.append(f'{restore}.assignment_map: moments of the optimizer begin anew, and the step goes on')
    made.fields |= {'assignment_map': tuple(tuple(pair) for pair in pairs if pair not in states)}
    made.fields |= {'from_scratch': bool(from_scratch)}
  _report_rest(restore, made)
  if not path:
    return {}
  if not isinstance(path, str):
    made.lacks(f'{restore}.path = {path!r}', 'one checkpoint is read')
    return {}
  step = re.fullmatch(r'checkpoint_(\d+)', Path(path).name)
  if step is None or not int(step[1]):  # a field that has no 0: the checkpoint itself is named
    return {'init_from': f't5x:{path}'}
  return {'init_from': f't5x:{Path(path).parent}', 'init_from_step': int(step[1])}


def _partitioner(partitioner: Node | None, made: Translation) -> None:
  if partitioner is None:
    return
  submesh = partitioner.get('model_parallel_submesh', None, (tuple, list))
  number = partitioner.get('num_partitions', None, int)
  if number and submesh and number != math.prod(submesh) and partitioner.name == 'MoePjitPartitioner':
    raise UserError(f'num_partitions={number} and model_parallel_submesh={submesh} are inconsistent: bind one of them.')
  made.fields['ici_mesh_shape'] = (1, -1, math.prod(submesh) if submesh else number or 1)
  if not partitioner.get('params_on_devices', True):
    made.notes.append(f'{partitioner}.params_on_devices = False: each process restores its own shards to its devices')
  rules, default = partitioner.get('logical_axis_rules', None), 2 if partitioner.name == 'MoePjitPartitioner' else 1
  dims = {'activation_partitioning_dims': default, 'parameter_partitioning_dims': 1}
  additional: AxisRules = ()
  if isinstance(rules, Node) and rules.name == 'standard_logical_axis_rules':
    dims = {name: rules.get(name, value) for name, value in dims.items()}
    additional = _additional_rules(rules, made)
    _report_rest(rules, made)
  elif rules is not None:
    made.notes.append(f'{partitioner}.logical_axis_rules: the layout is that of axis_rules, which has its default')
  if additional or set(dims.values()) != {1}:  # else weights are split over `data` too, which T5X's default does not
    activations, parameters = dims.values()
    made.fields['axis_rules'] = t5x_axis_rules(
      DEFAULT_AXIS_RULES,
      activation_partitioning_dims=activations,
      parameter_partitioning_dims=parameters,
      additional_rules=additional,
    )
  _report_rest(partitioner, made)


def _additional_rules(rules: Node, made: Translation) -> AxisRules:
  """Returns the additional rules of a function of axis rules, with the axes of our mesh."""
  additional: list[tuple[str, SplitDim]] = []
  for rule in rules.get('additional_rules', None, (list, tuple)) or ():
    is_pair = isinstance(rule, (list, tuple)) and len(rule) == 2 and isinstance(rule[0], str)
    target = rule[1] if is_pair else MISSING
    axes = (target,) if isinstance(target, str) else () if target is None else target
    if not isinstance(axes, (list, tuple)) or not all(isinstance(axis, str) and axis in _AXES for axis in axes):
      known = ', '.join(_AXES)
      made.lacks(f'{rules}.additional_rules has {rule!r}', f'a rule has a name, and axes among {known}, or None')
      continue
    of_mesh = tuple(dict.fromkeys(_AXES[axis] for axis in axes))
    additional.append((rule[0], of_mesh if len(of_mesh) > 1 else next(iter(of_mesh), None)))
  return tuple(additional)


def _report_rest(node: Node, made: Translation, also_ignored: str = '') -> None:
  """Lists the bindings of a node that nobody read, and that are not known to leave the numbers as they are."""
  ignored = f'{_IGNORED.get(node.name, "")} {also_ignored}'.split()
  for text in node.rest():
    if text.partition(' = ')[0].rpartition('.')[2] not in ignored:
      made.lacks(text, 'has no counterpart that is known')


def source_file(name: str, made: Translation, files: list[str]) -> str:
  """Returns the Python source of a subclass of T5xExperiment."""
  listed = dict.fromkeys([*made.missing, *made.notes] or ['nothing'])
  lines = [f'"""{name}, translated from {", ".join(files)}.', '', 'Not translated, or done differently:', '']
  lines += [f'* {each}' for each in listed]
  base = made.experiment
  lines += ['"""', '', f'from spmd_tasks.bridges.t5x import {base}', '', '', f'class {name}({base}):']
  lines += [f'  """The setup {Path(files[0]).name} of T5X."""', '']
  for field, value in made.fields.items():
    text = pprint.pformat(value, width=100, sort_dicts=False, compact=True)
    lines += [f'  {line}' for line in f'{field} = {text}'.splitlines()]
  return '\n'.join(lines) + '\n'
