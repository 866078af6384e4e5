"""Dequantizes any part of a tensor: MXFP4 (gpt-oss) and fp8 blocks (DeepSeek)."""

import json

import ml_dtypes
import numpy as np
import pytest

from spmd_tasks.bridges._lazy_arrays import lazy_array
from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface._quantized import dequantize
from spmd_tasks.errors import UserError
from tests.bridges.huggingface.tiny_configs import CONFIGS
from tests.bridges.test_lazy_arrays import assert_parts_are_equal

NUM_EXPERTS, ROWS, NUM_BLOCKS = 2, 5, 3


def mxfp4(rng):
  blocks = rng.integers(0, 256, (NUM_EXPERTS, ROWS, NUM_BLOCKS, 16), dtype=np.uint8)
  scales = rng.integers(120, 131, (NUM_EXPERTS, ROWS, NUM_BLOCKS), dtype=np.uint8)
  return blocks, scales


def number_of(code):
  """Decodes 4 bits: sign, two bits of exponent, one of mantissa."""
  sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
  size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
  return -size if sign else size


def test_mxfp4(rng):
  blocks, scales = mxfp4(rng)
  expected = np.zeros((NUM_EXPERTS, 32 * NUM_BLOCKS, ROWS), np.float32)
  for expert, row, block, byte in np.ndindex(blocks.shape):
    value, scale = int(blocks[expert, row, block, byte]), 2.0 ** (int(scales[expert, row, block]) - 127)
    expected[expert, 32 * block + 2 * byte, row] = number_of(value & 15) * scale
    expected[expert, 32 * block + 2 * byte + 1, row] = number_of(value >> 4) * scale
  tensors = {'up_blocks': lazy_array(blocks), 'up_scales': lazy_array(scales)}
  dequantized, quantized = dequantize(tensors, (128, 128))
  assert dequantized.keys() == quantized == {'up'}
  assert_parts_are_equal(dequantized['up'], expected, rng)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_mxfp4_as_transformers_reads_it(rng):
  import torch
  from transformers.integrations.mxfp4 import convert_moe_packed_tensors

  blocks, scales = mxfp4(rng)
  theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
  dequantized, _ = dequantize({'up_blocks': lazy_array(blocks), 'up_scales': lazy_array(scales)}, (128, 128))
  np.testing.assert_array_equal(np.asarray(dequantized['up']), theirs)


def test_fp8_blocks(rng):
  values = rng.normal(size=(13, 10)).astype(ml_dtypes.float8_e4m3fn)
  scales = rng.uniform(0.5, 2.0, (4, 3)).astype(np.float32)
  expected = values.astype(np.float32) * scales.repeat(4, 0)[:13].repeat(4, 1)[:, :10]
  tensors = {'up.weight': lazy_array(values), 'up.weight_scale_inv': lazy_array(scales), 'norm': lazy_array(scales[0])}
  dequantized, quantized = dequantize(tensors, (4, 4))
  assert dequantized.keys() == {'up.weight', 'norm'}
  assert quantized == {'up.weight'}
  assert_parts_are_equal(dequantized['up.weight'], expected, rng)


@pytest.mark.parametrize('missing', ['up_scales', 'up.weight_scale_inv'])
def test_a_tensor_without_its_scale_is_refused(missing, rng):
  blocks, scales = mxfp4(rng)
  values = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
  tensors = {'up_blocks': blocks, 'up_scales': scales, 'up.weight': values, 'up.weight_scale_inv': np.ones((1, 1))}
  with pytest.raises(UserError, match='do not match'):
    dequantize({name: lazy_array(value) for name, value in tensors.items() if name != missing}, (4, 4))


def test_another_quantization_is_refused(tmp_path):
  config = CONFIGS['llama'] | {'quantization_config': {'quant_method': 'gptq', 'bits': 4}}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match='must be mxfp4 or fp8'):
    open_folder(tmp_path)
