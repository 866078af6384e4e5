"""What T5X's own networks computed, and our models with the same weights.

tests/data/t5x/networks.npz: `packed`, T5 1.0 with tied embeddings on packed rows, with five losses of T5X; `prefix`,
its decoder-only network as a prefix language model. T5X cc342d4, float32, 2 layers, random weights.
"""

import functools
from pathlib import Path
from typing import Any

from flax.traverse_util import unflatten_dict
import numpy as np

from spmd_tasks.layers import (
  EncoderDecoderLm,
  FeedForward,
  GatedFeedForward,
  LanguageModel,
  RmsNorm,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention, RelativePositionBias

FILE = Path(__file__).parents[1] / 'data' / 't5x' / 'networks.npz'
NUM_HEADS, HEAD_DIM, NUM_LAYERS, HIDDEN_DIM, VOCAB_SIZE, MODEL_DIM = 3, 4, 2, 20, 37, 16


@functools.cache
def case(name: str) -> dict[str, np.ndarray]:
  with np.load(FILE) as arrays:
    return {key.removeprefix(f'{name}/'): arrays[key] for key in arrays if key.startswith(f'{name}/')}


def batch(arrays) -> dict[str, np.ndarray]:
  """Our batch of T5X's features."""
  labels = arrays['decoder_target_tokens']
  columns = np.broadcast_to(np.arange(labels.shape[1], dtype=np.int32), labels.shape)
  made = {
    'ids': arrays['decoder_input_tokens'],
    'labels': labels,
    'segment_ids': arrays.get('decoder_segment_ids', (labels > 0).astype(np.int32)),
    'segment_pos': arrays.get('decoder_positions', columns),
  }
  if 'decoder_causal_attention' in arrays:
    made['prefix_mask'] = arrays['decoder_causal_attention']
  if 'encoder_input_tokens' in arrays:
    names = {'ids': 'input_tokens', 'segment_ids': 'segment_ids', 'segment_pos': 'positions'}
    made |= {f'encoder_{ours}': arrays[f'encoder_{theirs}'] for ours, theirs in names.items()}
  return made


def weights(arrays) -> dict[str, Any]:
  """The tree of our weights from T5X's."""

  def per_layer(side: str, theirs: str) -> np.ndarray:
    return np.stack([arrays[f'weights/{side}/layers_{i}/{theirs}'] for i in range(NUM_LAYERS)])

  def stack(side: str, attentions: dict[str, str]) -> dict[str, np.ndarray]:
    made = {f'{ours}_norm/scale': per_layer(side, f'pre_{theirs}_layer_norm/scale') for ours, theirs in norms.items()}
    for ours, theirs in attentions.items():
      for part in ('query', 'key', 'value', 'out'):
        kernel = per_layer(side, f'{theirs}/{part}/kernel')
        heads = (NUM_HEADS, HEAD_DIM)
        shape = (NUM_LAYERS, *heads, -1) if part == 'out' else (NUM_LAYERS, kernel.shape[1], *heads)
        made[f'{ours}/{part}/kernel'] = kernel.reshape(shape)
    kernels = {'up': 'wi', 'down': 'wo', 'gate': 'wi_0'}
    if f'weights/{side}/layers_0/mlp/wi_0/kernel' in arrays:
      kernels['up'] = 'wi_1'
    else:
      del kernels['gate']
    return made | {f'ffn/{ours}/kernel': per_layer(side, f'mlp/{theirs}/kernel') for ours, theirs in kernels.items()}

  has_encoder = 'encoder_input_tokens' in arrays
  norms = {'attention': 'self_attention', 'ffn': 'mlp'} | (
    {'cross_attention': 'cross_attention'} if has_encoder else {}
  )
  attentions = {'attention': 'self_attention'} | (
    {'cross_attention': 'encoder_decoder_attention'} if has_encoder else {}
  )
  flat = {f'stack/layers/{name}': weight for name, weight in stack('decoder', attentions).items()}
  embedder = 'weights/token_embedder/embedding' if has_encoder else 'weights/decoder/token_embedder/embedding'
  flat |= {
    'embedding/table': arrays[embedder],
    'final_norm/scale': arrays['weights/decoder/decoder_norm/scale'],
    'position_bias/table': arrays['weights/decoder/relpos_bias/rel_embedding'],
  }
  if 'weights/decoder/logits_dense/kernel' in arrays:
    flat['embedding/softmax_kernel'] = arrays['weights/decoder/logits_dense/kernel']
  if has_encoder:
    norms = {'attention': 'attention', 'ffn': 'mlp'}
    encoder = stack('encoder', {'attention': 'attention'})
    flat |= {f'encoder_stack/layers/{name}': weight for name, weight in encoder.items()}
    flat['encoder_norm/scale'] = arrays['weights/encoder/encoder_norm/scale']
    flat['encoder_position_bias/table'] = arrays['weights/encoder/relpos_bias/rel_embedding']
  return unflatten_dict(flat, sep='/')


def model(name: str, **settings: Any) -> LanguageModel:
  """Our model of a case; `settings` are of every attention."""

  def attention(**others: Any) -> Attention:
    same = {'num_heads': NUM_HEADS, 'head_dim': HEAD_DIM, 'rotary': None, 'softmax_scale': 1.0, 'even_padding': True}
    return Attention(**same, **settings, **others)

  has_encoder = name == 'packed'
  ffn = GatedFeedForward(hidden_dim=HIDDEN_DIM, activation='silu')
  if has_encoder:
    ffn = FeedForward(hidden_dim=HIDDEN_DIM, activation='relu')
  cross = attention(cross=True) if has_encoder else None
  block = TransformerBlock(attention=attention(), cross_attention=cross, ffn=ffn, norm=RmsNorm())
  decoder: dict[str, Any] = {
    'embedding': TokenEmbedding(
      vocab_size=VOCAB_SIZE, embed_dim=MODEL_DIM, tied=has_encoder, scale_sqrt_depth=False, scale_logits=has_encoder
    ),
    'stack': TransformerStack(block=block, num_layers=NUM_LAYERS),
    'final_norm': RmsNorm(),
    'position_bias': RelativePositionBias(num_heads=NUM_HEADS),
  }
  if not has_encoder:
    return LanguageModel(**decoder)
  encoder_block = TransformerBlock(attention=attention(causal=False), ffn=ffn, norm=RmsNorm())
  return EncoderDecoderLm(
    **decoder,
    encoder_stack=TransformerStack(block=encoder_block, num_layers=NUM_LAYERS),
    encoder_norm=RmsNorm(),
    encoder_position_bias=RelativePositionBias(num_heads=NUM_HEADS, bidirectional=True),
  )
