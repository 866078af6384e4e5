#!/usr/bin/env python
"""Measures the cost of pipelining on 8 fake devices: bubbles in FLOPs and time, memory per microbatch, compile time.

    .venv/bin/python scripts/bench_pipeline.py [--quick]

Compares the gradient of a pipelined stack of transformer blocks (without embedding and logits) over 4 stages x data 2
with the plain stack, data-parallel on the same devices. The last line is one JSON object:

* `flops`: matmul FLOPs that the compiled program executes per device. `bubble` is the fraction that is not work. Work
  is the plain gradient's share, times the recomputation that the schedule needs by design. `ideal_bubble` is
  (P - 1) / (M V + P - 1). `ratio` is the worst ratio of executed to ideal FLOPs; the goal is within 5% of 1.
* `memory`: temporaries of one device for several M, with microbatches of a fixed size, and what one more microbatch
  adds, in units of its x [rows, T, D] on a device. The stack's input and output and their gradients are 4 of these
  units, sharded over the P stages.
* `time`: CPU time of a step over the plain stack's with the same remat. On fake devices of one machine a bubble costs
  as much as work.
* `compile`: CPU time to trace and compile with 8 times the microbatches, and with 8 times the layers, over once.
"""

import argparse
from collections.abc import Callable, Iterable
import functools
from statistics import median
import time
from typing import Any

from alternation import alternate, paired_ratio, print_result
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.experiment import DEFAULT_AXIS_RULES
from spmd_tasks.layers import GatedFeedForward, RmsNorm, TransformerBlock, TransformerStack
from spmd_tasks.layers.attention import Attention
from spmd_tasks.layers.pipeline import PipelinedStack, Schedule
from spmd_tasks.planning.traced_step import walk_jaxpr
from spmd_tasks.sharding import MeshSpec, stage_axis_rules
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import unbox_weights

STAGES, DATA = 4, 2
SEQ_LEN, MODEL_DIM, HIDDEN_DIM, NUM_HEADS = 64, 64, 192, 4
ROWS = 4  # of a microbatch
LAYERS = 8
# How often a matrix product of the forward pass runs in a step, counting the backward pass as two.
PRODUCTS = {'gpipe': 3, 'circular': 3, 'one_forward_one_backward': 4}
CASES: dict[str, dict[str, Any]] = {
  'gpipe': {'schedule': 'gpipe'},
  'gpipe, full remat': {'schedule': 'gpipe', 'remat_policy': 'full'},
  'circular': {'schedule': 'circular'},
  'one_forward_one_backward': {'schedule': 'one_forward_one_backward'},
}
# No weight is split over data, so that all collectives are the pipeline's and the gradients'.
RULES = tuple((name, None if name == 'embed' else axes) for name, axes in DEFAULT_AXIS_RULES)


class Program:
  """The compiled gradient of a stack; calling it runs a step."""

  def __init__(self, stack: Any, batch_size: int, mesh_shape: tuple[int, int]):
    mesh = MeshSpec(axis_names=('replica', 'stage', 'data', 'mdl'), ici_mesh_shape=(1, *mesh_shape, 1)).build()
    rules = stage_axis_rules(RULES)
    x = jnp.zeros((batch_size, SEQ_LEN, MODEL_DIM))

    def loss(weights, x):
      y, _ = stack.apply({'params': weights}, x, train=True)
      return jnp.mean(jnp.square(y))

    def gradient(weights, x):
      with sharding_scope(mesh, rules):
        return jax.grad(loss, argnums=(0, 1))(weights, x)

    repeats = getattr(stack, 'num_repeats', 1)
    weights = unbox_weights(jax.jit(stack.init)(jax.random.key(0), x)['params'])
    layers = PartitionSpec(*[None] * (repeats > 1), 'stage')
    shardings = NamedSharding(mesh, layers), NamedSharding(mesh, PartitionSpec(('stage', 'data')))
    self._args = jax.device_put((weights, x), shardings)
    start = time.process_time()
    traced = jax.jit(gradient, in_shardings=shardings, out_shardings=shardings).trace(*self._args)
    self._jaxpr, self._axis_sizes = traced.jaxpr, dict(mesh.shape)
    self.compiled = traced.lower().compile()
    self.cpu_seconds = time.process_time() - start

  def __call__(self) -> Any:
    return self.compiled(*self._args)

  @property
  def flops(self) -> float:
    """FLOPs of products of one device, with recomputation and bubbles."""
    step = walk_jaxpr(self._jaxpr, self._args, self._axis_sizes)
    return sum(count * operation.flops for operation, count in step.walk())

  @property
  def temp_bytes(self) -> int:
    return self.compiled.memory_analysis().temp_size_in_bytes


def make_block() -> TransformerBlock:
  return TransformerBlock(
    attention=Attention(num_heads=NUM_HEADS, rotary=None), ffn=GatedFeedForward(hidden_dim=HIDDEN_DIM), norm=RmsNorm()
  )


