"""The training process of a host: it imports what it needs, and waits until its supervisor tells it its round.

    {"coordinator": "10.0.0.1:1234", "num_processes": 3, "process_id": 1, "round": 2}      one line on its stdin

While it trains, the next one waits, so that a round that follows a failure begins without Python's imports.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
from typing import Any

from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.files import write_durably
from spmd_tasks.programs import goodput
from spmd_tasks.programs.hooks import TrainHook, TrainRun

_ALWAYS = ('spmd_tasks.programs.train',)


def wait_for_round(flags: argparse.Namespace, modules_file: str) -> None:
  """Returns when this process is needed, with the flags and the environment of its round."""
  names = list(_ALWAYS)
  with contextlib.suppress(OSError, ValueError), open(modules_file) as file:
    names += json.load(file)
  for name in names:
    with contextlib.suppress(Exception):  # what is wrong is said when it is needed
      importlib.import_module(name)
  line = sys.stdin.readline()
  if not line:
    os._exit(exit_codes.OK)
  told: dict[str, Any] = json.loads(line)
  os.environ['SPMD_TASKS_ROUND'] = str(told['round'])
  flags.coordinator_address, flags.num_processes = told['coordinator'], told['num_processes']
  flags.process_id = told['process_id']
  goodput.woken = goodput.steady_now()
  nothing = os.open(os.devnull, os.O_RDONLY)
  os.dup2(nothing, 0)
  os.close(nothing)


class TellModules(TrainHook):
  """Tells the supervisor, once this process trains, which modules the next one will need."""

  def __init__(self, modules_file: str):
    self._path = epath.Path(modules_file)

  def after_first_step(self, run: TrainRun) -> None:
    write_durably(self._path, json.dumps([name for name in sys.modules if name != '__main__']))
