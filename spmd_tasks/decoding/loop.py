"""Prefill and step: what generation computes, as pure functions of weights, state and requests.

    state, first = prefill(forward, weights, state, requests)   # prompts into slots, and the first token of each
    state, outputs = step(forward, weights, state, keep)        # the next token of every slot

A long prompt is read in chunks, one prefill after another; only the last one gives its first token.

A slot holds one sequence; which one is in it and how long it is are numbers in arrays, so that one compiled step serves
every mix of requests. A request's tokens do not depend on its slot or on what is in the others. Slots that are finished
or have not read their whole prompt stand still in a step.

Shapes: N slots, P rows of a prefill, T tokens of its chunks, S positions, V vocabulary, K stop ids, n top logprobs.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.decoding.cache import take_slots, write_tokens
from spmd_tasks.decoding.samplers import Sampling, position_keys, request_keys, sample


class Forward(Protocol):
  """A language model that reads a cache of keys and values."""

  def __call__(self, weights: Any, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Returns (logits float32 [B, T, V], keys and values of the batch's tokens: leaves [..., B, G, T, K]).

    Args:
      weights: of the model.
      cache: leaves [..., B, G, S, K], of the tokens before the batch's; None where there are none. Where a leaf's S is
        less than T, the new keys and values are those of each row's last S tokens.
      batch: `ids`, `segment_ids` (0: padding) and `segment_pos` int32 [B, T]; with `logit_columns` [B, n] the logits
        are those of n columns only.
    """
    ...


class Requests(struct.PyTreeNode):
  """P chunks of prompts for a prefill.

  Attributes:
    ids: int32 [P, T], padded at the end.
    lengths: int32 [P], at least 1.
    starts: int32 [P], position of the first token.
    before: int32 [P, S], the prompt's tokens before it, -1 behind them; None where all chunks are the first of theirs.
    targets: int32 [P, T], the prompt's token behind each of `ids`, -1 where there is none; None: no prompt is scored.
    slots: int32 [P], all different; from N on for rows that are not used.
    max_tokens: int32 [P], how many may be generated; 0 where the prompt goes on or is only scored.
    seeds, samples: uint32 [P], see `request_keys`.
    stop_ids: int32 [P, K], tokens that end the sequence; -1 fills up.
    sampling: arrays [P].
  """

  ids: jax.Array
  lengths: jax.Array
  starts: jax.Array
  before: jax.Array | None
  targets: jax.Array | None
  slots: jax.Array
  max_tokens: jax.Array
  seeds: jax.Array
  samples: jax.Array
  stop_ids: jax.Array
  sampling: Sampling


class DecodeState(struct.PyTreeNode):
  """All slots.

  Attributes:
    cache: leaves [..., N, G, S, K].
    tokens: int32 [N], the newest token of each, which is not in the cache yet.
    positions: int32 [N], where it stands.
    ends: int32 [N], where the sequence must end: no token stands here.
    active: bool [N], whether another token follows.
    keys: uint32 [N, 2], each request's.
    seen: bool [N, V], the tokens in its text.
    stop_ids: int32 [N, K].
    sampling: arrays [N].
  """

  cache: Any
  tokens: jax.Array
  positions: jax.Array
  ends: jax.Array
  active: jax.Array
  keys: jax.Array
  seen: jax.Array
  stop_ids: jax.Array
  sampling: Sampling


