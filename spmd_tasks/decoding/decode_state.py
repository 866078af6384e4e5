"""DecodeState: the sequences in the slots of a model; sample_next_tokens adds a token to each.

A slot holds one sequence. Its tokens, length and sampling parameters are entries of arrays, so that one program
serves every mix of requests. A request's tokens depend neither on its slot nor on the other slots.

The KV cache is a tree of arrays. Most are pools [..., B, G, b, K] of B blocks of b positions, and a table lists the
blocks of each slot; see cache_arrays.py.

Shapes: N slots, P rows, T tokens of each, S positions, E positions of an encoder, V vocabulary, k drafts, n top
logprobs, W words of V bits, K stop ids (in a cache: head dim), G key/value heads; `...` counts layers.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.decoding.sampling import SamplingArrays, mask_logits, position_keys, sample
from spmd_tasks.runtime import SamplingParams


class Forward(Protocol):
  """The signature of a language model that reads a KV cache."""

  def __call__(self, variables: Any, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Computes logits for P rows of T tokens.

    Args:
      variables: the model's variables.
      cache: keys and values of the tokens before, arrays [..., P, G, S, K]; None if there are none. With `slots` in the
        batch, arrays [..., N, G, S, K] over all slots.
      batch: a dict of int32 arrays:
        `ids`, `segment_ids` (0: padding), `segment_pos`: [P, T].
        `slots`: [P], the slot of each row.
        `tables`: the blocks of each row, see `write_tokens`.
        `adapters`: [P], the low-rank adapter of each row; 0 for none.
        `logit_columns`: [P, n], computes the logits of n columns only.
        `drafts`: DraftRows; rows are single tokens, and several rows may belong to one text. With it, `logit_rows` [n]
        computes the logits of n rows only.
        `prefix_mask`: [P, T], without a cache: what a prefix language model reads in both directions; by default, the
        whole text.
        `encoder_ids`, `encoder_segment_ids`, `encoder_segment_pos`: [P, E], in the first call for a prompt of an
        encoder-decoder.

    Returns:
      Logits float32 [P, T, V], and the keys and values of the batch's tokens, arrays [..., P, G, T, K]. An array of the
      cache with S < T gets those of each row's last S tokens. The first call of an encoder-decoder also returns arrays
      `encoded_*` of the encoder's text, which later calls read from the cache.
    """


class DecodeState(struct.PyTreeNode):
  """The state of all slots.

  Attributes:
    cache: the KV cache.
    tokens: int32 [N], the newest token of each slot. Its keys and values are not in the cache yet.
    positions: int32 [N], the position of the newest token.
    ends: int32 [N], the position after the last one that the sequence may use.
    active: bool [N], whether another token follows.
    keys: uint32 [N, 2], the random key of each request.
    seen: bool [N, V], the tokens that the slot's text contains; None if no request has penalties.
    counts: int32 [N, V], how often each token was generated; None if no request has penalties.
    stop_ids: int32 [N, K], the tokens that end each sequence, padded with -1.
    sampling: the sampling parameters, arrays [N].
    adapters: int32 [N], the low-rank adapter of each slot; 0 for none.
    drafts: int32 [N, k], the next tokens that the model's own heads guess; None if the model has no heads.
  """

  cache: Any
  tokens: jax.Array
  positions: jax.Array
  ends: jax.Array
  active: jax.Array
  keys: jax.Array
  seen: jax.Array | None
  counts: jax.Array | None
  stop_ids: jax.Array
  sampling: SamplingArrays
  adapters: jax.Array
  drafts: jax.Array | None = None


class Outputs(struct.PyTreeNode):
  """One token for each row.

  Attributes:
    tokens: int32 [N], the sampled tokens.
    logprobs: float32 [N], their log-probabilities by the model itself: before masks, penalties, biases, temperature,
      top_k, top_p and min_p.
    top_ids, top_logprobs: [N, n], the likeliest tokens.
    is_valid: bool [N], whether the row was active. The other fields of an inactive row have no meaning.
    is_finished: bool [N], whether the token is the last one of its sequence.
    prompt_logprobs: float32 [P, T], the log-probability of the prompt's token after each token of the chunk, given only
      the tokens before it; 0 at the end of the prompt. None if no prompt is scored.
    prompt_top_ids, prompt_top_logprobs: [P, T, n], the likeliest tokens at these places; None if no prompt is scored.
  """

  tokens: jax.Array
  logprobs: jax.Array
  top_ids: jax.Array
  top_logprobs: jax.Array
  is_valid: jax.Array
  is_finished: jax.Array
  prompt_logprobs: jax.Array | None = None
  prompt_top_ids: jax.Array | None = None
  prompt_top_logprobs: jax.Array | None = None


