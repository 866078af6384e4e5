"""What the gin files that T5X ships say of numbers: defaults of its runs, sizes of its models, for setups with them.

    shipped_file('t5x/configs/runs/pretrain.gin')     # gin's own syntax, made of the tables below; None: not known here

T5X need not be installed; where it is, or where a search path has the file, that file is read.
"""

from collections.abc import Mapping
from typing import Any

REQUIRED = '%gin.REQUIRED'


class Raw(str):
  """A value in gin's syntax: a macro or a reference."""


_MODELS = ('emb_dim', 'num_heads', 'num_encoder_layers', 'num_decoder_layers', 'head_dim', 'mlp_dim')
_TINY = (8, 4, 2, 2, 3, 16)
SIZES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
  't5_1_0': {
    'tiny': _TINY,
    'small': (512, 8, 6, 6, 64, 2048),
    'base': (768, 12, 12, 12, 64, 3072),
    'large': (1024, 16, 24, 24, 64, 4096),
    '3B': (1024, 32, 24, 24, 128, 16384),
    '11B': (1024, 128, 24, 24, 128, 65536),
  },
  't5_1_1': {
    'tiny': _TINY,
    'small': (512, 6, 8, 8, 64, 1024),
    'base': (768, 12, 12, 12, 64, 2048),
    'large': (1024, 16, 24, 24, 64, 2816),
    'xl': (2048, 32, 24, 24, 64, 5120),
    'xxl': (4096, 64, 24, 24, 64, 10240),
  },
  'byt5': {
    'tiny': _TINY,
    'small': (1472, 6, 12, 4, 64, 3584),
    'base': (1536, 12, 18, 6, 64, 3968),
    'large': (1536, 16, 36, 12, 64, 3840),
    'xl': (2560, 32, 36, 12, 64, 6720),
    'xxl': (4672, 64, 36, 12, 64, 12352),
  },
}
_C4 = 'gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model'
FAMILIES: Mapping[str, Mapping[str, Any]] = {
  't5_1_0': {'vocabulary': _C4, 'vocab_size': 32128, 'activations': ('relu',), 'tied': True},
  't5_1_1': {'vocabulary': _C4, 'vocab_size': 32128, 'activations': ('gelu', 'linear'), 'tied': False},
  'mt5': {
    'sizes': 't5_1_1',
    'vocabulary': 'gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model',
    'vocab_size': 250112,
    'activations': ('gelu', 'linear'),
    'tied': False,
  },
  'byt5': {'vocabulary': None, 'vocab_size': 384, 'activations': ('gelu', 'linear'), 'tied': False},
  'decoder_only': {
    'sizes': 't5_1_1',  # of its decoders
    'vocabulary': _C4,
    'vocab_size': 32128,
    'activations': ('gelu', 'linear'),
    'tied': True,
  },
}


_MOE_RUN = """
include 't5x/configs/runs/{run}.gin'
from t5x.contrib.moe import partitioning as moe_partitioning
from t5x.contrib.moe import trainer as moe_trainer
NUM_MODEL_PARTITIONS = None
MODEL_PARALLEL_SUBMESH = None
NUM_EXPERT_PARTITIONS = %NUM_EXPERTS
{script}.partitioner = @moe_partitioning.MoePjitPartitioner()
moe_partitioning.MoePjitPartitioner.num_expert_partitions = %NUM_EXPERT_PARTITIONS
moe_partitioning.MoePjitPartitioner.num_partitions = %NUM_MODEL_PARTITIONS
moe_partitioning.MoePjitPartitioner.model_parallel_submesh = %MODEL_PARALLEL_SUBMESH
"""
_MOE_TRAINING = """
train_script.train.trainer_cls = @moe_trainer.MoeTrainer
moe_trainer.MoeTrainer.num_microbatches = None
moe_trainer.MoeTrainer.learning_rate_fn = @utils.create_learning_rate_scheduler()
moe_trainer.MoeTrainer.num_expert_partitions = %NUM_EXPERT_PARTITIONS
"""


