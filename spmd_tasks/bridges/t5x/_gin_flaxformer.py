"""What Flaxformer's gin files say of T5, mT5, byT5 and mixtures of experts: `flaxformer/t5x/configs/{t5,moe}/...`.

    flaxformer_file('flaxformer/t5x/configs/moe/models/switch_base.gin')     # in gin's syntax; None: not known here

Only what decides the numbers of a given checkpoint is here; where Flaxformer is installed, or below a search path, its
own file is read.
"""

from collections.abc import Mapping
from typing import Any

from spmd_tasks.bridges.t5x._gin_files import FAMILIES, SIZES, Raw, gin_text

# The parts of Flaxformer's architectures that decide what a model computes; initializers are its defaults here.
_MACROS = """
ARCHITECTURE = @t5_architecture.EncoderDecoder()
ACTIVATION_DTYPE = 'bfloat16'
DROPOUT_RATE = 0.0
DROPOUT_FACTORY = @dropout_factory/linen.Dropout
dropout_factory/linen.Dropout.rate = %DROPOUT_RATE
dropout_factory/linen.Dropout.broadcast_dims = (-2,)
t5_architecture.EncoderDecoder.shared_token_embedder_factory = @embedding.Embed
t5_architecture.EncoderDecoder.dtype = %ACTIVATION_DTYPE
embedding.Embed.num_embeddings = %NUM_EMBEDDINGS
embedding.Embed.features = %EMBED_DIM
dense_attention.MultiHeadDotProductAttention.num_heads = %NUM_HEADS
dense_attention.MultiHeadDotProductAttention.head_dim = %HEAD_DIM
dense_attention.MultiHeadDotProductAttention.dropout_rate = %DROPOUT_RATE
dense_attention.MultiHeadDotProductAttention.use_bias = False
relative_position_biases.RelativePositionBiases.num_buckets = 32
relative_position_biases.RelativePositionBiases.max_distance = 128
dense.MlpBlock.intermediate_dim = %MLP_DIM
dense.MlpBlock.activations = {activations}
dense.MlpBlock.intermediate_dropout_rate = %DROPOUT_RATE
dense.MlpBlock.final_dropout_rate = 0
dense.MlpBlock.use_bias = False
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
models.{model}.module = %ARCHITECTURE
models.{model}.input_vocabulary = %VOCABULARY
models.{model}.output_vocabulary = %VOCABULARY
models.{model}.optimizer_def = %OPTIMIZER
models.{model}.z_loss = %Z_LOSS
models.{model}.label_smoothing = %LABEL_SMOOTHING
models.{model}.loss_normalizing_factor = %LOSS_NORMALIZING_FACTOR
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
    known = {'t5': 't5_1_0'}.get(family, family)
    if known not in FAMILIES or size not in SIZES[(of := FAMILIES[known]).get('sizes', known)] or size == 'tiny':
      return None
    dims, own = SIZES[of.get('sizes', known)][size], {'NUM_EMBEDDINGS': of['vocab_size']}
    architecture = f't5/architectures/t5{"" if known == "t5_1_0" else "_1_1"}_flaxformer'
  names = ('EMBED_DIM', 'NUM_HEADS', 'NUM_ENCODER_LAYERS', 'NUM_DECODER_LAYERS', 'HEAD_DIM', 'MLP_DIM')
  macros = {**dict(zip(names, dims)), **own, **_EXCEPTIONS.get(name, {})}
  is_moe = kind == 'moe'
  model = _MODEL.format(
    model='MoeEncoderDecoderModel' if is_moe else 'EncoderDecoderModel',
    vocabulary='ByteVocabulary' if family == 'byt5' else 'SentencePieceVocabulary',
    normalization="'NUM_REAL_TARGET_TOKENS'" if is_moe else None,
  )
  if family != 'byt5':
    path = FAMILIES['mt5' if family == 'mt5' else 't5_1_1']['vocabulary']
    model += f'seqio.SentencePieceVocabulary.sentencepiece_model_file = {path!r}\n'
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
