"""Folders of `peft` over the small Llama of model_folders.py, and what a folder merged with one is, by numpy alone."""

import json
from pathlib import Path
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

ATTENTION = ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj')
FEED_FORWARD = ('mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj')


def write_adapter(folder: Path, base: Path, modules, *, rank: int, alpha: float, seed: int, **settings) -> Path:
  """Writes an adapter with random weights of modules such as 'self_attn.q_proj' of both layers, or 'lm_head'."""
  folder.mkdir(parents=True)
  kernels, rng, tensors = load_file(base / 'model.safetensors'), np.random.default_rng(seed), {}
  for name in _modules(modules):
    out, inputs = kernels[f'{name}.weight'].shape
    prefix = f'base_model.model.{name}'
    tensors[f'{prefix}.lora_A.weight'] = rng.normal(0, inputs**-0.5, (rank, inputs)).astype(np.float32)
    tensors[f'{prefix}.lora_B.weight'] = rng.normal(0, 0.3, (out, rank)).astype(np.float32)
    if settings.get('use_dora'):
      lengths = np.linalg.norm(kernels[f'{name}.weight'], axis=1)
      tensors[f'{prefix}.lora_magnitude_vector'] = (lengths * rng.uniform(0.5, 1.5, out)).astype(np.float32)
  config = {'peft_type': 'LORA', 'r': rank, 'lora_alpha': alpha, 'bias': 'none', **settings}
  (folder / 'adapter_config.json').write_text(json.dumps(config))
  save_file(tensors, folder / 'adapter_model.safetensors')
  return folder


def write_merged(folder: Path, base: Path, adapter: Path) -> Path:
  """Writes the base with an adapter in its kernels: W + s B A, and with DoRA each row of it with its magnitude."""
  shutil.copytree(base, folder)
  kernels = load_file(base / 'model.safetensors')
  parts, config = (
    load_file(adapter / 'adapter_model.safetensors'),
    json.loads((adapter / 'adapter_config.json').read_text()),
  )
  scale = config['lora_alpha'] / (config['r'] ** (0.5 if config.get('use_rslora') else 1))
  for key in [key for key in parts if key.endswith('lora_A.weight')]:
    prefix = key.removesuffix('.lora_A.weight')
    name = f'{prefix.removeprefix("base_model.model.")}.weight'
    kernel = kernels[name].astype(np.float64) + scale * parts[f'{prefix}.lora_B.weight'] @ parts[key].astype(np.float64)
    if config.get('use_dora'):
      kernel *= (parts[f'{prefix}.lora_magnitude_vector'] / np.linalg.norm(kernel, axis=1))[:, None]
    kernels[name] = kernel.astype(np.float32)
  save_file(kernels, folder / 'model.safetensors', metadata={'format': 'pt'})
  return folder


def _modules(modules) -> list[str]:
  layers = [f'model.layers.{i}.{name}' for i in range(2) for name in modules if name != 'lm_head']
  return layers + [name for name in modules if name == 'lm_head']
