"""Estimates a train step without compiling it: memory by arithmetic, time by the roofline.

    make_plan(job, parse_target('v5p:8x8x8'), compiles=False)      # seconds, for any model and any number of chips

The step is traced for the target's chips, whose compiler need not be installed, and walked (traced_step.py).
docs/benchmarks/plans_tpu.md says how far its memory is from the compiler's.
"""

import time
from typing import Any

import jax

from spmd_tasks.experiment import Job
from spmd_tasks.planning.networks import Networks
from spmd_tasks.planning.operations import Block, Live
from spmd_tasks.planning.pipeline import bubble_fraction
from spmd_tasks.planning.roofline import roofline_terms, time_of_step
from spmd_tasks.planning.targets import Target
from spmd_tasks.planning.traced_step import trace_step
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.parameter_table import bytes_per_device

Json = dict[str, Any]


def estimate_step(job: Job, model: PartitionedModel, target: Target, *, num_tokens: int, model_flops: float) -> Json:
  """Returns what plan.json has of a train step, without compiling it.

  Args:
    job: the built experiment.
    model: its task on the target's abstract mesh.
    target: the chips.
    num_tokens, model_flops: of the step on all devices together.
  """
  start, chip = time.perf_counter(), target.chip
  step, networks = trace_step(model), Networks(target, job.experiment.mesh_spec())
  terms = roofline_terms(step, chip, networks, bubble=bubble_fraction(job, model)) if chip.peak_flops else []
  memory = {name: round(amount) for name, amount in _memory(model, step).items()}
  arguments = sum(memory[name] for name in ('weights', 'optimizer', 'other_state', 'batch'))
  peak = sum(memory.values())
  return {
    'fits': None if chip.hbm_bytes is None else peak <= chip.hbm_bytes,
    'hbm_bytes': chip.hbm_bytes,
    'argument_bytes': arguments,
    'temp_bytes': peak - arguments,
    'on_chip_bytes': None,
    'host_bytes': None,
    'out_of_memory': None,
    'peak_bytes': peak,
    'memory': memory,
    'padding_bytes': round(memory['weights'] * model.padding_waste),
    'largest': _largest(model, step),
    'collectives': _collectives(step, networks),
    **time_of_step(terms, chip, target.num_devices, model_flops=model_flops, num_tokens=num_tokens),
    'trace_seconds': round(time.perf_counter() - start, 1),
    'compile_seconds': 0.0,
  }


def _memory(model: PartitionedModel, step: Block) -> dict[str, float]:
  state = model.padded_state
  held: dict[str, float] = {
    'weights': bytes_per_device(state.weights),
    'optimizer': bytes_per_device(state.learner),
    'other_state': bytes_per_device((state.step, state.rng, state.non_trainable)),
    'batch': bytes_per_device(model.input_layout.padded),
    **dict.fromkeys(('gradients', 'activations', 'temporaries'), 0.0),
  }
  shapes = _weight_shapes(model)
  for live in step.peak:
    held[_part(live, shapes)] += live.array.local_bytes
  return held


def _part(live: Live, weight_shapes: set[tuple[int, ...]]) -> str:
  """Returns what an array is for: a loop's stacked results are kept values or gradients, the rest is of the moment."""
  if live.array.shape in weight_shapes and 'transpose(' in live.operation.name:
    return 'gradients'
  is_kept = live.operation.kind == 'loop' and 'transpose(' not in live.operation.name
  return 'activations' if is_kept else 'temporaries'


def _collectives(step: Block, networks: Networks) -> list[Json]:
  """Returns the collectives of a traced step, those of one kind over the same axes together."""
  sums: dict[tuple[str, tuple[str, ...]], list[float]] = {}
  for operation, count in step.walk():
    if operation.kind == 'collective':
      total = sums.setdefault((operation.collective, operation.group), [0, 0.0])
      total[0] += count
      total[1] += count * operation.bytes
  return [
    {
      'kind': kind,
      'axes': list(axes),
      'network': 'dcn' if networks.crosses_slices(axes) else 'ici',
      'count': count,
      'bytes_per_device': num_bytes / count,
      'is_asynchronous': True,
      'is_collective_matmul': False,
      'op_name': '',
    }
    for (kind, axes), (count, num_bytes) in sums.items()
  ]


def _largest(model: PartitionedModel, step: Block) -> list[Json]:
  shapes = _weight_shapes(model)
  return [
    {
      'name': '',
      'part': _part(live, shapes),
      'op_name': live.operation.name,
      'dtype': str(live.array.dtype),
      'shape': list(live.array.local_shape),
      'bytes': round(live.array.local_bytes),
      'padding_bytes': 0,
      'why': '',
    }
    for live in sorted(step.peak, key=lambda live: -live.array.local_bytes)[:20]
  ]


def _weight_shapes(model: PartitionedModel) -> set[tuple[int, ...]]:
  return {tuple(leaf.shape) for leaf in jax.tree.leaves(model.abstract_state.weights)}
