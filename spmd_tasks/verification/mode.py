"""--mode=verify: checks on fake devices that an experiment gives the same numbers however it runs.

`CLAIMS` lists the claims. The mode shrinks the experiment and decides each claim case by case. It prints a case when it
is decided, and at the end a table and one line of JSON.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import time
import traceback
from typing import Any

import jax

from spmd_tasks import exit_codes
from spmd_tasks.activity import set_activity
from spmd_tasks.command import Command
from spmd_tasks.config import to_json
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.files import absolute_path
from spmd_tasks.verification._cases import Bench, Case, Verdict
from spmd_tasks.verification._coordinate_claims import coordinate_cases, parse_widths
from spmd_tasks.verification._job_claims import job_cases
from spmd_tasks.verification._kernel_claims import kernel_cases
from spmd_tasks.verification._layout_claims import (
  mesh_cases,
  microbatch_cases,
  pipeline_cases,
  row_cases,
)
from spmd_tasks.verification._packing_claims import packing_cases
from spmd_tasks.verification._run_claims import checkpoint_cases, eval_cases, precision_cases, quantization_cases
from spmd_tasks.verification._settings import Source, scaled_mesh, shrink, with_quantization
from spmd_tasks.verification._step_claims import dropout_cases, step_cases
from spmd_tasks.verification._text_claims import decode_cases, sampler_cases
from spmd_tasks.verification._wrong_kernels import record_wrong_kernels
from spmd_tasks.xla_flags import add_xla_flags

DEFAULT_NUM_DEVICES = 8

_print = functools.partial(print, flush=True)  # output may be a pipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """A claim about numbers, and a function that yields its cases for an experiment."""

  sentence: str
  cases: Callable[[Bench], Iterator[Case]]


CLAIMS: Mapping[str, Claim] = {
  'step': Claim(sentence='a train step agrees with its formulas', cases=step_cases),
  'mesh': Claim(sentence='every mesh gives the numbers of one device, padded or not', cases=mesh_cases),
  'pipeline': Claim(sentence='a pipeline with any schedule equals its layers in sequence', cases=pipeline_cases),
  'microbatches': Claim(
    sentence="the learner's microbatches agree with the formulas and the full batch", cases=microbatch_cases
  ),
  'dropout': Claim(sentence='each layer, microbatch and row has its own dropout mask', cases=dropout_cases),
  'rows': Claim(sentence='uneven rows give the numbers of one device', cases=row_cases),
  'eval': Claim(sentence='evaluation gives the same metrics on every mesh', cases=eval_cases),
  'packing': Claim(sentence='documents in one row give the same as alone', cases=packing_cases),
  'decode': Claim(sentence='decoding and scores agree with a full forward pass', cases=decode_cases),
  'sampler': Claim(sentence='rollouts have the log-probabilities of the training pass', cases=sampler_cases),
  'bfloat16': Claim(sentence='bfloat16 is as close to float32 as rounding allows', cases=precision_cases),
  'quantization': Claim(sentence='int8 and fp8 are as close to float32 as rounding allows', cases=quantization_cases),
  'kernels': Claim(sentence='kernels and their gradients agree with float64', cases=kernel_cases),
  'checkpoint': Claim(
    sentence='a checkpoint restored on another mesh is the same, and so is the next step', cases=checkpoint_cases
  ),
  'coordinates': Claim(sentence='with muP, activations keep their sizes at all widths', cases=coordinate_cases),
  'job': Claim(sentence='a stopped job resumes, and evaluates as the formulas do', cases=job_cases),
}


def compile_quickly() -> None:
  """Makes XLA compile CPU programs several times faster into slower code. Call it before JAX's first use.

  Changes only LLVM's optimizations, not the partitioning over devices. Keeps the user's flags.
  """
  add_xla_flags(
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
    '--xla_cpu_parallel_codegen_split_count=1',
    '--xla_cpu_collective_call_terminate_timeout_seconds=300',
  )


def format_case(case: Case, verdict: Verdict) -> str:
  """Formats one case as a line, followed by its notes."""
  lines = [f'{verdict.status:15}{case.claim:14}{case.subject}: {verdict.detail}']
  return '\n'.join(lines + [f'{"":15}{"":14}{note}' for note in verdict.notes])


_STATUS_BY_COLUMN = {'held': 'held', 'broken': 'BROKEN', 'errors': 'ERROR', 'skipped': 'skipped'}


def format_table(decided: Sequence[tuple[Case, Verdict]]) -> str:
  """Formats a table with a line per claim: the counts of its cases by status, and its sentence."""
  rows = []
  for name, claim in CLAIMS.items():
    counts = [
      sum(case.claim == name and verdict.status == status for case, verdict in decided)
      for status in _STATUS_BY_COLUMN.values()
    ]
    if any(counts):
      verdict = 'BROKEN' if counts[1] else 'ERROR' if counts[2] else 'held' if counts[0] else 'skipped'
      numbers = ''.join(f'{count:{len(column) + 2}}' for count, column in zip(counts, _STATUS_BY_COLUMN))
      rows.append(f'{name:14}{verdict:7}{numbers}   {claim.sentence}')
  return '\n'.join([f'{"claim":14}{"verdict":7}' + ''.join(f'  {column}' for column in _STATUS_BY_COLUMN), *rows])


def summary(decided: Sequence[tuple[Case, Verdict]]) -> str:
  """Returns the JSON of the last line: `claims`, `held`, `broken`, `errors`, `skipped` (counts) and `failures`."""
  counts = {name: sum(verdict.status == status for _, verdict in decided) for name, status in _STATUS_BY_COLUMN.items()}
  failures = [
    {'claim': case.claim, 'case': case.subject} | verdict.failure
    for case, verdict in decided
    if verdict.status in ('BROKEN', 'ERROR')
  ]
  num_decided = sum(counts.values()) - counts['skipped']
  return json.dumps({'claims': num_decided} | counts | {'failures': failures})


def run(command: Command) -> int:
  """Runs --mode verify, which builds the experiment several times with different overrides.

  Returns the exit code: OK, or FAILED if a case is broken or raised an error.

  Raises a UserError if the experiment cannot be built, or a claim is unknown.
  """
  set_activity('preparing --mode verify')
  compile_quickly()
  claims = list(CLAIMS) if command.flags.claims is None else command.flags.claims.split(',')
  # Kernels run on this machine's own devices; the other claims are checked on fake CPU devices.
  num_devices = command.use_fake_devices(None if claims == ['kernels'] else DEFAULT_NUM_DEVICES) or jax.device_count()
  if unknown := sorted(set(claims) - set(CLAIMS)):
    raise UserError(f'--claims has {unknown[0]!r}, which is not a claim: choose from {", ".join(CLAIMS)}.')
  if (num_random_meshes := command.flags.cases or 0) < 0:
    raise UserError(f'--cases {num_random_meshes} must be at least 0.')
  widths = () if command.flags.widths is None else parse_widths(command.flags.widths)

  def resolve(before: Sequence[str], after: Sequence[str]) -> tuple[Job, Mapping[str, Any]]:
    """Builds the job with overrides before and after the user's. Returns (job, every field's value by path)."""
    resolved = command.resolve(before, after)
    return with_quantization(None, resolved.build()), to_json(resolved)['config']

  started = time.monotonic()
  quantization = command.resolve((), ()).build().task.as_task('--mode verify').quantization
  job, values = resolve((), ())
  mesh = dict(scaled_mesh(job.experiment, num_devices))
  shrunk = shrink(job, values, mesh)
  lines = [f'{path} {values[path]} -> {value}' for path, value in shrunk.items()]
  lines += ['task.quantization only for its own claim'] if quantization else []
  changes = f'shrunk: {", ".join(lines)}' if lines else 'not shrunk, because it is small'
  _print(f'{job.name} on {num_devices} devices; {changes}')
  shrink_overrides = [f'{path}={value}' for path, value in shrunk.items()]
  mesh_overrides = (f'ici_mesh_shape={",".join(map(str, mesh.values()))}', 'dcn_mesh_shape=None')
  source = Source(
    flags=tuple(command.identity()),
    resolve=lambda overrides: resolve(shrink_overrides, (*mesh_overrides, *overrides)),
    quantization=quantization,
    build_whole=lambda: command.resolve((), ()).build(),
  )
  decided: list[tuple[Case, Verdict]] = []
  bench = Bench(
    source, num_devices=num_devices, seed=job.experiment.seed, num_random_meshes=num_random_meshes, widths=widths
  )
  with contextlib.closing(bench):
    cases = [case for name, claim in CLAIMS.items() if name in claims for case in claim.cases(bench)]
    bench.prepare(setting for case in cases for setting in case.settings)
    for case in cases:
      verdict = _decide(case, bench)
      decided.append((case, verdict))
      _print(format_case(case, verdict))
  if 'kernels' in claims and command.flags.job_log_dir:
    failures = [
      verdict.failure for case, verdict in decided if case.claim == 'kernels' and 'settings' in verdict.failure
    ]
    record_wrong_kernels(absolute_path(command.flags.job_log_dir), failures)
  _print('')
  _print(format_table(decided))
  _print(f'in {time.monotonic() - started:.0f} s')
  _print(summary(decided))
  return exit_codes.FAILED if any(verdict.failure for _, verdict in decided) else exit_codes.OK


def _decide(case: Case, bench: Bench) -> Verdict:
  try:
    return case.decide(bench)
  except UserError as error:
    return Verdict(status='skipped', detail=f'refused: {error}')
  except Exception as error:  # raised by the experiment or by this package: nothing was compared
    traceback.print_exc()
    message = f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else "no message"}'
    return Verdict(status='ERROR', detail=message, failure={'error': message})
