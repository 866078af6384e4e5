"""Replays past steps of a job bit for bit.

    spmd-tasks --mode replay --job_log_dir runs/tiny --step 137 --out step137.json
    spmd-tasks --mode replay --job_log_dir runs/tiny --from 120 --to 160

Start with `mode.py`, which runs the training program from an earlier checkpoint and reports differences.
`statistics.py` summarizes a step by layer; `rows.py` describes the rows of a batch.
"""

import argparse

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import ACCEPT_CONFIG_CHANGES, Extension, Flag, Mode


def _check_flags(flags: argparse.Namespace) -> None:
  first, last = getattr(flags, 'from'), flags.to
  if (flags.step is None) == (first is None and last is None):
    raise UserError('--mode replay needs either --step N, to inspect one step, or --from A --to B, to compare several.')
  if flags.step is None and (first is None or last is None or not 1 <= first <= last):
    raise UserError(f'--from {first} --to {last} must be steps with 1 <= from <= to.')
  if flags.step is not None and flags.step < 1:
    raise UserError(f'--step {flags.step} must be at least 1.')
  if flags.tolerance is not None and not flags.tolerance >= 0:
    raise UserError(f'--tolerance {flags.tolerance} must be at least 0.')


EXTENSION = Extension(
  name='replay',
  modes=(
    Mode(
      name='replay',
      help='replays past steps of a job bit for bit, and inspects or compares them',
      run='spmd_tasks.replay.mode:run',
      check=_check_flags,
      needs_directory=True,
      prints_result=True,
      flags=(
        Flag(name='step', type=int, metavar='N', help='the step to inspect'),
        Flag(name='from', type=int, metavar='A', help='the first of several steps to compare with the record'),
        Flag(name='to', type=int, metavar='B', help='the last of these steps'),
        Flag(name='against', metavar='DIR', help='the job whose record to compare with; default: this job'),
        Flag(name='metric', metavar='NAME', help='the only metric to compare; default: all metrics of a step'),
        Flag(name='tolerance', type=float, metavar='X', help='the relative difference to allow; default: 0, every bit'),
        Flag(name='out', metavar='PATH', help='a JSON file for the report'),
        ACCEPT_CONFIG_CHANGES,
      ),
    ),
  ),
)
