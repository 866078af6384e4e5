"""Group sampling: samples n completions of each of P prompts by one program.

    groups = make_groups(requests, ...)
    samples = sample(steps.programs, variables, groups, num_samples=8, max_new_tokens=64)

`complete_groups` of generation.py turns the samples into texts.

A scheduler serves requests that come and go; a rollout of training has all prompts at the beginning. Here each prompt
is read once, its keys and values are copied to its n rows, and the loop over tokens runs on the device until no row is
active, so that the host waits once. When half of many rows are finished, a loop over the remaining rows takes over, and
again at a quarter and a sixteenth, so that the last texts cost little. The tokens are the same as the engine's, sampled
by the same functions with the same keys.

Shapes: P prompts, n samples, R = P n rows, T tokens of the longest prompt, M generated tokens at most, K stop ids.
"""

from collections.abc import Sequence
import functools
from typing import Any

from flax import struct, traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.decoding.cache_arrays import EXPERT_IDS, take_slots, write_tokens
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.decode_state import DecodeState, Forward, sample_next_tokens, text_entries
from spmd_tasks.decoding.requests import Request, filled_rows
from spmd_tasks.decoding.sampling import SamplingArrays, request_keys
from spmd_tasks.decoding.step import StepInputs, generate_tokens
from spmd_tasks.runtime.task import Variables

_MIN_ROWS = 32  # for loops over fewer rows
_MIN_COLUMNS = 16  # T is this times a power of 4, at most max_len; each T is another program


class Groups(struct.PyTreeNode):
  """P prompts, as the arrays that `sample_groups` takes.

  Attributes:
    ids: int32 [P, T], padded at the end.
    lengths, max_tokens: int32 [P], at least 1 and 0.
    seeds: uint32 [P].
    stop_ids: int32 [P, K], padded with -1.
    sampling: arrays [P], without biases, and without top_k, top_p and min_p if no prompt has them.
  """

  ids: Any
  lengths: Any
  max_tokens: Any
  seeds: Any
  stop_ids: Any
  sampling: SamplingArrays


class Samples(struct.PyTreeNode):
  """The samples, with all samples of a prompt in consecutive rows.

  Attributes:
    tokens: int32 [M, R], the tokens; entries after a row's length have no meaning.
    logprobs: float32 [M, R], their log-probabilities.
    lengths: int32 [R], how many tokens each sample has.
    expert_ids: int32 [R, S, n], the experts of each position of prompt and sample, concatenated over layers; None if
      the cache does not record them.
  """

  tokens: jax.Array
  logprobs: jax.Array
  lengths: jax.Array
  expert_ids: jax.Array | None = None


def make_groups(requests: Sequence[Request], num_prompts: int, *, max_len: int, num_stop_ids: int) -> Groups:
  """Returns the arrays of at most `num_prompts` prompts, as host arrays; further rows sample nothing."""
  longest, num_columns = max(len(request.ids) for request in requests), _MIN_COLUMNS
  while num_columns < longest:
    num_columns *= 4

  rows = functools.partial(filled_rows, num_prompts)
  params = [request.sampling for request in requests]
  sampling = SamplingArrays.from_params(params, num_prompts)
  none: dict[str, Any] = dict.fromkeys(('bias_ids', 'bias_values'))
  if not any(param.top_k > 0 or param.top_p < 1 or param.min_p > 0 for param in params):
    none |= dict.fromkeys(('top_k', 'top_p', 'min_p'))
  return Groups(
    ids=rows(np.int32, [request.ids for request in requests], 0, min(num_columns, max_len)),
    lengths=rows(np.int32, [len(request.ids) for request in requests], 1),
    max_tokens=rows(np.int32, [request.max_tokens for request in requests], 0),
    seeds=rows(np.uint32, [request.seed for request in requests], 0),
    stop_ids=rows(np.int32, [request.stop_ids for request in requests], -1, num_stop_ids),
    sampling=sampling.replace(**none),
  )


def sample(
  programs: DecodePrograms, variables: Variables, groups: Groups, *, num_samples: int, max_new_tokens: int
) -> Samples:
  """Runs `sample_groups` as a program, which is compiled once for each size; uses no slots."""
  model = programs.model

  def draw(forward, variables, groups):
    return sample_groups(
      forward,
      variables,
      model.empty_cache(groups.ids.shape[0] * num_samples),
      groups,
      num_samples=num_samples,
      max_new_tokens=max_new_tokens,
      shrinks=programs.layout.num_parts == 1,
    )

  name = ('sample', *groups.ids.shape, num_samples, max_new_tokens, groups.sampling.top_k is None)
  return programs.compute(name, draw, groups)(model.arrange(variables), groups)


