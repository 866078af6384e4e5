"""A greedy decode step of a dense language model, handwritten with plain jax.jit.

bench_serve.py compares the engine's step with this one, which uses nothing of spmd_tasks except the weights of
lm.DenseLanguageModel. Every slot is in use and gets the most likely next token, without other sampling, top
log-probabilities or ends of sequences. In the caches, heads come before positions, as the matmuls over positions need
that order; otherwise every step would transpose the caches.

Shapes: N slots, S positions, D model, H heads, K head dim, F ffn, V vocab, L layers.
"""

from collections.abc import Callable
import math
from typing import Any

from bare_step import rms_norm, rotate
import jax
import jax.numpy as jnp

State = dict[str, jax.Array]


def init_state(weights: Any, num_slots: int, max_len: int) -> State:
  """Returns empty caches (keys and values [L, N, H, S, K]), tokens and positions (int32 [N])."""
  num_layers, _, num_heads, head_dim = weights['stack']['layers']['attention']['key']['kernel'].shape
  cache = jnp.zeros((num_layers, num_slots, num_heads, max_len, head_dim), jnp.float32)
  zeros = jnp.zeros(num_slots, jnp.int32)
  return {'keys': cache, 'values': jnp.copy(cache), 'tokens': zeros, 'positions': jnp.copy(zeros)}


def make_step() -> Callable[[Any, State], tuple[State, tuple[jax.Array, jax.Array]]]:
  """Returns (weights, state) -> (state, (next tokens [N], their log-probabilities [N])), which donates the state."""

  def step(weights: Any, state: State) -> tuple[State, tuple[jax.Array, jax.Array]]:
    table, layers = weights['embedding']['table'], weights['stack']['layers']
    positions, head_dim = state['positions'], state['keys'].shape[-1]
    frequencies = 10_000.0 ** (-jnp.arange(0, head_dim, 2) / head_dim)
    angles = positions[:, None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)  # [N, 1, K/2]
    is_before = (jnp.arange(state['keys'].shape[3])[None, :] < positions[:, None])[:, None]  # [N, 1, S]

    def layer(x: jax.Array, weights_and_caches: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
      w, keys, values = weights_and_caches
      normed = rms_norm(x, w['attention_norm']['scale'])
      query, key, value = (
        jnp.einsum('ND,DHK->NHK', normed, w['attention'][name]['kernel']) for name in ('query', 'key', 'value')
      )
      query, key = rotate(query, sin, cos) / math.sqrt(head_dim), rotate(key, sin, cos)
      before = jnp.where(is_before, jnp.einsum('NHK,NHSK->NHS', query, keys), -jnp.inf)
      itself = jnp.sum(query * key, axis=-1, keepdims=True)
      attention = jax.nn.softmax(jnp.concatenate([before, itself], axis=-1), axis=-1)
      attended = jnp.einsum('NHS,NHSK->NHK', attention[..., :-1], values) + attention[..., -1:] * value
      x = x + jnp.einsum('NHK,HKD->ND', attended, w['attention']['out']['kernel'])
      normed = rms_norm(x, w['ffn_norm']['scale'])
      gate, up = normed @ w['ffn']['gate']['kernel'], normed @ w['ffn']['up']['kernel']
      return x + (jax.nn.silu(gate) * up) @ w['ffn']['down']['kernel'], (key, value)

    x = table[state['tokens']] * math.sqrt(table.shape[1])
    x, (new_keys, new_values) = jax.lax.scan(layer, x, (layers, state['keys'], state['values']))
    logits = rms_norm(x, weights['final_norm']['scale']) @ table.T
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logprobs = jnp.max(jax.nn.log_softmax(logits, axis=-1), axis=-1)
    slots = jnp.arange(tokens.shape[0])
    # One update in place after the loop over layers; a cache in the loop's carry would be copied.
    state = {
      'keys': state['keys'].at[:, slots, :, positions].set(jnp.moveaxis(new_keys, 0, 1)),
      'values': state['values'].at[:, slots, :, positions].set(jnp.moveaxis(new_values, 0, 1)),
      'tokens': tokens,
      'positions': positions + 1,
    }
    return state, (tokens, logprobs)

  return jax.jit(step, donate_argnums=1)
