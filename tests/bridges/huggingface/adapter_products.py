"""What adapters add to kernels: as `peft` computes it, and by our weights."""

import numpy as np

from spmd_tasks.tuning.adapted_weights import AdapterNames
from spmd_tasks.tuning.adapters import low_rank_product


def deltas_of(theirs, base):
  """Name of a file's tensor -> what the adapter adds to it, as `peft` computes it."""
  found, names = {}, base.family.names
  for name, module in theirs.model.named_modules():
    if not hasattr(module, 'get_delta_weight') or 'default' not in module.lora_A:
      continue
    delta, name = module.get_delta_weight('default').detach().numpy(), name.removeprefix('base_model.model.')
    if not hasattr(module, 'parameter_name'):
      found[f'{name}.weight'] = delta
      continue
    layer, parameter = name.split('.mlp.')[0], module.parameter_name
    if theirs.base.name == 'gpt_oss':
      found[f'{layer}.mlp.experts.{parameter}'] = delta
      continue
    own = (names.expert_gate, names.expert_up) if parameter == 'gate_up_proj' else (names.expert_down,)
    for e, rows in enumerate(delta):
      for kernel, part in zip(own, np.split(rows, len(own)), strict=True):
        found[f'{layer}.{names.expert.format(e)}{kernel}.weight'] = part
  return found


def products_of(arrays, adapters):
  """Kernel -> what its adapter adds to it, in all layers."""
  products = {}
  for name, adapter in adapters.items():
    a, b = (arrays[part] for part in (AdapterNames(kernel=name).a, AdapterNames(kernel=name).b))
    stacked = 1 + ('/experts/' in name)
    products[name] = np.asarray(low_rank_product(adapter, a, b, stacked))
  return products


def with_ranks(shapes, adapters):
  """The shapes of weights of adapters with these ranks."""
  shapes = dict(shapes)
  for kernel, adapter in adapters.items():
    names, dim = AdapterNames(kernel=kernel), 1 + ('/experts/' in kernel)
    shapes[names.a] = (*shapes[names.a][:-1], adapter.rank)
    shapes[names.b] = (*shapes[names.b][:dim], adapter.rank, *shapes[names.b][dim + 1 :])
  return shapes
