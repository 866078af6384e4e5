# ruff: noqa: E402
r"""Runs the real T5X on small made-up batches, and writes folders that `scripts/t5x_compare` compares with ours.

PYTHONPATH=T5X:FLAXFORMER:SHIMS python scripts/run_t5x.py NAME ... OUT_DIR      # names: see CASES; `all`

T5X cc342d4 and Flaxformer 399ea3a run on this repository's Python 3.11 environment, unchanged, with `pip install aqtp
cached_property`, jestimator's sources and a module `airio.core` of empty classes (AirIODatasetIterator, Task, Mixture,
DatasetProviderBase) on the path. The folders have the format of ../shared/t5x, without its curves of microbatches.

Whether T5X goes on from an export of ours, on one device: from MODEL_DIR/checkpoint_20 it writes checkpoint_30, whose
arrays (`open_checkpoint`) are those of a job of ours with `init_from=t5x:MODEL_DIR` and `skips_trained_batches=False`.

PYTHONPATH=... python -c "import jax.experimental.pjit, runpy; jax.experimental.pjit.PartitionSpec =
  jax.sharding.PartitionSpec; runpy.run_module('t5x.train', run_name='__main__', alter_sys=True)" \
  --gin_file=made_up_sums.gin --gin.MODEL_DIR="'MODEL_DIR'" --gin.TRAIN_STEPS=30
"""

import json
import os
import pathlib
import shutil
import sys
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

import jax
import jax.experimental.pjit

vars(jax.experimental.pjit)['PartitionSpec'] = jax.sharding.PartitionSpec  # a name that jestimator imports from there

import flax
from flax import traverse_util
import jax.numpy as jnp
import numpy as np
import seqio
from t5x import adafactor, checkpoints, decoding, models, partitioning, train_state, trainer, utils
from t5x import metrics as metrics_lib
from t5x.examples.decoder_only import network as decoder_network
from t5x.examples.scalable_t5 import network as scalable_network
from t5x.examples.t5 import network

