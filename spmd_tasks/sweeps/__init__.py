"""Sweeps: several jobs of one experiment, which differ in some settings.

    class Shapes(Experiment):
      learning_rate: float = 0.01

      def sweep(self):
        return product({'learning_rate': (0.001, 0.01, 0.1), 'seed': range(2)})

    spmd-tasks --exp mine.Shapes --sweep_list
    spmd-tasks --exp mine.Shapes --mode train --job_log_dir runs/lr --sweep all
    sbatch --array=0-5 --wrap 'spmd-tasks --exp mine.Shapes --mode train --job_log_dir runs/lr --sweep_index'

Each job has its own directory below --job_log_dir, and is an ordinary job with ordinary overrides. `choices.py` lists
settings, or Optuna chooses them (`optuna_choices.py`), `jobs.py` names them, and `start.py` runs them. `compare.py`
with `compare_page.html` shows jobs beside one another, whether or not they are of a sweep.
"""

from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import Extension, Flag, Mode
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.sweeps.choices import drawn, product, zipped
  from spmd_tasks.sweeps.optuna_choices import by_optuna


def _expand(flags: Any) -> int | None:
  """Turns the flags of a sweep into those of one of its jobs, or runs them all; returns an exit code if that is all."""
  if not flags.sweep_list and flags.sweep_index is None and flags.sweep is None:
    return None
  from spmd_tasks.sweeps import start

  return start.start(flags)


def _check_compare(flags: Any) -> None:
  if not flags.words:
    raise UserError("--mode compare needs directories of jobs, or of sweeps: --mode compare runs/lr 'runs/other*'.")


EXTENSION = Extension(
  name='sweeps',
  modes=(
    Mode(
      name='compare',
      words='DIR...',
      help='shows jobs beside one another: a table, and a page with curves',
      run='spmd_tasks.sweeps.compare:run',
      check=_check_compare,
      prints_result=True,
      flags=(
        Flag(name='out', metavar='PATH', help='the HTML page; default: DIR/compare.html, or ./compare.html of several'),
      ),
    ),
  ),
  flags=(
    Flag(name='sweep_list', is_switch=True, help="list the jobs of the experiment's sweep, and exit"),
    Flag(
      name='sweep_index',
      type=int,
      metavar='N',
      bare=True,
      help='run job N of the sweep, from 0, in a directory below --job_log_dir; without N: SLURM_ARRAY_TASK_ID or '
      'JOB_COMPLETION_INDEX',
    ),
    Flag(name='sweep', choices=('all',), help='run all jobs of the sweep, one after another, in this process'),
  ),
  expand=_expand,
  foreign_flags={name: 'Define sweep() in the experiment, and write --sweep all.' for name in ('multirun', 'sweeper')},
)
