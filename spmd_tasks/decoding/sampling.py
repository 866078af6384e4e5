"""Sampling: samples a token from logits and a key, with separate parameters for every row.

A row's token depends only on its logits, its key and its parameters, not on its index or on the other rows.

Shapes: N rows (slots), V vocabulary, W = ceil(V / 32) words, B = MAX_BIASES. Everything is float32.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.runtime import SamplingParams
from spmd_tasks.sharding.specs import current_platform

MAX_BIASES = 300  # of a request, as in OpenAI's API


class SamplingArrays(struct.PyTreeNode):
  """SamplingParams of N rows, as arrays [N], so that one program serves requests with different parameters.

  `top_k` is int32, the others are float32; see SamplingParams. `bias_values` [N, B] are added to the logits of the
  tokens `bias_ids`, int32 [N, B], padded with -1. If no row has biases, `bias_ids` and `bias_values` may be None; if no
  row has top_k, top_p or min_p, these may be None. The program then has no branch for them.
  """

  bias_ids: Any
  bias_values: Any
  repetition_penalty: jax.Array
  frequency_penalty: jax.Array
  presence_penalty: jax.Array
  temperature: jax.Array
  top_k: Any
  top_p: Any
  min_p: Any

  @classmethod
  def from_params(
    cls, params: Sequence[SamplingParams], num_rows: int, biases: Sequence[Sequence[tuple[int, float]]] = ()
  ) -> 'SamplingArrays':
    """Returns host arrays of `num_rows` rows; further rows are greedy. `biases` are each row's (token, bias) pairs."""
    rows = [*params, *[SamplingParams()] * (num_rows - len(params))]
    bias_ids: Any = np.full((num_rows, MAX_BIASES), -1, np.int32)
    bias_values: Any = np.zeros((num_rows, MAX_BIASES), np.float32)
    for row, pairs in enumerate(biases):
      for number, (token, value) in enumerate(pairs):
        bias_ids[row, number], bias_values[row, number] = token, value

    def column(field: dataclasses.Field) -> Any:
      dtype = np.int32 if field.type is int else np.float32
      return np.array([getattr(row, field.name) for row in rows], dtype)

    columns = {field.name: column(field) for field in dataclasses.fields(SamplingParams)}
    return cls(bias_ids=bias_ids, bias_values=bias_values, **columns)


def mask_logits(logits: jax.Array, masks: jax.Array) -> jax.Array:
  """Returns logits [N, V] with -inf for the tokens whose bits in `masks`, uint32 [N, W], are 0."""
  bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :] & 1
  allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[-1]]
  return jnp.where(allowed > 0, logits, -jnp.inf)


def penalize_repetition(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
  """Returns logits [N, V] in which the tokens in `seen`, bool [N, V], are less likely by `penalty` [N]."""
  factor = penalty[:, None]
  return jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)


def adjust(logits: jax.Array, seen: jax.Array, counts: jax.Array, sampling: SamplingArrays) -> jax.Array:
  """Returns logits [N, V] after the penalties.

  Args:
    logits: [N, V].
    seen: bool [N, V], the tokens that each row's text contains, its prompt included.
    counts: int32 [N, V], how often each token was generated.
    sampling: the rows' parameters.
  """
  logits = penalize_repetition(logits.astype(jnp.float32), seen, sampling.repetition_penalty)
  frequency, presence = sampling.frequency_penalty[:, None], sampling.presence_penalty[:, None]
  return logits - frequency * counts - presence * (counts > 0)  # without penalties, these are the same bits


def add_biases(logits: jax.Array, sampling: SamplingArrays) -> jax.Array:
  """Returns logits [N, V] plus the rows' biases."""
  vocab_size = logits.shape[-1]
  ids = jnp.where(sampling.bias_ids < 0, vocab_size, sampling.bias_ids)  # the scatter drops ids from V on
  return logits.at[jnp.arange(len(ids))[:, None], ids].add(sampling.bias_values, mode='drop')


def keep_likeliest(logits: jax.Array, sampling: SamplingArrays) -> jax.Array:
  """Returns logits [N, V] with -inf for the tokens that top_k, top_p and min_p exclude, never the likeliest one.

  top_p and min_p apply to the probabilities that top_k leaves. Tokens as likely as the least likely one that stays also
  stay. Instead of sorting, this finds the least logit that stays bit by bit, in a tenth of a sort's time on a CPU, or a
  quarter for 32 rows.
  """
  bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)  # without -0.0
  order = jnp.where(bits < 0, ~bits, bits | jnp.int32(-(2**31))).astype(jnp.uint32)  # increases with the logit
  least = jnp.where(sampling.top_k > 0, _largest_start(order, jnp.ones_like(order), sampling.top_k), 0)
  ratios = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))  # to the likeliest token's probability
  weights = jnp.where(order >= least[:, None], ratios, 0)
  # With top_p = 1, rounding must not exclude the tail.
  nucleus = _largest_start(order, weights, sampling.top_p * jnp.sum(weights, axis=-1))
  least = jnp.maximum(least, jnp.where(sampling.top_p < 1, nucleus, 0))
  is_likeliest = order == jnp.max(order, axis=-1, keepdims=True)  # it may be infinite, without a ratio
  stays = is_likeliest | (order >= least[:, None]) & (ratios >= sampling.min_p[:, None])
  return jnp.where(stays, logits, -jnp.inf)


