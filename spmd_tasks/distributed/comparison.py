"""Compares what all processes of a job must have alike: flags, config, environment, code. For several processes."""

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

# JAX's settings that decide how programs are compiled: one for all processes, but a job may go on with others.
_COMPILATION = ('jax_use_shardy_partitioner', 'jax_optimization_level', 'jax_disable_most_optimizations')
_VARIABLES = ('LIBTPU_INIT_ARGS', 'NVIDIA_TF32_OVERRIDE')
_LIBRARIES = ('jax', 'jaxlib', 'numpy', 'flax', 'optax')
_LOOKS_ONLY = re.compile('--xla_(gpu_)?(dump|hlo_profile|enable_dumping)')  # flags that one process alone may have
_PACKAGE = Path(__file__).parents[1]
_MAX_SHOWN, _MAX_SHOWN_CHARS = 10, 200  # differences, and characters of a value


def refuse_differences(topic: str, values: Mapping[str, Any], *, limit_s: int, must_have_all: bool = True) -> None:
  """Returns once every process has the `values` (JSON, by name) of process 0; a topic can be compared once.

  Without `must_have_all`, names that only one of them has are no difference.

  The values go through the coordination service, because processes that differ may never end a collective together. A
  process that differs raises, and EmergencyExit tells the others.

  Raises:
    UserError: this process has other values.
    JobError: a process did not come to this comparison.
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
      names = [name for name in compared if _shown(first, name) != _shown(own, name)]
      if names:
        lines = [f'{name}={_shown(own, name)}, process 0 has {_shown(first, name)}' for name in names[:_MAX_SHOWN]]
        more = f'; {len(names) - _MAX_SHOWN} more' if len(names) > _MAX_SHOWN else ''
        raise UserError(
          f'process {job.process_id} has {"; ".join(lines)}{more}: start all processes with the same {topic}.'
        )
    job.client.wait_at_barrier(f'{key}/compared', limit_s * 1000)
  except jax.errors.JaxRuntimeError as error:
    raise JobError(f'a process did not come within {limit_s} s to where all compare their {topic}: {error}') from error


def _shown(values: Mapping[str, Any], name: str) -> str:
  text = json.dumps(values[name]) if name in values else 'nothing'
  return text if len(text) <= _MAX_SHOWN_CHARS else f'{text[:_MAX_SHOWN_CHARS]}... ({zlib.crc32(text.encode()):x})'


def fields_to_compare(config: Mapping[str, Any], *, is_saved: bool) -> dict[str, Any]:
  """Returns the fields of a config, as `to_json` gives it, that all processes of a job must have alike.

  Unless the config `is_saved`, an input whose fields the experiment's own code chose, and no flag, may differ: each
  process can read files of its own. So may what an extension says of its own fields.
  """
  given = tuple(f'{name}.' for name in config['overrides'])
  of_process = {name for extension in extensions() for name in extension.fields_of_process}

  def may_differ(path: str) -> bool:
    is_input = path.startswith(('train_input', 'eval_inputs', 'decode_inputs'))
    is_chosen = is_input and not is_saved and not f'{path}.'.startswith(given)
    return is_chosen or path.rpartition('.')[2] in of_process

  common = {path: value for path, value in config['config'].items() if not may_differ(path)}
  return {'experiment': config['experiment']} | common


def process_environment() -> dict[str, Any]:
  """What the environments of a job's processes must agree on, by name, as JSON."""
  modules = {name: sys.modules[name] for name in _LIBRARIES if name in sys.modules}
  flags = dict(flag.partition('=')[::2] for flag in os.environ.get('XLA_FLAGS', '').split())
  return {
    'python': '.'.join(map(str, sys.version_info[:2])),
    **{f'version of {name}': getattr(module, '__version__', None) for name, module in modules.items()},
    **numeric_settings(),
    **{name: setting(name) for name in _COMPILATION},
    **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    **{f'XLA_FLAGS {name}': value for name, value in flags.items() if not _LOOKS_ONLY.match(name)},
  }


def code_digests() -> dict[str, str]:
  """Digests of this package and of the user's modules that are imported, by name."""
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
