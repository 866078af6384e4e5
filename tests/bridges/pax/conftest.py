"""Processes of the binary that have imported Paxml already: its import costs each 5 s of CPU."""

from collections.abc import Callable
import json
import os
from pathlib import Path
import subprocess

import pytest

from spmd_tasks.bridges.pax import install_shims
from tests import binary, forked

install_shims()  # lets the tests import Praxis

PAX_EXPERIMENTS = Path(__file__).parents[2] / 'data'  # holds the package pax_lab


@pytest.fixture(scope='session')
def start_pax() -> Callable[..., subprocess.Popen]:
  """Starts the binary, with pax_lab importable, from the server that has imported Paxml."""
  server = {'server': os.environ[forked.PAX_SOCKET_VARIABLE]} if forked.is_running() else {}
  return lambda *flags, **popen: binary.start_binary(*flags, '--experiment_path', PAX_EXPERIMENTS, **server, **popen)


@pytest.fixture(scope='session')
def run_pax(start_pax: Callable[..., subprocess.Popen]) -> Callable[..., binary.Finished]:
  """Runs the binary as `start_pax` starts it, to its end."""
  return lambda *flags, **popen: binary.finish(start_pax(*flags, **popen))


_TOGETHER = """
import json, sys
from spmd_tasks import main
from tests.shared_models import shared_models
for flags in json.loads(sys.argv[1]):
  with shared_models():
    code = main.run(flags)
  print(f'\\n=== {code}', file=sys.stderr, flush=True)
"""


@pytest.fixture(scope='session')
def start_pax_together(start_pax: Callable[..., subprocess.Popen]) -> Callable[..., subprocess.Popen]:
  """Starts several command lines, one after another, in one process, which shares what it compiles."""

  def start(*commands: tuple[object, ...]) -> subprocess.Popen:
    flags = [[*map(str, command), '--experiment_path', str(PAX_EXPERIMENTS)] for command in commands]
    return start_pax(command=('-c', _TOGETHER, json.dumps(flags)))

  return start


def ends_of(stderr: str) -> list[tuple[int, str]]:
  """Exit code and stderr of each command line that such a process has ended."""
  *said, _ = parts = stderr.split('\n=== ')
  codes = [int(part.partition('\n')[0]) for part in parts[1:]]
  return list(zip(codes, said, strict=True))


@pytest.fixture(scope='session')
def run_pax_together(start_pax_together: Callable[..., subprocess.Popen]) -> Callable[..., list[tuple[int, str]]]:
  """Runs such a process to its end."""

  def run(*commands: tuple[object, ...]) -> list[tuple[int, str]]:
    finished = binary.finish(start_pax_together(*commands), limit_s=200 + 20 * len(commands))
    assert finished.returncode == 0, finished.stderr
    return ends_of(finished.stderr)

  return run
