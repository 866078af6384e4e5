"""What the gin files that T5X and Flaxformer ship say of numbers: defaults of runs, sizes and parts of models.

    shipped_file('t5x/configs/runs/pretrain.gin')     # gin's own syntax, made of the tables below; None: not known here
    flaxformer_file('flaxformer/t5x/configs/moe/models/switch_base.gin')

Only what decides the numbers of a given checkpoint is here; where T5X or Flaxformer is installed, or below a search
path, its own file is read.
"""

from collections.abc import Mapping
from typing import Any

REQUIRED = '%gin.REQUIRED'


class Raw(str):
  """A value in gin's syntax: a macro or a reference."""

  __repr__ = str.__str__


_MODELS = ('emb_dim', 'num_heads', 'num_encoder_layers', 'num_decoder_layers', 'head_dim', 'mlp_dim')
SIZES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
  't5_1_0': {
    'small': (512, 8, 6, 6, 64, 2048),
    'base': (768, 12, 12, 12, 64, 3072),
    'large': (1024, 16, 24, 24, 64, 4096),
    '3B': (1024, 32, 24, 24, 128, 16384),
    '11B': (1024, 128, 24, 24, 128, 65536),
  },
  't5_1_1': {
    'tiny': (8, 4, 2, 2, 3, 16),
    'small': (512, 6, 8, 8, 64, 1024),
    'base': (768, 12, 12, 12, 64, 2048),
    'large': (1024, 16, 24, 24, 64, 2816),
    'xl': (2048, 32, 24, 24, 64, 5120),
    'xxl': (4096, 64, 24, 24, 64, 10240),
  },
  'byt5': {
    'small': (1472, 6, 12, 4, 64, 3584),
    'base': (1536, 12, 18, 6, 64, 3968),
    'large': (1536, 16, 36, 12, 64, 3840),
    'xl': (2560, 32, 36, 12, 64, 6720),
    'xxl': (4672, 64, 36, 12, 64, 12352),
  },
}
_C4 = 'gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model'
_MC4 = 'gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model'
_T5: dict[str, Any] = {'sizes': 't5_1_1', 'vocabulary': _C4, 'vocab_size': 32128, 'tied': False}
_GATED = _T5 | {'activations': ('gelu', 'linear')}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
  't5_1_0': _T5 | {'sizes': 't5_1_0', 'activations': ('relu',), 'tied': True},
  't5_1_1': _GATED,
  'mt5': _GATED | {'vocabulary': _MC4, 'vocab_size': 250112},
  'byt5': _GATED | {'sizes': 'byt5', 'vocabulary': None, 'vocab_size': 384},
  'decoder_only': _GATED | {'tied': True},  # of the sizes, those of the decoders
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
moe_trainer.MoeTrainer.learning_rate_fn = @utils.create_learning_rate_scheduler()
moe_trainer.MoeTrainer.num_expert_partitions = %NUM_EXPERT_PARTITIONS
"""


_SCRIPTS = {'pretrain': 'train', 'finetune': 'train', 'eval': 'eval', 'infer': 'infer'}  # of which a file is a run
_SCRIPTS |= {'infer_from_tfexample_file': 'infer'}


def shipped_file(name: str) -> str | None:
  """Returns the text of a file of T5X by the name under which setups include it; None where it is not known."""
  if name.startswith('t5x/contrib/gpu/t5/'):
    text = shipped_file(name.replace('contrib/gpu', 'examples'))
    return text and text.replace('from t5x.examples', 'from t5x.contrib.gpu')
  folder, _, file = name.removeprefix('t5x/').removesuffix('.gin').rpartition('/')
  if folder in ('configs/runs', 'contrib/moe/configs/runs'):
    return _run(file) if folder == 'configs/runs' else _moe_run(file)
  if folder == 'examples/scalable_t5/umt5' and file == 'vocab':
    model_file = Raw('"gs://t5-data/vocabs/umt5.256000/sentencepiece.model"')
    block = {'sentencepiece_model_file': model_file, 'extra_ids': 300}
    macros = {'VOCABULARY': Raw('@seqio.SentencePieceVocabulary()'), 'VOCAB_SIZE': 256384}
    return gin_text(('seqio',), macros, {'seqio.SentencePieceVocabulary': block})
  if folder == 'examples/scalable_t5/umt5/architectures' and file == 'encoder_decoder':
    return gin_text(('t5x.examples.scalable_t5.network',), {}, {'network.T5Config': {'vocab_size': Raw('%VOCAB_SIZE')}})
  if folder == 'examples/decoder_only/models' and file not in ('tiny', 'small'):  # there are none
    return _model('decoder_only', 'decoder_only', file)
  _, example, family = (*folder.split('/'), '', '')[:3]
  if folder != f'examples/{example}/{family}' or example not in ('t5', 'scalable_t5') or family == 'decoder_only':
    return None
  return _model(example, family if file != 'tiny' or family not in FAMILIES else 't5_1_1', file)


def _model(example: str, family: str, size: str) -> str | None:
  """A model of a family; T5X's tiny ones all include that of T5 1.1."""
  known = FAMILIES.get(family)
  if known is None or size not in SIZES[known['sizes']]:
    return None
  is_decoder = family == 'decoder_only'
  config, module = ('TransformerConfig', 'DecoderWrapper') if is_decoder else ('T5Config', 'Transformer')
  model = 'DecoderOnlyModel' if is_decoder else 'EncoderDecoderModel'
  fields: dict[str, Any] = dict(zip(_MODELS, SIZES[known['sizes']][size], strict=True))
  if is_decoder:
    fields['num_layers'] = fields.pop('num_decoder_layers')
    del fields['num_encoder_layers']
  fields |= {'vocab_size': known['vocab_size'], 'mlp_activations': known['activations']}
  fields |= {'dtype': 'bfloat16', 'dropout_rate': Raw('%DROPOUT_RATE'), 'logits_via_embedding': known['tied']}
  if example == 'scalable_t5':
    fields |= {'scan_layers': True, 'remat_policy': 'minimal'}
  imports = ('seqio', 't5x.adafactor', 't5x.decoding', 't5x.models', f't5x.examples.{example}.network')
  text = gin_text(imports, {'DROPOUT_RATE': Raw(REQUIRED)}, {f'network.{config}': fields})
  text += f'network.{module}.config = @network.{config}()\n'
  text += 'adafactor.Adafactor.logical_factor_rules = @adafactor.standard_logical_factor_rules()\n'
  return text + _bound(model, f'@network.{module}()', known['vocabulary']) + (_SAMPLING if is_decoder else '')


