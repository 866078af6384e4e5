"""Judges outcomes: bit-equality with an undisturbed run, refusals in one sentence, nothing lost or left behind.

    compare_with_reference(directory, reference)      # raises BrokenPromiseError with the first difference

A number is compared as it was written, so that every bit counts. Times and rates are left out.
"""

from collections.abc import Container, Mapping
import dataclasses
import hashlib
import json
from pathlib import Path
import re
import signal
from typing import Any

import jax
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.checkpoints import Checkpointer
from tests.fault_campaign.experiments import EVAL_INTERVAL, EVALS, NUM_STEPS, REWARD_EVALS, SAVE_INTERVAL

_TIMED = re.compile(r'time|second|goodput|badput|compilations|slowest|wait')
_MUST_BE_THERE = {'loss', 'grad_norm', 'weight_norm', 'learning_rate', 'num_skipped_steps'}
_STEP_NAME = re.compile(r'checkpoint_(\d{8})')

_EVALS = EVALS | REWARD_EVALS
REFUSED = (exit_codes.USAGE, exit_codes.FAILED)  # before anything is started, and by a job that was running
# What the binary ends with after a signal. SIGINT ends Python itself in its last moments; a shell says 130 to both.
CODES_AFTER = {
  signal.SIGKILL: (exit_codes.OK, -signal.SIGKILL),
  signal.SIGTERM: (exit_codes.OK, exit_codes.PREEMPTED),
  signal.SIGINT: (exit_codes.OK, exit_codes.INTERRUPTED, -signal.SIGINT),
}


