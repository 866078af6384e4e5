"""Compiles programs, and prints whether JAX's persistent compilation cache had them, and if not, why.

    compiled = compile_program(lowered, 'the train step')

    12:00:41 the train step: compiled in 41 s; the compilation cache has it with other devices (8 x cpu; here 16 x cpu)

The key of an entry is one digest over all that a program depends on. JAX logs the digest of each of these inputs. They
are recorded beside the entry, with values to show; the most similar record of the same name shows what has changed.
"""

import functools
import hashlib
import json
import logging as python_logging
import os
import re
import threading
import time
from typing import Any

from absl import logging
from etils import epath
import jax
from jax.sharding import NamedSharding
from jaxlib.version import __version__ as JAXLIB_VERSION

from spmd_tasks.activity import say

_SETTINGS = ('jax_compilation_cache_dir', 'jax_enable_compilation_cache', 'jax_persistent_cache_min_compile_time_secs')
_SUFFIX = '-inputs.json'
_MAX_SHOWN, _MAX_SHOWN_CHARS = 2, 60
# JAX (0.10 to 0.12) logs the inputs of its key like this, for debugging, and reports the event for each hit.
_KEY_LOGGER, _KEY_MESSAGE = 'jax._src.cache_key', 'get_cache_key hash of serialized %s: %s'
_HIT_EVENT = '/jax/compilation_cache/compile_time_saved_sec'
_LABELS = {  # of JAX's names
  'computation': 'arguments or operations',
  'jax_lib version': 'jaxlib',
  'backend version': 'platform',
  'XLA flags': 'XLA flags',
  'compile_options': 'compiler options or the order of devices',
  'accelerator_config': 'devices',
}
_UNUSED_FLAGS = ('--xla_dump', '--xla_force_host_platform_device_count')  # which are not in the key
_watched = threading.local()  # `inputs`: the digests of the key's inputs by name; `is_hit`


def compile_program(lowered: Any, name: str) -> Any:
  """Compiles a jax.stages.Lowered. With a compilation cache, prints one line, and records the inputs of the key.

  Nothing is printed of programs that JAX does not keep, because they compile faster than
  `jax_persistent_cache_min_compile_time_secs`. A record that cannot be read or written is a warning.
  """
  directory, is_enabled, least_seconds = (getattr(jax.config, setting) for setting in _SETTINGS)
  if not directory or not is_enabled:
    return lowered.compile()
  _watch()
  _watched.inputs, _watched.is_hit = {}, False
  start = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  inputs, is_hit = _watched.inputs, _watched.is_hit
  if inputs and (is_hit or seconds >= least_seconds):
    try:
      _report(epath.Path(directory), name, seconds, {'inputs': inputs, 'values': _values(lowered, compiled)}, is_hit)
    except Exception as error:  # of a disk, or of a store's client
      warning = 'what the programs in the compilation cache %s depend on cannot be read or recorded there: %s'
      logging.log_first_n(logging.WARNING, warning, 1, directory, error)
  return compiled


def _report(directory: epath.Path, name: str, seconds: float, record: dict[str, Any], is_hit: bool) -> None:
  """Prints the line about a program; process 0, which writes the entries, records the inputs."""
  text = json.dumps(record, sort_keys=True)
  prefix = re.sub(r'[^\w-]+', '_', name)
  path = directory / f'{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:32]}{_SUFFIX}'
  if is_hit:
    say(f'{name}: read from the compilation cache in {seconds:.1f} s')
  else:
    say(f'{name}: compiled in {seconds:.1f} s; {_why_missed(record, _read_records(directory, prefix))}')
  if jax.process_index() == 0 and not path.exists():
    path.write_text(text)


def _read_records(directory: epath.Path, prefix: str) -> list[dict[str, Any]]:
  """Returns the readable records of one program."""
  name, records = re.compile(rf'{re.escape(prefix)}-[0-9a-f]{{32}}{re.escape(_SUFFIX)}'), []
  for path in directory.iterdir():
    if name.fullmatch(path.name):
      try:
        record = json.loads(path.read_text())
        records.append({key: dict(record[key]) for key in ('inputs', 'values')})
      except (ValueError, TypeError, KeyError):  # half written
        continue
  return records


