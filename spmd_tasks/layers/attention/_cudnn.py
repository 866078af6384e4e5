"""cuDNN's attention on the rows and heads of each device: XLA's custom calls for it, with packed documents.

`jax.nn.dot_product_attention` makes the same calls, but it separates documents only by a bias [B, 1, T, T], whose
gradient it computes too; it asks this process's GPU what is supported, but a plan has no GPU; and remat runs the kernel
again. Here results and softmax denominators have the checkpoint name ATTENTION_NAME.

On Hopper and later, cuDNN gets documents as offsets into the row, and skips pairs of tokens of different documents. It
computes each of the [B, M] segments as if it had T tokens, so M is small. If a row has more documents, or they are not
in the order of their ids, all rows of the device use the bias instead.

Shapes: B rows, T tokens, H query heads, G key/value heads, K head dim, V dim of a value; M segments of a row.
"""

from collections.abc import Sequence
import functools
import json
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.layers.attention._on_devices import attend_on_devices
from spmd_tasks.layers.attention._plain import ATTENTION_NAME, AttentionLayout, AttentionOptions, Heads

_TOKENS_OF_A_SEGMENT = 256  # M = T / this: documents of this mean length fit
_LEAST_SEGMENTS, _MOST_SEGMENTS = 4, 32
_MASKED = -(2.0**41)  # as in JAX: cuDNN computes wrong differences of much larger numbers


class _Static(NamedTuple):
  """Static arguments of a call; `num_segments` is 0 if documents are always separated by a bias."""

  scale: float
  causal: bool
  window: int | None
  num_segments: int


