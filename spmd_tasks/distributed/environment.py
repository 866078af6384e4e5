"""Settings outside of the config, such as JAX's own, that change a job's numbers or prevent it from running.

refuse_unusable_environment()         # first of all
numeric_settings()                    # saved with the config, and compared when a job resumes
"""

from collections.abc import Iterator
import contextlib
import os
import re
import sys
from typing import Any

from absl import logging
import jax

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.user_code import describe_out_of_memory

# JAX's settings that change numbers.
_NUMERIC = (
  'jax_enable_x64',
  'jax_default_matmul_precision',
  'jax_default_prng_impl',
  'jax_threefry_partitionable',
  'jax_random_seed_offset',
  'jax_softmax_custom_jvp',
  'jax_high_dynamic_range_gumbel',
  'jax_allow_f16_reductions',
)
_UNUSABLE = {
  'jax_disable_jit': ((True,), 'steps are compiled'),
  'jax_no_tracing': ((True,), 'steps are traced'),
  'jax_no_execution': ((True,), 'steps are executed'),
  'jax_numpy_dtype_promotion': (('strict',), 'models, Flax and optax mix dtypes by the standard rules'),
  'jax_enable_preemption_service': ((False,), 'processes use it to stop at the same step'),
  'jax_enable_recoverability': ((True,), 'processes would wait forever for a killed process'),
  'jax_transfer_guard': (('disallow', 'disallow_explicit'), 'batches and step numbers are sent to devices'),
}


def refuse_unusable_environment() -> None:
  """Raises a UserError for settings with which no job runs; logs environment variables that change its numbers."""
  for name, (values, reason) in _UNUSABLE.items():
    if (value := setting(name)) in values:
      raise UserError(
        f'{name.upper()}={os.environ.get(name.upper(), value)} cannot be used, because {reason}: unset it.'
      )
  if sys.flags.optimize > 1:
    raise UserError('PYTHONOPTIMIZE=2 (python -OO) cannot be used, because Fiddle reads docstrings: use at most 1.')
  if variables := [f'{name.upper()}={os.environ[name.upper()]}' for name in _NUMERIC if name.upper() in os.environ]:
    logging.warning('the environment decides numbers: %s. A job keeps it in its config.json.', ', '.join(variables))


@contextlib.contextmanager
def backend_errors() -> Iterator[None]:
  """Turns an out-of-memory error of devices into a JobError, and a JAX_PLATFORMS without devices into a UserError."""
  try:
    yield
  except (RuntimeError, AssertionError) as error:
    if 'RESOURCE_EXHAUSTED' in str(error):
      raise JobError(describe_out_of_memory(error)) from error
    names = ('JAX_PLATFORMS', 'JAX_PLATFORM_NAME')
    settings = [f'{name}={value}' for name in names if (value := os.environ.get(name))]
    settings += re.findall(r'--xla_force_host_platform_device_count=\S*', os.environ.get('XLA_FLAGS', ''))
    if isinstance(error, JobError) or not settings:
      raise
    try:
      jax.devices()
    except (RuntimeError, AssertionError) as reason:
      raise UserError(
        f'JAX finds no devices with {" and ".join(settings)} ({" ".join(str(reason).split())}): unset it, pass '
        "--num_fake_devices, or install JAX for your devices: pip install 'jax[cuda13]' for NVIDIA GPUs, 'jax[tpu]' "
        'for TPUs.'
      ) from error
    raise


def numeric_settings() -> dict[str, Any]:
  """Returns JAX's settings that change numbers, by name, as JSON."""
  return {name: setting(name) for name in _NUMERIC if name in jax.config.values}


def setting(name: str) -> Any:
  """Returns the value of one of JAX's settings, as JSON."""
  value = jax.config.values.get(name)
  value = getattr(value, 'value', value)  # of an enum
  return value if isinstance(value, bool | int | float | str | None) else str(value)
