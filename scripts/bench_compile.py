#!/usr/bin/env python
"""Measures the trace and compile time of the train step with 4 and 32 layers, on 8 fake devices.

    .venv/bin/python scripts/bench_compile.py [--quick]

Layers are scanned, so neither should grow with depth. The two depths are compiled in turn, with JAX's caches emptied.
The last line is one JSON object. `ratio` is the time to trace and compile 32 layers over 4 layers, as the median over
rounds; the goal is at most 1.3.
"""

import argparse
from statistics import median
from typing import Any

from alternation import print_result
import jax

from spmd_tasks.config import resolve
from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.experiment import partition_job

DEPTHS = (4, 32)


def compile_once(experiment: str, num_layers: int) -> dict[str, Any]:
  jax.clear_caches()
  step = partition_job(resolve(experiment, [f'num_layers={num_layers}', 'ici_mesh_shape=1,4,2']).build()).train_step
  compiled = step.compile()
  return {
    'trace_seconds': step.trace_seconds,
    'compile_seconds': step.compile_seconds,
    'total_seconds': step.trace_seconds + step.compile_seconds,
    'num_hlo_instructions': compiled.as_text().count(' = '),
    'temp_bytes': compiled.memory_analysis().temp_size_in_bytes,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='one round of a smaller model, to see that it works')
  parser.add_argument('--num_rounds', type=int, default=7)
  args = parser.parse_args()
  experiment, num_rounds = ('synthetic.Tiny', 1) if args.quick else ('lm.StdlibTiny', args.num_rounds)
  use_fake_devices(8)
  jax.config.update('jax_enable_compilation_cache', False)
  if not args.quick:
    compile_once(experiment, num_layers=1)  # the first trace and compilation of a process take longer
  rounds: list[dict[int, dict[str, Any]]] = []
  for i in range(num_rounds):
    order = DEPTHS[:: -1 if i % 2 else 1]
    rounds.append({num_layers: compile_once(experiment, num_layers) for num_layers in order})
  shallow, deep = DEPTHS

  def paired_ratio(quantity: str) -> float:
    return median(pair[deep][quantity] / pair[shallow][quantity] for pair in rounds)

  layers = {str(depth): {name: median(r[depth][name] for r in rounds) for name in rounds[0][depth]} for depth in DEPTHS}
  print_result(
    ratio=paired_ratio('total_seconds'),
    trace_ratio=paired_ratio('trace_seconds'),
    compile_ratio=paired_ratio('compile_seconds'),
    num_rounds=num_rounds,
    layers=layers,
  )


if __name__ == '__main__':
  main()