def _bound(model: str, module: str, vocabulary: str | None, normalization: str | None = None) -> str:
  """What all models bind; a vocabulary is a file of SentencePiece, or None for bytes."""
  kind = 'ByteVocabulary' if vocabulary is None else 'SentencePieceVocabulary'
  text = _MODEL.format(model=model, module=module, vocabulary=kind, normalization=repr(normalization))
  for name in ('vocabulary',) if model == 'DecoderOnlyModel' else ('input_vocabulary', 'output_vocabulary'):
    text += f'models.{model}.{name} = %VOCABULARY\n'
  return text + (f'seqio.{kind}.sentencepiece_model_file = {vocabulary!r}\n' if vocabulary else '')


def _moe_run(run: str) -> str | None:
  """A run of contrib/moe: that of T5X with the partitioner and the trainer of experts."""
  base = 'pretrain' if run in ('continue_pretrain', 'sparse_upcycle') else run
  if base not in _SCRIPTS:
    return _run(base)
  trains, script = _SCRIPTS[base] == 'train', _SCRIPTS[base]
  text = f'import __main__ as {script}_script\n' + gin_text(('t5x.utils',), {}, {})
  text += _MOE_RUN.format(run=base, script=f'{script}_script.{"evaluate" if script == "eval" else script}')
  text += _MOE_TRAINING if trains else 'utils.DatasetConfig.batch_size = %BATCH_SIZE\n'
  text += f'utils.SaveCheckpointConfig.period = {5000 if base == "pretrain" else 2000}\n' if trains else ''
  text += 'utils.SaveCheckpointConfig.keep = 20\n' if base == 'pretrain' else ''
  text += 'EXPERT_DROPOUT_RATE = %DROPOUT_RATE\n' if base == 'finetune' else ''
  text += 'utils.RestoreCheckpointConfig.path = %INITIAL_CHECKPOINT_PATH\n' if run != base else ''
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
  macros |= {'RANDOM_SEED': None, 'TRAIN_STEPS_RELATIVE': None, 'USE_HARDWARE_RNG': False}
  macros |= {'DROPOUT_RATE': 0.1, 'EVAL_STEPS': 20, 'EVAL_PERIOD': 1000} if tuning else {'SHUFFLE_TRAIN_EXAMPLES': True}
  of_evaluator = {'EVALUATOR_USE_MEMORY_CACHE': True, 'EVALUATOR_NUM_EXAMPLES': None, 'JSON_WRITE_N_RESULTS': None}
  macros |= of_evaluator if tuning else {}
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
  output = 'EVAL_OUTPUT_DIR' if run == 'eval' else 'INFER_OUTPUT_DIR'
  macros: dict[str, Any] = dict.fromkeys((*named, 'CHECKPOINT_PATH', output), Raw(REQUIRED))
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
  if run == 'precompile':
    return 'import __main__ as train_script\ntrain_script.precompile.model = %MODEL\n'
  if run in ('export', 'export_seqio'):
    return 'from t5x import export_lib\nexport_lib.save.model = %MODEL\n'
  if (script := _SCRIPTS.get(run)) is None:
    return None
  macros, blocks = _training(run) if script == 'train' else _once(run)
  imports = ('seqio', 't5x.models', 't5x.partitioning', 't5x.trainer', 't5x.utils')
  return f'import __main__ as {script}_script\n' + gin_text(imports, macros, blocks)


