"""Attention of a call's tokens to one another, or to an encoder's tokens, by one of several implementations.

    attend(query, key, value, segment_ids, AttentionOptions(window=4096), implementation='splash')

'xla'        the plain computation, with all scores [B, H, T, S] in memory; on every platform.
'blockwise'  the plain computation for a few hundred queries at a time (_blockwise.py); on every platform.
'cudnn'      cuDNN's kernel (_cudnn.py); NVIDIA GPUs, 16-bit dtypes.
'splash'     JAX's Pallas kernel for TPUs (_splash.py).
'ring'       keys and values go round the devices that share a sequence (_context.py); only for those.

If the mesh splits the tokens of a sequence, all but 'ring' gather keys and values. None picks the best implementation
for the mesh's devices and the call, and logs it once with the reason. An implementation that is named must support the
call.

Shapes: B batch, T sequence (S as seen by queries), H query heads, G key/value heads, K head dim, V dim of a value.
"""

import dataclasses
import functools
import importlib.util
import re
from typing import Any, Literal, get_args

from absl import logging
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._blockwise import attend_blockwise
from spmd_tasks.layers.attention._context import attend_by_ring, attend_gathered, balance_tokens
from spmd_tasks.layers.attention._cudnn import attend_by_cudnn
from spmd_tasks.layers.attention._plain import (
  BLOCK,
  AttentionOptions,
  Heads,
  attend_plainly,
  attention_layout,
)
from spmd_tasks.layers.attention._splash import attend_by_splash
from spmd_tasks.layers.base import KernelCall, current_layer_scope, layer_scope
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.specs import current_device

