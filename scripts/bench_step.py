#!/usr/bin/env python
"""Compares the train step with a handwritten one (bare_step.py) on 8 fake devices, and measures the start of a job.

    .venv/bin/python scripts/bench_step.py [--quick]
    .venv/bin/python scripts/bench_step.py --compile_only 1,4,2

The last line is one JSON object. `ratio` is the ratio of the median step times, for a model whose dims the mesh
divides; the goal is at most 1.03. `paired_ratio`, the median of the rounds' ratios, and `cpu_ratio`, the same for CPU
time, depend less on other load. `uneven` has the same figures for dims that the mesh does not divide; there, the
handwritten step slices and pads at the step boundary, and `rounded_up` is a handwritten step of a model with its dims
rounded up to multiples of the mesh.

The losses of both steps must first agree to 1e-5 over 5 steps.

With --compile_only nothing is timed: the steps of a Llama of 10.5M parameters are compiled for a mesh, and the JSON has
the bytes of their temporaries, the FLOPs of their products and the bytes that they read and write, per device. Unlike
XLA's cost analysis, these figures count every iteration of a loop.
"""

import argparse
from collections.abc import Callable
import json
import math
from pathlib import Path
import re
import resource
import subprocess
import sys
import tempfile
from typing import Any

from alternation import alternate, paired_ratio, print_result, ratio
import bare_step

from spmd_tasks.config import resolve
from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.experiment import partition_job
from spmd_tasks.planning.hlo import Instruction
from spmd_tasks.planning.program import read_program

EXPERIMENT = 'lm.StdlibTiny'  # 1 x 4 x 2 devices, width 128, 4 layers
EVEN = ('vocab_size=260',)
HEAD_DIM = 'task.model.stack.block.attention.head_dim=42'
UNEVEN = ('model_dims=126', 'num_heads=3', HEAD_DIM, 'hidden_dims=381', 'vocab_size=259')
ROUNDED_UP = ('model_dims=128', 'num_heads=4', HEAD_DIM, 'hidden_dims=382', 'vocab_size=260')
SMALL = ('num_layers=1', 'seq_len=32')  # with --quick
LLAMA = (  # with --compile_only
  *('model_dims=256', 'num_layers=8', 'num_heads=8', 'hidden_dims=688', 'vocab_size=8192', 'seq_len=256'),
  *('batch_size=8', 'task.model.embedding.tied=False'),
)
NUM_CHECKED_STEPS = 5


class Stepper:
  """A step with its state and a batch: `stepper()` runs one more step."""

  def __init__(self, step: Callable[..., Any], state: Any, compiled: Any):
    self._step, self.state, self.compiled = step, state, compiled
    self.batch: Any = None

  def __call__(self) -> Any:
    self.state, metrics = self._step(self.state, self.batch)
    return self.state, metrics


class Case:
  """One model's compiled steps, ours and the handwritten one, with the same weights."""

  def __init__(self, overrides: tuple[str, ...], experiment: str = EXPERIMENT):
    self.job = resolve(experiment, overrides).build()
    self.model = partition_job(self.job)

  def ours(self) -> Stepper:
    step = self.model.train_step
    return Stepper(step, self.model.init(seed=0), step.compile())

  def bare(self, **how: Any) -> Stepper:
    model = self.model
    padded, true = model.padded_state.weights, model.abstract_state.weights
    step = bare_step.make_step(
      padded,
      model.input_layout.padded['ids'].sharding,
      self.job.experiment.num_train_steps,
      true if model.padding_waste else None,
      **how,
    )
    state = bare_step.init_state(model.init(seed=0).weights)
    return Stepper(step, state, step.lower(state, dict(model.input_layout.padded)).compile())

  def batches(self, count: int) -> list[Any]:
    iterator = self.job.train_input.make_iterator()
    return [self.model.train_step.place(next(iterator)) for _ in range(count)]


def check_same_losses(ours: Stepper, bare: Stepper, batches: list[Any]) -> float:
  """Returns the largest relative difference of the two losses; raises if it is more than 1e-5."""
  largest = 0.0
  for batch in batches:
    ours.batch = bare.batch = batch
    a, b = (float(stepper()[1]['loss']) for stepper in (ours, bare))
    largest = max(largest, abs(a - b) / abs(b))
  assert largest <= 1e-5, f'the two steps are not the same mathematics: their losses differ by {largest:.2g}'
  return largest


def describe(stepper: Stepper) -> dict[str, Any]:
  """Returns figures of the compiled step; bytes and FLOPs are per device."""
  compiled = stepper.compiled
  return {
    'num_hlo_instructions': compiled.as_text().count(' = '),
    'temp_bytes': compiled.memory_analysis().temp_size_in_bytes,
    'flops': compiled.cost_analysis()['flops'],
    'bytes_accessed': compiled.cost_analysis()['bytes accessed'],
  }


