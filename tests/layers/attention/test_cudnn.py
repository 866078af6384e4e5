"""cuDNN's attention without a GPU: an emulation of its calls gives the numbers; scripts/gpu_check has the real ones.

Shapes: as in _cudnn.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.attention import _cudnn
from spmd_tasks.layers.attention._plain import AttentionOptions, Heads, attend_plainly

B, T, H, G, K, M = 2, 48, 4, 2, 16, 4
SCALE, WINDOW = K**-0.5, 16


def emulated(static, bias, places, operands, results, *, is_backward):
  """What cuDNN computes, as its documentation has it, on rows that are one row of B * T tokens; in float32."""
  query, key, value = (jnp.asarray(x, jnp.float32).reshape(B * T, *x.shape[2:]) for x in operands[:3])
  repeats = query.shape[1] // key.shape[1]
  token = jnp.arange(B * T)
  distance = token[:, None] - token[None, :]
  if places is None:
    number, first = token // T, token // T * T
  else:  # only lengths and starts are given to it
    belongs = (token[:, None] >= places.starts[None, : B * M]) & (
      token[:, None] < (places.starts[: B * M] + places.lengths)[None, :]
    )
    number = jnp.argmax(belongs, axis=1)
    first = places.starts[number]
  may_see = (number[:, None] == number[None, :]) & (distance >= 0) & (distance < (static.window or B * T))
  added = jnp.zeros((B * T, B * T))
  if bias is not None:
    added = jax.vmap(lambda row: row[token % T][:, token % T])(bias[:, 0].astype(jnp.float32))[token // T, token]
  logits = jnp.einsum('TGRK,SGK->GRTS', query.reshape(B * T, -1, repeats, K), key) * static.scale + added[None, None]
  logits = jnp.where(may_see[None, None], logits, -jnp.inf)
  split = lambda x, last: jnp.moveaxis(x.reshape(B, T, -1, last), 1, 2)
  if not is_backward:
    attended = jnp.einsum('GRTS,SGK->TGRK', jax.nn.softmax(logits), value)
    sums = jax.scipy.special.logsumexp(logits, axis=-1).reshape(H, B * T)
    of_segments = jnp.full(results[1].shape, jnp.nan).at[number, :, token - first].set(sums.T)
    return split(attended, K).astype(results[0].dtype), of_segments
  sums, cotangent = (
    operands[3][number, :, token - first],
    operands[4].astype(jnp.float32).reshape(B * T, -1, repeats, K),
  )
  weights = jnp.exp(logits - sums.T.reshape(-1, repeats, B * T, 1))
  inner = jnp.einsum('TGRK,SGK->GRTS', cotangent, value)
  d_logits = weights * (inner - jnp.sum(weights * inner, axis=-1, keepdims=True)) * static.scale
  d_query = jnp.einsum('GRTS,SGK->TGRK', d_logits, key)
  d_key = jnp.einsum('GRTS,TGRK->SGK', d_logits, query.reshape(B * T, -1, repeats, K))
  d_value = jnp.einsum('GRTS,TGRK->SGK', weights, cotangent)
  return tuple(split(x, K).astype(r.dtype) for x, r in zip((d_query, d_key, d_value), results, strict=True))


def documents(*lengths):
  """Segment ids of a row, in order; a length below 0 is of padding."""
  return [0 if n < 0 else 1 + i for i, n in enumerate(lengths) for _ in range(abs(n))]


ROWS = {
  'few documents': (documents(7, 20, 21), documents(48)),
  'padding at the end': (documents(30, 2, -16), documents(1, 1, 46)),
  'more documents than there is room for': (documents(10, 10, 10, 10, 8), documents(48)),
  'a document in two parts': (documents(20, 28), [1] * 10 + [2] * 10 + [1] * 28),
}


@functools.cache
def compiled(is_plain):
  def run(query, key, value, segments, cotangent):
    options = AttentionOptions(window=WINDOW)
    static = _cudnn._Static(SCALE, True, WINDOW, M)

    def attend(*arrays):
      if is_plain:
        return attend_plainly(Heads(*arrays, segments, segments), options)
      return _cudnn._attend(*arrays, segments, static)

    out, pull_back = jax.vjp(attend, query, key, value)
    fits = _cudnn._fits(segments, M)
    return (out, *pull_back(cotangent)), fits

  return jax.jit(run)


@pytest.mark.parametrize('name', ROWS)
def test_packed_documents_have_the_numbers_of_the_plain_computation(name, rng, monkeypatch):
  monkeypatch.setattr(_cudnn, '_call', emulated)
  query, key, value, cotangent = (jnp.asarray(rng.normal(size=(B, T, n, K)), 'float32') for n in (H, G, G, H))
  segments = jnp.asarray(ROWS[name], jnp.int32)
  found, fits = compiled(False)(query, key, value, segments, cotangent)
  wanted, _ = compiled(True)(query, key, value, segments, cotangent)
  assert bool(fits) == (name in ('few documents', 'padding at the end'))
  for ours, theirs_ in zip(found, wanted, strict=True):
    np.testing.assert_allclose(ours, theirs_, atol=2e-5)