class Outputs(struct.PyTreeNode):
  """A token for each row.

  Attributes:
    tokens: int32 [N].
    logprobs: float32 [N], of the token by the model itself: before temperature, penalty and cuts.
    top_ids, top_logprobs: [N, n], the likeliest tokens.
    is_valid: bool [N], whether the row was active: else the rest means nothing.
    is_finished: bool [N], whether the token is the row's last.
    prompt_logprobs: float32 [P, T], of the prompt's token behind each one of the chunk, given those up to it; 0 where
      there is none. None where no prompt is scored, like
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


def empty_state(cache: Any, num_slots: int, vocab_size: int, num_stop_ids: int) -> DecodeState:
  """No slot is active; `cache` has the shapes for N slots of S positions (arrays, or abstract values)."""

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
    stop_ids=full(-1, jnp.int32, num_stop_ids),
    sampling=Sampling(
      repetition_penalty=full(1, jnp.float32),
      temperature=full(0, jnp.float32),
      top_k=full(0, jnp.int32),
      top_p=full(1, jnp.float32),
      min_p=full(0, jnp.float32),
    ),
  )


def prefill(
  forward: Forward, weights: Any, state: DecodeState, requests: Requests, *, num_top_logprobs: int = 0
) -> tuple[DecodeState, Outputs]:
  """Reads chunks of prompts into their slots, and gives the first token of each that ends; outputs are [P].

  A first chunk takes its slot over, whatever was there; a later one goes on behind the tokens before it, which the slot
  must hold.
  """
  num_rows, num_columns = requests.ids.shape
  columns = jnp.arange(num_columns, dtype=jnp.int32)[None, :]
  is_prompt = columns < requests.lengths[:, None]
  batch = {
    'ids': requests.ids,
    'segment_ids': is_prompt.astype(jnp.int32),
    # Padding may stand where no position is.
    'segment_pos': jnp.where(is_prompt, requests.starts[:, None] + columns, 0),
  }
  last = jnp.maximum(requests.lengths - 1, 0)[:, None]
  cache = None if requests.before is None else take_slots(state.cache, requests.slots)
  scores = {}
  if requests.targets is None:
    logits, new = forward(weights, cache, batch | {'logit_columns': last})
  else:
    logits, new = forward(weights, cache, batch)
    scores = _score(logits, requests.targets, num_top_logprobs)
    logits = jnp.take_along_axis(logits, last[:, :, None], axis=1)
  logits = logits[:, 0]

  rows, nowhere = jnp.arange(num_rows)[:, None], logits.shape[-1]
  seen = jnp.zeros(logits.shape, jnp.bool_).at[rows, jnp.where(is_prompt, requests.ids, nowhere)].set(True, mode='drop')
  if requests.before is not None:
    seen = seen.at[rows, jnp.where(requests.before >= 0, requests.before, nowhere)].set(True, mode='drop')
  ends = requests.starts + requests.lengths
  placed = DecodeState(
    cache=None,
    tokens=requests.ids[:, 0],
    positions=ends - 1,
    ends=ends + requests.max_tokens,
    active=requests.max_tokens > 0,
    keys=request_keys(requests.seeds, requests.samples),
    seen=seen,
    stop_ids=requests.stop_ids,
    sampling=requests.sampling,
  )
  placed, outputs = _emit(logits, placed, num_top_logprobs)

  def insert(old, new):
    return old.at[requests.slots].set(new.astype(old.dtype), mode='drop')

  inserted = jax.tree.map(insert, state.replace(cache=None), placed)
  written = write_tokens(state.cache, new, requests.starts, requests.lengths, slots=requests.slots)
  return inserted.replace(cache=written), outputs.replace(**scores)


def step(
  forward: Forward, weights: Any, state: DecodeState, keep: jax.Array, *, num_top_logprobs: int = 0
) -> tuple[DecodeState, Outputs]:
  """The next token of every active slot; `keep` bool [N] is False where the sequence is given up instead."""
  state = state.replace(active=state.active & keep)
  batch = {
    'ids': state.tokens[:, None],
    'segment_ids': state.active[:, None].astype(jnp.int32),
    'segment_pos': state.positions[:, None],
  }
  logits, new = forward(weights, state.cache, batch)
  cache = write_tokens(state.cache, new, state.positions, state.active.astype(jnp.int32))
  return _emit(logits[:, 0], state.replace(cache=cache), num_top_logprobs)


def _emit(logits: jax.Array, state: DecodeState, num_top_logprobs: int) -> tuple[DecodeState, Outputs]:
  """Samples the token behind each row's position."""
  positions = state.positions + 1
  tokens = sample(logits, position_keys(state.keys, positions), state.seen, state.sampling)
  logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top_logprobs)
  is_finished = jnp.any(tokens[:, None] == state.stop_ids, axis=-1) | (positions + 1 >= state.ends)
  outputs = Outputs(
    tokens=tokens,
    logprobs=jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0],
    top_ids=top_ids,
    top_logprobs=top_logprobs,
    is_valid=state.active,
    is_finished=is_finished,
  )
  rows = jnp.arange(tokens.shape[0])
  state = state.replace(
    tokens=jnp.where(state.active, tokens, state.tokens),
    positions=jnp.where(state.active, positions, state.positions),
    seen=state.seen.at[rows, tokens].set(True),
    active=state.active & ~is_finished,
  )
  return state, outputs


def _score(logits: jax.Array, targets: jax.Array, num_top_logprobs: int) -> dict[str, jax.Array]:
  """The fields of Outputs about the prompt, from logits [P, T, V]."""
  logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  of_targets = jnp.take_along_axis(logprobs, jnp.maximum(targets, 0)[:, :, None], axis=-1)[..., 0]
  top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top_logprobs)
  return {
    'prompt_logprobs': jnp.where(targets >= 0, of_targets, 0.0),
    'prompt_top_ids': top_ids,
    'prompt_top_logprobs': top_logprobs,
  }
