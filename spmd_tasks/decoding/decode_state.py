"""DecodeState: the sequences in the slots of a model, and how they grow by a token.

A slot holds one sequence. The sequence, its length and its sampling parameters are numbers in arrays, so that one
compiled program serves every mix of requests. A request's tokens depend neither on its slot nor on the other slots.

The KV cache is a tree of pools [..., B, G, b, K] of blocks of b positions. A table says which blocks a slot has:
position p is at place p mod b of its block p / b. Leaves of what has a fixed size are [..., N, G, S, K] over slots: an
encoder's text, and rings of the S positions of an attention window, with position p at place p mod S.

Shapes: N slots, P rows, T tokens of each, S positions (in a cache: places), V vocabulary, K stop ids (in a cache: head
dim), G key/value heads, n top logprobs, W words of V bits; `...` counts layers.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.decoding.sampling import SamplingArrays, mask_logits, position_keys, sample
from spmd_tasks.runtime import SamplingParams


class Forward(Protocol):
  """A language model that reads a KV cache."""

  def __call__(self, variables: Any, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Returns (logits float32 [B, T, V], keys and values of the batch's tokens: leaves [..., B, G, T, K]).

    Args:
      variables: of the model.
      cache: leaves [..., B, G, S, K], of the tokens before the batch's; None where there are none. Where a leaf's S is
        less than T, the new keys and values are those of each row's last S tokens. With `slots` int32 [B] in the batch
        the leaves are [..., N, G, S, K], and row i's tokens are in slot slots[i].
      batch: `ids`, `segment_ids` (0: padding) and `segment_pos` int32 [B, T]; with `logit_columns` [B, n] the logits
        are those of n columns only; `adapters` int32 [B], the number of each row's low-rank adapter, or 0 for none.
        With `drafts` (T is 1), rows are tokens of one text that follow each other, see DraftRows, and with
        `logit_rows` int32 [n] the logits are those of n rows only. `prefix_mask` int32 [B, T], in a call without a
        cache, is what a prefix language model reads in both directions; without it, all of the text.
        To an encoder-decoder the first call for a prompt gives `encoder_ids`, `encoder_segment_ids` and
        `encoder_segment_pos` too, and gets back leaves `encoded_*` of the encoder's text; later calls read these.
    """


class DecodeState(struct.PyTreeNode):
  """The state of all slots.

  Attributes:
    cache: leaves [..., N, G, S, K].
    tokens: int32 [N], the newest token of each slot, whose keys and values are not in the cache yet.
    positions: int32 [N], the position of that token.
    ends: int32 [N], the first position that the sequence may not use.
    active: bool [N], whether another token follows.
    keys: uint32 [N, 2], each request's random key.
    seen: bool [N, V], the tokens that the slot's text contains.
    counts: int32 [N, V], how often each token was generated; both None where no request has penalties.
    stop_ids: int32 [N, K].
    sampling: arrays [N].
    adapters: int32 [N], the number of each slot's low-rank adapter; 0 is none.
    drafts: int32 [N, k], what the model's own heads guess of the next tokens; None where they do not.
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
    tokens: int32 [N].
    logprobs: float32 [N], of the token by the model itself: before masks, penalties, biases, temperature and cuts.
    top_ids, top_logprobs: [N, n], the likeliest tokens.
    is_valid: bool [N], whether the row was active; the other fields mean nothing where it was not.
    is_finished: bool [N], whether the token is the row's last.
    prompt_logprobs: float32 [P, T], of the prompt's token that follows each token of the chunk, given the tokens before
      it alone; 0 where there is none. None where no prompt is scored, as are the next two.
    prompt_top_ids, prompt_top_logprobs: [P, T, n], the likeliest tokens there.
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
  """The state in which no slot is active; `cache` gives the shapes of the cache (arrays or abstract values)."""

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
  """Writes rows to slots, all different; ids from N on are not written."""
  return jax.tree.map(lambda x, rows: x.at[slots].set(rows.astype(x.dtype), mode='drop', unique_indices=True), old, new)


def emit(
  logits: jax.Array, state: DecodeState, masks: jax.Array | None, num_top_logprobs: int
) -> tuple[DecodeState, Outputs]:
  """Samples the token that follows each row's position."""
  occurrences: Any = None if state.seen is None else lambda: (state.seen, state.counts)
  outputs = draw(logits, state, masks, occurrences, num_top_logprobs)
  told = jnp.where(state.active, outputs.tokens, logits.shape[-1])
  return append_tokens(state, outputs.tokens, state.positions + 1, outputs.is_finished, told), outputs


def draw(
  logits: jax.Array, state: DecodeState, masks: jax.Array | None, occurrences: Any, num_top_logprobs: int
) -> Outputs:
  """Samples a token of each row; `occurrences` as of `sample`."""
  positions = state.positions + 1
  allowed = logits if masks is None else mask_logits(logits, masks)
  tokens = sample(allowed, position_keys(state.keys, positions), state.sampling, state.active, occurrences)
  # Of few tokens, from what all add to: log_softmax would write, and read, the whole vocabulary's.
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
  state: DecodeState, tokens: jax.Array, positions: jax.Array, is_finished: jax.Array, told: jax.Array
) -> DecodeState:
  """The state after the newest tokens [N] of the active rows; `told` [N] or [k + 1, N] are all new ones, V for none."""
  rows = jnp.arange(len(tokens))
  return state.replace(
    tokens=jnp.where(state.active, tokens, state.tokens),
    positions=jnp.where(state.active, positions, state.positions),
    seen=None if state.seen is None else state.seen.at[rows, told].set(True, mode='drop'),
    counts=None if state.counts is None else state.counts.at[rows, told].add(1, mode='drop'),
    active=state.active & ~is_finished,
  )


def target_logprobs(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns log-probabilities float32 [P, T, V], and those of targets [P, T], 0 if a target is -1."""
  logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  logprobs_of_targets = jnp.take_along_axis(logprobs, jnp.maximum(targets, 0)[:, :, None], axis=-1)[..., 0]
  return logprobs, jnp.where(targets >= 0, logprobs_of_targets, 0.0)


def text_entries(ids: jax.Array, lengths: jax.Array, starts: jax.Array | None = None) -> dict[str, jax.Array]:
  """Returns the entries of a model's batch for texts int32 [P, T] of these lengths, from their `starts` or 0 on."""
  columns = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
  is_text = columns < lengths[:, None]
  positions = columns if starts is None else starts[:, None] + columns
  # Padding may lie beyond the last position.
  return {'ids': ids, 'segment_ids': is_text.astype(jnp.int32), 'segment_pos': jnp.where(is_text, positions, 0)}


def encoder_entries(ids: jax.Array | None, lengths: jax.Array | None) -> dict[str, jax.Array]:
  """Returns the entries of a model's batch for the encoder, of texts int32 [P, E] of these lengths; {} for None."""
  if ids is None or lengths is None:
    return {}
  return {f'encoder_{name}': entry for name, entry in text_entries(ids, lengths).items()}
