"""What outside of the config decides a job's numbers, such as JAX's own settings.

refuse_unusable_environment()         # first of all: what JAX or XLA would answer by a traceback or an abort
numeric_settings()                    # saved with the config, and compared when a job goes on
"""

from collections.abc import Iterator
import contextlib
import errno
import functools
import os
import re
import sys
from typing import Any
import warnings

from absl import logging
import jax

from spmd_tasks.errors import JobError, UserError

# JAX's settings that decide numbers.
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
  'jax_enable_preemption_service': ((False,), 'processes stop together by it'),
  'jax_enable_recoverability': ((True,), 'processes would wait for ever for one that was killed'),
  'jax_transfer_guard': (('disallow', 'disallow_explicit'), 'batches and step numbers are sent to devices'),
}


def refuse_unusable_environment() -> None:
  """Raises a UserError for environment variables with which nothing runs; logs those that change a job's numbers."""
  for name, (values, reason) in _UNUSABLE.items():
    if (value := setting(name)) in values:
      raise UserError(
        f'{name.upper()}={os.environ.get(name.upper(), value)} cannot be used, because {reason}: unset it.'
      )
  if sys.flags.optimize > 1:
    raise UserError('PYTHONOPTIMIZE=2 (python -OO) cannot be used, because Fiddle reads docstrings: at most 1.')
  if (dumps := os.environ.get('JAX_DUMP_IR_TO', '')) not in ('', 'sponge') and '://' not in dumps:
    try:
      os.makedirs(dumps, exist_ok=True)
      if not os.access(dumps, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
      raise UserError(f'JAX_DUMP_IR_TO={dumps} cannot be written ({error.strerror}): name another one.') from error
  _refuse_unknown_xla_flags(os.environ.get('XLA_FLAGS', ''))
  if given := [f'{name.upper()}={os.environ[name.upper()]}' for name in _NUMERIC if name.upper() in os.environ]:
    logging.warning('the environment decides numbers: %s. A job keeps it in its config.json.', ', '.join(given))


@contextlib.contextmanager
def backend_errors() -> Iterator[None]:
  """Says in a sentence that devices have no memory left, or that JAX_PLATFORMS (or _PLATFORM_NAME) names none."""
  try:
    yield
  except (RuntimeError, AssertionError) as error:
    if 'RESOURCE_EXHAUSTED' in str(error):
      from spmd_tasks.user_code import describe_out_of_memory

      raise JobError(describe_out_of_memory(error)) from error
    given = [f'{name}={value}' for name in ('JAX_PLATFORMS', 'JAX_PLATFORM_NAME') if (value := os.environ.get(name))]
    given += re.findall(r'--xla_force_host_platform_device_count=\S*', os.environ.get('XLA_FLAGS', ''))
    if isinstance(error, JobError) or not given:
      raise
    try:
      jax.devices()
    except (RuntimeError, AssertionError) as reason:
      raise UserError(
        f'JAX finds no devices with {" and ".join(given)} ({" ".join(str(reason).split())}): '
        "unset it, pass --num_fake_devices, or install JAX for the devices that are there: pip install 'jax[cuda13]' "
        "for NVIDIA GPUs, 'jax[tpu]' for TPUs."
      ) from error
    raise


def numeric_settings() -> dict[str, Any]:
  """JAX's settings that decide numbers, by name, as JSON."""
  return {name: setting(name) for name in _NUMERIC if name in jax.config.values}


def setting(name: str) -> Any:
  """The value of one of JAX's settings, as JSON."""
  value = jax.config.values.get(name)
  value = getattr(value, 'value', value)  # of an enum
  return value if isinstance(value, bool | int | float | str | None) else str(value)


@functools.cache
def _refuse_unknown_xla_flags(flags: str) -> None:
  """Raises a UserError for flags that XLA does not take; it would end the process without a word of ours.

  A forked child has XLA read them, in some milliseconds.
  """
  if not flags:
    return
  try:
    from jaxlib._jax import CompileOptions  # its first use has XLA read the flags; no public name does
  except ImportError:
    return
  read_end, write_end = os.pipe()
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # that a fork beside threads may hang: the child has XLA read its flags, no more
    child = os.fork()
  if child == 0:
    try:
      os.dup2(write_end, 2)
      CompileOptions()
      os._exit(0)
    finally:
      os._exit(1)  # after any error, or the child would go on as a second parent
  os.close(write_end)
  with open(read_end, errors='replace') as said:
    unknown = re.search(r'Unknown flags? in XLA_FLAGS: .*', said.read())
  if os.waitpid(child, 0)[1] != 0:
    reason = f' ({unknown[0].strip()})' if unknown else ''
    raise UserError(
      f'XLA_FLAGS={flags!r} cannot be used, because XLA does not take it{reason}: correct it, or unset it.'
    )