class BrokenPromiseError(Exception):
  """A promise was broken; the message says which one, and the evidence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
  """The results of an undisturbed run.

  Attributes:
    directory: its job_log_dir, with all checkpoints.
    metrics, evals: step -> name -> value; of evals by set before that.
    digests: step -> the digest of its checkpoint's arrays and input positions.
    operations: the file operations of the run, in their order, as injected.py records them.
    seconds: how long it took from the beginning of the binary's code.
  """

  directory: Path
  metrics: Mapping[int, Mapping[str, Any]]
  evals: Mapping[str, Mapping[int, Mapping[str, Any]]]
  digests: Mapping[int, str]
  operations: list[tuple[str, str]]
  seconds: float


def check(condition: Any, sentence: str) -> None:
  if not condition:
    raise BrokenPromiseError(sentence)


def metric_lines(path: Path) -> list[dict[str, Any]]:
  """Returns the steps of a metrics file with the values that do not depend on time; [] without a file."""
  if not path.is_file():
    return []
  lines = []
  for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
    try:
      if not line.endswith(b'\n'):
        continue
      record = json.loads(line)
      lines.append({name: value for name, value in record.items() if not _TIMED.search(name)})
    except (ValueError, AttributeError):
      raise BrokenPromiseError(f'line {number} of {path.name} is not a metrics record: {line[:80]!r}') from None
  return lines


def last_of_steps(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
  return {line['step']: line for line in lines}


def complete_steps(job_log_dir: Path) -> list[int]:
  """Returns the steps whose directories are named as complete checkpoints."""
  names = [path.name for path in (job_log_dir / 'checkpoints').glob('*') if path.is_dir()]
  return sorted(int(match[1]) for match in map(_STEP_NAME.fullmatch, names) if match)


def digest_of(job_log_dir: Path, step: int) -> str:
  """Verifies and reads a checkpoint without a mesh; digests names, dtypes, shapes, bits and input positions."""
  checkpoint = job_log_dir / 'checkpoints' / f'checkpoint_{step:08d}'
  leaves = json.loads((checkpoint / 'manifest.json').read_text())['body']['leaves']
  abstract: dict[str, Any] = {}
  for name, shape, dtype in leaves:
    *parents, last = name.split('/')
    place = abstract
    for parent in parents:
      place = place.setdefault(parent, {})
    place[last] = jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
  checkpointer = Checkpointer(job_log_dir / 'checkpoints', read_only=True)
  try:
    restored = checkpointer.restore(abstract, step)
  finally:
    checkpointer.close()
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_flatten_with_path(jax.device_get(restored.state))[0]:
    digest.update(f'{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}'.encode() + np.asarray(leaf).tobytes())
  digest.update(json.dumps(restored.input_states, sort_keys=True).encode())
  return digest.hexdigest()


def sealed(body: Any) -> str:
  """Returns a manifest with this content and a valid digest, which anybody can compute."""
  digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
  return json.dumps({'body': body, 'sha256': digest}, indent=1) + '\n'


def compare_lines(lines: list[dict[str, Any]], expected: Mapping[int, Mapping[str, Any]], what: str) -> None:
  """Checks every line, also of repeated steps."""
  for line in lines:
    wanted = expected.get(line['step'])
    check(wanted is not None, f'{what} has a step {line["step"]}, which the undisturbed run has not')
    for name in wanted:
      check(
        name in line and line[name] == wanted[name],
        f'{what}: {name} of step {line["step"]} is {line.get(name)!r}, undisturbed {wanted[name]!r}',
      )


def compare_with_reference(job_log_dir: Path, reference: Reference, *, may_lack: Path | None = None) -> None:
  """Checks that all steps, metrics, evals and kept checkpoints equal the undisturbed run.

  `may_lack` is a metrics file of which the fault took a line.

  Raises:
    BrokenPromiseError: something is missing, or differs.
  """
  files = {job_log_dir / 'metrics.jsonl': reference.metrics}
  files |= {job_log_dir / _EVALS[name]: evals for name, evals in reference.evals.items()}
  for path, wanted in files.items():
    lines, what = metric_lines(path), str(path.relative_to(job_log_dir))
    missing = sorted(set(wanted) - {line['step'] for line in lines})
    check(len(missing) <= (path == may_lack), f'{what} lacks the steps {missing}')
    compare_lines(lines, wanted, what)
  steps = complete_steps(job_log_dir)
  check(steps and steps[-1] == NUM_STEPS, f'the last of the checkpoints {steps} is not that of step {NUM_STEPS}')
  check_digests(job_log_dir, reference)


def compare_evals(job_log_dir: Path, reference: Reference) -> None:
  for name, evals in reference.evals.items():
    compare_lines(metric_lines(job_log_dir / _EVALS[name]), evals, f'eval {name}')


def check_digests(job_log_dir: Path, reference: Reference) -> None:
  """Checks that every complete checkpoint has the bits of the undisturbed run, if that saved the step."""
  for step in complete_steps(job_log_dir):
    if step in reference.digests:
      try:
        same = digest_of(job_log_dir, step) == reference.digests[step]
      except Exception as error:  # also a checkpoint that cannot be read
        raise BrokenPromiseError(f'checkpoint {step} cannot be read: {type(error).__name__}: {error}') from error
      check(same, f'the arrays or the input position of checkpoint {step} differ from the undisturbed ones')


def check_nothing_is_left(job_log_dir: Path) -> None:
  """Checks that a successful job has left no partial file or checkpoint."""
  left = [
    str(path.relative_to(job_log_dir))
    for path in sorted(job_log_dir.rglob('*'))
    if re.search(r'\.(partial|deleting)$', path.name)
  ]
  check(not left, f'left behind: {left[:5]}')


def check_refusal(ended: Any, codes: tuple[int, ...] = REFUSED) -> None:
  """Checks that the process ended with one of these codes and one sentence, without a traceback."""
  check_no_traceback(ended.stderr)
  check(ended.returncode in codes, f'exit code {ended.returncode}, expected {codes}: {last_line(ended.stderr)}')
  check('spmd-tasks: ' in ended.stderr, f'exit code {ended.returncode} without a sentence: {last_line(ended.stderr)}')


def check_no_traceback(stderr: str) -> None:
  check('Traceback (most recent call last)' not in stderr, f'a traceback: {last_line(stderr)}')


def last_line(text: str, limit: int = 200) -> str:
  lines = [line for line in text.splitlines() if line.strip()]
  return lines[-1][:limit] if lines else '(nothing on stderr)'


def sentence_of(ended: Any, limit: int = 160) -> str:
  """Returns the last sentence of the binary."""
  sentences = [line for line in ended.stderr.splitlines() if line.startswith('spmd-tasks: ')]
  return (sentences[-1].removeprefix('spmd-tasks: ') if sentences else last_line(ended.stderr))[:limit]


def read_reference(directory: Path, operations: list[tuple[str, str]], seconds: float) -> Reference:
  """Reads the results of an undisturbed run; asserts that they are complete."""
  metrics = last_of_steps(metric_lines(directory / 'metrics.jsonl'))
  names = REWARD_EVALS if (directory / 'eval_rewards').exists() else EVALS
  evals = {name: last_of_steps(metric_lines(directory / path)) for name, path in names.items()}
  assert sorted(metrics) == list(range(1, NUM_STEPS + 1)), sorted(metrics)
  assert all(set(line) > _MUST_BE_THERE for line in metrics.values()), metrics[1]
  due = {*range(EVAL_INTERVAL, NUM_STEPS + 1, EVAL_INTERVAL)}
  assert all(steps.keys() - {0} == due for steps in evals.values()), evals
  steps = range(SAVE_INTERVAL, NUM_STEPS + 1, SAVE_INTERVAL)
  return Reference(
    directory=directory,
    metrics=metrics,
    evals=evals,
    digests={step: digest_of(directory, step) for step in steps},
    operations=operations,
    seconds=seconds,
  )


def keep_steps(path: Path, steps: Container[int]) -> None:
  """Keeps only these steps of a metrics file, as an eval job evaluates every checkpoint that it sees."""
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(''.join(line for line in lines if json.loads(line)['step'] in steps))