def _why_missed(record: dict[str, Any], others: list[dict[str, Any]]) -> str:
  """Returns how a program differs from the most similar record of the same name."""
  if not others:
    return 'it was not in the compilation cache: the first one of this name'
  inputs = record['inputs']

  def differing(other: dict[str, Any]) -> list[str]:
    return [name for name in inputs if inputs[name] != other['inputs'].get(name)]

  def difference(other: dict[str, Any]) -> tuple[int, int]:
    program = 'computation'
    changed = {*record['values'].get(program, ())}.symmetric_difference(other['values'].get(program, ()))
    return len(differing(other)), len(changed)

  nearest = min(others, key=difference)
  if not (names := differing(nearest)):
    return 'the compilation cache has a record of the same program, but no entry that can be read'
  changes = [_show_change(name, record['values'].get(name, []), nearest['values'].get(name, [])) for name in names]
  return f'the compilation cache has it with other {", other ".join(changes)}'


def _show_change(name: str, values: list[str], others: list[str]) -> str:
  new, old = ([*map(str, own)] for own in (values, others))
  added, gone = _show([value for value in new if value not in old]), _show([value for value in old if value not in new])
  label = _LABELS.get(name, name)
  return f'{label} ({gone or "none"}; here {added or "none"})' if added or gone else label


def _show(values: list[str]) -> str:
  shown = ', '.join(value[:_MAX_SHOWN_CHARS] for value in values[:_MAX_SHOWN])
  return f'{shown} and {len(values) - _MAX_SHOWN} more' if len(values) > _MAX_SHOWN else shown


def _values(lowered: Any, compiled: Any) -> dict[str, list[str]]:
  """Returns what a user can be shown of the inputs of a program's key."""
  arguments = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
  program = [f'{jax.tree_util.keystr(path)} {info.dtype}{[*info.shape]}' for path, info in arguments]
  shardings = [x for x in jax.tree.leaves(compiled.input_shardings) if isinstance(x, NamedSharding)]
  meshes = {', '.join(f'{axis} {size}' for axis, size in sharding.mesh.shape.items()) for sharding in shardings}
  devices = [device for sharding in shardings[:1] for device in sharding.mesh.devices.flat] or jax.local_devices()
  flags = f'{os.environ.get("XLA_FLAGS", "")} {os.environ.get("LIBTPU_INIT_ARGS", "")}'.split()
  return {
    'computation': [f'jax {jax.__version__}', *(f'mesh ({mesh})' for mesh in sorted(meshes)), *program],
    'jax_lib version': [JAXLIB_VERSION],
    'backend version': [' '.join(devices[0].client.platform_version.split())],
    'XLA flags': sorted(flag for flag in flags if not flag.startswith(_UNUSED_FLAGS)),
    'accelerator_config': [f'{len(devices)} x {devices[0].device_kind}'],
  }


@functools.cache
def _watch() -> None:
  """Listens to what JAX says about compilations on each thread."""
  logger = python_logging.getLogger(_KEY_LOGGER)
  is_shown = logger.isEnabledFor(python_logging.DEBUG)  # as the user has asked for

  def collect(record: python_logging.LogRecord) -> bool:
    if record.msg == _KEY_MESSAGE and isinstance(record.args, tuple) and hasattr(_watched, 'inputs'):
      name, digest = record.args
      _watched.inputs[str(name)] = str(digest)
    return is_shown or record.levelno > python_logging.DEBUG

  def listen(event: str, duration_secs: float, **metadata: str | int) -> None:
    if event == _HIT_EVENT:
      _watched.is_hit = True

  logger.setLevel(python_logging.DEBUG)
  logger.addFilter(collect)
  jax.monitoring.register_event_duration_secs_listener(listen)