SMALL = {'vocab': 256, 'emb': 128, 'heads': 4, 'head_dim': 32, 'enc': 2, 'dec': 2, 'z_loss': 1e-4}
OTHER = {'vocab': 192, 'emb': 96, 'heads': 6, 'head_dim': 16, 'mlp': 160, 'enc': 3, 'dec': 2, 'z_loss': 1e-4}
GEGLU = {'activations': ['gelu', 'linear'], 'tied': False}
RELU = {'activations': ['relu'], 'tied': True}
NORMALIZED = {'loss_normalizing_factor': 'NUM_REAL_TARGET_TOKENS'}
MOE = {'vocab': 256, 'emb': 64, 'heads': 4, 'head_dim': 16, 'mlp': 128, 'enc': 2, 'dec': 2, 'lengths': [24, 16]}
MOE |= {'kind': 'moe', 'experts': 8, 'group': 64, 'capacity': 1.25, 'aux': 0.01, 'z_loss': 1e-4}
MOMENTUM = {'beta1': 0.9, 'weight_decay_rate': 1e-3, 'clipping_threshold': 0.5, 'max_parameter_scale': 0.05}
CAUSAL = {'inputs_bidirectional_attention': False}
CASES: dict[str, dict[str, Any]] = {
  't5_1_0': {'kind': 'encdec', **SMALL, 'mlp': 256, 'lengths': [24, 16], **RELU, 'label_smoothing': 0.1, 'seed': 10},
  'packed_other': {'kind': 'encdec', **OTHER, 'lengths': [40, 24], **GEGLU, 'packed': True, **NORMALIZED, 'seed': 11},
  'other_sizes': {'kind': 'encdec', **OTHER, 'lengths': [20, 12], **GEGLU, 'seed': 12},
  'prefix_lm': {'kind': 'prefix_lm', **SMALL, 'mlp': 192, 'enc': 0, 'lengths': [20, 16], **GEGLU, 'seed': 13},
  'switch': {**MOE, 'top_k': 1, 'seed': 14},
  'st_moe': {**MOE, 'top_k': 2, 'extra_mlp': True, 'batch_prioritized': False, 'seed': 16},
  'switch_packed': {**MOE, 'top_k': 1, 'packed': True, **RELU, 'batch_prioritized': False, 'seed': 15},
  'experts_choose': {**MOE, 'top_k': 2, 'experts_choose': True, 'seed': 17},
  'scanned': {'kind': 'encdec', **OTHER, 'lengths': [20, 12], **GEGLU, 'scan_layers': True, 'seed': 18},
  'scanned_momentum': {
    'kind': 'encdec',
    **SMALL,
    'mlp': 192,
    'lengths': [20, 12],
    **RELU,
    'scan_layers': True,
    **MOMENTUM,
    'seed': 19,
  },
  'momentum': {
    'kind': 'encdec',
    **SMALL,
    'mlp': 192,
    'lengths': [12, 8],
    'activations': ['swish'],
    'tied': False,
    **MOMENTUM,
    'factors': 'constant * linear_warmup * rsqrt_decay',
    'seed': 20,
  },
  'decoder': {'kind': 'decoder', **OTHER, 'enc': 0, 'lengths': [0, 24], **GEGLU, 'seed': 21},
  'causal_inputs': {
    'kind': 'prefix_lm',
    **OTHER,
    'enc': 0,
    'lengths': [14, 12],
    **RELU,
    'packed': True,
    **CAUSAL,
    'seed': 22,
  },
  'odd': {
    'kind': 'encdec',
    **{'vocab': 131, 'emb': 72, 'heads': 3, 'head_dim': 20, 'mlp': 100, 'enc': 1, 'dec': 3, 'z_loss': 1e-3},
    **{'lengths': [13, 9], 'rows': 6, 'activations': ['swish', 'linear'], 'tied': True, 'label_smoothing': 0.05},
    'seed': 23,
  },
  'sparse': {
    **{'kind': 'moe', 'vocab': 160, 'emb': 48, 'heads': 6, 'head_dim': 8, 'mlp': 80, 'enc': 4, 'dec': 4},
    **{'lengths': [28, 20], 'experts': 4, 'top_k': 2, 'group': 48, 'capacity': 2.0, 'aux': 0.02, 'z_loss': 1e-3},
    **{'packed': True, 'seed': 24},
  },
  'unscanned': {
    **{'kind': 'encdec', **OTHER, 'lengths': [40, 24], **GEGLU, 'packed': True, 'scan_layers': False},
    **{'loss_normalizing_factor': 'NUM_TOTAL_TARGET_TOKENS', 'label_smoothing': 0.1, 'seed': 25},
  },
  'decoder_packed': {
    **{'kind': 'decoder', **SMALL, 'mlp': 192, 'enc': 0, 'lengths': [0, 24], **RELU, 'packed': True},
    **{'loss_normalizing_factor': 'AVERAGE_PER_SEQUENCE', 'seed': 26},
  },
  'prefix_packed': {
    **{'kind': 'prefix_lm', **OTHER, 'enc': 0, 'lengths': [16, 14], **GEGLU, 'packed': True},
    **{'loss_normalizing_factor': 50.0, 'seed': 27},
  },
  'experts_choose_packed': {
    **{**MOE, 'mlp': 96, 'experts': 4, 'top_k': 2, 'experts_choose': True, 'group': 96, 'packed': True},
    **{'tied': True, 'seed': 28},
  },
}


