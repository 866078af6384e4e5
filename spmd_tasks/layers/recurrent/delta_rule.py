"""The gated delta rule: a matrix per head that each token decays, corrects and reads.

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T        o_t = S_t^T q_t

S maps keys to values. A token forgets a part 1 - a of it, then replaces a part b of the value that S has for its key by
its own (Gated DeltaNet: Yang et al., 2024, arXiv 2412.06464). The decay a is a number per head, or one per feature of a
key, whose row of S it multiplies (Kimi Delta Attention: Kimi Team, 2025, arXiv 2510.26692).

`delta_rule_by_chunk` computes C tokens at once by products of matrices. With the decays folded into the products, the
corrections r_i = b_i (v_i - ...) of a chunk's tokens solve a triangular system

    (I + L) r = b (v - decayed k S),        L_ij = b_i (decay from j to i) k_i . k_j    for j < i

whose inverse does not depend on S. So only the products with S are in the loop over chunks. `delta_rule_by_token` is
the formula itself.

Shapes: B batch, T sequence in N chunks of C tokens, H heads, K and V features of a head's key and value.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import current_layer_scope


def delta_rule(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  log_decay: jax.Array,
  strength: jax.Array,
  documents: jax.Array,
  state: jax.Array,
  *,
  chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
  """Computes the recurrence from a first state, in float32; the state starts from zero in each document but the first.

  Tokens with strength 0 and log decay 0, as padding has, leave the state as it is, to the bit.

  Args:
    query, key: float32 [B, T, H, K], normalized.
    value: float32 [B, T, H, V].
    log_decay: float32 [B, T, H], or [B, T, H, K] for a decay per feature: log a, at most 0.
    strength: float32 [B, T, H], b.
    documents: int32 [B, T], see `document_numbers`; document 0 continues `state`.
    state: float32 [B, H, K, V].
    chunk: C, a power of two; short rows have a shorter one.

  Returns:
    The outputs, float32 [B, T, H, V], and the state after the last token.
  """
  length = query.shape[1]
  if length == 1 or current_layer_scope().plain_products:
    return delta_rule_by_token(query, key, value, log_decay, strength, documents, state)
  chunk = min(chunk, 1 << (length - 1).bit_length())
  return delta_rule_by_chunk(query, key, value, log_decay, strength, documents, state, chunk)


def delta_rule_by_token(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  log_decay: jax.Array,
  strength: jax.Array,
  documents: jax.Array,
  state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Computes `delta_rule` one token after another."""
  continues = documents == jnp.pad(documents, ((0, 0), (1, 0)))[:, :-1]
  decay = jnp.where(continues[:, :, None, None], jnp.exp(_by_feature(log_decay)), 0.0)

  def step(state, token):
    query, key, value, decay, strength = token
    state = state * decay[..., None]
    missing = value - jnp.einsum('BHKV,BHK->BHV', state, key)
    state = state + jnp.einsum('BHK,BHV->BHKV', key, strength[..., None] * missing)
    return state, jnp.einsum('BHKV,BHK->BHV', state, query)

  tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (query, key, value, decay, strength))
  if query.shape[1] == 1:
    state, output = step(state, tuple(x[0] for x in tokens))
    return output[:, None], state
  state, outputs = jax.lax.scan(step, state, tokens)
  return jnp.moveaxis(outputs, 0, 1), state


def delta_rule_by_chunk(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  log_decay: jax.Array,
  strength: jax.Array,
  documents: jax.Array,
  state: jax.Array,
  chunk: int,
) -> tuple[jax.Array, jax.Array]:
  """Computes `delta_rule` in chunks of `chunk` tokens, a power of two; the last one is filled up with padding."""
  num_rows, length, num_heads, _ = value.shape
  tokens = query, key, value, _by_feature(log_decay), strength[..., None]
  query, key, value, log_decay, strength = (_chunks(x, chunk) for x in tokens)  # [N, B, H, C, ...]
  documents = _chunks(documents[:, :, None, None], chunk, mode='edge')[..., 0]  # [N, B, 1, C]
  last = documents[..., -1:]  # [N, B, 1, 1]
  before = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])  # the document that a chunk continues

  def masked(is_same: jax.Array, logs: jax.Array) -> jax.Array:
    return jnp.exp(jnp.where(is_same[..., None], logs, -jnp.inf))

  state_decay = masked(documents == before, jnp.cumsum(log_decay, axis=-2))  # from the state before the chunk
  added_keys = key * masked(documents == last, _sum_of_later(log_decay))  # with the decay to the end of the chunk
  is_same = documents[..., :, None] == documents[..., None, :]
  lower, weights = (jnp.where(is_same, x, 0.0) for x in decayed_products((strength * key, query), key, log_decay))
  inverse = invert_unit_lower(jnp.tril(lower, -1))
  new_values = inverse @ (strength * value)
  read_keys = inverse @ (strength * state_decay * key)

  def advance(state, arrays):
    new_values, read_keys, added_keys, decay = arrays
    corrections = new_values - read_keys @ state
    return state * decay + jnp.einsum('...CK,...CV->...KV', added_keys, corrections), (state, corrections)

  chunks = new_values, read_keys, added_keys, jnp.swapaxes(state_decay[..., -1:, :], -1, -2)
  state, (states, corrections) = jax.lax.scan(advance, state, chunks)
  outputs = (query * state_decay) @ states + weights @ corrections  # [N, B, H, C, V]
  outputs = jnp.transpose(outputs, (1, 0, 3, 2, 4)).reshape(num_rows, -1, num_heads, value.shape[-1])
  return outputs[:, :length], state


