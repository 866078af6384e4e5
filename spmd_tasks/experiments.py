"""The registered experiments: `spmd_tasks.experiments.lm` is experiments/lm.py of the repository.

They lie at the top of a checkout, and beside this file (as `_experiments`) where the package came from a wheel.
Under this name they neither shadow a user's own package `experiments`, nor are shadowed by it.
"""

from pathlib import Path

_HERE = Path(__file__).parent
DIRECTORY = next(path for path in (_HERE / '_experiments', _HERE.parent / 'experiments') if path.is_dir())
__path__ = [str(DIRECTORY)]