def _largest_start(order: jax.Array, weights: jax.Array, total: jax.Array) -> jax.Array:
  """Returns for each row the largest x, uint32 [N], for which the weights [N, V] with `order` >= x sum to `total`.

  It is 0 if the sum of all weights is less.
  """

  def add_bit(i, start):
    larger = start | jnp.uint32(2**31) >> i.astype(jnp.uint32)
    reached = jnp.sum(jnp.where(order >= larger[:, None], weights, 0), axis=-1, dtype=weights.dtype)
    return jnp.where(reached >= total.astype(weights.dtype), larger, start)

  unroll = current_platform() == 'gpu'  # a GPU's graph of a step has no loops: the host would wait here
  return jax.lax.fori_loop(0, 32, add_bit, jnp.zeros_like(order[:, 0]), unroll=unroll)


def sample(
  logits: jax.Array,
  keys: jax.Array,
  sampling: SamplingArrays,
  active: jax.Array,
  occurrences: Callable[[], tuple[jax.Array, jax.Array]] | None = None,
) -> jax.Array:
  """Samples one token per row, int32 [N].

  Penalties, noise, and biases with cuts are only computed if a row needs them; the other rows have the same bits either
  way. There is a single branch, as the host of a GPU may wait at each one, and few kinds, as each is compiled apart.

  Args:
    logits: [N, V].
    keys: uint32 [N, 2], threefry key data, one per row and position.
    sampling: the rows' parameters.
    active: bool [N], the rows whose tokens matter.
    occurrences: computes `seen` and `counts`, see `adjust`; None if no row has penalties.
  """
  is_greedy = ~active | (sampling.temperature <= 0)

  has_penalties = jnp.bool_(False)
  if occurrences is not None:
    penalties = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1
    has_penalties = jnp.any(active[:, None] & (jnp.stack(penalties, axis=-1) != 0))

  def adjusted(logits):
    logits = logits.astype(jnp.float32)
    return logits if occurrences is None else adjust(logits, *occurrences(), sampling)

  def draw(logits, sampled):
    noise = jax.vmap(_gumbel, in_axes=(0, None))(keys, logits.shape[-1])
    return _likeliest(jnp.where(is_greedy[:, None], logits, sampled + noise))

  def scale(logits):
    return logits / jnp.where(is_greedy, 1.0, sampling.temperature)[:, None]

  def draw_whole(logits):
    logits = adjusted(logits)
    return draw(logits, scale(logits))

  def cut_and_draw(logits):
    logits = add_biases(adjusted(logits), sampling) if has_biases else adjusted(logits)
    return draw(logits, keep_likeliest(scale(logits), sampling) if has_cuts else scale(logits))

  kinds = [_likeliest, lambda logits: _likeliest(adjusted(logits)), draw_whole]
  kind = jnp.where(jnp.all(is_greedy), jnp.where(has_penalties, 1, 0), 2)
  has_cuts, has_biases = sampling.top_k is not None, sampling.bias_ids is not None
  needs_rest = jnp.bool_(False)
  if has_cuts:
    is_cut = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    needs_rest |= jnp.any(~is_greedy & is_cut)
  if has_biases:
    needs_rest |= jnp.any(active[:, None] & (sampling.bias_ids >= 0))
  if has_cuts or has_biases:
    kind = jnp.where(needs_rest, len(kinds), kind)
    kinds.append(cut_and_draw)
  return jax.lax.switch(kind, kinds, logits)


def _likeliest(logits: jax.Array) -> jax.Array:
  """Returns the argmax of each row, int32 [N], in a third of argmax's time on a CPU."""
  last, columns = logits.shape[-1] - 1, jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
  return jnp.min(jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), columns, last), axis=-1)


def prompt_seed(seed: int, number: int) -> int:
  """Returns the seed of prompt `number` of several prompts that share a seed; prompt 0 has the seed itself."""
  return seed if number == 0 else int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def request_keys(seeds: jax.Array, sample_indices: jax.Array) -> jax.Array:
  """Returns key data uint32 [N, 2] of each request, from its seed and the index of its sample (both uint32 [N])."""

  def one(seed, index):
    return jax.random.key_data(jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), index))

  return jax.vmap(one)(seeds, sample_indices)


def position_keys(keys: jax.Array, positions: jax.Array) -> jax.Array:
  """Returns key data uint32 [N, 2] for the token at each row's position."""

  def one(key, position):
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl='threefry2x32'), position))

  return jax.vmap(one)(keys, positions)


def _gumbel(key: jax.Array, vocab_size: int) -> jax.Array:
  return jax.random.gumbel(jax.random.wrap_key_data(key, impl='threefry2x32'), (vocab_size,), jnp.float32)
