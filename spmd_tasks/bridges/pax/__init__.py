"""Runs Praxis models and Pax experiments here, to the numbers of Paxml; reads and writes Paxml's checkpoints.

    spmd-tasks --exp my_package.my_experiments.MyPaxExperiment --mode train --job_log_dir runs/pax
    state = read_pax_checkpoint('job/checkpoints/checkpoint_00000100', abstract_state)

Importing this package makes Praxis and Paxml importable (`_shims.py`) and imports neither of them. The reader of
checkpoints needs neither; the rest does. TensorFlow and others that Paxml imports wait until something uses them
(`_deferred_imports.py`).

Read `_experiment.py` (a Pax experiment as one of ours), `_task.py` (Paxml's pure steps inside our partitioned ones),
`_praxis_task.py` (Praxis models and layers in experiments of ours), `_input.py`, `_decode.py` (decode jobs) and
`_kv_cache.py` (serving); then `_checkpoint_files.py`, `_checkpoint_arrays.py` and `_loading_rules.py` (parts of other
jobs). `translate_language_model` makes one of our language models of a Praxis one, weights included:
`_praxis_model.py`, `_praxis_stack.py`, `_praxis_layers.py`. `translate_experiment` writes a whole experiment:
`_native_experiment.py`.
"""

from etils import epy

from spmd_tasks.bridges.pax._shims import install_shims

install_shims()

with epy.lazy_api_imports(globals()):
  from spmd_tasks.bridges.pax._checkpoint_arrays import read_pax_checkpoint, write_pax_checkpoint
  from spmd_tasks.bridges.pax._checkpoint_files import (
    PaxCheckpoint,
    checkpoint_format,
    open_pax_checkpoint,
    pax_checkpoints,
  )
  from spmd_tasks.bridges.pax._experiment import PaxExperiment, as_experiment, is_pax_experiment
  from spmd_tasks.bridges.pax._input import PaxInput
  from spmd_tasks.bridges.pax._native_experiment import TranslatedExperiment, pax_dataset, translate_experiment
  from spmd_tasks.bridges.pax._praxis_model import Translation, translate_language_model
  from spmd_tasks.bridges.pax._praxis_task import PraxisLayer, PraxisTask
  from spmd_tasks.bridges.pax._task import PaxTask

__all__ = [
  'PaxCheckpoint',
  'PaxExperiment',
  'PaxInput',
  'PaxTask',
  'PraxisLayer',
  'PraxisTask',
  'TranslatedExperiment',
  'Translation',
  'as_experiment',
  'checkpoint_format',
  'install_shims',
  'is_pax_experiment',
  'open_pax_checkpoint',
  'pax_checkpoints',
  'pax_dataset',
  'read_pax_checkpoint',
  'translate_experiment',
  'translate_language_model',
  'write_pax_checkpoint',
]
