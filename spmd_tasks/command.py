"""Command: resolves the flags of one command of the binary to an experiment and a job.

    def run(command: Command) -> int:                    # the `run` of a Mode, see extensions.py
      with command.open_job() as opened:                 # processes connected, configs compared, experiment built
        return census(opened.job, opened.directory, step=command.flags.checkpoint_step)

A mode that builds an experiment more than once, or for devices of another machine, calls `command.resolve` instead.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import math
import os
import secrets
import shutil
import tempfile
from typing import Any

from etils import epath
import jax
from jax.experimental.compilation_cache import compilation_cache

from spmd_tasks.activity import set_activity, silence
from spmd_tasks.config import resolve, to_json
from spmd_tasks.config.changes import refuse_changed_config
from spmd_tasks.config.from_saved import from_json
from spmd_tasks.config.resolution import Prepare, ResolvedConfig
from spmd_tasks.config.saved_config import read_saved_config
from spmd_tasks.distributed import DistributedSettings, EmergencyExit, initialize, is_primary, use_fake_devices
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.distributed.comparison import code_digests, fields_to_compare, process_environment, refuse_differences
from spmd_tasks.distributed.environment import backend_errors, numeric_settings
from spmd_tasks.distributed.rendezvous import report_absence
from spmd_tasks.errors import UserError, refuse_exit
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.extensions import prepare_job
from spmd_tasks.files import absolute_path, is_missing, is_remote, stay_inside
from spmd_tasks.flags import NO_DIRECTORY, all_modes, common_flags, overrides_of
from spmd_tasks.programs.compiled_programs import copy_from_store, programs_directory
from spmd_tasks.programs.goodput import process_start_time, since_epoch
from spmd_tasks.programs.job_directory import has_trained, refuse_lost_config
from spmd_tasks.programs.restore import LOOK_LIMIT_S
from spmd_tasks.runtime.origin import Base


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenJob:
  """A job that is ready to run: the processes are connected and have the same config."""

  job: Job
  directory: epath.Path  # the job_log_dir; for a model without a job, a temporary directory for reports
  config: Mapping[str, Any]  # the content of config.json
  emergency: EmergencyExit  # ends this process on a failure and tells the others
  begun: float  # when the command was started, in seconds since the epoch

  def load_draft(self, model: Any) -> Any:
    """See loading.load_draft."""
    from spmd_tasks.loading import load_draft

    return load_draft(self.job, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """The flags of a command.

  Attributes:
    flags: the parsed flags.
    mode: the name of the mode; '' for --print_config.
    called: the `time.monotonic()` of a call from Python; None if the process was started for this command.
  """

  flags: argparse.Namespace
  mode: str = ''
  called: float | None = None

  @property
  def overrides(self) -> list[str]:
    """The user's overrides, as `path=value`."""
    return overrides_of(self.flags)

  def identity(self) -> list[str]:
    """Returns the flags of the experiment and its overrides, for another command about the same experiment."""
    flags = self.flags
    if flags.exp is not None:
      words = ['--exp', flags.exp]
    else:
      words = ['--config', flags.config or f'{flags.job_log_dir}/config.json']
    words += [word for directory in flags.experiment_path for word in ('--experiment_path', directory)]
    return words + [word for override in self.overrides for word in ('--set', override)]

  def use_fake_devices(self, default: int | None = None) -> int | None:
    """Replaces the devices by --num_fake_devices, or else `default`, fake devices; returns their number, or None."""
    num_devices = default if self.flags.num_fake_devices is None else self.flags.num_fake_devices
    if num_devices is not None:
      use_fake_devices(num_devices)
    return num_devices

  def resolve(
    self, before: Sequence[str] = (), after: Sequence[str] = (), prepare: Prepare | None = None
  ) -> ResolvedConfig:
    """Resolves the experiment: a class, a saved config, or the config in --job_log_dir.

    Args:
      before, after: overrides that are applied before and after the user's.
      prepare: called with the experiment before its parts are built.

    Raises a UserError: the flags name no experiment, or its config is wrong.
    """
    flags, overrides, path = self.flags, [*before, *self.overrides, *after], self.flags.config
    if flags.exp is not None:
      if path is not None:
        raise UserError('--exp and --config both name an experiment: give only one of them.')
      return resolve(flags.exp, overrides, prepare, flags.experiment_path)
    if path is None:
      if not flags.job_log_dir:
        raise UserError(
          'the command names no experiment: give --exp NAME (--list shows the registered names), --config FILE, or the '
          '--job_log_dir of an earlier job.'
        )
      path = absolute_path(flags.job_log_dir) / 'config.json'
      if is_missing(path):
        raise UserError(
          f'{path} does not exist, so there is no job to continue: correct --job_log_dir, or start a job with --exp '
          'NAME (--list shows the registered names).'
        )
      saved = read_saved_config(path, remedy='Put the original back, or name the experiment: --exp NAME.')
    else:
      saved = read_saved_config(path)
    return from_json(saved, overrides, flags.experiment_path, prepare)

  @contextlib.contextmanager
  def open_job(self) -> Iterator[OpenJob]:
    """Connects the processes, builds the experiment, and compares its config with the config in the directory.

    Raises a UserError: the config is wrong, or differs from another process's or from the config of the job.
    """

    def connect(experiment: Experiment) -> None:
      if not jax.distributed.is_initialized() and initialize(self._distributed_settings(experiment)):
        if not is_primary():
          silence()
        emergency.watch_peers()
        self._compare('flags and environment', common_flags(self.flags, all_modes()) | process_environment())

    self.use_fake_devices()
    emergency = EmergencyExit()
    with emergency.on_failure(), refuse_exit(), backend_errors(), contextlib.ExitStack() as stack:
      # The processes are connected first, as the experiment's inputs may ask JAX for its devices.
      try:
        resolved = self.resolve(prepare=connect)
      except Exception as error:
        if (settings := self._distributed_settings()).is_explicit:
          report_absence(settings, str(error))
        raise
      directory = self._directory(resolved.experiment, stack)
      self._set_compilation_cache(directory, stack)
      config = to_json(resolved) | {'environment': numeric_settings()}
      set_activity(f'preparing --mode {self.mode}')
      if jax.distributed.is_initialized():
        self._compare('code', code_digests(), must_have_all=False)
        self._compare('config', fields_to_compare(config, is_saved=self.flags.exp is None))
      job = prepare_job(resolved.build(), self.mode, directory)
      if not self.flags.accept_config_changes:
        refuse_lost_config(directory)
      if has_trained(directory) and not self.flags.accept_config_changes:
        refuse_changed_config(directory, config, mode='train' if self.mode == 'train' else 'eval')
      begun = process_start_time() if self.called is None else since_epoch(self.called)
      yield OpenJob(job=job, directory=directory, config=config, emergency=emergency, begun=begun)

  def _compare(self, topic: str, values: Mapping[str, Any], **options: Any) -> None:
    refuse_differences(topic, values, limit_s=self.flags.initialization_timeout_s, **options)

  def _set_compilation_cache(self, directory: epath.Path, stack: contextlib.ExitStack) -> None:
    """Sets the directory of JAX's compilation cache: --compilation_cache, or the job's own on accelerators."""
    setting = 'jax_compilation_cache_dir'
    if self.flags.compilation_cache == 'none':
      jax.config.update('jax_enable_compilation_cache', False)
      return
    path = absolute_path(self.flags.compilation_cache) if self.flags.compilation_cache else None
    if path is None and self.flags.job_log_dir and jax.default_backend() != 'cpu':
      # Process 0 decides for all: if only some processes read a cached program, the others would compile alone.
      def decide() -> str:
        return '' if getattr(jax.config, setting) else os.fspath(programs_directory(directory) or '')

      cache = primary_decides(decide, 'compiled programs', limit_s=LOOK_LIMIT_S)
      path = epath.Path(cache) if cache and not getattr(jax.config, setting) else None
    if path is not None and is_remote(path):
      path = copy_from_store(path, stack)
      # XLA's own caches for GPUs are folders, which are not copied; JAX 0.10 has their path on this host in its key.
      jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
    elif path is not None and path.exists() and not path.is_dir():
      raise UserError(f'--compilation_cache {path} is not a directory: give another path, or none.')
    if path is not None:
      compilation_cache.reset_cache()  # of programs that connecting the processes took: JAX keeps its first directory
      jax.config.update(setting, str(path))

  def _directory(self, experiment: Experiment, stack: contextlib.ExitStack) -> epath.Path:
    """Returns the job_log_dir; for a model without a job, a temporary directory for reports, which `stack` removes."""
    if self.flags.job_log_dir:
      directory = absolute_path(self.flags.job_log_dir)
      stay_inside(directory)
      return directory
    if not isinstance(experiment.origin(), Base):
      raise UserError(NO_DIRECTORY)
    directory = absolute_path(tempfile.gettempdir()) / f'spmd_tasks_{secrets.token_hex(8)}'
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    return directory

  def _distributed_settings(self, experiment: Experiment | None = None) -> DistributedSettings:
    """Returns the settings from the flags; collectives may wait as long as the experiment's first step."""
    fields = {field.name for field in dataclasses.fields(DistributedSettings)} - {'collective_timeout_s'}
    settings = DistributedSettings(**{name: getattr(self.flags, name) for name in fields})
    if experiment is None:
      return settings
    return dataclasses.replace(settings, collective_timeout_s=math.ceil(experiment.first_step_timeout_s))
