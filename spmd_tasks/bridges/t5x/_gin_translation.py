"""Translates a gin setup of T5X to the fields of a T5xExperiment, and says what has no counterpart.

    translation = translate(read_setup(files, bindings))
    translation.fields      # of T5xExperiment
    translation.missing     # what would change numbers, each with the reason; such a setup does not start
    translation.notes       # what is different and changes no number, or none that T5X fixes

A field that no binding names has T5X's default.
"""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
import pprint
import re
from typing import Any

from spmd_tasks.bridges.t5x._gin import Node, Setup
from spmd_tasks.errors import UserError

_RUNS = {'train': 'train', 'evaluate': 'eval', 'infer': 'decode'}
_NETWORK = re.compile(r't5x\.examples\.(t5|scalable_t5|decoder_only)\.network\.(Transformer|DecoderWrapper)')
_NORMALIZATION = {
  None: 'sum',
  'NUM_REAL_TARGET_TOKENS': 'tokens',
  'NUM_TOTAL_TARGET_TOKENS': 'all_tokens',
  'AVERAGE_PER_SEQUENCE': 'sequences',
}
_REMAT = {None: 'none', 'none': 'none', 'minimal': 'dots_no_batch', 'full': 'full'}
# T5X's name, ours and T5X's default.
_SIZES = {
  'vocab_size': ('vocab_size', None),
  'emb_dim': ('model_dims', 512),
  'num_heads': ('num_heads', 8),
  'head_dim': ('head_dim', 64),
  'mlp_dim': ('hidden_dims', 2048),
  'dropout_rate': ('dropout_rate', 0.1),
  'logits_via_embedding': ('ties_embedding', False),
}
_ADAFACTOR = {
  'beta1': 'momentum',
  'decay_rate': 'decay_exponent',
  'step_offset': 'step_offset',
  'clipping_threshold': 'clipping_threshold',
  'weight_decay_rate': 'weight_decay',
  'min_dim_size_to_factor': 'min_dim_size_to_factor',
  'epsilon1': 'epsilon',
  'epsilon2': 'min_parameter_scale',
  'multiply_by_parameter_scale': 'multiply_by_parameter_scale',
  'weight_decay_rate_lr_exponent': 'weight_decay_exponent',
  'max_parameter_scale': 'max_parameter_scale',
}
_RATE = {'base_learning_rate': 'base', 'min_learning_rate': 'minimum'}
_RATE |= {name: name for name in ('factors', 'warmup_steps', 'decay_factor', 'steps_per_decay', 'steps_per_cycle')}
_RATE['step_offset'] = 'step_offset'
# Bindings that say where something is computed or written, which no number depends on: by the last part of a selector.
_IGNORED = {
  'train': ('summarize_config_fn', 'use_hardware_rng', 'gc_period', 'use_orbax', 'concurrent_metrics', 'stats_period'),
  'evaluate': ('output_dir', 'inference_evaluator_cls', 'summarize_config_fn'),
  'infer': ('output_dir', 'mode', 'checkpoint_period', 'shard_id', 'num_shards'),
  'DatasetConfig': ('use_memory_cache', 'num_workers', 'num_prefetch_threads'),
  'PjitPartitioner': ('backend', 'params_on_devices', 'logical_axis_rules', 'use_cpu_pjit'),
  'SaveCheckpointConfig': ('save_dataset', 'keep_dataset_checkpoints', 'dtype', 'checkpointer_cls'),
  'RestoreCheckpointConfig': ('mode', 'dtype', 'strict', 'restore_dataset', 'checkpointer_cls'),
  'T5Config': ('param_scan_axis', 'float32_attention_logits'),
}


@dataclasses.dataclass(kw_only=True)
class Translation:
  """The fields of an experiment, and what they do not say."""

  mode: str = 'train'
  fields: dict[str, Any] = dataclasses.field(default_factory=dict)
  missing: list[str] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)
  model_dir: str | None = None
  relative_steps: int | None = None

  def lacks(self, what: str, why: str) -> None:
    self.missing.append(f'{what}: {why}')


