"""Group sampling: n completions of each of P prompts by one compiled program, for prompts that are all known at once.

    groups = make_groups(requests, ...)
    samples = sample(steps.programs, variables, groups, num_samples=8, max_new_tokens=64)

`complete_groups` of generation.py makes texts of the samples.

A scheduler serves requests that come and go; a rollout of training has all of its prompts at the beginning. Here each
prompt is read once, its keys and values become those of its n rows, and the loop over tokens runs on the device until
no row is active, so that the host waits once. Once half of many rows are active, a loop over these alone goes on, and
again at a quarter and at a sixteenth, so that the last texts cost little. Tokens are those of the engine: the same keys
and the same functions draw them.

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
from spmd_tasks.decoding.decode_state import DecodeState, Forward, emit, text_entries
from spmd_tasks.decoding.requests import Request, filled_rows
from spmd_tasks.decoding.sampling import SamplingArrays, request_keys
from spmd_tasks.decoding.step import StepInputs, generate_tokens
from spmd_tasks.runtime.task import Variables

_MIN_ROWS = 32  # from which on there are loops for fewer
_MIN_COLUMNS = 16  # T is this times a power of 4, at most max_len: each T is compiled once


class Groups(struct.PyTreeNode):
  """P prompts, as the arrays that `sample_groups` takes.

  Attributes:
    ids: int32 [P, T], padded at the end.
    lengths, max_tokens: int32 [P], at least 1 and 0.
    seeds: uint32 [P].
    stop_ids: int32 [P, K], padded with -1.
    sampling: arrays [P], without biases, and without cuts where no prompt has any.
  """

  ids: Any
  lengths: Any
  max_tokens: Any
  seeds: Any
  stop_ids: Any
  sampling: SamplingArrays


class Samples(struct.PyTreeNode):
  """What was drawn: tokens int32 and logprobs float32 [M, R], and lengths int32 [R]; the samples of a prompt follow one
  another, and what is behind a length means nothing.

  Where the cache keeps the choices of experts, `expert_ids` int32 [R, S, n] are those of each place of prompt and
  sample, of all layers one after another.
  """

  tokens: jax.Array
  logprobs: jax.Array
  lengths: jax.Array
  expert_ids: jax.Array | None = None


def make_groups(requests: Sequence[Request], num_prompts: int, *, max_len: int, num_stop_ids: int) -> Groups:
  """The arrays of prompts, at most `num_prompts`, as host arrays; further rows draw nothing."""
  longest, num_columns = max(len(request.ids) for request in requests), _MIN_COLUMNS
  while num_columns < longest:
    num_columns *= 4

  rows = functools.partial(filled_rows, num_prompts)
  sampling = SamplingArrays.from_params([request.sampling for request in requests], num_prompts)
  none: dict[str, Any] = dict.fromkeys(('bias_ids', 'bias_values'))
  if not any(each.top_k > 0 or each.top_p < 1 or each.min_p > 0 for each in (request.sampling for request in requests)):
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
  """Draws n completions of each prompt.

  Args:
    forward, variables: the model.
    empty_cache: zeros [..., R, G, S, K].
    groups: the prompts; none has penalties or biases.
    num_samples, max_new_tokens: n and M.
    shrinks: whether rows that are done may be left out; False where the mesh splits rows. They are not where the cache
      keeps the choices of experts.
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
  state, first = emit(logits[:, 0][row], state, None, 0)
  rows: Any = slice(None)
  carry = (jnp.ones((), jnp.int32), state, add(nothing, 0, first, rows))
  shrinks = shrinks and num_rows >= _MIN_ROWS and _expert_ids(state.cache) is None
  # One row has other bits.
  sizes = [size for size in (num_rows // 2, num_rows // 4, num_rows // 16) if shrinks and size >= 4]
  for least in (*sizes, 0):
    goes_on = lambda carry, least=least: jnp.sum(carry[1].active) > least
    carry = jax.lax.while_loop(goes_on, functools.partial(advance, rows), carry)
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
  """The choices [R, S, n] of a cache with leaves [..., R, 1, S, k]."""
  leaves = sorted((path, leaf) for path, leaf in traverse_util.flatten_dict(cache).items() if path[-1] == EXPERT_IDS)
  if not leaves:
    return None
  by_row = [jnp.moveaxis(leaf[..., 0, :, :], (-3, -2), (0, 1)) for _, leaf in leaves]
  return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in by_row], axis=-1)
