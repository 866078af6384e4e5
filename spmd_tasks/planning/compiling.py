"""Compiles the steps of a job for a target: the very programs that training, evaluation and decoding run.

A program that does not fit is an answer, not an error: the compiler's refusal becomes an `OutOfMemory`. What the
compiler writes on stderr is shown only if it fails.
"""

from collections.abc import Iterator
import contextlib
import functools
import os
import re
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax

from spmd_tasks.decoding import DecodeSteps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.planning.targets import Target
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.tpu_options import refused_option

STEPS = ('train', 'eval', 'prefill', 'decode', 'joined')
_SIZE = r'([\d.]+)([KMGT]?)i?B?'
_REFUSALS = (  # of all that a device holds; of temporaries alone
  (False, re.compile(rf'[Uu]sed {_SIZE} of {_SIZE} hbm')),
  (True, re.compile(rf'required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)')),
)
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


class OutOfMemory(NamedTuple):
  """The compiler's refusal: bytes of one device, its own words, and whether it counts temporaries alone."""

  needed_bytes: int
  available_bytes: int
  message: str
  is_temporaries: bool


def compile_step(job: Job, model: PartitionedModel, step: str, target: Target) -> tuple[Any, dict[str, float]]:
  """Lowers and compiles one step of a job.

  Args:
    job, model: the built experiment, and its task partitioned over the target's devices.
    step: a name in STEPS. `prefill` reads the longest chunk that a prompt begins with; `decode` generates one token for
      every slot; `joined` does both.
    target: is named in the lines on stderr before and after it.

  Returns:
    (a jax.stages.Compiled or the compiler's OutOfMemory, trace_seconds and compile_seconds).

  Raises:
    UserError: the task has no such step, its split is impossible, or the compiler knows an option not.
  """
  note = functools.partial(print, f'plan: compiling the {step} step for {target.name}', file=sys.stderr, flush=True)
  note('...')
  start = time.perf_counter()
  with quiet_stderr(target.chip.platform != 'cpu'):
    # A Pallas kernel asks the context's mesh for the kind of GPU it is lowered for; there need not be one here.
    with jax.sharding.use_abstract_mesh(model.mesh.abstract_mesh):
      lowered = _lower(job, model, step)
    traced = time.perf_counter()
    try:
      made = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      made = read_refusal(str(error))
      if made is None:
        raise refused_option(error) or error from error.__cause__
  compiled = time.perf_counter()
  note('needs more memory than there is' if isinstance(made, OutOfMemory) else 'done', f'{compiled - start:.0f} s')
  return made, {'trace_seconds': round(traced - start, 1), 'compile_seconds': round(compiled - traced, 1)}


def _lower(job: Job, model: PartitionedModel, step: str) -> Any:
  if step == 'train':
    return model.train_step.lower()
  if step == 'eval':
    inputs = next(iter(job.eval_inputs.values()), job.train_input)
    return model.eval_step(inputs.element_spec()).lower()
  steps = DecodeSteps(model)
  if step == 'joined' and not steps.joins_prefills:
    raise UserError(
      'this job has no joined step: prompts and texts take turns. Set task.decode.step_tokens; '
      'docs/decoding.md says where it has no effect.'
    )
  return {'prefill': steps.lower_prefill, 'decode': steps.lower_step, 'joined': steps.lower_join}[step]()


def read_refusal(message: str) -> OutOfMemory | None:
  """Reads the compiler's out-of-memory error; None if it is another error."""
  if 'RESOURCE_EXHAUSTED' not in message and 'out of memory' not in message.lower():
    return None
  for is_temporaries, pattern in _REFUSALS:
    if found := pattern.search(message):
      needed, available = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
      return OutOfMemory(round(needed), round(available), message, is_temporaries)
  return None


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