def translate(setup: Setup) -> Translation:
  """Translates a setup.

  Raises:
    UserError: it is no run of T5X that trains, evaluates or infers, or it lacks a value that T5X requires.
  """
  root = next((node for name in _RUNS if (node := setup.node(f'__main__.{name}'))), None)
  root = root or next((node for name in _RUNS if (node := setup.node(f't5x.{name}.{name}'))), None)
  if root is None:
    raise UserError(
      f'the gin setup ({", ".join(setup.files)}) binds nothing of train, evaluate or infer: include '
      "'t5x/configs/runs/pretrain.gin' or another file of a run of T5X."
    )
  made = Translation(mode=_RUNS[root.name])
  _model(root.get('model'), made)
  if made.mode == 'train':
    _training(root, made)
  else:
    dataset = _dataset(root.get('dataset_cfg'), made)
    dataset |= {'num_epochs': 1, 'packing': False}
    made.fields |= {'train_data': dataset, 'eval_data' if made.mode == 'eval' else 'decode_data': dataset}
    made.fields |= _sizes_of(dataset) | _start(root.get('restore_checkpoint_cfg'), made)
    if root.get('mode', 'predict') != 'predict':
      made.notes.append('infer.mode: --mode decode_once predicts, --mode eval --write_examples gives scores')
  _partitioner(root.get('partitioner', None), made)
  _report_rest(root, made)
  return made


def _model(model: Node, made: Translation) -> None:
  """Translates the model, its loss and its optimizer."""
  is_decoder = model.name == 'DecoderOnlyModel'
  if model.name not in ('EncoderDecoderModel', 'DecoderOnlyModel'):
    made.lacks(f'model = @{model}', 'only EncoderDecoderModel and DecoderOnlyModel of t5x.models are known')
    return
  module = model.get('module')
  known = _NETWORK.fullmatch(module.selector)
  if known is None:
    made.lacks(f'{model}.module = @{module}', 'only the networks of t5x.examples are known')
  else:
    _network(module.get('config'), known.group(1), is_decoder, made)
    _report_rest(module, made)
  normalization = model.get('loss_normalizing_factor', None)
  if isinstance(normalization, str) and normalization not in _NORMALIZATION:
    made.lacks(
      f'{model}.loss_normalizing_factor = {normalization!r}', f'known are {", ".join(map(str, _NORMALIZATION))}'
    )
  made.fields |= {
    'z_loss': model.get('z_loss', 0.0) or 0.0,
    'label_smoothing': model.get('label_smoothing', 0.0),
    'normalization': _NORMALIZATION.get(normalization, normalization),
  }
  for name in ('vocabulary', 'input_vocabulary', 'output_vocabulary', 'decode_fn', 'feature_converter_cls'):
    value = model.get(name, None)
    if name == 'feature_converter_cls' and value is not None:
      made.lacks(f'{model}.{name} = @{value}', 'the converter is that of the model')
  made.notes.append('decoding: beam search and sampling are settings of task.decode, and not of decode_fn')
  optimizer = model.get('optimizer_def')
  if optimizer.selector != 't5x.adafactor.Adafactor':
    made.lacks(f'{model}.optimizer_def = @{optimizer}', 'only t5x.adafactor.Adafactor is translated')
  else:
    _adafactor(optimizer, made)
  _report_rest(model, made)


def _network(config: Node, example: str, is_decoder: bool, made: Translation) -> None:
  for theirs, (ours, default) in _SIZES.items():
    made.fields[ours] = config.get(theirs) if default is None else config.get(theirs, default)
  layers = ('num_layers',) if is_decoder else ('num_decoder_layers', 'num_encoder_layers')
  made.fields |= dict(zip(('num_layers', 'num_encoder_layers'), [config.get(name, 6) for name in layers]))
  made.fields.setdefault('num_encoder_layers', 0)
  dtype = config.get('dtype', 'float32')
  made.fields['dtype'] = dtype.name if isinstance(dtype, Node) else str(dtype)
  activations = tuple(config.get('mlp_activations', ('relu',)))
  if len(activations) == 2 and 'linear' in activations:
    [activation] = [name for name in activations if name != 'linear'] or ['linear']
  else:
    activation = activations[0]
  if len(activations) > 2 or (len(activations) == 2 and activations[1] != 'linear'):
    made.lacks(f'{config}.mlp_activations = {activations}', 'one activation, or one and then linear, is known')
  made.fields |= {'activation': activation, 'is_gated': len(activations) == 2}
  is_scalable = example == 'scalable_t5'
  made.fields |= {'has_bias_per_layer': is_scalable, 'scanned': is_scalable and config.get('scan_layers', True)}
  remat = config.get('remat_policy', None)
  if remat not in _REMAT:
    made.notes.append(f'{config}.remat_policy = {remat!r}: everything is kept; set remat_policy')
  made.fields['remat_policy'] = _REMAT.get(remat, 'none')
  _report_rest(config, made)


