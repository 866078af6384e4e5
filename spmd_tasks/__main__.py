"""The command `spmd-tasks`, also `python -m spmd_tasks`: handles Ctrl-C, then runs main.py."""

from spmd_tasks.interrupt import leave_on_sigint

leave_on_sigint()

from spmd_tasks.main import main  # noqa: E402

if __name__ == '__main__':
  main()
