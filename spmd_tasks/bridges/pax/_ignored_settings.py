"""Describes the settings of a Pax experiment that Paxml reads but this package ignores, if they are not the default."""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

import fiddle as fdl

_WITH_EVALS = 'evals in training need --eval_on_test'
_WITH_DECODING = 'decoding in training needs --decode_during_train'
_ONE_INTERVAL = 'metrics are written every log_train_output_interval_steps'
_OWN_FORMAT = 'checkpoints are not in the format of Paxml'
_PROFILES = 'profile_steps and JOB_LOG_DIR/profile_now select the profiled steps'
_NO_INFERENCE = 'there are no inference runners'

# Mode -> path of the setting -> why it has no effect.
IGNORED: Mapping[str, Mapping[str, str]] = {
  'train': {
    'task.train.max_inflight_steps': 'one step is dispatched ahead',
    'task.train.summary_interval_steps': _ONE_INTERVAL,
    'task.train.summary_accumulate_interval_steps': 'metrics are not accumulated over steps',
    'task.train.async_summary_writing': 'metrics are written between steps',
    'task.train.eval_interval_steps': _WITH_EVALS,
    'task.train.decode_interval_steps': _WITH_DECODING,
    'task.train.decode_start_after_n_steps': _WITH_DECODING,
    'task.train.decode_use_ema_states': _WITH_DECODING,
    'task.train.compute_steps_per_sec_interval_steps': 'rates are computed for logged steps',
    'task.train.profiler_min_duration_sec': _PROFILES,
    'task.train.profiler_max_num_hosts': _PROFILES,
    'task.train.profiler_capture_host_profile': _PROFILES,
    'task.train.enforce_input_specs': 'every batch is checked',
    'task.train.tensorstore_metadata_key': _OWN_FORMAT,
    'task.train.report_progress_hook': 'progress is on stderr',
    'task.model.contiguous_submeshes': 'JAX orders the devices of the mesh',
  },
  'eval': {
    'task.evaluate.random_seed': 'evals use task.train.random_seed, as in training',
  },
  'decode': {
    'task.decode.profiler_num_steps': _PROFILES,
    'task.decode.profiler_min_duration_sec': _PROFILES,
    'task.decode.profiler_capture_step': _PROFILES,
    'task.decode.profiler_max_num_hosts': _PROFILES,
  },
  'every': {
    'task.train.always_use_train_for_model_init': 'the model is initialized with the first training batch',
    'task.infer.random_seed': _NO_INFERENCE,
    'task.infer_writer': _NO_INFERENCE,
    'train_input.experimental_remote_input': 'each process reads its own rows',
    'train_input.batch_padding_size': 'batches are padded as the mesh requires',
    'train_input.custom_device_order': 'JAX orders the devices of the mesh',
  },
}


def describe_ignored_settings(job: Any, mode: str) -> str:
  """Returns a sentence that lists a job's settings without effect in a mode; '' if there are none."""
  reasons = {**IGNORED['every'], **IGNORED.get('decode' if mode == 'decode_once' else mode, {})}
  effective = set(_effective_settings(job))
  texts = [text for path, why in reasons.items() if path not in effective for text in _describe_changed(job, path, why)]
  return f'These settings have no effect: {"; ".join(texts)}.' if texts else ''


def _effective_settings(job: Any) -> Iterator[str]:
  """Yields the settings of IGNORED that have an effect, or cannot have one, in this job."""
  experiment, task = job.experiment, job.task.task
  if experiment.eval_every_steps is not None or not job.eval_inputs:
    yield 'task.train.eval_interval_steps'
  if experiment.decode_during_train or not job.decode_inputs:
    yield from (path for path, why in IGNORED['train'].items() if why is _WITH_DECODING)
  if task.early_stopping_fn is not None:
    yield 'task.train.compute_steps_per_sec_interval_steps'
  if task.train.log_train_output_interval_steps in (None, task.train.summary_interval_steps):
    yield 'task.train.summary_interval_steps'


def _describe_changed(job: Any, path: str, why: str) -> Iterator[str]:
  """Yields `path = value (why)` if the value is not the default."""
  part, *names, name = path.split('.')
  owner = job.train_input.config if part == 'train_input' else job.task.task
  for attribute in names:
    owner = getattr(owner, attribute)
  cls = owner.cls if isinstance(owner, fdl.Buildable) else type(owner)
  default = next(field.default for field in dataclasses.fields(cls) if field.name == name)
  value = getattr(owner, name)
  if value != default:
    yield f'{path} = {value!r} ({why})' if isinstance(value, bool | int | float | str) else f'{path} ({why})'