def make_batch(c):
  """Returns texts of synthetic tokens, converted by SeqIO's feature converter of the model's kind."""
  rng = np.random.default_rng(c['seed'])
  inputs, targets = c['lengths']
  feature_lengths = {'inputs': inputs, 'targets': targets}

  def text(longest):
    return np.append(rng.integers(3, c['vocab'], rng.integers(2, longest - 1)), 1).astype(np.int32)

  def examples():
    for _ in range(64):
      if inputs:
        yield {'inputs': text(inputs // 2 if c.get('packed') else inputs), 'targets': text(targets // 2)}
      else:
        yield {'targets': text(targets)}

  import tensorflow as tf

  converters = dict.fromkeys(('prefix_lm', 'decoder'), seqio.PrefixLMFeatureConverter)
  if not inputs:
    del feature_lengths['inputs']
    converters['decoder'] = seqio.LMFeatureConverter
  signature = dict.fromkeys(feature_lengths, tf.TensorSpec([None], tf.int32))
  converter = converters.get(c['kind'], seqio.EncDecFeatureConverter)
  rows = converter(pack=c.get('packed', False))(
    tf.data.Dataset.from_generator(examples, output_signature=signature), feature_lengths
  )
  return {name: rows.astype(np.int32) for name, rows in next(rows.batch(c.get('rows', 8)).as_numpy_iterator()).items()}


def make_moe_model(c):
  """Returns Flaxformer's mixture, configured by its own gin files."""
  import flaxformer
  import gin

  root = pathlib.Path(flaxformer.__file__).parent.parent
  prioritized = c.get('batch_prioritized', True)
  activations = tuple(c.get('activations', ('gelu', 'linear')))
  text = f"""
    from __gin__ import dynamic_registration
    import seqio
    from flaxformer.architectures.moe import moe_architecture
    from flaxformer.architectures.moe import routing
    from flaxformer.components import dense
    from t5x.contrib.moe import models
    include 'flaxformer/t5x/configs/moe/models/{'experts' if c.get('experts_choose') else 'tokens'}_choose_tiny.gin'
    NUM_ENCODER_LAYERS = {c['enc']}
    NUM_DECODER_LAYERS = {c['dec']}
    NUM_HEADS = {c['heads']}
    HEAD_DIM = {c['head_dim']}
    EMBED_DIM = {c['emb']}
    MLP_DIM = {c['mlp']}
    NUM_EMBEDDINGS = {c['vocab']}
    NUM_EXPERTS = {c['experts']}
    NUM_SELECTED_EXPERTS = {c['top_k']}
    GROUP_SIZE = {c['group']}
    TRAIN_EXPERT_CAPACITY_FACTOR = {c['capacity']}
    Z_LOSS = {c['z_loss']}
    AUX_LOSS_FACTOR = {c['aux']}
    ROUTER_Z_LOSS_FACTOR = 1e-3
    NUM_MODEL_PARTITIONS = 1
    SCALE = 1.0
    ACTIVATION_DTYPE = 'float32'
    MOE_TRUNCATED_DTYPE = 'float32'
    dense.MlpBlock.activations = {activations}
    expert/dense.MlpBlock.activations = {activations}
    sparse_encoder/routing.TokensChooseMaskedRouter.batch_prioritized_routing = {prioritized}
    seqio.PassThroughVocabulary.size = {c['vocab']}
    seqio.PassThroughVocabulary.eos_id = 1
    VOCABULARY = @seqio.PassThroughVocabulary()
    ARCHITECTURE = @t5_architecture.EncoderDecoder()
    made/macro.value = %MODEL
    """
  for side in ('Encoder', 'Decoder') if c.get('extra_mlp') else ():
    text += f'    moe_architecture.Sparse{side}Layer.extra_mlp = @dense.MlpBlock()\n'
  if c.get('tied'):
    text += '    moe_architecture.SparseDecoder.output_logits_factory = None\n'
  text = text.replace('    made/macro.value = %MODEL\n', '').replace('\n    ', '\n')
  text = text.replace('import seqio\n', 'import seqio\nfrom flaxformer.architectures.t5 import t5_architecture\n', 1)
  gin.add_config_file_search_path(str(root))
  gin.parse_config(text)
  return gin.query_parameter('%MODEL').scoped_configurable_fn()


def make_model(c):
  if c['kind'] == 'moe':
    return make_moe_model(c)
  vocabulary = seqio.PassThroughVocabulary(c['vocab'], eos_id=1)
  rules = adafactor.standard_logical_factor_rules()
  own = {name: c[name] for name in MOMENTUM if name in c}
  optimizer = adafactor.Adafactor(decay_rate=0.8, logical_factor_rules=rules, **own)
  sizes = {'vocab_size': c['vocab'], 'emb_dim': c['emb'], 'num_heads': c['heads'], 'head_dim': c['head_dim']}
  sizes |= {'mlp_dim': c['mlp'], 'mlp_activations': tuple(c['activations']), 'dropout_rate': 0.0}
  sizes |= {'logits_via_embedding': c['tied']}
  shared = {'optimizer_def': optimizer, 'z_loss': c['z_loss'], 'label_smoothing': c.get('label_smoothing', 0.0)}
  shared |= {'loss_normalizing_factor': c.get('loss_normalizing_factor')}
  if c['kind'] in ('prefix_lm', 'decoder'):
    config = decoder_network.TransformerConfig(**sizes, num_layers=c['dec'])
    is_prefix = c.get('inputs_bidirectional_attention', c['kind'] == 'prefix_lm')
    return models.DecoderOnlyModel(
      decoder_network.DecoderWrapper(config), vocabulary, inputs_bidirectional_attention=is_prefix, **shared
    )
  is_scalable = 'scan_layers' in c
  source = scalable_network if is_scalable else network
  sizes |= {'scan_layers': c['scan_layers']} if is_scalable else {}
  config = source.T5Config(**sizes, num_encoder_layers=c['enc'], num_decoder_layers=c['dec'])
  return models.EncoderDecoderModel(source.Transformer(config), vocabulary, vocabulary, **shared)


def named(tree):
  flat = traverse_util.flatten_dict(flax.core.unfreeze(tree), sep='/')
  return {name: np.asarray(jax.device_get(x)) for name, x in flat.items()}


class TwoByFour(partitioning.PjitPartitioner):
  """Returns the mesh data 4 x model 2, which T5X does not create on a CPU."""

  @property
  def mesh(self):
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'model'))