def _adafactor(optimizer: Node, made: Translation) -> None:
  settings = {}
  for theirs, ours in _ADAFACTOR.items():
    value = optimizer.get(theirs, _ADAFACTOR)  # the table itself: no binding
    if isinstance(value, Node):
      made.lacks(f'{optimizer}.{theirs} = @{value}', 'a map by name of the weight; set it in a subclass')
    elif value is not _ADAFACTOR and not (
      value is None and theirs in ('weight_decay_rate', 'weight_decay_rate_lr_exponent')
    ):
      settings[ours] = value
  if optimizer.get('factored', True) is False:
    settings['min_dim_size_to_factor'] = 2**31 - 1
  rules = optimizer.get('logical_factor_rules', None)
  if isinstance(rules, Node) and rules.name != 'standard_logical_factor_rules':
    made.lacks(f'{optimizer}.logical_factor_rules = @{rules}', 'only standard_logical_factor_rules is known')
  elif rules is None and optimizer.get('factored', True):
    made.lacks(
      f'{optimizer}.logical_factor_rules', "without T5X's rules the largest dims are factored; set `optimizer`"
    )
  made.fields |= {'adafactor': settings, 'clip_global_norm': optimizer.get('global_norm_clip_threshold', None)}
  optimizer.get('learning_rate', None)  # which the schedule sets
  _report_rest(optimizer, made)


def _training(root: Node, made: Translation) -> None:
  """Translates the data, the schedule, the checkpoints and the intervals of train()."""
  made.model_dir = root.get('model_dir', None)
  data = _dataset(root.get('train_dataset_cfg'), made)
  steps, every = root.get('eval_steps', None), root.get('eval_period', None)
  made.fields |= {'train_data': data, **_sizes_of(data)}
  evaluation = root.get('train_eval_dataset_cfg', None)
  if evaluation is not None:
    data = _dataset(evaluation, made)
    made.fields['eval_data'] = data | {'num_epochs': steps * data['batch_size'], 'max_batches': steps}
    made.fields['eval_every_steps'] = every or None
  inference = root.get('infer_eval_dataset_cfg', None)
  if inference is not None:
    made.fields['infer_data'] = _dataset(inference, made) | {'num_epochs': 1, 'packing': False}
    made.fields['eval_every_steps'] = every or None
    evaluator = root.get('inference_evaluator_cls', None)
    if isinstance(evaluator, Node) and evaluator.get('num_examples', None):
      made.notes.append(f'{evaluator}.num_examples: all examples of a task are judged')
  trainer = root.get('trainer_cls')
  rate = trainer.get('learning_rate_fn')
  if rate.name == 'create_learning_rate_scheduler':
    bound = {ours: rate.get(theirs, None) for theirs, ours in _RATE.items()}
    made.fields['rate'] = {name: value for name, value in bound.items() if value is not None}
    _report_rest(rate, made)
  else:
    made.lacks(f'{trainer}.learning_rate_fn = @{rate}', 'only utils.create_learning_rate_scheduler is known')
  made.fields['num_microbatches'] = trainer.get('num_microbatches', None) or 1
  _report_rest(trainer, made)
  checkpoints = root.get('checkpoint_cfg')
  save, restore = checkpoints.get('save', None), checkpoints.get('restore', None)
  if save is not None:
    made.fields['checkpoint_every_steps'] = save.get('period', None)
    keep = save.get('keep', None)
    made.fields['checkpoint_max_to_keep'] = 1_000_000 if keep is None else keep
    _report_rest(save, made)
  made.fields |= _start(restore, made) if restore is not None else {}
  made.fields['num_train_steps'] = root.get('total_steps')
  relative = root.get('relative_steps', None)
  if relative:
    made.relative_steps = relative
    made.fields['num_train_steps'] = relative + (made.fields.get('init_from_step') or 0)
  seed = root.get('random_seed', None)
  if seed is None:
    made.notes.append('random_seed = None: T5X draws a seed by the clock; here it is 0')
  made.fields['seed'] = seed or 0


