"""T5X's models, checkpoints and setups: read, trained on and written back, to T5X's numbers; T5X is never imported."""

from etils import epy

from spmd_tasks.wings import Wing

with epy.lazy_api_imports(globals()):
  from spmd_tasks.bridges.t5x._seqio import SeqIoInput

__all__ = ['WING', 'SeqIoInput']

WING = Wing(name='t5x')