def shipped_file(name: str) -> str | None:
  """Returns the text of a file of T5X by the name under which setups include it; None where it is not known."""
  parts = name.removeprefix('t5x/').removesuffix('.gin').split('/')
  if parts[:4] == ['contrib', 'moe', 'configs', 'runs'] and len(parts) == 5:
    return _moe_run(parts[4])
  if name == 't5x/examples/scalable_t5/umt5/vocab.gin':
    model_file = Raw('"gs://t5-data/vocabs/umt5.256000/sentencepiece.model"')
    block = {'sentencepiece_model_file': model_file, 'extra_ids': 300}
    macros = {'VOCABULARY': Raw('@seqio.SentencePieceVocabulary()'), 'VOCAB_SIZE': 256384}
    return gin_text(('seqio',), macros, {'seqio.SentencePieceVocabulary': block})
  if name == 't5x/examples/scalable_t5/umt5/architectures/encoder_decoder.gin':
    return gin_text(('t5x.examples.scalable_t5.network',), {}, {'network.T5Config': {'vocab_size': Raw('%VOCAB_SIZE')}})
  if parts[:2] == ['configs', 'runs'] and len(parts) == 3:
    return _run(parts[2])
  if parts[:1] != ['examples'] or len(parts) != 4:
    return None
  _, example, family, size = parts
  family = 'decoder_only' if (example, family) == ('decoder_only', 'models') else family
  known = FAMILIES.get(family)
  if known is None or size not in SIZES[known.get('sizes', family)]:
    return None
  is_decoder = family == 'decoder_only'
  if example not in (('decoder_only',) if is_decoder else ('t5', 'scalable_t5')):
    return None
  if is_decoder and size in ('tiny', 'small'):  # there are none
    return None
  if size == 'tiny' and family != 't5_1_1':  # T5X's own tiny files all include that of T5 1.1
    family, known = 't5_1_1', FAMILIES['t5_1_1']
  return _model(example, family, known, SIZES[known.get('sizes', family)][size])


def _model(example: str, family: str, known: Mapping[str, Any], sizes: tuple[int, ...]) -> str:
  """A model of a family."""
  is_decoder = family == 'decoder_only'
  config, module = ('TransformerConfig', 'DecoderWrapper') if is_decoder else ('T5Config', 'Transformer')
  model = 'DecoderOnlyModel' if is_decoder else 'EncoderDecoderModel'
  fields: dict[str, Any] = dict(zip(_MODELS, sizes, strict=True))
  if is_decoder:
    fields['num_layers'] = fields.pop('num_decoder_layers')
    del fields['num_encoder_layers']
  fields |= {'vocab_size': known['vocab_size'], 'mlp_activations': known['activations']}
  fields |= {'dtype': 'bfloat16', 'dropout_rate': Raw('%DROPOUT_RATE'), 'logits_via_embedding': known['tied']}
  if example == 'scalable_t5':
    fields |= {'scan_layers': True, 'remat_policy': 'minimal'}
  vocabularies = ('vocabulary',) if is_decoder else ('input_vocabulary', 'output_vocabulary')
  kind = 'ByteVocabulary' if known['vocabulary'] is None else 'SentencePieceVocabulary'
  optimizer: dict[str, Any] = {'decay_rate': 0.8, 'step_offset': 0}
  optimizer['logical_factor_rules'] = Raw('@adafactor.standard_logical_factor_rules()')
  of_model = {'module': Raw(f'@network.{module}()'), **dict.fromkeys(vocabularies, Raw('%VOCABULARY'))}
  of_model |= {'optimizer_def': Raw('%OPTIMIZER'), 'z_loss': Raw('%Z_LOSS')}
  of_model |= {name: Raw(f'%{name.upper()}') for name in ('label_smoothing', 'loss_normalizing_factor')}
  blocks: dict[str, Mapping[str, Any]] = {'adafactor.Adafactor': optimizer, f'models.{model}': of_model}
  blocks |= {f'network.{module}': {'config': Raw(f'@network.{config}()')}, f'network.{config}': fields}
  if known['vocabulary'] is not None:
    blocks['seqio.SentencePieceVocabulary'] = {'sentencepiece_model_file': known['vocabulary']}
  if is_decoder:
    blocks['models.DecoderOnlyModel'] = {**of_model, 'decode_fn': Raw('@decoding.temperature_sample')}
    blocks['decoding.temperature_sample'] = {'temperature': 1.0, 'topk': 40}
  macros = {'Z_LOSS': 0.0001, 'LABEL_SMOOTHING': 0.0, 'LOSS_NORMALIZING_FACTOR': None, 'DROPOUT_RATE': Raw(REQUIRED)}
  macros |= {'VOCABULARY': Raw(f'@seqio.{kind}()'), 'OPTIMIZER': Raw('@adafactor.Adafactor()')}
  macros |= {'MODEL': Raw(f'@models.{model}()')}
  imports = ('seqio', 't5x.adafactor', 't5x.decoding', 't5x.models', f't5x.examples.{example}.network')
  return gin_text(imports, macros, blocks)


