"""Processes of the binary that have imported Paxml already: its import costs each 15 s of CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
import subprocess
import tempfile

import pytest

import spmd_tasks.bridges.pax  # noqa: F401  lets the tests import Praxis
from tests import binary, forked

PAX_EXPERIMENTS = Path(__file__).parents[2] / 'data'  # holds the package pax_lab


@pytest.fixture(scope='session')
def start_pax() -> Iterator[Callable[..., subprocess.Popen]]:
  """Starts the binary, with pax_lab importable, from a server that has imported Paxml."""

  def start(*flags: object, **popen: object) -> subprocess.Popen:
    return binary.start_binary(*flags, '--experiment_path', PAX_EXPERIMENTS, **popen)

  if not forked.is_running():
    yield start
    return
  with tempfile.TemporaryDirectory(prefix='spmd_tasks_') as directory:
    modules = ['spmd_tasks.bridges.pax._experiment']
    with forked.running_extra_server(Path(directory), modules) as server:
      yield lambda *flags, **popen: start(*flags, server=server, **popen)


@pytest.fixture(scope='session')
def run_pax(start_pax: Callable[..., subprocess.Popen]) -> Callable[..., binary.Finished]:
  """Runs the binary as `start_pax` starts it, to its end."""
  return lambda *flags, **popen: binary.finish(start_pax(*flags, **popen))
