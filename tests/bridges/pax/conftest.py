"""Starts the binary in processes that have already imported Paxml, which takes 5 s."""

from collections.abc import Callable
import json
import os
from pathlib import Path
import subprocess
import tarfile

import pytest

from spmd_tasks.bridges.pax import install_shims
from tests import binary, forked

install_shims()  # lets the tests import Praxis

PAX_EXPERIMENTS = Path(__file__).parents[2] / 'data'  # holds the package pax_lab
# Losses of steps 4 and 5, computed by Paxml's step function on one device from the checkpoint of `paxml_job`.
CONTINUED = [4.193216800689697, 4.155379295349121]


@pytest.fixture(scope='session')
def paxml_job(tmp_path_factory) -> Path:
  """Returns a job of Paxml with the checkpoint of step 3."""
  directory = tmp_path_factory.mktemp('paxml')
  with tarfile.open(PAX_EXPERIMENTS / 'paxml_1_4_0' / 'dense_lm_ema.tar.xz') as archive:
    archive.extractall(directory, filter='data')
  return directory


@pytest.fixture(scope='session')
def start_pax() -> Callable[..., subprocess.Popen]:
  """Returns a function that starts the binary from a server that has imported Paxml, with pax_lab importable."""
  server = {'server': os.environ[forked.PAX_SOCKET_VARIABLE]} if forked.is_running() else {}
  return lambda *flags, **popen: binary.start_binary(*flags, '--experiment_path', PAX_EXPERIMENTS, **server, **popen)


@pytest.fixture(scope='session')
def run_pax(start_pax: Callable[..., subprocess.Popen]) -> Callable[..., binary.Finished]:
  """Returns a function that runs the binary like `start_pax` and waits for it."""
  return lambda *flags, **popen: binary.finish(start_pax(*flags, **popen))


_TOGETHER = """
import json, pkgutil, sys
from spmd_tasks import main
from tests.shared_models import shared_models
for name, arguments in json.loads(sys.argv[1]):
  code = 0
  with shared_models():
    if name:
      pkgutil.resolve_name(name)(*arguments)
    else:
      code = main.run(arguments)
  print(f'\\n=== {code}', file=sys.stderr, flush=True)
"""


@pytest.fixture(scope='session')
def start_pax_together(start_pax: Callable[..., subprocess.Popen]) -> Callable[..., subprocess.Popen]:
  """Returns a function that starts a process that runs several commands in sequence and shares compiled programs.

  A command is flags of the binary, or `module:function` and its arguments, of which paths become strings.
  """

  def step(command: tuple[object, ...]) -> tuple[str, list[object]]:
    name, *arguments = command
    if ':' in str(name):
      return str(name), arguments
    return '', [*map(str, command), '--experiment_path', str(PAX_EXPERIMENTS)]

  def start(*commands: tuple[object, ...]) -> subprocess.Popen:
    return start_pax(command=('-c', _TOGETHER, json.dumps([*map(step, commands)], default=str)))

  return start


def ends_of(stderr: str) -> list[tuple[int, str]]:
  """Returns the exit code and stderr of each command that a process of `start_pax_together` has run."""
  *outputs, _ = parts = stderr.split('\n=== ')
  codes = [int(part.partition('\n')[0]) for part in parts[1:]]
  return list(zip(codes, outputs, strict=True))


@pytest.fixture(scope='session')
def run_pax_together(start_pax_together: Callable[..., subprocess.Popen]) -> Callable[..., list[tuple[int, str]]]:
  """Returns a function that runs commands like `start_pax_together`, waits, and returns exit codes and stderr."""

  def run(*commands: tuple[object, ...]) -> list[tuple[int, str]]:
    finished = binary.finish(start_pax_together(*commands), limit_s=200 + 20 * len(commands))
    assert finished.returncode == 0, finished.stderr
    return ends_of(finished.stderr)

  return run
