"""Beam search: finds the likeliest whole texts.

    search = BeamSearch(programs)
    beams = search(variables, prefill.make_batch(chunks))

Shapes: P prompts, W beams of each, T tokens of the prompts, M generated tokens at most, V vocabulary, K stop ids.
"""

from typing import Any, Literal

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.decoding.cache_arrays import is_encoded, take_slots, write_tokens
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.decode_state import Forward, encoder_entries, text_entries
from spmd_tasks.decoding.requests import PrefillBatch
from spmd_tasks.runtime.task import Variables


class Beams(struct.PyTreeNode):
  """The texts that a search finds, best first.

  Attributes:
    tokens: int32 [P, W, M], zeros after the text's length.
    lengths: int32 [P, W], the stop token included; 0 if there are fewer than W texts.
    logprobs: float32 [P, W], the log-probability of the whole text.
    scores: float32 [P, W], `logprobs / ((5 + length) / 6) ** length_penalty`; -inf for no text. With the rule 't5x' the
      length counts the prompt too, less 1, and the score of a text without a stop token is `logprobs`.
  """

  tokens: jax.Array
  lengths: jax.Array
  logprobs: jax.Array
  scores: jax.Array


class BeamSearch:
  """The compiled searches of a model, one for each length of prompts."""

  def __init__(self, programs: DecodePrograms):
    self._programs = programs

  def __call__(self, variables: Variables, batch: PrefillBatch) -> Beams:
    """Searches texts after each row of the batch; ignores its slots, seeds and sampling."""
    return self.compile(batch)(self._programs.model.arrange(variables), *_arrays(batch))

  def compile(self, batch: PrefillBatch) -> Any:
    """Compiles the search for prompts of this length."""
    model = self._programs.model
    settings = model.settings

    def search(forward, variables, *arrays):
      return beam_search(
        forward,
        variables,
        model.empty_cache((settings.prefill_rows or 1) * settings.num_beams),
        *arrays,
        num_beams=settings.num_beams,
        max_new_tokens=model.max_len - 1,
        length_penalty=settings.length_penalty,
        rule=settings.beam_rule,
      )

    return self._programs.compute(('search', batch.ids.shape[1]), search, *_arrays(batch))


def _arrays(batch: PrefillBatch) -> tuple[Any, ...]:
  """Returns the arrays of a batch that a search takes."""
  arrays = (batch.ids, batch.lengths, batch.max_tokens, batch.stop_ids)
  return arrays if batch.encoder_ids is None else (*arrays, batch.encoder_ids, batch.encoder_lengths)


class _Search(struct.PyTreeNode):
  """The state of a search: W live texts per prompt and the finished ones.

  Attributes:
    cache: the KV cache of the live texts, arrays [..., P * W, G, S, K].
    num_generated: int32, the length of every live text.
    logprobs, tokens: [P, W] and [P, W, M], the live texts.
    done: the best finished texts.
  """

  cache: Any
  num_generated: jax.Array
  logprobs: jax.Array
  tokens: jax.Array
  done: Beams