def train(model, make_state, batch, rate, steps, partitioner=None):
  """Returns the metrics of every step, the weights after the first step, and the last state."""

  def step(state, batch):
    return trainer.train_with_lr(state, batch, rate(state.step), jax.random.key(0), model, None)

  if partitioner is None:
    step, state = jax.jit(step), make_state()
  else:
    state = make_state()
    axes, spec = partitioner.get_mesh_axes(state), partitioner.data_partition_spec
    step = partitioner.partition(step, in_axis_resources=(axes, spec), out_axis_resources=(axes, None))
  curve, first = [], None
  for _ in range(steps):
    state, metrics = step(state, batch)
    loss = metrics_lib.set_step_metrics_num_steps({'loss': metrics['loss']}, 1)['loss']
    curve.append({'loss': float(loss.compute())})
    first = first or named(state.params)
  return curve, first, state


def decode(model, c, params, batch):
  """Returns scores, greedy and beam search (4 beams, alpha 0.6) of the rows as single texts."""
  rows = {name: x for name, x in batch.items() if not name.endswith(('_segment_ids', '_positions'))}
  results = {'score_batch': np.asarray(jax.jit(model.score_batch)(params, rows)).tolist()}
  # rescale_log_probs: greedy's scores are log probabilities then.
  searches: dict[str, tuple[Any, int, dict[str, float]]] = {
    'greedy': (decoding.temperature_sample, 1, {'topk': 1, 'rescale_log_probs': False}),
    'beam_4_alpha_0.6': (decoding.beam_search, 4, {'alpha': 0.6}),
  }
  for name, (function, width, settings) in searches.items():
    model._decode_fn = function
    predict = jax.jit(
      lambda params, rows, width=width, settings=settings: model.predict_batch_with_aux(
        params, rows, return_all_decodes=True, num_decodes=width, decoder_params=dict(settings)
      )
    )
    tokens, scores = jax.device_get(predict(params, rows))
    scores = scores['scores']
    if width == 1:
      tokens, scores = tokens[:, 0], scores[:, 0]
    results[name] = {'tokens': tokens.tolist(), 'scores': scores.tolist()}
  return results