Implementation = Literal['xla', 'blockwise', 'cudnn', 'splash', 'ring']
_LONG = 1024  # from this T on, None does not compute the scores of all queries at once


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array | None,
  options: AttentionOptions = AttentionOptions(),
  *,
  prefix_mask: jax.Array | None = None,
  key_segments: jax.Array | None = None,
  implementation: Implementation | None = None,
  split_dims: SplitDims = None,
) -> jax.Array:
  """Computes the attention of all tokens of a batch to one another: [B, T, H, V].

  Every implementation defines its own VJP, so `jax.jvp` and `jax.linearize` do not support it. Second derivatives work
  without a kernel ('xla', 'blockwise'): `jax.jvp` of a gradient gives Hessian-vector products. A forward-mode
  derivative takes two reverse passes: after `y, vjp = jax.vjp(f, x)`, `jax.vjp(vjp, y)[1]((dx,))`.

  Args:
    query, key, value: [B, T, H, K], [B, T, G, K] and [B, T, G, V]; an encoder's keys and values have S tokens.
    segment_ids: int32 [B, T], the document of each token; None: one document per row.
    options: the window, the scale, and so on.
    prefix_mask, implementation: see `Attention`.
    key_segments: int32 [B, S], the documents of the keys; None: the same as the queries'.
    split_dims: of `query`; a kernel runs on each device's rows and heads.

  Raises:
    UserError: `implementation` does not support the call, or not on these devices.
  """
  layout = attention_layout(split_dims, len(query))
  special = {
    'relative position biases': options.bias is not None,
    'prefixes': prefix_mask is not None,
    'evenly attending padding': options.even_padding,
    'keys of an encoder': key_segments is not None or key.shape[1] != query.shape[1],
  }
  device = current_device()
  is_hopper = re.search(r'\bG?[HB]\d+\b', device.device_kind) is not None  # H100, GH200, B200, ...
  call = AttentionCall(
    platform=device.platform,
    dtype=query.dtype.name,
    length=query.shape[1],
    head_dim=query.shape[-1],
    value_dim=value.shape[-1],
    has_cap=options.logit_cap is not None,
    has_sinks=options.sinks is not None,
    num_token_parts=layout.num_tokens,
    has_cudnn=_has_cudnn() or not isinstance(device, jax.Device),  # a device that a plan stands for
    is_hopper=is_hopper,
    special=next((name for name, is_used in special.items() if is_used), None),
  )
  scope = current_layer_scope()
  name = 'xla' if scope.plain_products else resolve_implementation(implementation, call)
  if scope.balanced_tokens and (name != 'splash' or query.shape[1] % (256 * layout.num_tokens)):
    arrays = query, key, value, segment_ids, prefix_mask
    query, key, value, segment_ids, prefix_mask = balance_tokens(arrays, layout, back=True)
    settings: Any = {'prefix_mask': prefix_mask, 'implementation': implementation, 'split_dims': split_dims}
    with layer_scope(balanced_tokens=False):
      return balance_tokens(attend(query, key, value, segment_ids, options, **settings), layout)
  if prefix_mask is not None:
    segment_ids = jnp.ones_like(prefix_mask) if segment_ids is None else segment_ids
    segment_ids = 2 * segment_ids + prefix_mask.astype(segment_ids.dtype)
    options = dataclasses.replace(options, has_prefix=True)
  heads = Heads(query, key, value, segment_ids, segment_ids if key_segments is None else key_segments)
  if scope.on_kernel is not None:
    scope.on_kernel(KernelCall('attention', name, heads, (options, layout)))
  if name == 'ring':
    return attend_by_ring(heads, options, layout=layout)
  if name == 'splash':
    return attend_by_splash(heads, options, layout=layout, interpret=call.platform != 'tpu')
  if name == 'cudnn':
    return attend_by_cudnn(heads, options, layout=layout, has_offsets=is_hopper)
  if call.num_token_parts > 1:
    return attend_gathered(heads, options, layout=layout, block=BLOCK if name == 'blockwise' else query.shape[1])
  if name == 'blockwise':
    return attend_blockwise(heads, options)
  return attend_plainly(heads, options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
  """What decides which implementations support a call.

  Attributes:
    platform: of the devices that the call is compiled for: 'cpu', 'gpu' or 'tpu'.
    dtype: of the queries.
    length, head_dim, value_dim: T, K and V.
    has_cap, has_sinks: whether logits are capped, and whether heads have sinks.
    num_token_parts: into how many parts the mesh splits T.
    has_cudnn: whether JAX's plugin for CUDA is installed, which includes cuDNN.
    is_hopper: whether the devices are NVIDIA GPUs of the Hopper generation or later.
    special: a feature that only 'xla' and 'blockwise' support, such as 'relative position biases'; None: none.
  """

  platform: str
  dtype: str
  length: int
  head_dim: int
  value_dim: int
  has_cap: bool = False
  has_sinks: bool = False
  num_token_parts: int = 1
  has_cudnn: bool = True
  is_hopper: bool = False
  special: str | None = None

  def obstacle(self, implementation: str) -> str | None:
    """Returns why `implementation` does not support this call; None if it does."""
    if self.special and implementation not in ('xla', 'blockwise'):
      return f'does not support {self.special}'
    if self.special and self.num_token_parts > 1:
      return f'does not support {self.special} on a mesh that splits sequences, here into {self.num_token_parts} parts'
    if implementation == 'splash' and self.platform != 'tpu':
      return f"is a kernel for TPUs, but the mesh's devices are of the platform {self.platform!r}"
    if implementation == 'ring' and self.num_token_parts == 1:
      return 'needs a mesh axis of several devices that splits the sequence'
    if implementation == 'cudnn':
      if self.num_token_parts > 1:
        return f'needs whole sequences on each device, but the mesh splits them into {self.num_token_parts} parts'
      if self.platform != 'gpu':
        return f"is a library for NVIDIA GPUs, but the mesh's devices are of the platform {self.platform!r}"
      if not self.has_cudnn:
        return "needs JAX's plugin for CUDA, which is not installed"
      if self.dtype not in ('bfloat16', 'float16'):
        return f'needs bfloat16 or float16, not {self.dtype}'
      if self.has_cap or self.has_sinks:
        return f'does not support {"a logit cap" if self.has_cap else "sinks"}'
      most = 256 if self.is_hopper else 128
      if self.head_dim != self.value_dim or self.head_dim % 8 or self.head_dim > most:
        return (
          f'needs keys and values of one head dim that is divisible by 8 and at most {most}'
          f'{"" if self.is_hopper else " (256 from Hopper on)"}, not {self.head_dim} and {self.value_dim}'
        )
    return None


def resolve_implementation(asked: str | None, call: AttentionCall) -> str:
  """Returns the implementation that is asked for, or the best one if None is.

  Raises a UserError if there is no such implementation, or it does not support the call.
  """
  if asked is None:
    return _best_implementation(call)
  if asked not in (known := get_args(Implementation)):
    raise UserError(f'implementation={asked!r} of attention is unknown: choose one of {", ".join(known)}, or None.')
  if obstacle := call.obstacle(asked):
    raise UserError(f'implementation={asked!r} of attention {obstacle}: choose another, or None for the best.')
  return asked


@functools.cache
def _has_cudnn() -> bool:
  return any(importlib.util.find_spec(f'jax_cuda{version}_plugin') is not None for version in (12, 13))


@functools.cache
def _best_implementation(call: AttentionCall) -> str:
  """Returns the best implementation for a call; decides and logs it once per process and kind of call."""
  preferred = {'tpu': 'splash', 'gpu': 'cudnn'}.get(call.platform)
  obstacle = call.obstacle(preferred) if preferred else None
  name = 'blockwise' if call.length >= _LONG else 'xla'
  if plain_obstacle := call.obstacle(name):
    raise UserError(f"implementation={name!r} of attention {plain_obstacle}: remove 'seq' from the axis rules.")
  if preferred and not obstacle:
    name, reason = preferred, f'the devices are of the platform {call.platform!r}'
  else:
    reason = f'{preferred} {obstacle}' if obstacle else f'{call.length} tokens on {call.platform!r}'
  logging.info('Attention is computed by %r: %s.', name, reason)
  return name
