"""Makes the registered experiments importable: `spmd_tasks.experiments.lm` is experiments/lm.py of the repository.

This module acts as a package: its `__path__` is the directory experiments/ of a checkout, or `_experiments` beside this
file in an installed wheel. So a user's own package `experiments` and ours never meet. (experiment.py is something else:
the class Experiment.)
"""

from pathlib import Path

_HERE = Path(__file__).parent
DIRECTORY = next((path for path in (_HERE / '_experiments', _HERE.parent / 'experiments') if path.is_dir()), _HERE)
__path__ = [str(DIRECTORY)]
