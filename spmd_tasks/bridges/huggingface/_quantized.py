"""Dequantizes tensors lazily: MXFP4 (gpt-oss) and blockwise fp8 (DeepSeek).

Exports are not quantized.
"""

from collections.abc import Mapping

import numpy as np

from spmd_tasks.bridges._lazy_arrays import Index, LazyArray
from spmd_tasks.bridges.huggingface._config_keys import Config, is_neutral
from spmd_tasks.errors import UserError

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_MXFP4_BLOCK = 32
# Settings that do not affect the values of the weights.
_IGNORED = {'quant_method', 'fmt', 'scale_fmt', 'weight_block_size', 'activation_scheme', 'dequantize'}
_IGNORED |= {'modules_to_not_convert', 'ignored_layers'}


def check_quantization(config: Config) -> None:
  """Raises a UserError if the `quantization_config` of a config is not supported."""
  quantization = config.read('quantization_config', dict, {})
  method, fmt = quantization.get('quant_method', 'fp8'), quantization.get('fmt') or 'e4m3'
  if method not in ('mxfp4', 'fp8') or fmt not in ('e4m3', 'float8_e4m3fn'):
    raise config.error('quantization_config', 'must be mxfp4 or fp8 (e4m3): use the folder with unquantized weights')
  unknown = sorted(key for key, value in quantization.items() if key not in _IGNORED and not is_neutral(value))
  if unknown:
    raise config.error('quantization_config', f'has the unknown setting {unknown[0]}')


def dequantize(tensors: Mapping[str, LazyArray], block: tuple[int, int]) -> tuple[dict[str, LazyArray], set[str]]:
  """Replaces quantized tensors by float32 tensors.

  MXFP4: `x_blocks` uint8 [..., rows, n, 16] and `x_scales` uint8 [..., rows, n] become `x` [..., 32 n, rows].
  fp8: `x` float8 [rows, columns] is multiplied by `x_scale_inv` [rows / block, columns / block].

  Args:
    tensors: name -> tensor.
    block: the number of rows and columns per fp8 scale.

  Returns:
    The tensors, and the names of those that were quantized.

  Raises:
    UserError: a scale is missing or has a wrong shape.
  """
  dequantized, quantized = {}, set()
  for name, tensor in tensors.items():
    if name.endswith('_blocks') and tensor.dtype == np.uint8:
      base = name.removesuffix('_blocks')
      dequantized[base] = _mxfp4(base, tensor, tensors.get(f'{base}_scales'))
      quantized.add(base)
    elif tensor.dtype.itemsize == 1 and tensor.dtype.name.startswith('float8'):
      dequantized[name] = _fp8(name, tensor, tensors.get(f'{name}_scale_inv'), block)
      quantized.add(name)
    elif not (name.endswith('_scales') and name.replace('_scales', '_blocks') in tensors):
      dequantized[name] = tensor
  scales = {f'{name}_scale_inv' for name in quantized}
  return {name: tensor for name, tensor in dequantized.items() if name not in scales}, quantized


def _mxfp4(name: str, blocks: LazyArray, scales: LazyArray | None) -> LazyArray:
  *leading, rows, num_blocks, half = blocks.shape
  if scales is None or scales.shape != blocks.shape[:-1] or 2 * half != _MXFP4_BLOCK:
    shape = None if scales is None else list(scales.shape)
    raise UserError(f'{name}_blocks {list(blocks.shape)} and {name}_scales {shape} do not match: download them again.')

  def read(index: Index) -> np.ndarray:
    *leading_index, column, row = index
    low, high = column.start // _MXFP4_BLOCK, -(-column.stop // _MXFP4_BLOCK)
    block = (*leading_index, row, slice(low, high))
    packed = blocks.read((*block, slice(0, half)))
    values = np.stack([_FP4[packed & 15], _FP4[packed >> 4]], axis=-1)  # the low nibble comes first
    values = values.reshape((*packed.shape[:-1], _MXFP4_BLOCK))
    values = np.ldexp(values, scales.read(block).astype(np.int32)[..., None] - 127)
    flat = values.reshape((*values.shape[:-2], -1))
    first_column = low * _MXFP4_BLOCK
    return np.swapaxes(flat[..., column.start - first_column : column.stop - first_column], -1, -2)

  return LazyArray((*leading, num_blocks * _MXFP4_BLOCK, rows), 'float32', read)


def _fp8(name: str, values: LazyArray, scales: LazyArray | None, block: tuple[int, int]) -> LazyArray:
  if scales is None or scales.shape != tuple(-(-size // step) for size, step in zip(values.shape, block)):
    shape = None if scales is None else list(scales.shape)
    raise UserError(f'{name} {list(values.shape)} and {name}_scale_inv {shape} do not match: download them again.')

  def read(index: Index) -> np.ndarray:
    covered = tuple(slice(part.start // step, -(-part.stop // step)) for part, step in zip(index, block))
    scale = scales.read(covered).astype(np.float32)
    for axis, (part, step) in enumerate(zip(index, block)):
      scale = np.take(scale, np.arange(part.start, part.stop) // step - covered[axis].start, axis=axis)
    return values.read(index).astype(np.float32) * scale

  return LazyArray(values.shape, 'float32', read)
