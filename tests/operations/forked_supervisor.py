"""spmd_tasks.main whose training processes the tests' server forks; the file that PIDS names gets their pids."""

import os
import subprocess
import types

from spmd_tasks import main
from spmd_tasks.operations import supervisor
from tests.forked import ForkedPopen

PIDS = 'SPMD_TASKS_PIDS'


class Process(ForkedPopen):
  """Python with the arguments of a command; no child of this process, for whose end it ends too."""

  def __init__(self, command, **popen):
    super().__init__(command[1:], **popen)
    with open(os.environ[PIDS], 'a') as file:
      print(self.pid, file=file)


if __name__ == '__main__':
  supervisor._end_with_parent = lambda parent: None  # the server sees to it
  supervisor.subprocess = types.SimpleNamespace(**vars(subprocess) | {'Popen': Process})
  main.main()