def attend_by_cudnn(
  heads: Heads,
  options: AttentionOptions,
  *,
  layout: AttentionLayout,
  has_offsets: bool,
) -> jax.Array:
  """Computes `attend`; `has_offsets`: whether the GPU's cuDNN supports packed documents as offsets.

  With a bias, cuDNN needs an even number of tokens; the result of a padded token is dropped.
  """
  length, head_dim = heads.query.shape[1] + heads.query.shape[1] % 2, heads.query.shape[-1]
  num_segments = min(_MOST_SEGMENTS, max(_LEAST_SEGMENTS, length // _TOKENS_OF_A_SEGMENT)) if has_offsets else 0
  static = _Static(options.scale(head_dim), options.causal, options.window, num_segments)

  def attend_local(query, key, value, segment_ids, sinks, table):
    del sinks, table  # cuDNN has none
    return _attend(query, key, value, segment_ids, static)

  return attend_on_devices(attend_local, heads, options, layout=layout, tile=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query, key, value, segments, static: _Static):
  return _attend_forward(query, key, value, segments, static)[0]


def _attend_forward(query, key, value, segments, static):
  attended, sums = _by_documents(_forward, segments, static, query, key, value)
  attended, sums = checkpoint_name(attended, ATTENTION_NAME), checkpoint_name(sums, ATTENTION_NAME)
  return attended, (query, key, value, segments, attended, sums)


def _attend_backward(static, saved, cotangent):
  query, key, value, segments, attended, sums = saved
  gradients = _by_documents(_backward, segments, static, query, key, value, attended, sums, cotangent)
  return *gradients, None


_attend.defvjp(_attend_forward, _attend_backward)


def _by_documents(kernel: Any, segments: jax.Array | None, static: _Static, *arrays: jax.Array) -> Any:
  """Runs a kernel without documents, with their offsets if they fit, or else with a bias."""
  if segments is None:
    return kernel(static, None, None, *arrays)

  def by_bias(segments, *arrays):
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return kernel(static, jnp.where(same, 0, _MASKED).astype(arrays[0].dtype), None, *arrays)

  if not static.num_segments:
    return by_bias(segments, *arrays)

  def by_offsets(segments, *arrays):
    return kernel(static, None, _places(segments, static.num_segments), *arrays)

  return jax.lax.cond(_fits(segments, static.num_segments), by_offsets, by_bias, segments, *arrays)


class _Places(NamedTuple):
  """The places of the segments of all rows.

  Attributes:
    lengths: int32 [B * M], the number of tokens of each segment, row by row; then zeros.
    starts: int32 [B * (M + 1)], the first token of each segment among the B * T; B * T after the last.
    segment, column: int32 [B, T], the number of each token's segment, and the token's place in it.
  """

  lengths: jax.Array
  starts: jax.Array
  segment: jax.Array
  column: jax.Array


def _begins(segments: jax.Array) -> jax.Array:
  """Returns bool [B, T]: whether a token is the first of a segment."""
  return jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0


def _fits(segments: jax.Array, num_segments: int) -> jax.Array:
  """Returns whether each row has at most M segments, in the order of their ids, with padding only at the end."""
  ids = jnp.where(segments > 0, segments, jnp.iinfo(jnp.int32).max - 1 - segments)  # 0, and -1 after it, come last
  return jnp.all(ids[:, 1:] >= ids[:, :-1]) & jnp.all(jnp.sum(_begins(segments), axis=1) <= num_segments)


def _places(segments: jax.Array, num_segments: int) -> _Places:
  num_rows, length = segments.shape
  begins, total = _begins(segments).reshape(-1), num_rows * length
  tokens = jnp.arange(total, dtype=jnp.int32)
  segment = jnp.cumsum(begins, dtype=jnp.int32) - 1
  starts = jnp.full(num_rows * (num_segments + 1), total, jnp.int32)
  starts = starts.at[jnp.where(begins, segment, starts.size)].set(tokens, mode='drop')
  column = tokens - starts[segment]
  return _Places(
    jnp.diff(starts)[: num_rows * num_segments], starts, segment.reshape(segments.shape), column.reshape(segments.shape)
  )


def _forward(static, bias, places, query, key, value):
  """Returns results [B, T, H, V] and the logarithms of the softmax's sums, float32 [B, H, T]."""
  num_rows, length, num_heads, _ = query.shape
  num_segments = 1 if places is None else static.num_segments
  results = (
    jax.ShapeDtypeStruct((num_rows, num_heads, length, value.shape[-1]), query.dtype),
    jax.ShapeDtypeStruct((num_rows * num_segments, num_heads, length), jnp.float32),
  )
  operands = (query, key, value, *(() if bias is None else (bias,)))
  attended, sums = _call(static, bias, places, operands, results, is_backward=False)
  if places is not None:  # from the tokens of each segment to the tokens of each row
    sums = jnp.moveaxis(sums[places.segment, :, places.column], 2, 1)
  return jnp.swapaxes(attended, 1, 2), sums


def _backward(static, bias, places, query, key, value, attended, sums, cotangent):
  """Returns the gradients of query, key and value."""
  if places is not None:
    num_rows, num_heads, length = sums.shape
    of_segments = jnp.zeros((num_rows * static.num_segments, num_heads, length), sums.dtype)
    sums = of_segments.at[places.segment, :, places.column].set(jnp.moveaxis(sums, 1, 2))
  results = tuple(
    jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in (query, key, value)
  )
  operands = (query, key, value, sums, cotangent, *(() if bias is None else (bias,)), attended)
  return tuple(jnp.swapaxes(x, 1, 2) for x in _call(static, bias, places, operands, results, is_backward=True))


def _call(
  static: _Static,
  bias: jax.Array | None,
  places: _Places | None,
  operands: tuple[jax.Array, ...],
  results: tuple[jax.ShapeDtypeStruct, ...],
  *,
  is_backward: bool,
) -> Sequence[jax.Array]:
  """Calls cuDNN; results [B, H, T, K] have the memory layout of [B, T, H, K]."""
  query, key = operands[:2]
  mask = 'CAUSAL' if static.causal else 'NO_MASK'
  if places is not None:
    mask = 'PADDING_CAUSAL' if static.causal else 'PADDING'
    rows = len(query), -1
    offsets = (places.starts * (x.shape[2] * x.shape[3]) for x in (query, key))  # in numbers, not in tokens
    operands = (*operands, *[places.lengths.reshape(rows)] * 2, *(x.reshape(rows) for x in offsets))
  call = jax.ffi.ffi_call(
    f'__cudnn$fmha{"" if bias is None else "ScaleBias"}Softmax{"Backward" if is_backward else ""}',
    (*results, jax.ShapeDtypeStruct((0,), jnp.uint8)),  # the last is the kernel's workspace
    vmap_method='sequential',
    output_layouts=[*((0, 2, 1, 3) if len(x.shape) == 4 else None for x in results), None],
    custom_call_api_version=2,
    legacy_backend_config=_config(static, mask, query, key, places, is_backward),
  )
  return call(*operands)[:-1]


# cuDNN's products -> the dims of both operands that are contracted, and the operands' batch dims: rows and heads.
_PRODUCTS = {
  False: {'bmm1': ((3, 3), (0, 2), (0, 2)), 'bmm2': ((3, 1), (0, 1), (0, 2))},
  True: {
    'bmm1_grad_gemm1': ((2, 1), (0, 1), (0, 2)),
    'bmm1_grad_gemm2': ((3, 1), (0, 1), (0, 2)),
    'bmm2_grad_gemm1': ((2, 1), (0, 1), (0, 2)),
    'bmm2_grad_gemm2': ((3, 3), (0, 2), (0, 2)),
  },
}


def _config(
  static: _Static, mask: str, query: jax.Array, key: jax.Array, places: _Places | None, is_backward: bool
) -> str:
  """Returns XLA's CudnnfMHABackendConfig as JSON, as JAX writes it."""
  num_rows, length, num_heads, _ = query.shape
  scores = {
    'element_type': {'bfloat16': 'BF16', 'float16': 'F16'}[query.dtype.name],
    'dimensions': [str(size) for size in (num_rows, num_heads, length, key.shape[1])],
    'layout': {'minor_to_major': ['3', '2', '1', '0']},
  }
  products = {
    f'{name}_dot_dimension_numbers': {
      'lhs_contracting_dimensions': [str(contracted[0])],
      'rhs_contracting_dimensions': [str(contracted[1])],
      'lhs_batch_dimensions': [str(dim) for dim in left],
      'rhs_batch_dimensions': [str(dim) for dim in right],
    }
    for name, (contracted, left, right) in _PRODUCTS[is_backward].items()
  }
  kernel = {
    'algorithm': {'algo_id': '0', 'math_type': 'TENSOR_OP_MATH', 'tuning_knobs': {'17': '1', '24': '0'}}
    | {'is_cudnn_frontend': True, 'workspace_size': '0'},
    'fmha_scale': static.scale,
    'intermediate_tensor_shape': scores,
    'is_flash_attention': True,
    'mask_type': mask,
    **products,
    'dropout_rate': 0.0,
    'seed': 42,
    'sliding_window_length': static.window or 0,
    'max_seg_per_batch': 1 if places is None else static.num_segments,
    'is_paged_attention': False,
  }
  return json.dumps({'operation_queue_id': '0', 'cudnn_fmha_backend_config': kernel})