@functools.cache
def plain(num_microbatches: int, remat_policy: str) -> Program:
  stack = TransformerStack(block=make_block(), num_layers=LAYERS, remat_policy=remat_policy)
  return Program(stack, num_microbatches * ROWS, (1, STAGES * DATA))


@functools.cache
def pipelined(schedule: Any, num_microbatches: int, num_layers: int = LAYERS, remat_policy: str = 'none') -> Program:
  stack = PipelinedStack(
    block=make_block(),
    num_layers=num_layers,
    num_microbatches=num_microbatches,
    schedule=schedule,
    num_repeats=2 if schedule == 'circular' else 1,
    remat_policy=remat_policy,
  )
  return Program(stack, num_microbatches * ROWS, (STAGES, DATA))


def measure_flops(cases: list[tuple[str, int]]) -> tuple[float, dict[str, Any]]:
  """The worst ratio of executed to ideal work, and each case's bubble."""
  result, worst = {}, 1.0
  for name, num_microbatches in cases:
    repeats = 2 if name == 'circular' else 1
    schedule = Schedule(num_stages=STAGES, num_microbatches=num_microbatches, num_repeats=repeats)
    work = plain(num_microbatches, 'none').flops * PRODUCTS[name] / PRODUCTS['gpipe']
    executed = pipelined(num_microbatches=num_microbatches, **CASES[name]).flops
    result[f'{name}, M {num_microbatches}, V {repeats}'] = {
      'bubble': 1 - work / executed,
      'ideal_bubble': schedule.bubble_fraction,
    }
    ratio = executed * (1 - schedule.bubble_fraction) / work
    worst = max(worst, ratio, key=lambda r: abs(r - 1))
  return worst, result


def measure_memory(names: Iterable[str], counts: tuple[int, ...]) -> dict[str, Any]:
  unit = ROWS // DATA * SEQ_LEN * MODEL_DIM * 4
  result = {}
  for name in names:
    sizes = {m: pipelined(num_microbatches=m, **CASES[name]).temp_bytes for m in counts}
    slope = (sizes[counts[-1]] - sizes[counts[0]]) / (counts[-1] - counts[0])
    result[name] = {'temp_bytes': {str(m): size for m, size in sizes.items()}, 'units_per_microbatch': slope / unit}
  return result


def measure_time(names: Iterable[str], num_microbatches: int, num_rounds: int) -> dict[str, Any]:
  bases = {name: CASES[name].get('remat_policy', 'none') for name in names}
  programs: dict[str, Callable[[], Any]] = {
    f'plain, {policy}': plain(num_microbatches, policy) for policy in dict.fromkeys(bases.values())
  }
  programs |= {name: pipelined(num_microbatches=num_microbatches, **CASES[name]) for name in bases}
  times = alternate(programs, num_rounds)
  result = {}
  for name, policy in bases.items():
    repeats = 2 if name == 'circular' else 1
    schedule = Schedule(num_stages=STAGES, num_microbatches=num_microbatches, num_repeats=repeats)
    result[name] = {
      'over_plain': paired_ratio(times, name, f'plain, {policy}', clock='cpu'),
      'ideal': PRODUCTS[CASES[name]['schedule']] / PRODUCTS['gpipe'] / (1 - schedule.bubble_fraction),
    }
  return result


def measure_compile(names: tuple[str, ...], num_rounds: int) -> dict[str, Any]:
  def once(name, **settings):
    jax.clear_caches()
    return pipelined.__wrapped__(name, **settings).cpu_seconds

  result = {}
  for name in names:
    rounds = [
      (
        once(name, num_microbatches=4),
        once(name, num_microbatches=32),
        once(name, num_microbatches=4, num_layers=8 * LAYERS),
      )
      for _ in range(num_rounds)
    ]
    result[name] = {
      'microbatches_ratio': median(wide / base for base, wide, _ in rounds),
      'layers_ratio': median(deep / base for base, _, deep in rounds),
    }
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='few cases and rounds, to see that it works')
  parser.add_argument('--num_rounds', type=int, default=40)
  args = parser.parse_args()
  use_fake_devices(8)
  jax.config.update('jax_enable_compilation_cache', False)  # what comes from there takes no time
  names = ('gpipe',) if args.quick else tuple(CASES)
  counts = (4, 8) if args.quick else (4, 8, 16, 32)
  worst, flops = measure_flops([(name, m) for name in PRODUCTS for m in counts[: 1 if args.quick else 3]])
  print_result(
    ratio=worst,
    flops=flops,
    memory=measure_memory(names, counts),
    time=measure_time(names, 4, 2) if args.quick else measure_time(names, 8, args.num_rounds),
    compile={} if args.quick else measure_compile(tuple(PRODUCTS), 3),
  )


if __name__ == '__main__':
  main()