def _moe_run(run: str) -> str | None:
  """A run of contrib/moe: that of T5X with the partitioner and the trainer of experts."""
  base = 'pretrain' if run in ('continue_pretrain', 'sparse_upcycle') else run
  if base not in ('pretrain', 'finetune', 'eval', 'infer', 'infer_from_tfexample_file'):
    return None
  trains = base in ('pretrain', 'finetune')
  script = {'eval': 'eval_script.evaluate'}.get(base, 'train_script.train' if trains else 'infer_script.infer')
  text = f'import __main__ as {script.partition(".")[0]}\n' + gin_text(('t5x.utils',), {}, {})
  text += _MOE_RUN.format(run=base, script=script) + (_MOE_TRAINING if trains else '')
  text += f'utils.SaveCheckpointConfig.period = {5000 if base == "pretrain" else 2000}\n' if trains else ''
  text += 'utils.SaveCheckpointConfig.keep = 20\n' if base == 'pretrain' else ''
  text += 'EXPERT_DROPOUT_RATE = %DROPOUT_RATE\n' if base == 'finetune' else ''
  text += '' if trains else 'utils.DatasetConfig.batch_size = %BATCH_SIZE\n'
  if run != base:
    text += 'utils.RestoreCheckpointConfig.path = %INITIAL_CHECKPOINT_PATH\n'
  if run == 'sparse_upcycle':
    text += 'from t5x.contrib.moe import checkpoints\n'
    text += 'utils.RestoreCheckpointConfig.checkpointer_cls = @checkpoints.UpcycleCheckpointer\n'
  return text


def _dataset(**fields: Any) -> dict[str, Any]:
  """A utils.DatasetConfig, with what all of T5X's have."""
  common = {'mixture_or_task_name': Raw('%MIXTURE_OR_TASK_NAME'), 'module': Raw('%MIXTURE_OR_TASK_MODULE')}
  return {**common, 'task_feature_lengths': Raw('%TASK_FEATURE_LENGTHS'), 'shuffle': False, 'pack': False, **fields}


