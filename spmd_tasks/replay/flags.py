"""Checks the flags of --mode replay, before anything heavy is imported."""

import argparse

from spmd_tasks.errors import UserError


def check(flags: argparse.Namespace) -> None:
  """Raises a UserError for flags that do not go together."""
  first, last = getattr(flags, 'from'), flags.to
  if (flags.step is None) == (first is None and last is None):
    raise UserError(
      '--mode replay makes one step again, --step N, or compares several, --from A --to B: give one of them.'
    )
  if flags.step is None and (first is None or last is None or not 1 <= first <= last):
    raise UserError(f'--from {first} --to {last} must be steps with 1 <= from <= to.')
  if flags.step is not None and flags.step < 1:
    raise UserError(f'--step {flags.step} must be at least 1: step 1 is the first one.')
  if flags.tolerance is not None and flags.tolerance < 0:
    raise UserError(f'--tolerance {flags.tolerance} must be at least 0.')
