"""Paxml and Praxis: reads and writes Paxml's checkpoints.

    state = read_pax_checkpoint('job/checkpoints/checkpoint_00000100', abstract_state)

Read _checkpoint_files.py (names, shapes), then _checkpoint_arrays.py.
"""

from spmd_tasks.bridges.pax._checkpoint_arrays import read_pax_checkpoint, write_pax_checkpoint
from spmd_tasks.bridges.pax._checkpoint_files import (
  PaxCheckpoint,
  checkpoint_format,
  open_pax_checkpoint,
  pax_checkpoints,
)

__all__ = [
  'PaxCheckpoint',
  'checkpoint_format',
  'open_pax_checkpoint',
  'pax_checkpoints',
  'read_pax_checkpoint',
  'write_pax_checkpoint',
]