def gin_text(imports: tuple[str, ...], macros: Mapping[str, Any], blocks: Mapping[str, Mapping[str, Any]]) -> str:
  lines = [f'from {name.rpartition(".")[0]} import {name.rpartition(".")[2]}' for name in imports if '.' in name]
  lines += [f'import {name}' for name in imports if '.' not in name]
  bindings = dict(macros)
  for block, fields in blocks.items():
    bindings |= {f'{block}.{name}': value for name, value in fields.items()}
  return '\n'.join([*lines, *(f'{name} = {value!r}' for name, value in bindings.items())]) + '\n'


# The parts of Flaxformer's architectures that decide what a model computes; initializers are its defaults here.
_MACROS = """
ARCHITECTURE = @t5_architecture.EncoderDecoder()
ACTIVATION_DTYPE = 'bfloat16'
DROPOUT_RATE = 0.0
DROPOUT_FACTORY = @dropout_factory/linen.Dropout
dropout_factory/linen.Dropout.rate = %DROPOUT_RATE
t5_architecture.EncoderDecoder.shared_token_embedder_factory = @embedding.Embed
t5_architecture.EncoderDecoder.dtype = %ACTIVATION_DTYPE
embedding.Embed.num_embeddings = %NUM_EMBEDDINGS
embedding.Embed.features = %EMBED_DIM
dense_attention.MultiHeadDotProductAttention.num_heads = %NUM_HEADS
dense_attention.MultiHeadDotProductAttention.head_dim = %HEAD_DIM
dense_attention.MultiHeadDotProductAttention.dropout_rate = %DROPOUT_RATE
relative_position_biases.RelativePositionBiases.num_buckets = 32
relative_position_biases.RelativePositionBiases.max_distance = 128
dense.MlpBlock.intermediate_dim = %MLP_DIM
dense.MlpBlock.activations = {activations}
dense.MlpBlock.intermediate_dropout_rate = %DROPOUT_RATE
"""
_STACK = """
t5_architecture.EncoderDecoder.{side}_factory = @{stack}
{stack}.num_layers = %NUM_{SIDE}_LAYERS
{stack}.layer_factory = @t5_architecture.{Side}Layer
{stack}.dropout_factory = %DROPOUT_FACTORY
{stack}.shared_relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
t5_architecture.{Side}Layer.{attention} = @dense_attention.MultiHeadDotProductAttention()
t5_architecture.{Side}Layer.mlp = @dense.MlpBlock()
"""
_SPARSE = """
NUM_{SIDE}_SPARSE_LAYERS = %NUM_{SIDE}_LAYERS
{SIDE}_SPARSE_LAYOUT = %moe_enums.LayerLayout.MIXED
{stack}.num_sparse_layers = %NUM_{SIDE}_SPARSE_LAYERS
{stack}.sparse_layout = %{SIDE}_SPARSE_LAYOUT
{stack}.sparse_layer_factory = @moe_architecture.Sparse{Side}Layer
moe_architecture.Sparse{Side}Layer.{attention} = @dense_attention.MultiHeadDotProductAttention()
moe_architecture.Sparse{Side}Layer.mlp = @sparse_{side}/moe_layers.MoeLayer()
sparse_{side}/moe_layers.MoeLayer.router = @sparse_{side}/routing.TokensChooseMaskedRouter()
sparse_{side}/routing.TokensChooseMaskedRouter.batch_prioritized_routing = {is_encoder}
"""
_EXPERTS = """
NUM_MODEL_PARTITIONS = None
MODEL_PARALLEL_SUBMESH = None
NUM_EXPERT_PARTITIONS = %NUM_EXPERTS
GROUP_SIZE = 4096
TRAIN_EXPERT_CAPACITY_FACTOR = 1.0
EVAL_EXPERT_CAPACITY_FACTOR = 1.0
EXPERT_MLP_DIM = %MLP_DIM
NUM_SELECTED_EXPERTS = 1
JITTER_NOISE = 0.0
MOE_TRUNCATED_DTYPE = 'bfloat16'
EXPERT_DROPOUT_RATE = %DROPOUT_RATE
moe_layers.MoeLayer.num_experts = %NUM_EXPERTS
moe_layers.MoeLayer.max_group_size = %GROUP_SIZE
moe_layers.MoeLayer.train_capacity_factor = %TRAIN_EXPERT_CAPACITY_FACTOR
moe_layers.MoeLayer.eval_capacity_factor = %EVAL_EXPERT_CAPACITY_FACTOR
moe_layers.MoeLayer.expert = @expert/dense.MlpBlock()
moe_layers.MoeLayer.num_expert_partitions = %NUM_EXPERT_PARTITIONS
moe_layers.MoeLayer.dtype = %MOE_TRUNCATED_DTYPE
routing.TokensChooseMaskedRouter.num_selected_experts = %NUM_SELECTED_EXPERTS
routing.TokensChooseMaskedRouter.jitter_noise = %JITTER_NOISE
routing.TokensChooseMaskedRouter.ignore_padding_tokens = False
routing.ExpertsChooseMaskedRouter.jitter_noise = %JITTER_NOISE
routing.ExpertsChooseMaskedRouter.ignore_padding_tokens = False
expert/dense.MlpBlock.intermediate_dim = %EXPERT_MLP_DIM
expert/dense.MlpBlock.activations = ('gelu', 'linear')
expert/dense.MlpBlock.intermediate_dropout_rate = %EXPERT_DROPOUT_RATE
"""
_MODEL = """
Z_LOSS = 0.0001
LABEL_SMOOTHING = 0.0
LOSS_NORMALIZING_FACTOR = {normalization}
OPTIMIZER = @adafactor.Adafactor()
adafactor.Adafactor.decay_rate = 0.8
adafactor.Adafactor.step_offset = 0
VOCABULARY = @seqio.{vocabulary}()
MODEL = @models.{model}()
models.{model}.module = {module}
models.{model}.optimizer_def = %OPTIMIZER
models.{model}.z_loss = %Z_LOSS
models.{model}.label_smoothing = %LABEL_SMOOTHING
models.{model}.loss_normalizing_factor = %LOSS_NORMALIZING_FACTOR
"""
_SAMPLING = """
models.DecoderOnlyModel.decode_fn = @decoding.temperature_sample
decoding.temperature_sample.temperature = 1.0
decoding.temperature_sample.topk = 40
"""
_COMPONENTS = ('dense', 'embedding', 'relative_position_biases', 'attention.dense_attention')
_MODULES: tuple[str, ...] = ('flax.linen', 'seqio', 't5x.adafactor', 'flaxformer.architectures.t5.t5_architecture')
_MODULES += tuple(f'flaxformer.components.{each}' for each in _COMPONENTS)
_MOE_MODULES = tuple(f'flaxformer.architectures.moe.{each}' for each in ('moe_architecture', 'moe_layers', 'routing'))
_CAPACITY: dict[str, Any] = {'TRAIN_EXPERT_CAPACITY_FACTOR': 1.25, 'EVAL_EXPERT_CAPACITY_FACTOR': 2.0}
# Of a family of mixtures: experts and the distance between sparse layers, by size, and its other macros.
_MIXTURES: Mapping[str, tuple[Mapping[str, tuple[int, int]], Mapping[str, Any]]] = {
  'tokens_choose': (
    {'tiny': (8, 2), 'small': (32, 4), **dict.fromkeys(('base', 'large', 'xl', 'xxl'), (64, 4))},
    _CAPACITY | {'NUM_SELECTED_EXPERTS': 2},
  ),
  'experts_choose': (
    {'tiny': (8, 2), 'small': (32, 2), **dict.fromkeys(('base', 'large', 'xl', 'xxl'), (64, 2))},
    {'NUM_SELECTED_EXPERTS': 2},
  ),
  'st_moe': (
    {'base': (16, 4), 'xl': (16, 4), '32b': (64, 4)},
    _CAPACITY
    | {'NUM_SELECTED_EXPERTS': 2, 'ROUTER_Z_LOSS_FACTOR': 0.0001}
    | {f'moe_architecture.Sparse{side}Layer.extra_mlp': Raw('@dense.MlpBlock()') for side in ('Encoder', 'Decoder')},
  ),
  'switch': ({**dict.fromkeys(('base', 'large', 'xxl'), (128, 2)), 'c': (2048, 1)}, _CAPACITY),
}
_MIXTURE_DIMS = {'tiny': (32, 6, 2, 2, 64, 64), 'c': (2080, 30, 15, 15, 64, 6144)}
_MIXTURE_DIMS['32b'] = (5120, 64, 24, 24, 128, 20480)
_RELU = {'dense.MlpBlock.activations': ('relu',), 'expert/dense.MlpBlock.activations': ('relu',)}
_EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
  'st_moe_xl': {'GROUP_SIZE': 1024, 'TRAIN_EXPERT_CAPACITY_FACTOR': 2.0, 'EVAL_EXPERT_CAPACITY_FACTOR': 4.0},
  'st_moe_32b': {'ROUTER_Z_LOSS_FACTOR': 0.001},
  'switch_base': {'MLP_DIM': 3072, 'GROUP_SIZE': 8192},
  'switch_large': {'MLP_DIM': 4096},
  'switch_c': {'GROUP_SIZE': 2048, 'TRAIN_EXPERT_CAPACITY_FACTOR': 1.0, 'moe_layers.MoeLayer.min_expert_capacity': 2},
  'switch_xxl': {'EVAL_EXPERT_CAPACITY_FACTOR': 4.0, 'moe_layers.MoeLayer.min_expert_capacity': 2},
}


