"""Prefill and step: the computations of decoding, as pure functions of variables, state and host arrays.

    state, first = prefill(forward, variables, state, batch)      # prompts into slots, and the first token of each
    state, outputs = step(forward, variables, state, inputs)      # the next token of every slot

A long prompt is read in chunks, by one prefill after another; only its last chunk gives the first token.

A slot holds one sequence. The sequence, its length and its sampling parameters are numbers in arrays, so that one
compiled step serves every mix of requests. A request's tokens depend neither on its slot nor on the other slots. A step
leaves unchanged the slots that are finished or whose prompts are not read to the end.

The KV cache is a tree of pools [..., B, G, b, K] of blocks of b positions. A table says which blocks a slot has:
position p is at place p mod b of its block p / b. Leaves of what has a fixed size are [..., N, G, S, K] over slots: an
encoder's text, and rings of the S positions of an attention window, with position p at place p mod S.

Shapes: N slots, P rows of a prefill, T tokens of its chunks, S positions (in a cache: places), V vocabulary, K stop ids
(in a cache: head dim), G key/value heads, n top logprobs, W words of V bits; `...` counts layers.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
from typing import Any, Protocol

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.decoding import nextn_drafts
from spmd_tasks.decoding.cache_arrays import take_slots, write_tokens
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.decoding.requests import PrefillBatch
from spmd_tasks.decoding.sampling import SamplingArrays, mask_logits, position_keys, request_keys, sample
from spmd_tasks.layers.nextn import shift
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


class StepInputs(struct.PyTreeNode):
  """What a step takes besides the variables and the state.

  Attributes:
    keep: bool [N]; slots where it is False become inactive.
    slots: int32 [n], all different: the slots that a step of n rows computes; ids from N on stand for none. None
      computes all N.
    tables: int32 [D, R/D, M], the blocks of each row, see `write_tokens`; None if all of the cache is by slots.
    masks: uint32 [N, W], the tokens that each slot may take (constraints.py); None allows all.
    drafts: the R rows of the slots' newest tokens and drafts; None: the rows are the slots.
  """

  keep: Any
  slots: Any = None
  tables: Any = None
  masks: Any = None
  drafts: DraftRows | None = None


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


def prefill(
  forward: Forward,
  variables: Any,
  state: DecodeState,
  batch: PrefillBatch,
  *,
  num_top_logprobs: int = 0,
  by_slot: bool = True,
  has_prefix: bool = False,
  heads: Sequence[int] = (),
) -> tuple[DecodeState, Outputs]:
  """Reads chunks of prompts into their slots and samples the first token of each prompt that ends; outputs are [P].

  A first chunk replaces what its slot held before. A later chunk needs the tokens before it in its slot. With `by_slot`
  the model reads them there; without, from a copy of the slots, where the mesh splits slots. With `has_prefix` the
  tokens of a prompt see later ones, so that its scores are of a second call of the model, in which none does. `heads`
  are those of the model that guess the next tokens.
  """
  model_batch: dict[str, Any] = text_entries(batch.ids, batch.lengths, batch.starts) | {'adapters': batch.adapters}
  if batch.before is None:
    model_batch |= encoder_entries(batch.encoder_ids, batch.encoder_lengths)
  elif by_slot:  # which holds the encoder's text
    model_batch |= {'slots': batch.slots, 'tables': batch.tables}
  last = jnp.maximum(batch.lengths - 1, 0)[:, None]
  cache = state.cache if by_slot else take_slots(state.cache, batch.slots, batch.tables)
  if batch.before is None:
    cache = None
  scores = {}
  model_batch |= {'returns_hidden': True} if heads else {}
  if batch.targets is None:
    logits, new = forward(variables, cache, model_batch | {'logit_columns': last})
  else:
    logits, new = forward(variables, cache, model_batch)
    scored = logits
    if has_prefix:
      scored, _ = forward(variables, cache, model_batch | {'prefix_mask': jnp.zeros_like(batch.ids)})
    scores = _score(scored, batch.targets, num_top_logprobs)
    logits = jnp.take_along_axis(logits, last[:, :, None], axis=1)
  logits = logits[:, 0]

  num_rows, beyond_vocabulary = logits.shape  # the scatter drops ids from V on
  rows = jnp.arange(num_rows)[:, None]
  ids = jnp.where(model_batch['segment_ids'] > 0, batch.ids, beyond_vocabulary)
  seen = jnp.zeros(logits.shape, jnp.bool_).at[rows, ids].set(True, mode='drop')
  if batch.before is not None:
    before = jnp.where(batch.before >= 0, batch.before, beyond_vocabulary)
    seen = seen.at[rows, before].set(True, mode='drop')
  ends = batch.starts + batch.lengths
  placed = DecodeState(
    cache=None,
    tokens=batch.ids[:, 0],
    positions=ends - 1,
    ends=ends + batch.max_tokens,
    active=batch.max_tokens > 0,
    keys=request_keys(batch.seeds, batch.samples),
    seen=seen,
    counts=jnp.zeros(logits.shape, jnp.int32),
    stop_ids=batch.stop_ids,
    sampling=batch.sampling,
    adapters=batch.adapters,
    drafts=jnp.zeros((num_rows, len(heads)), jnp.int32) if heads else None,
  )
  placed, outputs = emit(logits, placed, batch.masks, num_top_logprobs)
  if heads:
    follower = jnp.where(batch.max_tokens > 0, outputs.tokens, batch.followers)
    following = shift(batch.ids, 1).at[jnp.arange(num_rows), last[:, 0]].set(follower)
    call = forward, variables, cache, model_batch, new, heads
    placed, new = _guess(placed, *call, following=following, lengths=batch.lengths)
  inserted = _put_rows(state.replace(cache=None), placed, batch.slots)
  written = write_tokens(
    state.cache, new, starts=batch.starts, lengths=batch.lengths, slots=batch.slots, tables=batch.tables
  )
  return inserted.replace(cache=written), outputs.replace(**scores)


def _put_rows(old: Any, new: Any, slots: jax.Array) -> Any:
  """Writes rows to slots, all different; ids from N on are not written."""
  return jax.tree.map(lambda x, rows: x.at[slots].set(rows.astype(x.dtype), mode='drop', unique_indices=True), old, new)


def step(
  forward: Forward,
  variables: Any,
  state: DecodeState,
  inputs: StepInputs,
  *,
  num_top_logprobs: int = 0,
  heads: Sequence[int] = (),
) -> tuple[DecodeState, Outputs]:
  """Samples the next token of every active slot. Outputs are [N].

  With drafts, outputs are [k + 1, N], up to k + 1 tokens of each slot. If the model has `heads`, they guessed these
  drafts in the step before, and guess the next ones now.
  """
  keep, slots, tables, masks, drafts = inputs.keep, inputs.slots, inputs.tables, inputs.masks, inputs.drafts
  kept = state.replace(active=state.active & keep)
  rows = kept.replace(cache=None)
  if slots is not None:
    rows, masks = jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode='clip'), (rows, masks))
    rows = rows.replace(active=rows.active & (slots < keep.shape[0]))
  tokens, positions, active, adapters, row_slots = rows.tokens, rows.positions, rows.active, rows.adapters, slots
  if drafts is not None:
    assert slots is not None
    given = (tokens, positions, active, adapters, slots)
    tokens, positions, active, adapters, row_slots = (jnp.take(x, drafts.owners, mode='clip') for x in given)
    if heads:
      assert rows.drafts is not None
      guessed = jnp.take(rows.drafts, drafts.owners, axis=0, mode='clip')
      guessed = jnp.take_along_axis(guessed, jnp.maximum(drafts.columns - 1, 0)[:, None], axis=1)[:, 0]
      drafts = drafts.replace(tokens=guessed)
    tokens, positions = jnp.where(drafts.columns == 0, tokens, drafts.tokens), positions + drafts.columns
    active &= drafts.owners < len(rows.tokens)
  batch: dict[str, Any] = {
    'ids': tokens[:, None],
    'segment_ids': active[:, None].astype(jnp.int32),
    'segment_pos': jnp.where(active, positions, 0)[:, None],
    'adapters': adapters,
    **({} if row_slots is None else {'slots': row_slots}),
    **({} if tables is None else {'tables': tables}),
    **({} if drafts is None else {'drafts': drafts}),
    **({'returns_hidden': True} if heads else {}),
  }
  logits, new = forward(variables, state.cache, batch)
  if drafts is None:
    rows, outputs = emit(logits[:, 0], rows, masks, num_top_logprobs)
  else:
    rows, outputs = _emit_drafted(logits[:, 0], rows, drafts, num_top_logprobs)
    num_read = jnp.sum(outputs.is_valid, axis=0)  # as many as were drawn: each after one that belongs to the text
    active &= drafts.columns < jnp.take(num_read, drafts.owners, mode='clip')
  if heads:
    following, lengths = outputs.tokens[:, None], jnp.ones_like(rows.tokens)
    if drafts is not None:
      following, lengths = outputs.tokens.T, num_read
    batch |= {'segment_ids': active[:, None].astype(jnp.int32)}
    call = forward, variables, state.cache, batch, new, heads
    rows, new = _guess(rows, *call, following=following, lengths=lengths, rows=drafts)
  cache = write_tokens(
    state.cache, new, starts=positions, lengths=active.astype(jnp.int32), slots=row_slots, tables=tables
  )
  if slots is not None:
    rows = _put_rows(kept.replace(cache=None), rows, slots)

    def put(x: jax.Array) -> jax.Array:  # outputs of all slots
      shape = (*x.shape[: drafts is not None], keep.shape[0], *x.shape[1 + (drafts is not None) :])
      index = (slots,) if drafts is None else (slice(None), slots)
      return jnp.zeros(shape, x.dtype).at[index].set(x, mode='drop', unique_indices=True)

    outputs = jax.tree.map(put, outputs)
  return rows.replace(cache=cache), outputs


def _guess(
  state: DecodeState,
  forward: Forward,
  variables: Any,
  cache: Any,
  batch: Mapping[str, Any],
  new: Any,
  heads: Sequence[int],
  **given: Any,
) -> tuple[DecodeState, Any]:
  """Puts the guesses of the model's heads into the state of some rows; returns it and the keys and values to write.

  Further arguments are those of nextn_drafts.guess.
  """
  drawn = state

  def draw(logits: jax.Array) -> jax.Array:
    nonlocal drawn
    drawn, outputs = emit(logits, drawn, None, 0)
    return outputs.tokens

  drafts, new = nextn_drafts.guess(forward, variables, cache, batch, new, heads, **given, draw=draw)
  return state.replace(drafts=drafts), new


def _emit_drafted(
  logits: jax.Array, state: DecodeState, drafts: DraftRows, num_top_logprobs: int
) -> tuple[DecodeState, Outputs]:
  """Samples tokens of each slot, up to the first that was not drafted; logits are [R, V], outputs [k + 1, n].

  All rows are sampled at once, each as if the drafts before it were right: else its token is not of the text.
  """
  num_rows, vocab_size = logits.shape
  take: Any = functools.partial(jnp.take, indices=drafts.owners, axis=0, mode='clip')
  of_rows = jax.tree.map(take, state.replace(cache=None, seen=None, counts=None))
  is_used = of_rows.active & (drafts.owners < len(state.tokens))
  of_rows = of_rows.replace(positions=of_rows.positions + drafts.columns, active=is_used)
  told = jnp.where(drafts.columns > 0, drafts.tokens, vocab_size)  # the scatters drop V
  told = jnp.concatenate([told[:, None], jnp.take(told, drafts.earlier, mode='fill', fill_value=vocab_size)], axis=1)

  def occurrences() -> tuple[jax.Array, jax.Array]:
    numbers, seen, counts = jnp.arange(num_rows)[:, None], take(state.seen), take(state.counts)
    return seen.at[numbers, told].set(True, mode='drop'), counts.at[numbers, told].add(1, mode='drop')

  drawn = _draw(logits, of_rows, None, None if state.seen is None else occurrences, num_top_logprobs)
  outputs = jax.tree.map(lambda x: jnp.take(x, drafts.rows.T, axis=0, mode='clip'), drawn)
  following = drafts.rows.T[1:]
  is_right = (following < num_rows) & (jnp.take(drafts.tokens, following, mode='clip') == outputs.tokens[:-1])
  goes_on = is_right & ~outputs.is_finished[:-1]
  is_valid = jnp.stack([*itertools.accumulate([state.active, *goes_on], jnp.logical_and)])
  outputs = outputs.replace(is_valid=is_valid)
  last = jnp.maximum(jnp.sum(is_valid, axis=0) - 1, 0)
  tokens, is_finished = (x[last, jnp.arange(len(last))] for x in (outputs.tokens, outputs.is_finished))
  told = jnp.where(is_valid, outputs.tokens, vocab_size)
  return _with_tokens(state, tokens, state.positions + 1 + last, is_finished, told), outputs


def emit(
  logits: jax.Array, state: DecodeState, masks: jax.Array | None, num_top_logprobs: int
) -> tuple[DecodeState, Outputs]:
  """Samples the token that follows each row's position."""
  occurrences: Any = None if state.seen is None else lambda: (state.seen, state.counts)
  outputs = _draw(logits, state, masks, occurrences, num_top_logprobs)
  told = jnp.where(state.active, outputs.tokens, logits.shape[-1])
  return _with_tokens(state, outputs.tokens, state.positions + 1, outputs.is_finished, told), outputs


