"""Runs Pax experiments here, to the numbers of Paxml; reads Paxml's checkpoints.

    spmd-tasks --exp my_package.my_experiments.MyPaxExperiment --mode train --job_log_dir runs/pax
    state = read_pax_checkpoint('job/checkpoints/checkpoint_00000100', abstract_state)

`install_shims()` makes Praxis and Paxml importable on today's JAX (`_shims.py`); naming one of the classes and
functions below that need them does so too, and so does an experiment whose module, or another one of the same author
that it imports, imports them (`_recognition.py`). One that gets them in another way first calls `install_shims()`.

Read `_experiment.py` (a Pax experiment as one of ours), `_task.py` (Paxml's pure steps inside our partitioned ones),
`_input.py` and `_decode.py` (decode jobs); `_checkpoints.py` and `_origins.py` (what a new job takes from others).
"""

import dataclasses
import sys
from typing import Any

from spmd_tasks.bridges.pax._flags import FLAGS
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import ExperimentKind, Extension, Flag
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals(), 'EXTENSION'):
  from spmd_tasks.bridges.pax._checkpoints import (
    checkpoint_format,
    open_pax_checkpoint,
    pax_checkpoints,
    read_pax_checkpoint,
  )
  from spmd_tasks.bridges.pax._experiment import PaxExperiment
  from spmd_tasks.bridges.pax._input import PaxInput
  from spmd_tasks.bridges.pax._shims import install_shims
  from spmd_tasks.bridges.pax._task import PaxTask

_WITHOUT_PRAXIS = ('read_', 'open_', 'checkpoint_', 'pax_checkpoints', 'install_shims')
_lazy: Any = globals()['__getattr__']  # of epy


def __getattr__(name: str) -> Any:
  if name in globals()['__all__'] and not name.startswith(_WITHOUT_PRAXIS):
    _lazy('install_shims')()
  return _lazy(name)


def is_pax_experiment(value: object) -> bool:
  """Tells whether a value is the class of a Pax experiment; imports nothing of Pax."""
  base = sys.modules.get('paxml.base_experiment')  # without it no class can be one of its
  return base is not None and isinstance(value, type) and issubclass(value, base.BaseExperiment)


# Settings of Praxis' layers and inputs that decide where something is computed; of the task, those of Paxml's loop.
_PLACES = ('ici_mesh_shape', 'dcn_mesh_shape', 'mesh_axis_names', 'infeed_host_index')
_NUMBERS_OF_TRAIN = ('task.train.learner', 'task.train.apply_mutable_list')


def _keeps_numbers(path: str) -> bool:
  if path.startswith('task.train.'):
    return not path.startswith(_NUMBERS_OF_TRAIN)
  if path in ('eval_on_test', 'decode_during_train'):
    return True
  return path.startswith('task.early_stopping_fn') or path.rpartition('.')[2] in _PLACES


def _prepare_job(job: Any, mode: str, directory: Any) -> Any:
  """Refuses to run in a directory of Paxml, whose checkpoints would be taken for damaged ones of ours."""
  if getattr(type(job.experiment), '_pax_class', None) is not None:
    job = _prepare_pax_job(job, mode)
  if directory is None:  # the mode reads none
    return job
  checkpoints = directory / 'checkpoints'
  is_ours = not checkpoints.is_dir() or (directory / 'config.json').exists()
  if not is_ours and _lazy('checkpoint_format')(checkpoints) == 'pax':
    how = f'go on from this one by --set continue_from={directory}'
    if mode != 'train':
      how = f'take its weights by --set init_from={directory}'
    raise UserError(
      f'{checkpoints} holds checkpoints of Paxml: choose another --job_log_dir, and let a Pax experiment {how}.'
    )
  return job


def _prepare_pax_job(job: Any, mode: str) -> Any:
  """Returns a Pax job without the evals that its training does not make, and names settings that have no effect."""
  from absl import logging

  from spmd_tasks.bridges.pax._unread import unread_settings
  from spmd_tasks.distributed import is_primary

  if is_primary() and (sentence := unread_settings(job, mode)):
    logging.warning('%s', sentence)
  if mode == 'train' and job.experiment.eval_every_steps is None:
    return dataclasses.replace(job, eval_inputs={})
  if mode == 'decode':
    first = job.task.task.train.decode_start_after_n_steps
    return dataclasses.replace(job, task=dataclasses.replace(job.task, first_decoded_step=first))
  return job


def _expand(flags: Any) -> None:
  """Turns Paxml's switches into fields of its experiments."""
  flags.overrides[:0] = [f'{switch.name}=true' for switch in _SWITCHES if getattr(flags, switch.name)]


_SWITCHES = (
  Flag(name='eval_on_test', is_switch=True, help='evaluate in the training of a Pax experiment, as in Paxml'),
  Flag(name='decode_during_train', is_switch=True, help='decode in the training of a Pax experiment, as in Paxml'),
)

EXTENSION = Extension(
  name='pax',
  kinds=(
    ExperimentKind(
      name='Pax',
      base='spmd_tasks.bridges.pax._experiment:PaxExperiment',
      before_import='spmd_tasks.bridges.pax._recognition:prepare_import',
      recognizes=is_pax_experiment,
      adapt='spmd_tasks.bridges.pax._experiment:as_experiment',
      build='spmd_tasks.bridges.pax._experiment:build_parts',
      short_names=(('tasks.', 'paxml.tasks.'),),
    ),
  ),
  unbuilt_configs=('praxis',),
  packages=('paxml', 'praxis'),
  keeps_numbers=_keeps_numbers,
  fields_of_process=('infeed_host_index',),
  flags=_SWITCHES,
  expand=_expand,
  foreign_flags={name: hint.replace('`', '') for name, hint in FLAGS.items()},
  prepare_job=_prepare_job,
)