def flaxformer_file(path: str) -> str | None:
  """Returns the text of an architecture, or of a model of a family, which has the sizes of T5X's; None: not known."""
  parts = path.removesuffix('.gin').split('/')
  if parts[:3] != ['flaxformer', 't5x', 'configs'] or len(parts) != 6:
    return None
  kind, folder, name = parts[3:]
  if folder == 'architectures' and name in ('t5_flaxformer', 't5_1_1_flaxformer', 'moe'):
    return _architecture(is_tied=name == 't5_flaxformer', is_sparse=name == 'moe')
  family, _, size = name.rpartition('_')
  if folder != 'models' or kind not in ('t5', 'moe'):
    return None
  if kind == 'moe':
    sizes, macros = _MIXTURES.get(family, ({}, {}))
    if size not in sizes:
      return None
    dims = _MIXTURE_DIMS.get(size) or SIZES['t5_1_1'][size]
    num_experts, every = sizes[size]
    own: dict[str, Any] = {'AUX_LOSS_FACTOR': 0.01, 'ROUTER_Z_LOSS_FACTOR': 0.0, 'SCALE': 0.1}
    own |= {'NUM_EMBEDDINGS': 32128, 'NUM_EXPERTS': num_experts, **macros}
    own |= {f'NUM_{side}_SPARSE_LAYERS': dims[2] // every for side in ('ENCODER', 'DECODER')}
    if family in ('switch', 'st_moe'):
      own['sparse_encoder/routing.TokensChooseMaskedRouter.batch_prioritized_routing'] = False
    if family == 'switch':
      own |= _RELU if size != 'xxl' else {}
      own |= {'moe_architecture.SparseDecoder.output_logits_factory': None} if size in ('base', 'large') else {}
    if family == 'experts_choose':
      own['sparse_encoder/moe_layers.MoeLayer.router'] = Raw('@sparse_encoder/routing.ExpertsChooseMaskedRouter()')
    architecture = 'moe/architectures/moe'
  else:
    known = FAMILIES.get({'t5': 't5_1_0'}.get(family, family))
    if known is None or size not in SIZES[known['sizes']] or size == 'tiny':
      return None
    dims, own = SIZES[known['sizes']][size], {'NUM_EMBEDDINGS': known['vocab_size']}
    architecture = f't5/architectures/t5{"" if known["sizes"] == "t5_1_0" else "_1_1"}_flaxformer'
  names = ('EMBED_DIM', 'NUM_HEADS', 'NUM_ENCODER_LAYERS', 'NUM_DECODER_LAYERS', 'HEAD_DIM', 'MLP_DIM')
  macros = {**dict(zip(names, dims)), **own, **_EXCEPTIONS.get(name, {})}
  is_moe = kind == 'moe'
  vocabulary = {'byt5': None, 'mt5': _MC4}.get(family, _C4)
  kind, normalization = (
    ('MoeEncoderDecoderModel', 'NUM_REAL_TARGET_TOKENS') if is_moe else ('EncoderDecoderModel', None)
  )
  model = _bound(kind, '%ARCHITECTURE', vocabulary, normalization)
  if is_moe:
    model += 'models.MoeEncoderDecoderModel.aux_loss_factor = %AUX_LOSS_FACTOR\n'
    model += 'models.MoeEncoderDecoderModel.router_z_loss_factor = %ROUTER_Z_LOSS_FACTOR\n'
    model += 'adafactor.Adafactor.logical_factor_rules = @adafactor_utils.logical_factor_rules()\n'
  imports = ('t5x.contrib.moe.models', 't5x.contrib.moe.adafactor_utils') if is_moe else ('t5x.models',)
  head = f"include 'flaxformer/t5x/configs/{architecture}.gin'\n" + gin_text((*imports, *_MODULES), {}, {})
  return head + model + gin_text((), macros, {})


def _architecture(*, is_tied: bool = False, is_sparse: bool = False) -> str:
  activations = ('relu',) if is_tied else ('gelu', 'linear')
  modules = _MODULES + (_MOE_MODULES if is_sparse else ())
  text = gin_text(modules, {}, {}) + _MACROS.format(activations=activations)
  stacks = {side: f'moe_architecture.Sparse{side}' if is_sparse else f't5_architecture.{side}' for side in _SIDES}
  for side, attention in _SIDES.items():
    names = {'side': side.lower(), 'SIDE': side.upper(), 'Side': side, 'stack': stacks[side], 'attention': attention}
    pattern = _STACK + (_SPARSE if is_sparse else '')
    text += pattern.format(**names, is_encoder=side == 'Encoder')
  logits = 'None' if is_tied else '@output_logits/dense.DenseGeneral'
  text += f'{stacks["Decoder"]}.output_logits_factory = {logits}\n'
  return text + (_EXPERTS if is_sparse else '')


_SIDES = {'Encoder': 'attention', 'Decoder': 'self_attention'}
