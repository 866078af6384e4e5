"""Checks that the processes of a job have equal flags, config, environment and code."""

from collections.abc import Mapping
import hashlib
import json
import os
from pathlib import Path
import re
import sys
import sysconfig
from typing import Any
import zlib

import jax

from spmd_tasks.distributed.environment import numeric_settings, setting
from spmd_tasks.distributed.initialization import coordination
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.extensions import extensions

# JAX's settings for compilation. They must be equal on all processes, but may change when a job resumes.
_COMPILATION = ('jax_use_shardy_partitioner', 'jax_optimization_level', 'jax_disable_most_optimizations')
_VARIABLES = ('LIBTPU_INIT_ARGS', 'NVIDIA_TF32_OVERRIDE')
_LIBRARIES = ('jax', 'jaxlib', 'numpy', 'flax', 'optax')
_DEBUG_FLAGS = re.compile('--xla_(gpu_)?(dump|hlo_profile|enable_dumping)')  # may be set on one process only
_PACKAGE = Path(__file__).parents[1]
_MAX_SHOWN, _MAX_SHOWN_CHARS = 10, 200  # differences, and characters of a value


def refuse_differences(topic: str, values: Mapping[str, Any], *, limit_s: int, must_have_all: bool = True) -> None:
  """Compares `values` (JSON, by name) with the values of process 0. A collective call, once per topic.

  Without `must_have_all`, names that only one of the two processes has are ignored.

  The values go through the coordination service, because processes that differ may never finish a collective together.
  A process that differs raises, and EmergencyExit tells the others.

  Raises:
    UserError: this process has other values than process 0.
    JobError: a process did not call this in time.
  """
  job = coordination()
  if job is None or job.num_processes == 1:
    return
  key = f'spmd_tasks/{topic}'
  try:
    if job.process_id == 0:
      job.client.key_value_set_bytes(key, zlib.compress(json.dumps(dict(values)).encode()))
    else:
      first = json.loads(zlib.decompress(job.client.blocking_key_value_get_bytes(key, limit_s * 1000)))
      own = json.loads(json.dumps(dict(values)))
      compared = {**first, **own} if must_have_all else [name for name in first if name in own]
      names = [name for name in compared if _show(first, name) != _show(own, name)]
      if names:
        lines = [f'{name}={_show(own, name)}, process 0 has {_show(first, name)}' for name in names[:_MAX_SHOWN]]
        more = f'; {len(names) - _MAX_SHOWN} more' if len(names) > _MAX_SHOWN else ''
        raise UserError(
          f'process {job.process_id} has {"; ".join(lines)}{more}: start all processes with the same {topic}.'
        )
    job.client.wait_at_barrier(f'{key}/compared', limit_s * 1000)
  except jax.errors.JaxRuntimeError as error:
    raise JobError(f'a process did not compare its {topic} within {limit_s} s: see its log ({error}).') from error


def _show(values: Mapping[str, Any], name: str) -> str:
  text = json.dumps(values[name]) if name in values else 'nothing'
  return text if len(text) <= _MAX_SHOWN_CHARS else f'{text[:_MAX_SHOWN_CHARS]}... ({zlib.crc32(text.encode()):x})'


def fields_to_compare(config: Mapping[str, Any], *, is_saved: bool) -> dict[str, Any]:
  """Returns the fields of a config from `to_json` that must be equal on all processes.

  Fields of inputs may differ if the experiment's code sets them rather than a flag or a saved config (`is_saved`):
  each process may read its own files. So may the `fields_of_process` of extensions.
  """
  overridden = tuple(f'{name}.' for name in config['overrides'])
  fields_of_process = {name for extension in extensions() for name in extension.fields_of_process}

  def may_differ(path: str) -> bool:
    is_input = path.startswith(('train_input', 'eval_inputs', 'decode_inputs'))
    is_set_by_code = is_input and not is_saved and not f'{path}.'.startswith(overridden)
    return is_set_by_code or path.rpartition('.')[2] in fields_of_process

  common = {path: value for path, value in config['config'].items() if not may_differ(path)}
  return {'experiment': config['experiment']} | common


def process_environment() -> dict[str, Any]:
  """Returns the environment that must be equal on all processes, by name, as JSON."""
  modules = {name: sys.modules[name] for name in _LIBRARIES if name in sys.modules}
  flags = dict(flag.partition('=')[::2] for flag in os.environ.get('XLA_FLAGS', '').split())
  return {
    'python': '.'.join(map(str, sys.version_info[:2])),
    **{f'version of {name}': getattr(module, '__version__', None) for name, module in modules.items()},
    **numeric_settings(),
    **{name: setting(name) for name in _COMPILATION},
    **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    **{f'XLA_FLAGS {name}': value for name, value in flags.items() if not _DEBUG_FLAGS.match(name)},
  }


def code_digests() -> dict[str, str]:
  """Returns digests of this package and of the user's imported modules, by name."""
  libraries = [Path(sysconfig.get_paths()[kind]) for kind in ('stdlib', 'purelib', 'platlib')]
  digests = {'the code of spmd_tasks': _digest(sorted(_PACKAGE.rglob('*.py')))}
  for name, module in list(sys.modules.items()):
    path = Path(getattr(module, '__file__', None) or '')
    if path.suffix == '.py' and path.is_file() and not any(map(path.is_relative_to, (_PACKAGE, *libraries))):
      digests[f'the code of {name}'] = _digest([path])
  return digests


def _digest(paths: list[Path]) -> str:
  digest = hashlib.blake2b(digest_size=6)
  for path in paths:
    digest.update(path.name.encode() + b'\0' + path.read_bytes())
  return digest.hexdigest()
