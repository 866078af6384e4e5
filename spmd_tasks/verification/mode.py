"""--mode=verify: checks that an experiment gives the same numbers however it is run, on fake devices.

The experiment is shrunk, then each claim of `spmd_tasks.verification` is decided case by case. A case is printed when
it is decided; the table and one line of JSON come last.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
from pathlib import Path
import tempfile
import time
import traceback
from typing import Any

from spmd_tasks import exit_codes
from spmd_tasks.activity import set_activity
from spmd_tasks.command import Command
from spmd_tasks.config import to_json
from spmd_tasks.distributed.fake_devices import compile_quickly
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.verification._cases import Bench, Case, Verdict
from spmd_tasks.verification._claims import CLAIMS, format_case, format_table, summary
from spmd_tasks.verification._settings import Source, scaled_mesh
from spmd_tasks.verification._shrink import shrink

DEFAULT_NUM_DEVICES = 8

_print = functools.partial(print, flush=True)  # at once, also into a pipe

Resolve = Callable[[Sequence[str], Sequence[str]], tuple[Job, Mapping[str, Any]]]


def run(command: Command) -> int:
  """Runs --mode verify, which builds the experiment again and again, with overrides of its own."""
  set_activity('preparing --mode verify')
  compile_quickly()
  flags = command.flags
  num_devices = command.use_fake_devices(DEFAULT_NUM_DEVICES)
  assert num_devices is not None

  def resolve(before: Sequence[str], after: Sequence[str]) -> tuple[Job, Mapping[str, Any]]:
    resolved = command.resolve(before, after)
    return resolved.build(), to_json(resolved)['config']

  return verify(
    resolve,
    command.identity(),
    num_devices=num_devices,
    claims=None if flags.claims is None else flags.claims.split(','),
    num_cases=flags.cases or 0,
    directory=flags.job_log_dir,
  )


def verify(
  resolve: Resolve,
  flags: Sequence[str],
  *,
  num_devices: int,
  claims: Sequence[str] | None = None,
  num_cases: int = 0,
  directory: str | None = None,
) -> int:
  """Verifies an experiment; returns the exit code: OK, or FAILED if a claim is broken.

  Args:
    resolve: (overrides before the user's, overrides after the user's) -> (the built job, every field's value by path).
    flags: that name the experiment and the user's own overrides, for commands that are printed and for child processes.
    num_devices: how many devices there are.
    claims: the names of the claims to decide; None: all.
    num_cases: how many random meshes more.
    directory: gets the files of child processes, in `verify/`; None: a temporary directory, removed at the end.

  Raises:
    UserError: the experiment cannot be built, or a claim is unknown.
  """
  if unknown := sorted(set(claims or ()) - set(CLAIMS)):
    raise UserError(f'--claims names {unknown[0]!r}, which is no claim: choose from {", ".join(CLAIMS)}.')
  started = time.monotonic()
  job, values = resolve((), ())
  mesh = dict(scaled_mesh(job.experiment, num_devices))
  shrunk = shrink(job, values, mesh)
  changes = f'shrunk: {", ".join(shrunk.lines)}' if shrunk.lines else 'as it is, for nothing in it can be made smaller'
  _print(f'{job.name} on {num_devices} devices; {changes}')
  on_mesh = (f'ici_mesh_shape={",".join(map(str, mesh.values()))}', 'dcn_mesh_shape=None')
  source = Source(
    flags=tuple(flags),
    resolve=lambda overrides: resolve(shrunk.overrides, (*on_mesh, *overrides)),
    shrinking=shrunk.overrides,
  )
  decided: list[tuple[Case, Verdict]] = []
  with contextlib.ExitStack() as stack:
    if directory is None:
      place = stack.enter_context(tempfile.TemporaryDirectory(prefix='spmd_tasks_verify_'))
    else:
      place = str(Path(directory).absolute() / 'verify')
    bench = Bench(source, num_devices=num_devices, directory=place, seed=job.experiment.seed)
    stack.callback(bench.close)
    chosen = {name: CLAIMS[name] for name in CLAIMS if claims is None or name in claims}
    cases = [case for claim in chosen.values() for case in claim.cases(bench, num_cases)]
    bench.prepare(setting for case in cases for setting in case.settings)
    for case in cases:
      case.begin(bench)
    for case in cases:
      verdict = _decide(case, bench)
      decided.append((case, verdict))
      _print(format_case(case, verdict))
  _print('')
  _print(format_table(decided))
  _print(f'in {time.monotonic() - started:.0f} s')
  _print(summary(decided))
  return exit_codes.FAILED if any(verdict.status == 'BROKEN' for _, verdict in decided) else exit_codes.OK


def _decide(case: Case, bench: Bench) -> Verdict:
  try:
    return case.decide(bench)
  except UserError as error:
    return Verdict(status='not applicable', detail=f'refused: {error}')
  except Exception as error:  # a mesh on which the experiment cannot run at all is a finding too
    traceback.print_exc()
    message = f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else "no message"}'
    return Verdict(status='BROKEN', detail=message, failure={'error': message})
