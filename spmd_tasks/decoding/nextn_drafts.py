"""Drafts by a model's own heads (layers/nextn.py): what is done after each call of the model, in the same program.

A head reads the model's final activations of a token and the token that follows, which has just been drawn, and keeps
keys and values of its own, at the same places of the same blocks as the model's. Draft i comes of head number i, or of
the last one, which then reads its own activations. The one head of EAGLE-3 (tuning/eagle.py) guesses all drafts: for
those after the first it reads its own activations of a text's last token alone (CHAINED). Their keys and values stand
behind the text's until the next tokens' take their places. The drafts wait in the state for the next step. They are
drawn with the sampling parameters and the noise of their positions, as those of a draft model are.

What a text becomes does not depend on it: where a step took another token than was guessed, or texts that share a chunk
go on differently after it, a head's keys and values may be those of other tokens, and its next guesses a little worse.

Shapes: B rows of a call, T tokens of each, n texts, C tokens of each that have a follower, k drafts, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.layers.nextn import HIDDEN, shift

CHAINED = -1  # in place of a head's number: `guess` leaves these drafts to `go_on`


def cache_name(number: int) -> str:
  """The name of the part of the cache that has keys and values of a draft's head."""
  return f'draft_{number}'


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
) -> tuple[jax.Array, dict[str, Any], jax.Array]:
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
    (int32 [n, k], the new keys and values of the model and its heads, the last head's activations of each text's last
    token [n, 1, D]).
  """
  new, heads = dict(new), [head for head in heads if head != CHAINED]
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
  if rows is None:
    of_texts = jnp.take_along_axis(hidden, last[:, :, None], axis=1)
  else:
    of_texts = jnp.take(hidden, where['logit_rows'], axis=0, mode='clip')
  return jnp.stack(drafts, axis=1), new, of_texts


def go_on(
  forward: Callable[..., tuple[jax.Array, Any]],
  variables: Any,
  pool: Any,
  drafts: jax.Array,
  hidden: jax.Array,
  num: int,
  *,
  draw: Callable[[jax.Array], jax.Array],
  write: Callable[..., Any],
  positions: jax.Array,
  is_text: jax.Array,
  tables: jax.Array,
) -> tuple[jax.Array, Any]:
  """Guesses `num` more tokens of each text by the head that guessed the first one.

  Args:
    forward, variables, draw: as of `guess`.
    pool: the head's keys and values, those of the call among them.
    drafts, hidden: int32 [n, 1] and [n, 1, D], what `guess` has returned.
    write: writes new keys and values to a pool: (pool, new, positions, lengths, tables=...).
    positions: int32 [n], of each text's last token that was read.
    is_text: bool [n], for which rows there is one.
    tables: int32 [D, n/D, M], the blocks of each text; places beyond are not written, and guesses there are worse.

  Returns:
    (int32 [n, 1 + num], the pool).
  """
  blocks = {leaf.shape[-2] for leaf in jax.tree.leaves(pool)}
  for number in range(1, num + 1):
    at = positions + number
    is_text &= at < tables.shape[-1] * min(blocks)
    segments, places = is_text[:, None].astype(jnp.int32), jnp.where(is_text, at, 0)[:, None]
    given = {'ids': drafts[:, -1:], 'segment_ids': segments, 'segment_pos': places, 'tables': tables}
    logits, kept = forward(variables, pool, {**given, 'hidden': hidden, 'nextn': 0})
    kept = dict(kept)
    hidden = kept.pop(HIDDEN)
    drafts = jnp.concatenate([drafts, draw(logits[:, 0])[:, None]], axis=1)
    if number < num:
      pool = write(pool, kept, at, is_text.astype(jnp.int32), tables=tables)
  return drafts, pool
