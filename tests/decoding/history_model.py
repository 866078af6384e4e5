"""A model small enough to be written twice: its logits depend on the last token and on the sum of all before it.

As a Forward over a cache, and as a float64 function of the whole text.
"""

import jax
import jax.numpy as jnp
import numpy as np

VOCAB = 5


def make_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
  return {name: (2 * rng.normal(size=(VOCAB, VOCAB))).astype(np.float32) for name in ('last', 'sum')}


def empty_cache(num_slots: int, num_positions: int) -> jax.Array:
  return jnp.zeros((num_slots, 1, num_positions, 1), jnp.int32)


def forward(weights, cache, batch):
  ids, positions, is_real = batch['ids'], batch['segment_pos'], batch['segment_ids'] != 0
  total = jnp.cumsum(jnp.where(is_real, ids, 0), axis=1)
  if cache is not None:
    before = jnp.arange(cache.shape[2])[None, :] < positions[:, :1]
    total += jnp.sum(jnp.where(before, cache[:, 0, :, 0], 0), axis=-1)[:, None]
  total %= VOCAB
  logits = weights['last'][ids] + weights['sum'][total]
  if 'logit_columns' in batch:
    logits = jnp.take_along_axis(logits, batch['logit_columns'][:, :, None], axis=1)
  return logits, ids[:, None, :, None]


def logprobs(weights, text) -> np.ndarray:
  """float64 [V], of the token behind the text."""
  logits = weights['last'][text[-1]].astype(np.float64) + weights['sum'][sum(text) % VOCAB]
  return logits - np.log(np.sum(np.exp(logits)))
