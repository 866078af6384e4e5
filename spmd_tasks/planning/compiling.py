"""Compiles the steps of a job for a target: the very programs that training, evaluation and decoding run.

    compilation = compile_step(job, model, 'train', target)
    compilation.program                # jax.stages.Compiled, None where it needs more memory than the chip has
    compilation.out_of_memory          # by how much

A program that does not fit is an answer, not an error: the compiler's refusal becomes an `OutOfMemory`. While it
compiles, one line on stderr counts the seconds; what the compiler itself writes there is shown only if it fails.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import os
import re
import sys
import tempfile
import threading
import time
from typing import Any

import jax

from spmd_tasks.decoding import DecodeSteps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.planning.targets import Target
from spmd_tasks.runtime import PartitionedModel

STEPS = ('train', 'eval', 'prefill', 'decode')
_TICK_S = 1.0
_LINE_EVERY_S = 30.0  # where stderr is no terminal
_SIZE = r'([\d.]+)([KMGT]?)i?B?'
_REFUSALS = (  # of all that a device holds; of temporaries alone
  (False, re.compile(rf'[Uu]sed {_SIZE} of {_SIZE} hbm')),
  (True, re.compile(rf'required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)')),
)
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutOfMemory:
  """The compiler's refusal.

  Attributes:
    needed_bytes, available_bytes: of one device.
    is_temporaries: whether the compiler counts temporaries alone, without the step's arguments.
    message: the compiler's own words, with its largest allocations.
  """

  needed_bytes: int
  available_bytes: int
  is_temporaries: bool
  message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
  """One step, compiled or refused.

  Attributes:
    step: a name in STEPS.
    program: jax.stages.Compiled; None where it was refused.
    out_of_memory: why it was refused; None where it was compiled.
    trace_seconds, compile_seconds: how long each took.
  """

  step: str
  program: Any
  out_of_memory: OutOfMemory | None
  trace_seconds: float
  compile_seconds: float


def compile_step(
  job: Job, model: PartitionedModel, step: str, target: Target, *, show_progress: bool = True
) -> Compilation:
  """Lowers and compiles one step of a job.

  Args:
    job: the built experiment.
    model: its task, partitioned over the target's devices.
    step: a name in STEPS. `prefill` reads the longest chunk that a prompt begins with; `decode` generates one token for
      every slot.
    target: names the devices in the progress line.
    show_progress: whether to write that line.

  Raises:
    UserError: the task has no such step, or its split is impossible.
  """
  with _Progress(f'compiling the {step} step for {target.name}', show=show_progress) as progress:
    with quiet_stderr(target.compiler != 'cpu'):
      start = time.perf_counter()
      # A Pallas kernel asks the context's mesh for the kind of GPU it is lowered for; there need not be one here.
      with jax.sharding.use_abstract_mesh(model.mesh.abstract_mesh):
        lowered = _lower(job, model, step)
      traced = time.perf_counter()
      program, refused = _compile(lowered)
      compiled = time.perf_counter()
    progress.finish('needs more memory than there is' if refused else 'done')
  return Compilation(
    step=step,
    program=program,
    out_of_memory=refused,
    trace_seconds=traced - start,
    compile_seconds=compiled - traced,
  )


def _lower(job: Job, model: PartitionedModel, step: str) -> Any:
  if step == 'train':
    return model.train_step.lower()
  if step == 'eval':
    inputs = next(iter(job.eval_inputs.values()), job.train_input)
    return model.eval_step(inputs.element_spec()).lower()
  if step in STEPS:
    steps = DecodeSteps(model)
    return steps.lower_prefill() if step == 'prefill' else steps.lower_step()
  raise UserError(f'--plan_steps names {step!r}, which is no step: choose from {", ".join(STEPS)}.')


def _compile(lowered: Any) -> tuple[Any, OutOfMemory | None]:
  try:
    return lowered.compile(), None
  except jax.errors.JaxRuntimeError as error:
    refused = read_refusal(str(error))
    if refused is None:
      raise
    return None, refused


def read_refusal(message: str) -> OutOfMemory | None:
  """Reads the compiler's out-of-memory error; None if it is another error."""
  if 'RESOURCE_EXHAUSTED' not in message and 'out of memory' not in message.lower():
    return None
  for is_temporaries, pattern in _REFUSALS:
    if found := pattern.search(message):
      needed, available = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
      return OutOfMemory(
        needed_bytes=round(needed),
        available_bytes=round(available),
        is_temporaries=is_temporaries,
        message=message,
      )
  return None


class _Progress:
  """A line on stderr that counts the seconds; where stderr is no terminal, a new line every 30 s."""

  def __init__(self, text: str, *, show: bool):
    self._text, self._show = text, show
    self._ended = threading.Event()

  def __enter__(self) -> '_Progress':
    # The stream that stderr is now: while the compiler runs, file descriptor 2 is another one.
    self._stream = os.fdopen(os.dup(sys.__stderr__.fileno()), 'w') if self._show and sys.__stderr__ else None
    self._begun = time.monotonic()
    if self._stream is not None:
      self._is_terminal = self._stream.isatty()
      self._thread = threading.Thread(target=self._count, daemon=True)
      self._thread.start()
    return self

  def _count(self) -> None:
    while not self._ended.wait(_TICK_S if self._is_terminal else _LINE_EVERY_S):
      self._write('...')

  def _write(self, state: str, *, last: bool = False) -> None:
    assert self._stream is not None
    line = f'plan: {self._text} {state} {time.monotonic() - self._begun:.0f} s'
    with contextlib.suppress(OSError):  # nobody reads
      self._stream.write(f'\r{line}   ' + ('\n' if last else '') if self._is_terminal else f'{line}\n')
      self._stream.flush()

  def finish(self, state: str) -> None:
    """Writes the last state of the line."""
    if self._stream is not None:
      self._ended.set()
      self._thread.join()
      self._write(state, last=True)

  def __exit__(self, *exception: object) -> None:
    self._ended.set()
    if self._stream is not None:
      self._thread.join()
      self._stream.close()


@contextlib.contextmanager
def quiet_stderr(is_quiet: bool = True) -> Iterator[None]:
  """Keeps what libraries write to file descriptor 2; an exception gets the last lines of it as a note."""
  if not is_quiet:
    yield
    return
  sys.stderr.flush()
  saved = os.dup(2)
  with tempfile.TemporaryFile() as kept:
    os.dup2(kept.fileno(), 2)
    try:
      yield
    except Exception as error:
      kept.seek(max(0, kept.seek(0, os.SEEK_END) - 4000))
      if text := kept.read().decode(errors='replace').strip():
        error.add_note(f'The compiler wrote:\n{text}')
      raise
    finally:
      sys.stderr.flush()
      os.dup2(saved, 2)
      os.close(saved)