def _dataset(config: Node, made: Translation) -> dict[str, Any]:
  """Returns the fields of a SeqIoInput."""
  task, module = config.get('mixture_or_task_name'), config.get('module', None)
  if isinstance(task, Node):
    made.lacks(f'{config}.mixture_or_task_name = @{task}', 'name a task; prompts in files are read by --decode_input')
    task = task.name
  if module:
    modules = made.fields.setdefault('task_modules', ())
    made.fields['task_modules'] = tuple(dict.fromkeys((*modules, module)))
  lengths = config.get('task_feature_lengths')
  if not made.fields.get('num_encoder_layers', 1):
    architecture = 'prefix_lm' if lengths is None or 'inputs' in lengths else 'decoder_only'
  else:
    architecture = 'encoder_decoder'
  seed = config.get('seed', None)
  if seed is None and config.get('shuffle', False):
    made.notes.append(f'{config}.seed = None: T5X shuffles by the clock; here the seed is 0, so that a job can resume')
  if config.get('use_custom_packing_ops', False):
    made.notes.append(f'{config}.use_custom_packing_ops: packed by the ops of TensorFlow, in another order')
  if config.get('runtime_preprocessors', None):
    made.lacks(f'{config}.runtime_preprocessors', 'AirIO is not read')
  fields = {
    'task': task,
    'lengths': lengths,
    'split': config.get('split'),
    'batch_size': config.get('batch_size'),
    'architecture': architecture,
    'packing': config.get('pack', False),
    'shuffle': config.get('shuffle'),
    'seed': seed or 0,
    'use_cached': config.get('use_cached', False),
    'trim_output_features': config.get('trim_output_features', True),
  }
  _report_rest(config, made)
  return fields


def _sizes_of(data: Mapping[str, Any]) -> dict[str, Any]:
  lengths = data['lengths'] or {}
  sizes = {'batch_size': data['batch_size']}
  if 'targets' in lengths:
    width = sum(lengths.values()) if data['architecture'] == 'prefix_lm' else lengths['targets']
    sizes |= {'seq_len': width, 'encoder_len': lengths.get('inputs', 1)}
  return sizes


def _start(restore: Node, made: Translation) -> dict[str, Any]:
  """Returns where the weights are from."""
  path = restore.get('path', None)
  if restore.get('state_transformation_fns', ()) or restore.get('assignment_map', None):
    made.lacks(f'{restore}.state_transformation_fns', 'return a T5xOrigin with an assignment_map from origin()')
  for name in ('assignment_map', 'fallback_to_scratch'):
    restore.get(name, None)
  _report_rest(restore, made)
  if not path:
    return {}
  if not isinstance(path, str):
    made.lacks(f'{restore}.path = {path!r}', 'one checkpoint is read')
    return {}
  directory = Path(path)
  step = re.fullmatch(r'checkpoint_(\d+)', directory.name)
  if step is None:
    return {'init_from': f't5x:{path}'}
  if not int(step.group(1)):  # a field that has no 0: the checkpoint itself is named
    return {'init_from': f't5x:{path}'}
  return {'init_from': f't5x:{directory.parent}', 'init_from_step': int(step.group(1))}


def _partitioner(partitioner: Node | None, made: Translation) -> None:
  if partitioner is None:
    return
  submesh, number = partitioner.get('model_parallel_submesh', None), partitioner.get('num_partitions', None) or 1
  if submesh:
    number = 1
    for size in submesh:
      number *= size
  made.fields['ici_mesh_shape'] = (1, -1, number)
  _report_rest(partitioner, made)


def _report_rest(node: Node, made: Translation) -> None:
  """Lists the bindings of a node that nobody read, and that are not known to leave the numbers as they are."""
  ignored = _IGNORED.get(node.name, ())
  for text in node.rest():
    if text.partition(' = ')[0].rpartition('.')[2] not in ignored:
      made.lacks(text, 'has no counterpart that is known')


def source_file(name: str, made: Translation, files: list[str]) -> str:
  """Returns the Python source of a subclass of T5xExperiment."""
  listed = dict.fromkeys([*made.missing, *made.notes] or ['nothing'])
  lines = [f'"""{name}, translated from {", ".join(files)}.', '', 'Not translated, or done differently:', '']
  lines += [f'* {each}' for each in listed]
  lines += ['"""', '', 'from spmd_tasks.bridges.t5x import T5xExperiment', '', '', f'class {name}(T5xExperiment):']
  lines += [f'  """The setup {Path(files[0]).name} of T5X."""', '']
  for field, value in made.fields.items():
    text = pprint.pformat(value, width=100, sort_dicts=False, compact=True)
    lines += [f'  {line}' for line in f'{field} = {text}'.splitlines()]
  return '\n'.join(lines) + '\n'
