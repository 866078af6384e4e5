"""Trains, evaluates, decodes and serves large JAX models over a device mesh.

    from spmd_tasks import load, register
    from spmd_tasks.recipes import DenseLanguageModel

    @register
    class Narrow(DenseLanguageModel):          # an experiment: model, data, mesh and intervals in one class
      '''A narrow byte model.'''

      model_dims = 48

    $ spmd-tasks --exp mine.Narrow --mode train --job_log_dir runs/narrow --num_fake_devices 8

    model = load('runs/narrow')                # in a notebook: weights, logits, generated text
    print(model.generate(['import '], max_tokens=40))

Read in this order: `experiment.py` (what a user subclasses), `recipes/` (bases), `main.py` (the binary), `config/`
(names and overrides), `programs/` (train, eval, decode), `runtime/` (partitioning and compiled steps), then `layers/`,
`learning/`, `inputs/` and `sharding/`. The names below are imported on first use, to keep `--list` fast.
"""

import os

TYPE_CHECKING = False  # as in typing, whose import takes a third of the time until the binary's first line
# Libraries read these variables once, on import. etils reads gs:// and s3:// with fsspec (stores.py), not TensorFlow.
os.environ.setdefault('EPATH_USE_TF', 'false')
# Otherwise gcsfs asks another Google service, with its own timeouts, for the kind of each bucket.
os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')

if TYPE_CHECKING:
  from typing import Any

  from spmd_tasks.config import register
  from spmd_tasks.errors import UserError
  from spmd_tasks.experiment import Experiment
  from spmd_tasks.learning import Learner
  from spmd_tasks.loading import LoadedModel, load
  from spmd_tasks.programs.recorded_runs import read_metrics
  from spmd_tasks.runtime import Task

__all__ = ['Experiment', 'Learner', 'LoadedModel', 'Task', 'UserError', 'load', 'read_metrics', 'register']

_MODULES = {
  'Experiment': 'spmd_tasks.experiment',
  'Learner': 'spmd_tasks.learning.learner',
  'LoadedModel': 'spmd_tasks.loading',
  'Task': 'spmd_tasks.runtime.task',
  'UserError': 'spmd_tasks.errors',
  'load': 'spmd_tasks.loading',
  'read_metrics': 'spmd_tasks.programs.recorded_runs',
  'register': 'spmd_tasks.config.registry',
}


def __getattr__(name: str) -> 'Any':
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  import importlib

  from spmd_tasks.activity import doing

  with doing('importing spmd_tasks'):
    value = getattr(importlib.import_module(_MODULES[name]), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