def _draw(
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


def _with_tokens(
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


def _score(logits: jax.Array, targets: jax.Array, num_top_logprobs: int) -> dict[str, jax.Array]:
  """The prompt_* fields of Outputs, from logits [P, T, V]."""
  logprobs, of_targets = _target_logprobs(logits, targets)
  top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top_logprobs)
  return {'prompt_logprobs': of_targets, 'prompt_top_ids': top_ids, 'prompt_top_logprobs': top_logprobs}


def _target_logprobs(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities float32 [P, T, V], and those of targets [P, T], 0 where a target is -1."""
  logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  of_targets = jnp.take_along_axis(logprobs, jnp.maximum(targets, 0)[:, :, None], axis=-1)[..., 0]
  return logprobs, jnp.where(targets >= 0, of_targets, 0.0)


class ScoreBatch(struct.PyTreeNode):
  """B texts whose last tokens are scored, as the arrays that `score` takes.

  Attributes:
    ids: int32 [B, T], padded at the end; without the last token of each text, which nothing follows.
    lengths: int32 [B], at least 1.
    columns: int32 [B, C], the columns of T that a scored token follows, in order; the first is the context's last.
    targets: int32 [B, C], the scored tokens; -1 where there is none.
    adapters: int32 [B], the number of each row's low-rank adapter; 0 is none.
    encoder_ids, encoder_lengths: int32 [B, E] and [B], what an encoder reads; None where the model has none.
  """

  ids: Any
  lengths: Any
  columns: Any
  targets: Any
  adapters: Any
  encoder_ids: Any = None
  encoder_lengths: Any = None


class Scores(struct.PyTreeNode):
  """The log-probabilities that the model gives to the tokens of a ScoreBatch.

  Attributes:
    logprobs: float32 [B, C], of each target given the tokens before it; 0 where there is none.
    are_likeliest: bool [B, C], whether no other token is likelier.
  """

  logprobs: jax.Array
  are_likeliest: jax.Array


def score(forward: Forward, variables: Any, batch: ScoreBatch) -> Scores:
  """Computes the log-probabilities of given tokens. Uses no slots, and logits of the asked columns only."""
  model_batch: dict[str, Any] = text_entries(batch.ids, batch.lengths)
  is_context = jnp.arange(batch.ids.shape[1])[None, :] <= batch.columns[:, :1]
  model_batch |= {'prefix_mask': is_context.astype(jnp.int32)}
  model_batch |= {'logit_columns': batch.columns, 'adapters': batch.adapters}
  model_batch |= encoder_entries(batch.encoder_ids, batch.encoder_lengths)
  logits, _ = forward(variables, None, model_batch)
  logprobs, of_targets = _target_logprobs(logits, batch.targets)
  are_likeliest = (jnp.argmax(logprobs, axis=-1) == batch.targets) | (batch.targets < 0)
  return Scores(logprobs=of_targets, are_likeliest=are_likeliest)


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
