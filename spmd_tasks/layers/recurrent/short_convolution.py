"""Short causal convolution: each feature of a token is a weighted sum of that feature in the last few tokens.

Shapes: B batch, T sequence, W taps, H heads, K head dim.
"""

import jax
import jax.numpy as jnp


def document_numbers(segment_ids: jax.Array) -> jax.Array:
  """Returns int32 [B, T], 0 for the tokens that continue what precedes the row, then 1, 2, ... for its documents.

  A document starts where the segment id changes to another id than 0, so padding, which has id 0, belongs to the tokens
  before it. The document in a row's first column has number 0.
  """
  starts = (segment_ids[:, 1:] != segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
  return jnp.pad(jnp.cumsum(starts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def convolve(x: jax.Array, kernel: jax.Array, documents: jax.Array, earlier: jax.Array | None = None) -> jax.Array:
  """Returns y [B, T, H, K], y[t] = sum over w of kernel[w] * x[t - (W - 1) + w] over the tokens of t's document.

  Args:
    x: [B, T, H, K].
    kernel: [W, H, K]; the last tap is of the token itself.
    documents: int32 [B, T], see `document_numbers`.
    earlier: [B, W - 1, H, K], the tokens before the row, which document 0 continues; None: there are none.
  """
  num_taps, length = len(kernel), x.shape[1]
  x, documents = _with_earlier(x, documents, earlier, num_taps)
  y = jnp.zeros((), x.dtype)
  for tap in range(num_taps):
    is_same = documents[:, tap : tap + length] == documents[:, num_taps - 1 :]
    y += jnp.where(is_same[:, :, None, None], x[:, tap : tap + length], 0) * kernel[None, None, tap]
  return y


def last_tokens(x: jax.Array, lengths: jax.Array, earlier: jax.Array | None, num_tokens: int) -> jax.Array:
  """Returns [B, num_tokens, H, K], the last ones of the tokens of rows with `lengths` [B] tokens and then padding."""
  x, _ = _with_earlier(x, lengths[:, None], earlier, num_tokens + 1)
  columns = lengths[:, None] + jnp.arange(num_tokens)[None, :]
  return jnp.take_along_axis(x, columns[:, :, None, None], axis=1)


def _with_earlier(
  x: jax.Array, documents: jax.Array, earlier: jax.Array | None, num_taps: int
) -> tuple[jax.Array, jax.Array]:
  """Returns x and documents with W - 1 earlier tokens, of document 0, in front; zeros if there are none."""
  before = ((0, 0), (num_taps - 1, 0))
  if earlier is None:
    return jnp.pad(x, (*before, (0, 0), (0, 0))), jnp.pad(documents, before)
  return jnp.concatenate([earlier.astype(x.dtype), x], axis=1), jnp.pad(documents, before)
