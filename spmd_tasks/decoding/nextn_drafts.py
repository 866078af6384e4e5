"""Drafts by a model's own heads (layers/nextn.py), which are called after the model in the same program.

A head reads the model's final activations of a token, and the next token, which has just been sampled. It has keys and
values of its own, at the same places of the same blocks as the model's. Head i guesses draft i; the last head guesses
the remaining drafts from its own activations. The state keeps the drafts for the next step. They are sampled with the
sampling parameters and the noise of their positions, as a draft model's are.

The text does not depend on the drafts. If a step samples another token than was guessed, or texts with a shared chunk
continue differently, a head's keys and values may be of other tokens, and its next guesses a little worse.

Shapes: B rows of a call, T tokens of each, R rows with drafts, n texts, C tokens of each that have a next token, k
drafts, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.decoding.decode_state import DecodeState, Forward, sample_next_tokens
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.layers.nextn import HIDDEN, shift


def cache_name(number: int) -> str:
  """Returns the name of the part of the cache that has the keys and values of a draft's head."""
  return f'draft_{number}'


def tokens_of_rows(drafts: jax.Array | None, rows: DraftRows) -> jax.Array:
  """Returns the draft that each row checks, int32 [R], from the drafts [n, k] of the texts.

  Rows of newest tokens get any draft.
  """
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
  """Guesses the next tokens of n texts; returns the state with these drafts, and the new keys and values.

  The arguments after the state are those of `guess`.
  """
  ahead = state  # with the drafts as if they were right

  def draw(logits: jax.Array) -> jax.Array:
    nonlocal ahead
    ahead, outputs = sample_next_tokens(logits, ahead, None, 0)
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
    forward, variables, cache, batch: the arguments of the model's call. `segment_ids` exclude wrong drafts.
    new: the keys and values that the model returned, with its final activations.
    heads: the number of each draft's head.
    draw: samples a token of each text from logits [n, V]; called once for each draft, in order.
    following: int32 [n, C], the next token after each token.
    lengths: int32 [n], how many next tokens there are; a text without any gets arbitrary drafts.
    rows: the rows of a step that checks drafts, each with one token of a text. None: row i has all tokens of text i.

  Returns:
    (int32 [n, k], the new keys and values of the model and its heads).
  """
  new = dict(new)
  hidden, drafts, last = new.pop(HIDDEN), [], jnp.maximum(lengths - 1, 0)[:, None]
  places = {'logit_columns': last}
  if rows is not None:
    places = {'logit_rows': jnp.take_along_axis(rows.rows, last, axis=1)[:, 0]}
  batch = {name: entry for name, entry in batch.items() if name not in ('logit_columns', 'returns_hidden')}
  for number, head in enumerate(heads):
    ids = following
    if rows is not None:
      ids = following[jnp.minimum(rows.owners, len(following) - 1), rows.columns][:, None]
    head_cache = None if cache is None else cache[cache_name(number)]
    logits, head_new = forward(variables, head_cache, {**batch, **places, 'ids': ids, 'hidden': hidden, 'nextn': head})
    head_new = dict(head_new)
    hidden = head_new.pop(HIDDEN)
    new[cache_name(number)] = head_new
    drafts.append(draw(logits[:, 0]))
    following = shift(following, 1).at[jnp.arange(len(last)), last[:, 0]].set(drafts[-1])
  return jnp.stack(drafts, axis=1), new