def sample_groups(
  forward: Forward,
  variables: Any,
  empty_cache: Any,
  groups: Groups,
  *,
  num_samples: int,
  max_new_tokens: int,
  shrinks: bool = True,
) -> Samples:
  """Samples n completions of each prompt.

  Args:
    forward, variables: the model.
    empty_cache: zeros [..., R, G, S, K].
    groups: the prompts; none has penalties or biases.
    num_samples, max_new_tokens: n and M.
    shrinks: whether finished rows may be dropped; False if the mesh splits rows. Never if the cache records experts.
  """
  num_prompts = len(groups.ids)
  num_rows = num_prompts * num_samples
  none = jnp.zeros(num_prompts, jnp.int32)
  batch = text_entries(groups.ids, groups.lengths)
  batch |= {'logit_columns': groups.lengths[:, None] - 1, 'adapters': none}
  logits, prompts = forward(variables, None, batch)
  row = jnp.repeat(jnp.arange(num_prompts), num_samples)
  lengths, max_tokens, seeds, stop_ids, sampling, adapters = jax.tree.map(
    lambda x: x[row],
    (groups.lengths, groups.max_tokens, groups.seeds, groups.stop_ids, groups.sampling, none),
  )
  state = DecodeState(
    cache=write_tokens(empty_cache, take_slots(prompts, row), jnp.zeros_like(lengths), lengths),
    tokens=jnp.zeros_like(lengths),
    positions=lengths - 1,
    ends=lengths + max_tokens,
    active=max_tokens > 0,
    keys=request_keys(seeds, jnp.tile(jnp.arange(num_samples, dtype=jnp.uint32), num_prompts)),
    seen=None,
    counts=None,
    stop_ids=stop_ids,
    sampling=sampling,
    adapters=adapters,
  )

  def add(samples: Samples, number: jax.Array | int, outputs: Any, rows: Any) -> Samples:
    return Samples(
      tokens=samples.tokens.at[number, rows].set(outputs.tokens),
      logprobs=samples.logprobs.at[number, rows].set(outputs.logprobs),
      lengths=samples.lengths.at[rows].add(outputs.is_valid.astype(jnp.int32)),
    )

  def advance(rows: Any, carry: Any) -> Any:
    number, state, samples = carry
    inputs = StepInputs(keep=jnp.ones(len(state.tokens), jnp.bool_))
    state, outputs = generate_tokens(forward, variables, state, inputs)
    return number + 1, state, add(samples, number, outputs, rows)

  shape = (max_new_tokens, num_rows)
  nothing = Samples(tokens=jnp.zeros(shape, jnp.int32), logprobs=jnp.zeros(shape), lengths=jnp.zeros_like(lengths))
  state, first = sample_next_tokens(logits[:, 0][row], state, None, 0)
  rows: Any = slice(None)
  carry = (jnp.ones((), jnp.int32), state, add(nothing, 0, first, rows))
  shrinks = shrinks and num_rows >= _MIN_ROWS and _expert_ids(state.cache) is None
  # One row alone would have other bits.
  sizes = [size for size in (num_rows // 2, num_rows // 4, num_rows // 16) if shrinks and size >= 4]
  for least in (*sizes, 0):
    is_larger = lambda carry, least=least: jnp.sum(carry[1].active) > least
    carry = jax.lax.while_loop(is_larger, functools.partial(advance, rows), carry)
    if least:
      number, state, samples = carry
      kept = jnp.argsort(~state.active, stable=True)[:least]
      rows = jnp.arange(num_rows)[rows][kept]
      cache = take_slots(state.cache, kept)
      state = jax.tree.map(lambda x, kept=kept: x[kept], state.replace(cache=None)).replace(cache=cache)
      carry = (number, state, samples)
  _, state, samples = carry
  return samples.replace(expert_ids=_expert_ids(state.cache))


def _expert_ids(cache: Any) -> jax.Array | None:
  """Returns the recorded experts [R, S, n] of a cache with arrays [..., R, 1, S, k]; None if there are none."""
  leaves = sorted((path, leaf) for path, leaf in traverse_util.flatten_dict(cache).items() if path[-1] == EXPERT_IDS)
  if not leaves:
    return None
  by_row = [jnp.moveaxis(leaf[..., 0, :, :], (-3, -2), (0, 1)) for _, leaf in leaves]
  return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in by_row], axis=-1)
