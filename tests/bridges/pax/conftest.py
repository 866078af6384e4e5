"""Processes of the binary that have imported Paxml already: its import costs each 5 s of CPU."""

from collections.abc import Callable
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