def _training(run: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """The macros and the blocks of pretrain.gin and finetune.gin."""
  tuning = run == 'finetune'
  required = ('MODEL_DIR', 'MIXTURE_OR_TASK_NAME', 'TASK_FEATURE_LENGTHS', 'TRAIN_STEPS')
  macros: dict[str, Any] = dict.fromkeys((*required, *['INITIAL_CHECKPOINT_PATH'] * tuning), Raw(REQUIRED))
  macros |= {'USE_CACHED_TASKS': True, 'BATCH_SIZE': 128, 'MIXTURE_OR_TASK_MODULE': None}
  macros |= {'RANDOM_SEED': None, 'TRAIN_STEPS_RELATIVE': None}
  macros |= {'DROPOUT_RATE': 0.1, 'EVAL_STEPS': 20, 'EVAL_PERIOD': 1000} if tuning else {'SHUFFLE_TRAIN_EXAMPLES': True}
  names = ('model', 'model_dir', 'random_seed')
  train: dict[str, Any] = {name: Raw(f'%{name.upper()}') for name in names}
  train |= {'total_steps': Raw('%TRAIN_STEPS'), 'relative_steps': Raw('%TRAIN_STEPS_RELATIVE')}
  train |= {f'{name}_dataset_cfg': Raw(f'@{name}/utils.DatasetConfig()') for name in ('train', 'train_eval')}
  train |= {'infer_eval_dataset_cfg': Raw('@infer_eval/utils.DatasetConfig()') if tuning else None}
  train |= {'eval_steps': 20, 'eval_period': 1000}
  train |= {f'eval_{name}': Raw(f'%EVAL_{name.upper()}') for name in ('steps', 'period') if tuning}
  train |= {'checkpoint_cfg': Raw('@utils.CheckpointConfig()'), 'trainer_cls': Raw('@trainer.Trainer')}
  train |= {'partitioner': Raw('@partitioning.PjitPartitioner()')}
  cached, size = Raw('%USE_CACHED_TASKS'), Raw('%BATCH_SIZE')
  shuffle = True if tuning else Raw('%SHUFFLE_TRAIN_EXAMPLES')
  datasets = {
    'train': _dataset(split='train', batch_size=size, shuffle=shuffle, seed=None, use_cached=cached, pack=True),
    'train_eval': _dataset(split='validation', batch_size=size, seed=42, use_cached=cached, pack=True),
  }
  if tuning:
    infer = _dataset(split='validation', batch_size=size, seed=42, use_cached=cached)
    datasets['infer_eval'] = infer | {'task_feature_lengths': None}
  rates = ('constant', 0.001, 1000) if tuning else ('constant * rsqrt_decay', 1.0, 10000)
  return macros, {
    'train_script.train': train,
    **{f'{name}/utils.DatasetConfig': fields for name, fields in datasets.items()},
    'partitioning.PjitPartitioner': {'num_partitions': 1, 'model_parallel_submesh': None},
    'utils.CheckpointConfig': {f: Raw(f'@utils.{f.title()}CheckpointConfig()') for f in ('restore', 'save')},
    'utils.RestoreCheckpointConfig': {'path': Raw('%INITIAL_CHECKPOINT_PATH') if tuning else []},
    'utils.SaveCheckpointConfig': {'period': 5000 if tuning else 1000, 'keep': None},
    'trainer.Trainer': {'learning_rate_fn': Raw('@utils.create_learning_rate_scheduler()')},
    'utils.create_learning_rate_scheduler': dict(zip(('factors', 'base_learning_rate', 'warmup_steps'), rates)),
  }


def _once(run: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """The macros and the blocks of eval.gin, infer.gin and infer_from_tfexample_file.gin."""
  of_file = run == 'infer_from_tfexample_file'
  named = ('TF_EXAMPLE_FILE_PATHS', 'TF_EXAMPLE_FILE_TYPE', 'FEATURE_LENGTHS') if of_file else ('MIXTURE_OR_TASK_NAME',)
  macros: dict[str, Any] = dict.fromkeys((*named, 'CHECKPOINT_PATH'), Raw(REQUIRED))
  if not of_file:
    macros |= {'TASK_FEATURE_LENGTHS': None if run == 'eval' else Raw(REQUIRED), 'MIXTURE_OR_TASK_MODULE': None}
  function: dict[str, Any] = {'model': Raw('%MODEL')}
  function |= {'dataset_cfg': Raw('@utils.DatasetConfig()'), 'partitioner': Raw('@partitioning.PjitPartitioner()')}
  function |= {'restore_checkpoint_cfg': Raw('@utils.RestoreCheckpointConfig()')}
  seed = 42 if run == 'eval' else 0
  dataset = _dataset(split='infer' if of_file else 'test', batch_size=32, seed=seed, use_cached=False)
  blocks: dict[str, Any] = {'partitioning.PjitPartitioner': {'num_partitions': 1}}
  blocks['utils.RestoreCheckpointConfig'] = {'path': Raw('%CHECKPOINT_PATH')}
  if of_file:
    del dataset['module']
    dataset |= {'mixture_or_task_name': Raw('@infer_script.create_task_from_tfexample_file()')}
    dataset |= {'task_feature_lengths': Raw('%FEATURE_LENGTHS')}
    source = {'paths': Raw('%TF_EXAMPLE_FILE_PATHS'), 'file_type': Raw('%TF_EXAMPLE_FILE_TYPE')}
    blocks['infer_script.create_task_from_tfexample_file'] = source | {'inputs_key': 'inputs', 'targets_key': None}
  script = 'eval_script.evaluate' if run == 'eval' else 'infer_script.infer'
  return macros, {script: function, 'utils.DatasetConfig': dataset, **blocks}


def _run(run: str) -> str | None:
  if run not in ('pretrain', 'finetune', 'eval', 'infer', 'infer_from_tfexample_file'):
    return None
  macros, blocks = _training(run) if run in ('pretrain', 'finetune') else _once(run)
  imports = ('seqio', 't5x.models', 't5x.partitioning', 't5x.trainer', 't5x.utils')
  script = {'eval': 'eval', 'infer': 'infer', 'infer_from_tfexample_file': 'infer'}.get(run, 'train')
  return f'import __main__ as {script}_script\n' + gin_text(imports, macros, blocks)


def gin_text(imports: tuple[str, ...], macros: Mapping[str, Any], blocks: Mapping[str, Mapping[str, Any]]) -> str:
  lines = [f'from {name.rpartition(".")[0]} import {name.rpartition(".")[2]}' for name in imports if '.' in name]
  lines += [f'import {name}' for name in imports if '.' not in name]
  bindings = dict(macros)
  for block, fields in blocks.items():
    bindings |= {f'{block}.{name}': value for name, value in fields.items()}
  return '\n'.join([*lines, *(f'{name} = {_syntax(value)}' for name, value in bindings.items())]) + '\n'


def _syntax(value: Any) -> str:
  return str(value) if isinstance(value, Raw) else repr(value)