def run(name, directory):
  c, directory = CASES[name], directory / name
  shutil.rmtree(directory, ignore_errors=True)
  directory.mkdir(parents=True)
  batch, model, steps = make_batch(c), make_model(c), 20
  shapes, types = {n: x.shape for n, x in batch.items()}, {n: x.dtype for n, x in batch.items()}
  variables = model.get_initial_variables(jax.random.PRNGKey(c['seed']), shapes, types)
  factors = c.get('factors', 'constant * rsqrt_decay')
  rate = utils.create_learning_rate_scheduler(factors, base_learning_rate=0.1, warmup_steps=10)

  def make_state():
    state = train_state.FlaxOptimTrainState.create(model.optimizer_def, variables)
    return jax.tree.map(jnp.copy, state)  # T5X's partitioner donates it

  np.savez(directory / 'batch.npz', **batch)
  np.savez(directory / 'initial_weights.npz', **named(variables['params']))
  if c['kind'] != 'moe':
    np.savez(directory / 'initial_logits.npz', logits=jax.jit(model._compute_logits)(variables['params'], batch))
  losses = jax.jit(jax.value_and_grad(lambda params: model.loss_fn(params, batch, jax.random.key(0))[0]))
  loss, gradients = losses(variables['params'])
  norms = {n: float(np.linalg.norm(x.astype(np.float64).ravel())) for n, x in named(gradients).items()}
  curve, first, state = train(model, make_state, batch, rate, steps)
  partitioner = TwoByFour(num_partitions=2)
  if c['kind'] == 'moe':  # T5X's own has no mesh of several axes on a CPU
    from t5x.contrib.moe.partitioning import MoePjitPartitioner

    partitioner, on_8, other = MoePjitPartitioner(num_expert_partitions=c['experts'], num_partitions=1), curve, state
  elif c['heads'] % 2 or c.get('rows', 8) % 4:
    on_8, other = curve, state  # T5X refuses them
  else:
    on_8, _, other = train(model, make_state, batch, rate, steps, partitioner)
  final = named(state.params)
  apart = max(float(np.abs(x - final[n]).max()) for n, x in named(other.params).items())
  curves = {'1 device': {'curve': curve}, '8 devices, data 4 x model 2': {'curve': on_8, 'apart': apart}}
  settings = {**c, 'case': name, 'steps': steps, 'learning_rate': f'{factors}, 0.1, warmup 10'}
  texts = {'initial_grads': {'loss': float(loss), 'norms': norms}, 'curves': curves, 'config': settings}
  if 'encoder_input_tokens' in batch or 'decoder_causal_attention' in batch:
    texts['decoded'] = decode(model, c, state.params, batch)
  for name, contents in texts.items():
    (directory / f'{name}.json').write_text(json.dumps(contents, indent=1))
  np.savez(directory / 'weights_step_1.npz', **first)
  np.savez(directory / 'final_weights.npz', **final)
  checkpointer = checkpoints.Checkpointer(state, partitioner, str(directory))
  checkpointer.save(state)
  print(f'{name}: losses {curve[0]["loss"]:.6g} to {curve[-1]["loss"]:.6g}; 8 devices apart by {apart:.2g}', flush=True)


def main():
  *names, out = sys.argv[1:]
  for name in CASES if names == ['all'] else names:
    run(name, pathlib.Path(out))


if __name__ == '__main__':
  main()
