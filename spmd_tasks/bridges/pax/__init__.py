"""Runs unmodified Pax experiments with Paxml's numbers, and reads Paxml's checkpoints.

    spmd-tasks --exp my_package.my_experiments.MyPaxExperiment --mode train --job_log_dir runs/pax
    state = read_pax_checkpoint('job/checkpoints/checkpoint_00000100', abstract_state)

`install_shims()` makes Praxis and Paxml importable on today's JAX (`_shims.py`). It is called for you when you use a
name below that needs them, or an experiment whose source imports them (`_recognition.py`). A module that gets Praxis
through another installed package must call it first.

Read `_experiment.py` (a Pax experiment as an Experiment), `_task.py` (Paxml's pure steps inside our partitioned steps),
`_input.py` and `_decode.py` (decode jobs), then `_checkpoints.py` and `_origins.py` (how a new job is initialized).
"""

import dataclasses
import sys
from typing import Any

from spmd_tasks.bridges.pax._flags import FLAGS
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import ExperimentKind, Extension, Flag
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
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
_lazy_export: Any = globals()['__getattr__']  # defined by lazy_exports


def __getattr__(name: str) -> Any:
  if name in globals()['__all__'] and not name.startswith(_WITHOUT_PRAXIS):
    _lazy_export('install_shims')()
  return _lazy_export(name)


def is_pax_experiment(value: object) -> bool:
  """Whether a value is the class of a Pax experiment; does not import Paxml."""
  base_experiment = sys.modules.get('paxml.base_experiment')
  return base_experiment is not None and isinstance(value, type) and issubclass(value, base_experiment.BaseExperiment)


_LAYOUT_SETTINGS = ('ici_mesh_shape', 'dcn_mesh_shape', 'mesh_axis_names', 'infeed_host_index')
# Settings of task.train that affect the numbers; the others are settings of Paxml's loop.
_NUMERIC_TRAIN_SETTINGS = ('task.train.learner', 'task.train.apply_mutable_list')


def _keeps_numbers(path: str) -> bool:
  """Whether a change of the setting at this path leaves the numbers of a job as they are."""
  if path.startswith('task.train.'):
    return not path.startswith(_NUMERIC_TRAIN_SETTINGS)
  if path in ('eval_on_test', 'decode_during_train'):
    return True
  return path.startswith('task.early_stopping_fn') or path.rpartition('.')[2] in _LAYOUT_SETTINGS


def _prepare_job(job: Any, mode: str, directory: Any) -> Any:
  """Prepares a Pax job for a mode. Raises a UserError for any job in a job directory of Paxml."""
  if getattr(type(job.experiment), '_pax_class', None) is not None:
    job = _prepare_pax_job(job, mode)
  if directory is None:  # the mode has no job directory
    return job
  checkpoints = directory / 'checkpoints'
  is_ours = not checkpoints.is_dir() or (directory / 'config.json').exists()
  if not is_ours and _lazy_export('checkpoint_format')(checkpoints) == 'pax':
    remedy = 'continue it with --set continue_from' if mode == 'train' else 'use its weights with --set init_from'
    raise UserError(
      f'{checkpoints} has checkpoints of Paxml: choose another --job_log_dir, and in a Pax experiment {remedy}='
      f'{directory}.'
    )
  return job


def _prepare_pax_job(job: Any, mode: str) -> Any:
  """Removes evals that training does not run, and warns about ignored settings."""
  from absl import logging

  from spmd_tasks.bridges.pax._ignored_settings import describe_ignored_settings
  from spmd_tasks.distributed import is_primary

  if is_primary() and (warning := describe_ignored_settings(job, mode)):
    logging.warning('%s', warning)
  if mode == 'train' and job.experiment.eval_every_steps is None:
    return dataclasses.replace(job, eval_inputs={})
  return job


def _expand(flags: Any) -> None:
  """Converts Paxml's switches to overrides of the experiment's fields."""
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
      decode='spmd_tasks.bridges.pax._decode:decode',
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