def empty_state(cache: Any, num_slots: int, vocab_size: int, num_stop_ids: int, num_drafts: int = 0) -> DecodeState:
  """Returns the state in which no slot is active; `cache` has the shapes of the cache (arrays or abstract values)."""

  def full(value, dtype, *shape):
    return jnp.full((num_slots, *shape), value, dtype)

  return DecodeState(
    cache=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache),
    tokens=full(0, jnp.int32),
    positions=full(0, jnp.int32),
    ends=full(0, jnp.int32),
    active=full(False, jnp.bool_),
    keys=full(0, jnp.uint32, 2),
    seen=full(False, jnp.bool_, vocab_size),
    counts=full(0, jnp.int32, vocab_size),
    stop_ids=full(-1, jnp.int32, num_stop_ids),
    sampling=SamplingArrays.from_params([SamplingParams()] * num_slots, num_slots),
    adapters=full(0, jnp.int32),
    drafts=full(0, jnp.int32, num_drafts) if num_drafts else None,
  )


def put_rows(old: Any, new: Any, slots: jax.Array) -> Any:
  """Writes rows to slots, which are all different; drops rows with slots from N on."""
  return jax.tree.map(lambda x, rows: x.at[slots].set(rows.astype(x.dtype), mode='drop', unique_indices=True), old, new)


def sample_next_tokens(
  logits: jax.Array, state: DecodeState, masks: jax.Array | None, num_top_logprobs: int
) -> tuple[DecodeState, Outputs]:
  """Samples the next token of each row from logits [N, V], and appends it to the row's sequence."""
  occurrences: Any = None if state.seen is None else lambda: (state.seen, state.counts)
  outputs = sample_outputs(logits, state, masks, occurrences, num_top_logprobs)
  added = jnp.where(state.active, outputs.tokens, logits.shape[-1])
  return append_tokens(state, outputs.tokens, state.positions + 1, outputs.is_finished, added), outputs


def sample_outputs(
  logits: jax.Array, state: DecodeState, masks: jax.Array | None, occurrences: Any, num_top_logprobs: int
) -> Outputs:
  """Samples a token for each row from logits [N, V]; `occurrences` is the argument of `sample`."""
  positions = state.positions + 1
  allowed = logits if masks is None else mask_logits(logits, masks)
  tokens = sample(allowed, position_keys(state.keys, positions), state.sampling, state.active, occurrences)
  # Only a few log-probabilities are needed: log_softmax would write, and read, those of the whole vocabulary.
  highest = jnp.max(logits, axis=-1, keepdims=True).astype(jnp.float32)
  log_total = jnp.log(jnp.sum(jnp.exp(logits.astype(jnp.float32) - highest), axis=-1, keepdims=True))
  top_logits, top_ids = jax.lax.top_k(logits, num_top_logprobs)
  logprobs = jnp.take_along_axis(logits, tokens[:, None], axis=-1).astype(jnp.float32) - highest - log_total
  return Outputs(
    tokens=tokens,
    logprobs=logprobs[:, 0],
    top_ids=top_ids,
    top_logprobs=top_logits.astype(jnp.float32) - highest - log_total,
    is_valid=state.active,
    is_finished=jnp.any(tokens[:, None] == state.stop_ids, axis=-1) | (positions + 1 >= state.ends),
  )


def append_tokens(
  state: DecodeState, tokens: jax.Array, positions: jax.Array, is_finished: jax.Array, added: jax.Array
) -> DecodeState:
  """Updates the active rows of the state.

  Args:
    state: the state.
    tokens, positions: int32 [N], the newest tokens and their positions.
    is_finished: bool [N], whether the newest token is the last one.
    added: int32 [N] or [k + 1, N], all tokens that are added, for penalties; V for none.
  """
  rows = jnp.arange(len(tokens))
  return state.replace(
    tokens=jnp.where(state.active, tokens, state.tokens),
    positions=jnp.where(state.active, positions, state.positions),
    seen=None if state.seen is None else state.seen.at[rows, added].set(True, mode='drop'),
    counts=None if state.counts is None else state.counts.at[rows, added].add(1, mode='drop'),
    active=state.active & ~is_finished,
  )


def target_logprobs(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns float32 log-probabilities: of all tokens [P, T, V], and of `targets` [P, T], with 0 for a target of -1."""
  logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  chosen = jnp.take_along_axis(logprobs, jnp.maximum(targets, 0)[:, :, None], axis=-1)[..., 0]
  return logprobs, jnp.where(targets >= 0, chosen, 0.0)


def text_entries(ids: jax.Array, lengths: jax.Array, starts: jax.Array | None = None) -> dict[str, jax.Array]:
  """Returns the batch entries of texts int32 [P, T] of these lengths, whose first positions are `starts`, or 0."""
  columns = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
  is_text = columns < lengths[:, None]
  positions = columns if starts is None else starts[:, None] + columns
  # The positions of padding may exceed the last position of a text.
  return {'ids': ids, 'segment_ids': is_text.astype(jnp.int32), 'segment_pos': jnp.where(is_text, positions, 0)}


def encoder_entries(ids: jax.Array | None, lengths: jax.Array | None) -> dict[str, jax.Array]:
  """Returns the batch entries of the encoder's texts int32 [P, E] of these lengths; {} if there are none."""
  if ids is None or lengths is None:
    return {}
  return {f'encoder_{name}': entry for name, entry in text_entries(ids, lengths).items()}
