"""`python -m spmd_tasks` is the command `spmd-tasks`."""

from spmd_tasks.main import main

if __name__ == '__main__':
  main()
