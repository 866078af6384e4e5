"""Starts the real binary as a user does, and reads what it leaves in its job_log_dir.

Usage:

    finished = run_binary('--exp', 'synthetic.Tiny', '--mode', 'train', '--job_log_dir', directory)
    assert finished.returncode == 0, finished.stderr
    losses = column(directory, 'loss')
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import time

from spmd_tasks import main
from tests import forked
from tests.shared_models import shared_models

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
  """How a run ended: exit code, its two streams, wall-clock seconds."""

  returncode: int
  stdout: str
  stderr: str
  seconds: float


def start_process(argv: Sequence[object], *, fresh: bool = False, **popen) -> subprocess.Popen:
  """`python <argv>`: forked by the server that has imported the package (tests/fork_server.py), or `fresh`.

  A forked process is no child of this one: os.waitpid does not know it.
  """
  argv = [str(word) for word in argv]
  if fresh or not forked.is_running():
    return subprocess.Popen([sys.executable, *argv], **popen)
  return forked.ForkedPopen(argv, **popen)


def start_binary(
  *flags: object,
  cwd: Path = REPOSITORY,
  env: Mapping[str, str] | None = None,
  command: Sequence[object] = ('-m', 'spmd_tasks.main'),
  fresh: bool = False,
  **popen,
) -> subprocess.Popen:
  """`python <command> <flags>` as a process of one CPU device, both streams piped."""
  own = {name: value for name, value in os.environ.items() if name not in ('JAX_NUM_CPU_DEVICES', 'PYTHONPATH')}
  return start_process(
    [*command, *flags],
    fresh=fresh,
    cwd=cwd,
    env=own | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(REPOSITORY)} | dict(env or {}),
    text=True,
    **{'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE} | popen,
  )


def wait_until_stopped(process: subprocess.Popen, limit_s: float = 60) -> None:
  """Returns once SIGSTOP has stopped every thread of the process."""
  deadline = time.monotonic() + limit_s
  while Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()[0] != 'T':
    assert process.poll() is None, 'the process has ended instead'
    assert time.monotonic() < deadline, 'the process does not stop'
    time.sleep(0.001)


def finish(process: subprocess.Popen, limit_s: float = 200) -> Finished:
  """Waits for the end of a process; one that does not end within the limit is killed and a TimeoutExpired raised."""
  started = time.monotonic()
  try:
    stdout, stderr = process.communicate(timeout=limit_s)
  except BaseException:
    process.kill()
    process.communicate()
    raise
  return Finished(returncode=process.returncode, stdout=stdout, stderr=stderr, seconds=time.monotonic() - started)


def run_binary(*flags: object, limit_s: float = 200, **start) -> Finished:
  return finish(start_binary(*flags, **start), limit_s)


def run_python(code: str, *, limit_s: float = 60, **start) -> Finished:
  """`python -c <code>`, both streams piped."""
  streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  return finish(start_process(['-c', code], **streams | start), limit_s)


def run_in_process(*flags: object) -> int:
  """The same command line on this process's 8 fake devices; returns the exit code."""
  with shared_models():
    return main.run([str(flag) for flag in flags])


def metric_lines(directory: Path) -> list[dict]:
  """Every line of `metrics.jsonl`, steps that were executed twice twice; [] if there is none yet."""
  path = directory / 'metrics.jsonl'
  lines = path.read_text(encoding='utf-8').splitlines(keepends=True) if path.exists() else []
  return [json.loads(line) for line in lines if line.endswith('\n')]


def column(directory: Path, name: str) -> dict[int, float]:
  """Step -> one metric, of a job that executed no step twice."""
  lines = metric_lines(directory)
  values = {line['step']: line[name] for line in lines}
  assert len(values) == len(lines), 'a step was executed twice'
  return values


def checkpoint_names(directory: Path) -> list[str]:
  """What lies in the directory of checkpoints, sorted."""
  return sorted(path.name for path in (directory / 'checkpoints').glob('*'))


def copy_at(directory: Path | str, step: int, to: Path | str) -> Path:
  """Copies a job's directory with what it had when its checkpoint of `step` was the last one."""
  copy = Path(shutil.copytree(directory, to))
  for path in (copy / 'checkpoints').iterdir():
    if path.name != f'checkpoint_{step:08d}':
      shutil.rmtree(path)
  (copy / 'newest_checkpoint.json').write_text(json.dumps({'step': step}) + '\n')
  lines = (copy / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (copy / 'metrics.jsonl').write_text(''.join(line for line in lines if json.loads(line)['step'] <= step))
  return copy


def snapshot(directory: Path) -> dict[str, tuple[int, str]]:
  """Modification time and digest of every file and directory below `directory`, itself included."""
  paths = [directory, *sorted(directory.rglob('*'))] if directory.exists() else []
  return {
    str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else '')
    for path in paths
  }
