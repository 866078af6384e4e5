"""Drafts by a model's own heads (layers/nextn.py): what is done after each call of the model, in the same program.

A head reads the model's final activations of a token and the token that follows, which has just been drawn, and keeps
keys and values of its own, at the same places of the same blocks as the model's. Draft i comes of head number i, or of
the last one, which then reads its own activations. The drafts wait in the state for the next step. They are drawn with
the sampling parameters and the noise of their positions, as a draft model's are.

What a text becomes does not depend on it: where a step took another token than was guessed, or texts that share a chunk
go on differently after it, a head's keys and values may be those of other tokens, and its next guesses a little worse.

Shapes: B rows of a call, T tokens of each, n texts, C tokens of each that have a follower, k drafts, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.decoding.decode_state import DecodeState, Forward, emit
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.layers.nextn import HIDDEN, shift


def cache_name(number: int) -> str:
  """The name of the part of the cache that has keys and values of a draft's head."""
  return f'draft_{number}'


def tokens_of_rows(drafts: jax.Array | None, rows: DraftRows) -> jax.Array:
  """Returns the draft of each row, int32 [R], of the drafts [n, k] of the texts; rows of newest tokens get any."""
  assert drafts is not None
  of_texts = jnp.take(drafts, rows.owners, axis=0, mode='clip')
  return jnp.take_along_axis(of_texts, jnp.maximum(rows.columns - 1, 0)[:, None], axis=1)[:, 0]


def update_drafts(
  state: DecodeState,
  forward: Forward,
  variables: Any,
  cache: Any,
  batch: Mapping[str, Any],
  new: Any,
  heads: Sequence[int],
  **following: Any,
) -> tuple[DecodeState, Any]:
  """Puts guesses of the next tokens into the state of n texts; returns it with the new keys and values.

  The arguments after the state are those of `guess`.
  """
  drawn = state

  def draw(logits: jax.Array) -> jax.Array:
    nonlocal drawn
    drawn, outputs = emit(logits, drawn, None, 0)
    return outputs.tokens

  drafts, new = guess(forward, variables, cache, batch, new, heads, **following, draw=draw)
  return state.replace(drafts=drafts), new


def guess(
  forward: Callable[..., tuple[jax.Array, Any]],
  variables: Any,
  cache: Any,
  batch: Mapping[str, Any],
  new: dict[str, Any],
  heads: Sequence[int],
  *,
  draw: Callable[[jax.Array], jax.Array],
  following: jax.Array,
  lengths: jax.Array,
  rows: DraftRows | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
  """Guesses k tokens of each text.

  Args:
    forward, variables, cache: what the model was called with; it has all keys and values.
    batch: too, but `segment_ids` say which tokens belong to their texts now.
    new: what the model returned, with the activations.
    heads: the number of each draft's head.
    draw: draws a token of each text from logits [n, V]; called once for each draft, in order.
    following: int32 [n, C], the token that follows each.
    lengths: int32 [n], how many of them there are; texts of none get any drafts.
    rows: where a row of the call has one token of a text, which. None: row i has those of text i.

  Returns:
    (int32 [n, k], the new keys and values of the model and its heads).
  """
  new = dict(new)
  hidden, drafts, last = new.pop(HIDDEN), [], jnp.maximum(lengths - 1, 0)[:, None]
  where = {'logit_columns': last}
  if rows is not None:
    where = {'logit_rows': jnp.take_along_axis(rows.rows, last, axis=1)[:, 0]}
  batch = {name: each for name, each in batch.items() if name not in ('logit_columns', 'returns_hidden')}
  for number, head in enumerate(heads):
    ids = following
    if rows is not None:
      ids = following[jnp.minimum(rows.owners, len(following) - 1), rows.columns][:, None]
    given = {**batch, **where, 'ids': ids, 'hidden': hidden, 'nextn': head}
    own = None if cache is None else cache[cache_name(number)]
    logits, kept = forward(variables, own, given)
    kept = dict(kept)
    hidden = kept.pop(HIDDEN)
    new[cache_name(number)] = kept
    drafts.append(draw(logits[:, 0]))
    following = shift(following, 1).at[jnp.arange(len(last)), last[:, 0]].set(drafts[-1])
  return jnp.stack(drafts, axis=1), new
