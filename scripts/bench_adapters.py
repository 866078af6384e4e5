#!/usr/bin/env python
"""Measures the decode step with 0, 1, 4 and 16 low-rank adapters that requests choose by name.

    .venv/bin/python scripts/bench_adapters.py [--quick] [--plan v5p:2x2x1]

Every projection of attention and feed-forward network has adapters of rank 16. There are 8 slots, which use the
adapters in turn. A small model with random weights runs on one CPU device; the engines' steps are timed in turn. With
`--plan`, the step of Llama 3.1 8B in bfloat16 is only compiled, for TPUs. The last line is one JSON object:

  ratio: CPU time of the step with 16 adapters over the step without, median over rounds; or predicted seconds.
  ratios: the same for every number of adapters.
  step_ms: milliseconds of a step: CPU time, or predicted.
  adapter_mib: size of the adapter stacks, including number 0; per device with `--plan`.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import median
import tempfile

from alternation import alternate, paired_ratio, print_result
from bench_low_rank import LLAMA_8B
import jax
import numpy as np

from spmd_tasks.adapters import add_adapters
from spmd_tasks.adapters.choices import AdapterChoices
from spmd_tasks.config import resolve
from spmd_tasks.decoding import DecodeSteps, Request
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.requests import chunk_prompt
from spmd_tasks.experiment import partition_job
from spmd_tasks.planning import make_plan, parse_target

RANK, NUMBERS, TARGETS = 16, (0, 1, 4, 16), ('attention/', 'ffn/')
SIZES = ('model_dims=256', 'num_layers=4', 'num_heads=4', 'hidden_dims=768', 'seq_len=256', 'batch_size=8')
QUICK_SIZES = ('model_dims=64', 'num_layers=1', 'num_heads=1', 'hidden_dims=16', 'seq_len=64', 'batch_size=2')
STEPS_PER_ROUND = 8


def job_with(number, experiment, settings):
  """Returns the job of an experiment whose model has `number` adapters."""
  resolved = resolve(experiment, settings)
  if number:
    choices = tuple(f'adapter {i}' for i in range(number))
    adapter = AdapterChoices(rank=RANK, choices=choices)
    add_adapters(resolved.parts['task'].model, TARGETS, adapter)
  return resolved.build()


def adapter_mib(model):
  leaves = jax.tree_util.tree_flatten_with_path(model.padded_state.weights)[0]
  sizes = [
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for path, leaf in leaves
    if 'lora_' in jax.tree_util.keystr(path)
  ]
  return sum(sizes) / 2**20


def running_engine(number, settings):
  """Returns an engine with random weights and a sequence in each slot; slot i has adapter i mod (N + 1)."""
  job = job_with(number, 'lm.StdlibTiny', [*settings, 'ici_mesh_shape=1,1,1'])
  model = partition_job(job)
  weights, rng = model.init(0).weights, np.random.default_rng(0)

  def random_adapter(path, leaf):
    is_stack = 'lora_' in jax.tree_util.keystr(path)
    return jax.device_put(rng.normal(0, 0.02, leaf.shape).astype(leaf.dtype), leaf.sharding) if is_stack else leaf

  steps = DecodeSteps(model)
  engine = ModelEngine(steps, {'params': jax.tree_util.tree_map_with_path(random_adapter, weights)})
  engine.warm_up()
  for slot in range(engine.num_slots):
    request = Request(ids=(5 + slot,), max_tokens=engine.max_len - 1, adapter=slot % (number + 1))
    engine.prefill(chunk_prompt(request, slot, engine.prefill_chunk)).read()
  return engine, adapter_mib(model)


def measure(quick):
  engines = {number: running_engine(number, QUICK_SIZES if quick else SIZES) for number in NUMBERS}
  keep = np.ones(8, np.bool_)

  def steps_of(engine):
    def run():
      for _ in range(STEPS_PER_ROUND):
        launched = engine.step(keep)
      return launched.read().tokens

    return run

  # Each engine has room for max_len - 1 steps.
  times = alternate({number: steps_of(engine) for number, (engine, _) in engines.items()}, 2 if quick else 24)
  return {
    'ratios': {str(number): paired_ratio(times, number, 0, clock='cpu') for number in NUMBERS},
    'step_ms': {str(number): 1e3 * median(times[number].cpu) / STEPS_PER_ROUND for number in NUMBERS},
    'adapter_mib': {str(number): mib for number, (_, mib) in engines.items()},
  }


def predict(target):
  parsed, milliseconds, mib = parse_target(target), {}, {}
  with tempfile.TemporaryDirectory() as directory:
    (Path(directory) / 'config.json').write_text(json.dumps(LLAMA_8B))
    for number in NUMBERS:
      sizes = [f'model={directory}', 'seq_len=2048', f'ici_mesh_shape=1,1,{len(parsed.devices())}']
      job = job_with(number, 'hf.Model', sizes)
      step = make_plan(job, parsed, steps=('decode',))
      milliseconds[str(number)] = 1e3 * step['predicted_step_s']
      mib[str(number)] = adapter_mib(partition_job(job, job.experiment.mesh_spec().build(parsed.devices())))
      print(
        number, milliseconds[str(number)], {name: size for name, size in step['memory'].items() if size}, flush=True
      )
  ratios = {number: value / milliseconds['0'] for number, value in milliseconds.items()}
  return {'ratios': ratios, 'step_ms': milliseconds, 'adapter_mib': mib}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='a tiny model and few rounds: does it run?')
  parser.add_argument('--plan', metavar='TARGET', help='compile for these chips instead, such as v5p:2x2x1')
  args = parser.parse_args()
  if args.plan is None:
    jax.config.update('jax_platforms', 'cpu')
  result = predict(args.plan) if args.plan else measure(args.quick)
  print_result(ratio=result['ratios']['16'], **result)


if __name__ == '__main__':
  main()