def compare(overrides: tuple[str, ...], rounded_up: tuple[str, ...] | None, num_rounds: int) -> dict[str, Any]:
  case = Case(overrides)
  steppers = {'ours': case.ours(), 'bare': case.bare()}
  loss_difference = check_same_losses(steppers['ours'], steppers['bare'], case.batches(NUM_CHECKED_STEPS))
  if rounded_up:
    steppers['rounded_up'] = Case(rounded_up).bare()
    steppers['rounded_up'].batch = steppers['bare'].batch
  times = alternate(steppers, num_rounds)
  result = {
    'ratio': ratio(times, 'ours', 'bare'),
    'paired_ratio': paired_ratio(times, 'ours', 'bare'),
    'cpu_ratio': paired_ratio(times, 'ours', 'bare', clock='cpu'),
    'step_ms': 1000 * sorted(times['ours'].wall)[num_rounds // 2],
    'loss_difference': loss_difference,
    'programs': {name: describe(stepper) for name, stepper in steppers.items()},
  }
  if rounded_up:
    result |= {'cpu_ratio_to_rounded_up': paired_ratio(times, 'ours', 'rounded_up', clock='cpu')}
    result |= {'bare_cpu_ratio_to_rounded_up': paired_ratio(times, 'bare', 'rounded_up', clock='cpu')}
  return result


def measure_startup(num_steps: int, overrides: tuple[str, ...]) -> dict[str, Any]:
  """Runs the binary in its own process, with one eval and one checkpoint halfway."""
  with tempfile.TemporaryDirectory() as directory:
    flags = f'--exp {EXPERIMENT} --mode train --num_fake_devices 8 --num_train_steps {num_steps}'
    intervals = f'eval_every_steps={num_steps // 2}', f'checkpoint_every={num_steps // 2}', 'log_every_steps=1'
    sets = [flag for override in (*intervals, *overrides) for flag in ('--set', override)]
    command = [sys.executable, '-m', 'spmd_tasks.main', *flags.split(), '--job_log_dir', directory, *sets]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    startup = json.loads((Path(directory) / 'startup.json').read_text())
    lines = [json.loads(line) for line in (Path(directory) / 'metrics.jsonl').read_text().splitlines()]
  first_half = [line['num_compilations'] for line in lines if line['step'] <= num_steps // 2]
  return {
    'seconds_to_first_step': startup,
    'peak_memory_mib': resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    'num_compilations_after_first_step': first_half[-1],
    'num_compilations_with_first_checkpoint': lines[-1]['num_compilations'],
  }


def compile_only(mesh: str, overrides: list[str]) -> dict[str, dict[str, float]]:
  use_fake_devices(math.prod(map(int, mesh.split(','))))
  case = Case((*LLAMA, f'ici_mesh_shape={mesh}', *overrides))
  return {name: loops_counted(stepper.compiled) for name, stepper in {'ours': case.ours(), 'bare': case.bare()}.items()}


def loops_counted(compiled: Any) -> dict[str, float]:
  """Returns figures of a compiled step, with the iterations of loops counted."""
  flops = num_bytes = 0.0
  for computation, count in read_program(compiled).executions.items():
    for each in computation.instructions:
      inside = each.fused.instructions if each.fused else (each,)
      flops += count * sum(product_flops(one) for one in inside if one.opcode == 'dot')
      num_bytes += count * moved_bytes(each)
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  return {'temp_bytes': temporaries, 'product_flops': flops, 'moved_bytes': num_bytes}


def product_flops(dot: Instruction) -> int:
  contracted = re.search(r'lhs_contracting_dims={([\d,]*)}', dot.attributes)
  dims = [int(dim) for dim in contracted[1].split(',') if dim] if contracted else []
  return 2 * math.prod(dot.shape.dims) * math.prod(dot.operands[0].shape.dims[dim] for dim in dims)


def moved_bytes(instruction: Instruction) -> int:
  """Returns the bytes of operands and results; of an array that is only sliced or updated, of the slice."""
  opcode, fused = instruction.opcode, instruction.fused
  if opcode in ('parameter', 'tuple', 'get-tuple-element', 'bitcast', 'constant', 'while', 'conditional', 'call'):
    return 0
  if opcode in ('dynamic-slice', 'slice', 'gather'):
    return 2 * instruction.shape.num_bytes
  if opcode == 'dynamic-update-slice':
    return 2 * instruction.operands[1].shape.num_bytes
  if fused is None:
    return sum(each.shape.num_bytes for each in (instruction, *instruction.operands))

  def readers(value: Instruction) -> list[Instruction]:
    users = fused.users.get(value, ())
    return [one for user in users for one in (readers(user) if user.opcode == 'bitcast' else [user])]

  def read_from(parameter: Instruction) -> int:
    users = readers(parameter)
    if users and all(user.opcode in ('dynamic-slice', 'slice', 'gather') for user in users):
      return sum(user.shape.num_bytes for user in users)
    if users and all(user.opcode == 'dynamic-update-slice' for user in users):
      return sum(user.operands[1].shape.num_bytes for user in users)
    return parameter.shape.num_bytes

  def written(result: Instruction) -> int:
    while result.opcode == 'bitcast':
      result = result.operands[0]
    return (result.operands[1] if result.opcode == 'dynamic-update-slice' else result).shape.num_bytes

  results = fused.root.operands if fused.root.opcode == 'tuple' else (fused.root,)
  parameters = (each for each in fused.instructions if each.opcode == 'parameter')
  return sum(map(read_from, parameters)) + sum(map(written, results))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='a smaller model and a few rounds: does it run?')
  parser.add_argument('--num_rounds', type=int, default=150, help='per case')
  parser.add_argument('--compile_only', metavar='MESH', help='the sizes of replica, data and mdl')
  parser.add_argument('--set', action='append', default=[], metavar='PATH=VALUE', help='with --compile_only, ours')
  args = parser.parse_args()
  if args.compile_only:
    print_result(**compile_only(args.compile_only, args.set))
    return
  num_rounds, size = (3, SMALL) if args.quick else (args.num_rounds, ())
  use_fake_devices(8)
  startup = measure_startup(4 if args.quick else 20, size)
  even = compare(EVEN + size, None, num_rounds)
  print_result(**even)  # already worth reading while the rest is measured
  uneven = compare(UNEVEN + size, ROUNDED_UP + size, num_rounds)
  print_result(
    ratio=even['ratio'], uneven_ratio=uneven['ratio'], num_rounds=num_rounds, **startup, even=even, uneven=uneven
  )


if __name__ == '__main__':
  main()
