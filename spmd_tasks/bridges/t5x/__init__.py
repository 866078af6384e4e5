"""T5X's models, checkpoints and setups: read, trained on and written back, to T5X's numbers; T5X is never imported."""

from spmd_tasks.wings import Wing

WING = Wing(name='t5x')