def decayed_products(arrays: tuple[jax.Array, ...], key: jax.Array, log_decay: jax.Array) -> tuple[jax.Array, ...]:
  """Returns x_i . (decay from j to i) k_j [..., C, C] for i >= j, and 0 for others, for each of the arrays x.

  A difference of two cumulative sums would lose slow decays after fast ones, so the sums from j to i have terms of one
  sign. With a decay per head, each pair has a sum of its own. With a decay per feature, which would take C C K numbers,
  the sum is split at the middle of the smallest block of 2, 4, 8, ... tokens that has both: before it a factor of k_j,
  from it on a factor of x_i, neither of which exceeds 1.

  Args:
    arrays: [..., C, K] each; C is a power of two.
    key: [..., C, K].
    log_decay: [..., C, 1] or [..., C, K].
  """
  size, order = key.shape[-2], jnp.arange(key.shape[-2])
  if log_decay.shape[-1] == 1:
    is_later = order[:, None] > order[None, :]
    logs = jnp.cumsum(jnp.where(is_later, log_decay, 0.0), axis=-2)  # [..., C, C], from j to i
    decay = jnp.exp(jnp.where(order[:, None] >= order[None, :], logs, -jnp.inf))
    return tuple(decay * jnp.einsum('...IK,...JK->...IJ', x, key) for x in arrays)
  products = [jnp.sum(x * key, axis=-1)[..., None, None] for x in arrays]  # [..., number of blocks, rows, columns]
  rows = 1
  while rows < size:
    halves = lambda x, rows=rows: jnp.moveaxis(x.reshape(*x.shape[:-2], -1, 2, rows, x.shape[-1]), -3, 0)
    (earlier_logs, later_logs), (earlier_keys, _) = halves(log_decay), halves(key)
    decayed_keys = earlier_keys * jnp.exp(_sum_of_later(earlier_logs))
    later_decay = jnp.exp(jnp.cumsum(later_logs, axis=-2))
    for n, x in enumerate(arrays):
      corner = jnp.einsum('...IK,...JK->...IJ', halves(x)[1] * later_decay, decayed_keys)
      products[n] = _join(products[n][..., 0::2, :, :], corner, products[n][..., 1::2, :, :])
    rows *= 2
  return tuple(x[..., 0, :, :] for x in products)


def _by_feature(log_decay: jax.Array) -> jax.Array:
  """Returns [B, T, H, 1] for a decay per head."""
  return log_decay if log_decay.ndim == 4 else log_decay[..., None]


def _sum_of_later(x: jax.Array) -> jax.Array:
  """Returns the sum of the entries after each of the second last dim."""
  sums = jax.lax.cumsum(x, axis=x.ndim - 2, reverse=True)
  return jnp.concatenate([sums[..., 1:, :], jnp.zeros_like(sums[..., :1, :])], axis=-2)


def _join(first: jax.Array, corner: jax.Array, second: jax.Array) -> jax.Array:
  """Returns the lower block-triangular matrices [[first, 0], [corner, second]]."""
  top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
  return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _chunks(x: jax.Array, chunk: int, mode: str = 'constant') -> jax.Array:
  """Returns [N, B, H, C, K] for x [B, T, H, K]."""
  added = [(0, 0), (0, -x.shape[1] % chunk), (0, 0), (0, 0)]
  x = jnp.pad(x, added, mode=mode)
  return jnp.transpose(x.reshape(len(x), -1, chunk, *x.shape[2:]), (1, 0, 3, 2, 4))


@jax.custom_jvp
def invert_unit_lower(lower: jax.Array) -> jax.Array:
  """Returns (I + lower)^-1 [..., C, C] for strictly lower triangular matrices; C is a power of two.

  Inverts blocks on the diagonal, of 1, 2, 4, ... rows: of [[A, 0], [B, D]] it is [[A', 0], [-D' B A', D']]. This is as
  exact as forward substitution; a product of powers of `lower` would cancel large numbers if keys are alike.
  """
  size = lower.shape[-1]
  inverse = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)  # [..., number of blocks, rows, columns]
  rows = 1
  while rows < size:
    pairs = size // (2 * rows)
    split: Sequence[int] = (*lower.shape[:-2], pairs, 2, rows, pairs, 2, rows)
    below = jnp.diagonal(lower.reshape(split)[..., :, 1, :, :, 0, :], axis1=-4, axis2=-2)  # [..., rows, rows, pairs]
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    highest = jax.lax.Precision.HIGHEST
    corner = jnp.matmul(second, jnp.moveaxis(below, -1, -3), precision=highest)
    corner = -jnp.matmul(corner, first, precision=highest)
    inverse = _join(first, corner, second)
    rows *= 2
  return inverse[..., 0, :, :]


@invert_unit_lower.defjvp
def _jvp_of_inverse(primals, tangents):
  inverse = invert_unit_lower(*primals)
  return inverse, -(inverse @ tangents[0] @ inverse)