def beam_search(
  forward: Forward,
  variables: Any,
  empty_cache: Any,
  ids: jax.Array,
  lengths: jax.Array,
  max_tokens: jax.Array,
  stop_ids: jax.Array,
  encoder_ids: jax.Array | None = None,
  encoder_lengths: jax.Array | None = None,
  *,
  num_beams: int,
  max_new_tokens: int,
  length_penalty: float,
  rule: Literal['exact', 't5x'] = 'exact',
) -> Beams:
  """Finds the W best texts after every prompt, by log-probability over a power of the length (Wu et al., 2016).

  A text ends with a stop token, or when it has max_tokens tokens. The result is exact if W is at least the number of
  possible texts. The search ends when no live text can reach a better score than the worst of W finished texts.

  With the rule 't5x' (also Tensor2Tensor's) a text ends only with a stop token, and only if this token is among the 2 W
  best continuations of all live texts; live texts at max_tokens count if no text has ended. The length in the penalty
  counts the prompt too, without its first token. (T5X also continues past a row's max_tokens while other rows have
  tokens left, and cuts the texts; here such texts do not count.)

  Args:
    forward, variables: the model.
    empty_cache: zeros [..., P * W, G, S, K]; S is at least a row's length + max_tokens, or an attention window.
    ids, lengths: int32 [P, T] and [P], the prompts, at least one token each.
    max_tokens: int32 [P], from 1 to M.
    stop_ids: int32 [P, K], padded with -1.
    encoder_ids, encoder_lengths: int32 [P, E] and [P], the encoder's texts; None if the model has no encoder.
    num_beams, max_new_tokens: W and M.
    length_penalty: 0 compares log-probabilities, which favors short texts; 1 roughly compares means per token.
    rule: when texts end, see above.
  """
  num_prompts = len(ids)
  batch = text_entries(ids, lengths) | {'logit_columns': lengths[:, None] - 1}
  batch |= encoder_entries(encoder_ids, encoder_lengths)
  logits, prompts = forward(variables, None, batch)
  beam_shape = (num_prompts, num_beams)
  tokens = jnp.zeros((*beam_shape, max_new_tokens), jnp.int32)

  # T5X counts a prompt's tokens too, without the one that every text begins with.
  num_counted = lengths - 1 if rule == 't5x' else jnp.zeros_like(lengths)

  def normalize(logprobs, length):
    scale = jnp.asarray((5 + num_counted + length) / 6, jnp.float32) ** length_penalty
    return logprobs / scale.reshape(-1, *(1,) * (logprobs.ndim - 1))

  def extend(search: _Search, logits: jax.Array) -> _Search:
    """Appends a token to the live texts, given the logits [P, W, V] of their next tokens."""
    length = search.num_generated + 1
    totals = search.logprobs[:, :, None] + jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    is_stop = jnp.any(jnp.arange(logits.shape[-1])[None, :, None] == stop_ids[:, None], axis=-1)[:, None]  # [P, 1, V]
    is_last = (length >= max_tokens)[:, None, None]
    may_end, is_end = totals, is_stop | is_last
    if rule == 't5x':
      least = jax.lax.top_k(totals.reshape(num_prompts, -1), 2 * num_beams)[0][:, -1]
      may_end, is_end = jnp.where(totals >= least[:, None, None], totals, -jnp.inf), is_stop

    ended, _, ended_tokens = _best(search, jnp.where(is_end, may_end, -jnp.inf))
    live, parents, live_tokens = _best(search, jnp.where(is_stop | is_last, -jnp.inf, totals))
    done = _better(search.done, _texts(length, ended, ended_tokens, normalize(ended, length)))
    if rule == 't5x':
      unended, _, unended_tokens = _best(search, jnp.where(is_stop, -jnp.inf, totals))
      none_ended = is_last[:, :, 0] & (done.lengths[:, :1] == 0)
      unfinished = _texts(length, unended, unended_tokens, unended)
      done = jax.tree.map(lambda x, y: jnp.where(none_ended.reshape(-1, *(1,) * (x.ndim - 1)), x, y), unfinished, done)
    rows = (jnp.arange(num_prompts)[:, None] * num_beams + parents).reshape(-1)
    # All beams of a prompt read one text of the encoder.
    cache = jax.tree_util.tree_map_with_path(
      lambda path, leaf: leaf if is_encoded(path) else take_slots(leaf, rows), search.cache
    )
    return _Search(cache=cache, num_generated=length, logprobs=live, tokens=live_tokens, done=done)

  def may_improve(search: _Search) -> jax.Array:
    # A live text's log-probability only falls: its best possible score has the longest or the shortest length.
    longest = normalize(search.logprobs[:, 0], max_tokens)
    shortest = normalize(search.logprobs[:, 0], search.num_generated + 1)
    return jnp.any(jnp.maximum(longest, shortest) > search.done.scores[:, -1])

  def advance(search: _Search) -> _Search:
    last = search.tokens[:, :, search.num_generated - 1].reshape(-1, 1)
    positions = jnp.repeat(lengths, num_beams) + search.num_generated - 1
    is_live = (search.logprobs > -jnp.inf).reshape(-1).astype(jnp.int32)
    batch = {'ids': last, 'segment_ids': is_live[:, None], 'segment_pos': positions[:, None]}
    logits, new = forward(variables, search.cache, batch)
    cache = write_tokens(search.cache, new, positions, is_live)
    return extend(search.replace(cache=cache), logits.reshape(*beam_shape, -1))

  none = jnp.full(beam_shape, -jnp.inf, jnp.float32)
  parents = jnp.arange(num_prompts * num_beams) // num_beams
  search = _Search(
    cache=write_tokens(empty_cache, take_slots(prompts, parents), jnp.zeros_like(parents), lengths[parents]),
    num_generated=jnp.zeros((), jnp.int32),
    # At first all beams of a prompt are the same text: only the first one counts.
    logprobs=none.at[:, 0].set(0.0),
    tokens=tokens,
    done=_texts(0, none, tokens, none),
  )
  first = extend(search, jnp.broadcast_to(logits, (*beam_shape, logits.shape[-1])))
  return jax.lax.while_loop(may_improve, advance, first).done


def _best(search: _Search, totals: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the W best continuations by `totals` [P, W, V]: (log-probabilities, numbers of live texts, tokens)."""
  num_prompts, num_beams, vocab_size = totals.shape
  values, flat = jax.lax.top_k(totals.reshape(num_prompts, -1), num_beams)
  parents, chosen = flat // vocab_size, (flat % vocab_size).astype(jnp.int32)
  texts = jnp.take_along_axis(search.tokens, parents[:, :, None], axis=1)
  return values, parents, texts.at[:, :, search.num_generated].set(chosen)


def _texts(length: jax.Array | int, logprobs: jax.Array, tokens: jax.Array, scores: jax.Array) -> Beams:
  """Returns texts of one length; a log-probability of -inf is no text."""
  lengths = jnp.where(logprobs > -jnp.inf, jnp.asarray(length, jnp.int32), 0)
  return Beams(tokens=jnp.where(lengths[:, :, None] > 0, tokens, 0), lengths=lengths, logprobs=logprobs, scores=scores)


def _better(old: Beams, new: Beams) -> Beams:
  """Returns the W best of 2 W texts."""
  both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), old, new)
  _, order = jax.lax.top_k(both.scores, old.scores.shape[1])
  return jax.tree.map(lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1), both)
