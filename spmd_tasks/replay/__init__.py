"""Replays past steps of a job, bit for bit.

    spmd-tasks --mode replay --job_log_dir runs/tiny --step 137 --out step137.json
    spmd-tasks --mode replay --job_log_dir runs/tiny --from 120 --to 160

Read `mode.py` first: it runs the training program from an earlier checkpoint and reports what differs. `statistics.py`
summarizes one step layer by layer; `rows.py` names the rows of a batch.
"""

import argparse

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import ACCEPT_CONFIG_CHANGES, Extension, Flag, Mode


def _check_flags(flags: argparse.Namespace) -> None:
  first, last = getattr(flags, 'from'), flags.to
  if (flags.step is None) == (first is None and last is None):
    raise UserError(
      '--mode replay makes one step again, --step N, or compares several, --from A --to B: give one of them.'
    )
  if flags.step is None and (first is None or last is None or not 1 <= first <= last):
    raise UserError(f'--from {first} --to {last} must be steps with 1 <= from <= to.')
  if flags.step is not None and flags.step < 1:
    raise UserError(f'--step {flags.step} must be at least 1: step 1 is the first one.')
  if flags.tolerance is not None and not flags.tolerance >= 0:
    raise UserError(f'--tolerance {flags.tolerance} must be at least 0.')


EXTENSION = Extension(
  name='replay',
  modes=(
    Mode(
      name='replay',
      help='makes past steps of a job again, bit for bit, and looks into them',
      run='spmd_tasks.replay.mode:run',
      check=_check_flags,
      needs_directory=True,
      prints_result=True,
      flags=(
        Flag(name='step', type=int, metavar='N', help='the step to make again'),
        Flag(name='from', type=int, metavar='A', help='the first of several steps, which are compared with the record'),
        Flag(name='to', type=int, metavar='B', help='the last of them'),
        Flag(name='against', metavar='DIR', help='compare with the record of another job; default: the same'),
        Flag(name='metric', metavar='NAME', help='compare this metric alone; default: all of the step'),
        Flag(name='tolerance', type=float, metavar='X', help='relative difference that is none; default: 0, every bit'),
        Flag(name='out', metavar='PATH', help='a JSON file for all that was found'),
        ACCEPT_CONFIG_CHANGES,
      ),
    ),
  ),
)
