#!/usr/bin/env python
"""Compares a dropless mixture of experts with a dense feed-forward network of equal FLOPs, forward and backward.

    .venv/bin/python scripts/bench_moe.py [--quick]

Each token has one expert, which is an input; the layer sorts, gathers, computes and combines. Gradients are taken with
respect to x, the gates and all weights. Experts are drawn uniformly, or by Zipf's law (expert i in proportion to 1/i).
The last line is one JSON object:

  e8_ratio, e64_ratio, e8_zipf_ratio, e64_zipf_ratio: the layer's time over the dense network's, by medians; goals:
    at most 1.5 with 8 experts and 2.5 with 64, on 2 CPU cores. `ratio` is the first.
  paired_ratio, cpu_ratio: the median of the rounds' ratios, and the same in CPU time, which depend less on other load.
  ragged_dot_speedup: the layer's time with `jax.lax.ragged_dot` over its own, with 64 experts; goal: at least 15.
  overhead, cpu_overhead: the time of the layer beyond its networks' time on sorted rows, as a fraction of the latter.
  temp_bytes: temporaries of a step; `capacity` is the layer that drops tokens.
  growth: overhead and temp_bytes with 64 experts over 8, with equal FLOPs.
  tflops: of each backend; on a GPU in bfloat16, with a larger network.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
from statistics import median
from typing import Any

from alternation import alternate, paired_ratio, print_result, ratio
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.distributed.initialization import skip_absent_tpu
from spmd_tasks.layers.feed_forward import ACTIVATIONS
from spmd_tasks.layers.moe import CapacityGather, Dropless, ExpertWeights, RouterOutput
from spmd_tasks.layers.moe.grouped_matmul import best_grouped_matmul_backend

ACTIVATION = 'gelu'
NUMS_EXPERTS = (8, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dims:
  """T tokens, D model, F ffn, and the dtype of the computation."""

  num_tokens: int
  model_dim: int
  hidden_dim: int
  dtype: str

  @property
  def num_flops(self) -> int:
    """Of two matmuls, forward and for both gradients."""
    return 3 * 2 * 2 * self.num_tokens * self.model_dim * self.hidden_dim

  def draw(self, seed: int, *shape: int) -> jax.Array:
    """Normal values with standard deviation 1, over the square root of the rows' number in matrices [..., K, N]."""
    scale = shape[-2] ** -0.5 if len(shape) > 2 else 1.0
    return scale * jax.random.normal(jax.random.key(seed), shape, self.dtype)


class Program:
  """function(data, *args) with its gradients, compiled: `program()` returns the result and the gradients of `args`.

  Nothing is a constant to the compiler, which would compute with it beforehand.
  """

  def __init__(self, function: Callable[..., jax.Array], data: Any, *args: Any):
    def run(data: Any, args: tuple[Any, ...], d_result: jax.Array) -> tuple[jax.Array, Any]:
      result, pull_back = jax.vjp(functools.partial(function, data), *args)
      return result, pull_back(d_result)

    self._inputs = data, args, jnp.ones_like(args[0])
    self._compiled: Any = jax.jit(run).lower(*self._inputs).compile()

  def __call__(self) -> Any:
    return self._compiled(*self._inputs)

  @property
  def temp_bytes(self) -> int:
    return self._compiled.memory_analysis().temp_size_in_bytes


