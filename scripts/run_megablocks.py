"""Computes the cases of tests/layers/moe/megablocks_cases.py with MegaBlocks' real layers.

    .venv/bin/python scripts/run_megablocks.py PATH_OF_MEGABLOCKS tests/data/moe/megablocks.npz

Every layer is MegaBlocks' own Python; only its Triton and CUDA kernels are plain torch here, so that a CPU runs them.
"""

import pathlib
import sys
import types
from typing import Any

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent


def copy_rows(rows, indices, weights):
  return rows if weights is None else rows * weights[indices][:, None]


def gather(x, indices, bin_ids, weights, bins, top_k):
  return copy_rows(x[indices // top_k], indices, weights)


def scatter(x, indices, bin_ids, weights, bins, top_k):
  out = torch.zeros(len(indices), x.shape[1])
  out[indices.long()] = copy_rows(x, indices.long(), weights)
  return out.view(-1, top_k, x.shape[1]).sum(1)


def scatter_wgrad(x, grad, indices, bin_ids, bins, top_k):
  out = torch.zeros(len(indices))
  out[indices.long()] = (x * grad[indices // top_k]).sum(-1)
  return out


def bin_members(indices, bins, capacity):
  """Returns the assignments that fit into each bin."""
  starts = [0, *bins[:-1].tolist()]
  return [indices[start:end][:capacity].long() for start, end in zip(starts, bins.tolist(), strict=True)]


def binned_gather(x, indices, weights, bins, capacity, top_k):
  out = torch.zeros(len(bins), capacity, x.shape[1])
  for i, members in enumerate(bin_members(indices, bins, capacity)):
    out[i, : len(members)] = copy_rows(x[members // top_k], members, weights)
  return out


def binned_scatter(x, indices, weights, bins, top_k):
  out = torch.zeros(len(indices), x.shape[2])
  for i, members in enumerate(bin_members(indices, bins, x.shape[1])):
    out[members] = copy_rows(x[i, : len(members)], members, weights)
  return out.view(-1, top_k, x.shape[2]).sum(1)


def binned_scatter_wgrad(x, grad, indices, bins, top_k):
  out = torch.zeros(len(indices))
  for i, members in enumerate(bin_members(indices, bins, x.shape[1])):
    out[members] = (x[i, : len(members)] * grad[members // top_k]).sum(-1)
  return out


def grouped_matmul(a, b, batch_sizes, trans_a=False, trans_b=False, c=None):
  parts = torch.split(a, batch_sizes.tolist())
  if trans_a:
    out = torch.stack([x.T @ y for x, y in zip(parts, torch.split(b, batch_sizes.tolist()), strict=True)])
  else:
    out = torch.cat([x @ (y.T if trans_b else y) for x, y in zip(parts, b, strict=True)])
  return out if c is None else c.copy_(out)


def sort(x, end_bit, x_out, iota_out):
  values, order = torch.sort(x, stable=True)
  x_out.copy_(values)
  iota_out.copy_(order)


def install(source):
  """Makes `import megablocks` find the source, with torch in place of its kernels."""

  def module(name, **members):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)
    parent, _, child = name.rpartition('.')
    if parent in sys.modules:
      setattr(sys.modules[parent], child, sys.modules[name])

  module('stk', Matrix=type('Matrix', (), {}))
  for name in ('stk.ops', 'stk.backend', 'stk.backend.triton_kernels'):
    module(name)
  module('stk.backend.autocast', custom_fwd=lambda f: f, custom_bwd=lambda f: f)
  module('grouped_gemm')
  module('grouped_gemm.backend', gmm=grouped_matmul)
  module('grouped_gemm.ops', gmm=grouped_matmul)
  module(
    'megablocks_ops',
    sort=sort,
    histogram=lambda x, n: torch.bincount(x.flatten(), minlength=n).int(),
    inclusive_cumsum=lambda x, dim, out: out.copy_(x.cumsum(dim)),
  )
  sys.path[:0] = [str(source), str(ROOT / 'tests/layers/moe')]
  functions = (gather, scatter, scatter_wgrad, binned_gather, binned_scatter, binned_scatter_wgrad)
  module('megablocks.backend.kernels', **{function.__name__: function for function in functions})


def make_layer(case, arrays):
  """Returns the layer, and its parameters by their names in `draw`."""
  from megablocks.layers.arguments import Arguments
  from megablocks.layers.dmoe import dMoE
  from megablocks.layers.moe import MoE
  from megablocks_cases import HIDDEN
  from tests.layers.architectures import FFN, GLU

  _, _, dim, num_experts, top_k = case.sizes
  settings = {'mlp_type': 'glu'} if case.kind == 'glu' else {}
  args = Arguments(
    hidden_size=dim,
    ffn_hidden_size=HIDDEN,
    moe_num_experts=num_experts,
    moe_top_k=top_k,
    memory_optimized_mlp=True,
    fp16=False,
    device='cpu',
    return_bias=False,
    moe_zloss_weight=1e-3,
    **settings | dict(case.settings),
  )
  flat = lambda array: torch.tensor(array.reshape(-1, dim))
  if case.kind in ('ffn', 'glu'):
    layer = (FFN if case.kind == 'ffn' else GLU)(args)
    parameters = {'w1': layer.w1, 'w2': layer.w2} | ({'v1': layer.v1} if case.kind == 'glu' else {})
    values = {name: torch.tensor(arrays[name][0] if name == 'w2' else arrays[name][0].T) for name in parameters}
  else:
    layer = (MoE if case.kind == 'moe' else dMoE)(args)
    mlp, experts = layer.experts.mlp, layer.experts
    parameters = {'router': layer.router.layer.weight, 'w1': mlp.w1, 'w2': mlp.w2, 'bias': experts.bias}
    parameters |= {'v1': mlp.v1} if case.is_gated else {}
    values = {name: flat(arrays[name]) for name in parameters if name != 'bias'} | {
      'bias': torch.tensor(arrays['bias'])
    }
    if case.kind == 'moe':
      values |= {'w1': torch.tensor(arrays['w1'].swapaxes(1, 2)), 'w2': torch.tensor(arrays['w2'])}
    if layer.shared_expert is not None:
      for name in ('up', 'down'):
        projection = getattr(layer.shared_expert, f'{name}_proj')
        parameters |= {name: projection.weight, f'{name}_bias': projection.bias}
        values |= {part: torch.tensor(arrays[part]) for part in (name, f'{name}_bias')}
  with torch.no_grad():
    for name, parameter in parameters.items():
      parameter.copy_(values[name])
  return args, layer, parameters


def sparse_layer(case, arrays):
  """Returns the layer with one expert, which MegaBlocks compares with the dense layer."""
  import dataclasses

  from megablocks.layers import dmlp_registry

  if case.kind == 'ffn':
    kind = 'dmoe' if 'dmoe' in case.layer else 'moe'
    sparse = make_layer(dataclasses.replace(case, kind=kind, layer=''), {**arrays, 'bias': 0 * arrays['bias']})[1]
    return sparse.eval()
  args, _, _ = make_layer(case, arrays)
  args.memory_optimized_mlp = 'memory' in case.layer
  mlp = dmlp_registry.get(args)
  with torch.no_grad():
    for part in ('w1', 'v1', 'w2'):
      getattr(mlp, part).copy_(torch.tensor(arrays[part][0]))
  return lambda x: mlp(x.view(-1, x.shape[-1]), torch.tensor([x.shape[0] * x.shape[1]])).view(x.shape)


def run(name, case):
  """Returns 'NAME/y', 'NAME/losses' and a digest of each gradient, in the shapes of `draw`."""
  from megablocks.layers.moe import batched_load_balancing_loss, clear_load_balancing_loss
  from megablocks.layers.router import batched_router_zloss, clear_router_zloss
  from megablocks_cases import digest, draw

  arrays = draw(name)
  args, layer, parameters = make_layer(case, arrays)
  x = torch.tensor(arrays['x'], requires_grad=True)
  clear_load_balancing_loss()
  clear_router_zloss()
  y = layer(x)
  if case.layer:
    torch.testing.assert_close(sparse_layer(case, arrays)(x), y)  # what MegaBlocks' own test asserts
  loss = (y * torch.tensor(arrays['cotangent'])).sum()
  results = {'y': y}
  if case.kind in ('moe', 'dmoe'):
    losses = [batched_load_balancing_loss(args), batched_router_zloss(args).sum()]
    loss, results['losses'] = loss + sum(losses), torch.stack(losses)
  loss.backward()
  for part, parameter in {'x': x, **parameters}.items():
    gradient = parameter.grad.numpy()
    if part in ('w1', 'v1') and case.kind != 'dmoe':
      gradient = gradient.swapaxes(-1, -2)
    results[f'd_{part}'] = digest(gradient)
  return {
    f'{name}/{part}': np.asarray(value.detach() if hasattr(value, 'detach') else value, np.float32)
    for part, value in results.items()
  }


def main():
  source, out = sys.argv[1:]
  install(source)
  from megablocks_cases import CASES

  results: dict[str, Any] = {}
  for name, case in CASES.items():
    results |= run(name, case)
  np.savez_compressed(out, **results)
  print(f'{len(CASES)} cases, {pathlib.Path(out).stat().st_size} bytes')


if __name__ == '__main__':
  main()
