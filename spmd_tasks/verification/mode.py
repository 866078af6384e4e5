"""--mode=verify: checks that an experiment gives the same numbers however it is run, on fake devices.

`CLAIMS` is the table of the claims. The experiment is shrunk, then each claim is decided case by case. A case is
printed when it is decided; the table and one line of JSON come last.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import time
import traceback
from typing import Any

from spmd_tasks import exit_codes
from spmd_tasks.activity import set_activity
from spmd_tasks.command import Command
from spmd_tasks.config import to_json
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.verification._cases import Bench, Case, Verdict
from spmd_tasks.verification._job_claims import job_cases
from spmd_tasks.verification._layout_claims import (
  mesh_cases,
  microbatch_cases,
  pipeline_cases,
  row_cases,
)
from spmd_tasks.verification._run_claims import checkpoint_cases, eval_cases, precision_cases, quantization_cases
from spmd_tasks.verification._settings import Source, scaled_mesh, shrink, with_quantization
from spmd_tasks.verification._step_claims import dropout_cases, step_cases
from spmd_tasks.verification._text_claims import decode_cases, packing_cases, sampler_cases
from spmd_tasks.xla_flags import add_xla_flags

DEFAULT_NUM_DEVICES = 8

_print = functools.partial(print, flush=True)  # at once, also into a pipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """A sentence about numbers, and a function that yields the cases of an experiment."""

  sentence: str
  cases: Callable[[Bench], Iterator[Case]]


CLAIMS: Mapping[str, Claim] = {
  'step': Claim(sentence='a train step gives the numbers of its formulas', cases=step_cases),
  'mesh': Claim(sentence='every mesh gives the numbers of one device, padded or not', cases=mesh_cases),
  'pipeline': Claim(sentence='a pipeline of any schedule equals its layers in sequence', cases=pipeline_cases),
  'microbatches': Claim(
    sentence="the learner's microbatches equal the full batch, and each alone", cases=microbatch_cases
  ),
  'dropout': Claim(sentence='each layer, microbatch and row has a dropout mask of its own', cases=dropout_cases),
  'rows': Claim(sentence='rows that the mesh does not divide: the numbers of one device', cases=row_cases),
  'eval': Claim(sentence='evaluation gives the same on every mesh', cases=eval_cases),
  'packing': Claim(sentence='documents in one row give what each gives alone', cases=packing_cases),
  'decode': Claim(sentence='decoding and scores give what a full forward pass does', cases=decode_cases),
  'sampler': Claim(sentence='rollouts have the log-probabilities of the training pass', cases=sampler_cases),
  'bfloat16': Claim(sentence='bfloat16 is as near float32 as its roundings let expect', cases=precision_cases),
  'quantization': Claim(
    sentence='int8 and fp8 are as near float32 as their roundings let expect', cases=quantization_cases
  ),
  'checkpoint': Claim(sentence='saved, restored on another mesh and trained on: the same', cases=checkpoint_cases),
  'job': Claim(sentence='a job that is stopped goes on, and evaluates as by hand', cases=job_cases),
}


def compile_quickly() -> None:
  """Makes XLA compile CPU programs several times faster, for slower programs; call it before JAX's first use.

  Only LLVM does less: how a program is partitioned over devices stays. Flags of the user stay too.
  """
  add_xla_flags(
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
    '--xla_cpu_parallel_codegen_split_count=1',
    '--xla_cpu_collective_call_terminate_timeout_seconds=300',
  )


def format_case(case: Case, verdict: Verdict) -> str:
  """Returns the line of one case, with its notes below."""
  lines = [f'{verdict.status:15}{case.claim:14}{case.subject}: {verdict.detail}']
  return '\n'.join(lines + [f'{"":15}{"":14}{note}' for note in verdict.notes])


_COUNTED = {
  'held': 'held',
  'broken': 'BROKEN',
  'errors': 'ERROR',
  'skipped': 'skipped',
}  # statuses by what they are counted as


def format_table(decided: Sequence[tuple[Case, Verdict]]) -> str:
  """Returns a line per claim: how many of its cases held and broke, and what it says."""
  rows = []
  for name, claim in CLAIMS.items():
    counts = [
      sum(case.claim == name and verdict.status == status for case, verdict in decided) for status in _COUNTED.values()
    ]
    if any(counts):
      verdict = 'BROKEN' if counts[1] else 'ERROR' if counts[2] else 'held' if counts[0] else 'skipped'
      numbers = ''.join(f'{count:{len(column) + 2}}' for count, column in zip(counts, _COUNTED))
      rows.append(f'{name:14}{verdict:7}{numbers}   {claim.sentence}')
  return '\n'.join([f'{"claim":14}{"verdict":7}' + ''.join(f'  {column}' for column in _COUNTED), *rows])


def summary(decided: Sequence[tuple[Case, Verdict]]) -> str:
  """Returns the JSON of the last line: `claims`, `held`, `broken`, `errors`, `skipped` (counts) and `failures`."""
  counts = {name: sum(verdict.status == status for _, verdict in decided) for name, status in _COUNTED.items()}
  failures = [
    {'claim': case.claim, 'case': case.subject} | verdict.failure
    for case, verdict in decided
    if verdict.status in ('BROKEN', 'ERROR')
  ]
  claims = sum(counts.values()) - counts['skipped']
  return json.dumps({'claims': claims} | counts | {'failures': failures})


def run(command: Command) -> int:
  """Runs --mode verify, which builds the experiment again and again, with overrides of its own.

  Returns the exit code: OK, or FAILED if a claim is broken or ended in an error.

  Raises a UserError: the experiment cannot be built, or a claim is unknown.
  """
  set_activity('preparing --mode verify')
  compile_quickly()
  num_devices = command.use_fake_devices(DEFAULT_NUM_DEVICES)
  assert num_devices is not None
  claims = list(CLAIMS) if command.flags.claims is None else command.flags.claims.split(',')
  if unknown := sorted(set(claims) - set(CLAIMS)):
    raise UserError(f'--claims names {unknown[0]!r}, which is no claim: choose from {", ".join(CLAIMS)}.')
  if (num_drawn := command.flags.cases or 0) < 0:
    raise UserError(f'--cases {num_drawn} must be 0 or more.')

  def resolve(before: Sequence[str], after: Sequence[str]) -> tuple[Job, Mapping[str, Any]]:
    """Builds the job with overrides before and after the user's; returns every field's value by path too."""
    resolved = command.resolve(before, after)
    return with_quantization(None, resolved.build()), to_json(resolved)['config']

  started = time.monotonic()
  quantization = command.resolve((), ()).build().task.as_task('--mode verify').quantization
  job, values = resolve((), ())
  mesh = dict(scaled_mesh(job.experiment, num_devices))
  shrunk = shrink(job, values, mesh)
  lines = [f'{path} {values[path]} -> {value}' for path, value in shrunk.items()]
  lines += ['no task.quantization but for its own claim'] if quantization else []
  changes = f'shrunk: {", ".join(lines)}' if lines else 'as it is, for nothing in it can be made smaller'
  _print(f'{job.name} on {num_devices} devices; {changes}')
  smaller = [f'{path}={value}' for path, value in shrunk.items()]
  on_mesh = (f'ici_mesh_shape={",".join(map(str, mesh.values()))}', 'dcn_mesh_shape=None')
  source = Source(
    flags=tuple(command.identity()),
    resolve=lambda overrides: resolve(smaller, (*on_mesh, *overrides)),
    quantization=quantization,
  )
  decided: list[tuple[Case, Verdict]] = []
  bench = Bench(source, num_devices=num_devices, seed=job.experiment.seed, num_drawn=num_drawn)
  with contextlib.closing(bench):
    cases = [case for name, claim in CLAIMS.items() if name in claims for case in claim.cases(bench)]
    bench.prepare(setting for case in cases for setting in case.settings)
    for case in cases:
      verdict = _decide(case, bench)
      decided.append((case, verdict))
      _print(format_case(case, verdict))
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
  except Exception as error:  # of the experiment, or of this package: nothing was compared
    traceback.print_exc()
    message = f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else "no message"}'
    return Verdict(status='ERROR', detail=message, failure={'error': message})