def dense(dims: Dims) -> Program:
  def ffn(_: None, x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return ACTIVATIONS[ACTIVATION](x @ up[0]) @ down[0]

  D, F = dims.model_dim, dims.hidden_dim
  return Program(ffn, None, dims.draw(0, dims.num_tokens, D), dims.draw(1, 1, D, F), dims.draw(2, 1, F, D))


class Experts:
  """E experts and a routing decision."""

  def __init__(self, dims: Dims, num_experts: int, routing: str):
    self.dims = dims
    shares = np.ones(num_experts) if routing == 'uniform' else 1 / np.arange(1, num_experts + 1)
    self._expert_ids = np.random.default_rng(0).choice(num_experts, dims.num_tokens, p=shares / shares.sum())
    self._rows = dims.draw(0, dims.num_tokens, dims.model_dim)
    self._weights = ExpertWeights(
      up=dims.draw(1, num_experts, dims.model_dim, dims.hidden_dim),
      down=dims.draw(2, num_experts, dims.hidden_dim, dims.model_dim),
      gate=None,
      activation=ACTIVATION,
      up_split_dims=None,
      down_split_dims=None,
    )

  def layer(self, computation: Any) -> Program:
    """Returns the layer with the router's decision as an input."""
    scores = jnp.zeros((1, self.dims.num_tokens, self._weights.up.shape[0]))  # not read by a computation
    expert_ids = jnp.asarray(self._expert_ids, jnp.int32)[None, :, None]
    routing = RouterOutput(logits=scores, scores=scores, token_mask=None, expert_ids=expert_ids)

    def apply(routing: RouterOutput, x: jax.Array, gates: jax.Array, weights: ExpertWeights) -> jax.Array:
      return computation(x, routing.replace(gates=gates), weights, train=True)[0]

    gates = jax.random.uniform(jax.random.key(3), expert_ids.shape, minval=0.5)
    return Program(apply, routing, self._rows[None], gates, self._weights)

  def networks(self, backend: str | None = None) -> Program:
    """Returns only the experts' networks, on sorted rows."""
    sizes = jnp.asarray(np.bincount(self._expert_ids, minlength=self._weights.up.shape[0]), jnp.int32)

    def apply(sizes: jax.Array, rows: jax.Array, weights: ExpertWeights) -> jax.Array:
      return weights.replace(backend=backend).apply_to_rows(rows, sizes, jnp.ones(len(rows)))

    return Program(apply, sizes, self._rows, self._weights)


def compare_with_dense(dims: Dims, num_experts: int, num_rounds: int) -> dict[str, dict[str, float]]:
  """Returns the figures of the layer with uniform (such as e8) and Zipf routing (e8_zipf), by name.

  One number of experts at a time: 64 experts' gradients are half a gibibyte, which takes a third more time to come by
  when programs that need less ran for seconds before, as no training step finds it.
  """
  name, zipf, networks = (f'e{num_experts}{suffix}' for suffix in ('', '_zipf', '_networks'))
  uniform = Experts(dims, num_experts, 'uniform')
  programs = {
    'dense': dense(dims),
    name: uniform.layer(Dropless()),
    zipf: Experts(dims, num_experts, 'zipf').layer(Dropless()),
    networks: uniform.networks(),
  }
  times = alternate(programs, num_rounds)
  layers = (name, zipf)
  return {
    'ratio': {layer: ratio(times, layer, 'dense') for layer in layers},
    'paired_ratio': {layer: paired_ratio(times, layer, 'dense') for layer in layers},
    'cpu_ratio': {layer: paired_ratio(times, layer, 'dense', clock='cpu') for layer in layers},
    'overhead': {name: paired_ratio(times, name, networks) - 1},
    'cpu_overhead': {name: paired_ratio(times, name, networks, clock='cpu') - 1},
    'ms': {program: 1000 * median(times[program].wall) for program in programs},
  }


def measure_memory(dims: Dims) -> dict[str, dict[str, int]]:
  """Returns temp_bytes of each form of the layer, by number of experts."""
  forms = {
    'dropless': Dropless(),
    'capacity': CapacityGather(),
  }
  sizes: dict[str, dict[str, int]] = {'dense': {'e1': dense(dims).temp_bytes}}
  for name, form in forms.items():
    sizes[name] = {f'e{n}': Experts(dims, n, 'uniform').layer(form).temp_bytes for n in NUMS_EXPERTS}
  return sizes


def compare_with_ragged_dot(dims: Dims, num_rounds: int) -> float:
  """Returns the layer's time with ragged_dot over its own."""
  experts = Experts(dims, NUMS_EXPERTS[-1], 'uniform')
  layers = {
    name: experts.layer(Dropless(backend=name))
    for name in (best_grouped_matmul_backend(jax.default_backend()), 'ragged_dot')
  }
  times = alternate(layers, num_rounds, num_warmup=1)
  return paired_ratio(times, 'ragged_dot', next(iter(layers)))


def measure_tflops(dims: Dims, backends: tuple[str, ...], num_rounds: int) -> dict[str, float]:
  """Returns TFLOP/s of the dense network, and of each backend by number of experts."""
  programs = {'dense': dense(dims)}
  for num_experts in NUMS_EXPERTS:
    experts = Experts(dims, num_experts, 'uniform')
    programs |= {f'{backend} e{num_experts}': experts.networks(backend) for backend in backends}
  times = alternate(programs, num_rounds)
  return {name: dims.num_flops / median(time.wall) / 1e12 for name, time in times.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='tiny dims and a few rounds, to see that it works')
  parser.add_argument('--num_rounds', type=int, default=20)
  args = parser.parse_args()
  skip_absent_tpu()  # libtpu would put errors into words, in which a SIGSEGV of this script once ended (not seen again)
  num_rounds = 3 if args.quick else args.num_rounds
  on_cpu = jax.default_backend() == 'cpu'
  dims = Dims(num_tokens=4096, model_dim=512, hidden_dim=2048, dtype='float32')
  large = Dims(num_tokens=16384, model_dim=2048, hidden_dim=8192, dtype='bfloat16')
  if args.quick:
    dims = large = Dims(num_tokens=256, model_dim=16, hidden_dim=32, dtype='float32')

  few, many = (compare_with_dense(dims, num_experts, num_rounds) for num_experts in NUMS_EXPERTS)
  ratios = few['ratio'] | many['ratio']
  first, last = (f'e{num_experts}' for num_experts in NUMS_EXPERTS)
  growth = {
    f'{clock}_ratio': many[f'{clock}_ratio'][last] / few[f'{clock}_ratio'][first] for clock in ('paired', 'cpu')
  }
  result: dict[str, Any] = {
    'ratio': ratios[first],
    **{f'{layer}_ratio': value for layer, value in ratios.items()},
    **{figure: few[figure] | many[figure] for figure in ('paired_ratio', 'cpu_ratio', 'overhead', 'cpu_overhead')},
    'growth': growth,
    'ms': {first: few['ms'], last: many['ms']},
  }
  print_result(**result)  # already worth reading while the rest is measured
  backends = tuple(
    dict.fromkeys((best_grouped_matmul_backend(jax.default_backend()), *(() if on_cpu else ('ragged_dot',))))
  )
  result |= {
    'ragged_dot_speedup': compare_with_ragged_dot(dims, min(num_rounds, 2)),
    'temp_bytes': measure_memory(dims),
    'tflops': measure_tflops(dims if on_cpu else large, backends, num_rounds),
  }
  print_result(**result)


if __name__ == '__main__':
  main()
