"""Compiles programs, and prints whether JAX's persistent compilation cache had them, and if not, why.

    compiled = compile_program(lowered, 'the train step')

    12:00:41 the train step: compiled in 41 s; the compilation cache has it with other devices (8 x cpu; here 16 x cpu)

The key of an entry is one digest of all that a program depends on. A record beside the entries lists it, and a program
that was not found is compared with the most similar record of its name.
"""

import functools
import hashlib
import json
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

from spmd_tasks.activity import is_silent, say

_SUFFIX = '-inputs.json'
_MAX_SHOWN, _MAX_SHOWN_CHARS = 2, 100
# JAX (0.10 to 0.12) reports these events when it looks a program up, and when it has found it.
_LOOKUP_EVENT = '/jax/compilation_cache/compile_requests_use_cache'
_HIT_EVENT = '/jax/compilation_cache/cache_hits'
_UNUSED_FLAGS = ('--xla_dump', '--xla_force_host_platform_device_count')  # which are not in the key
_PROGRAM = 'arguments or operations'
_HIDDEN = '#'  # begins a value that says nothing to a user, such as a digest
_compiling = threading.local()  # `events`: the names of those that JAX has reported

Record = dict[str, list[str]]  # what a program depends on, as a user is shown it -> its values


def compile_program(lowered: Any, name: str) -> Any:
  """Compiles a jax.stages.Lowered. With a compilation cache, prints one line, and records what the program depends on.

  Nothing is printed of programs that JAX does not keep, because they compile faster than
  `jax_persistent_cache_min_compile_time_secs`. A record that cannot be read or written is a warning.
  """
  settings = jax.config.values
  directory = settings['jax_compilation_cache_dir']
  if not directory or not settings['jax_enable_compilation_cache']:
    return lowered.compile()
  _listen()
  _compiling.events = set()
  start = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  is_hit = _HIT_EVENT in _compiling.events
  is_kept = is_hit or seconds >= settings['jax_persistent_cache_min_compile_time_secs']
  if _LOOKUP_EVENT in _compiling.events and is_kept:
    try:
      _report(epath.Path(directory), name, seconds, _record_of(lowered, compiled), is_hit)
    except Exception as error:  # of a disk, or of a store's client
      warning = 'what the programs in the compilation cache %s depend on cannot be read or recorded there: %s'
      logging.log_first_n(logging.WARNING, warning, 1, directory, error)
  return compiled


@functools.cache
def _listen() -> None:
  """Collects the events that JAX reports on each thread."""

  def collect(event: str, **metadata: str | int) -> None:
    if hasattr(_compiling, 'events'):
      _compiling.events.add(event)

  jax.monitoring.register_event_listener(collect)


def _record_of(lowered: Any, compiled: Any) -> Record:
  arguments = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
  shapes = [f'{jax.tree_util.keystr(path)} {info.dtype}{[*info.shape]}' for path, info in arguments]
  shardings = [x for x in jax.tree.leaves(compiled.input_shardings) if isinstance(x, NamedSharding)]
  meshes = {', '.join(f'{axis} {size}' for axis, size in sharding.mesh.shape.items()) for sharding in shardings}
  devices = [device for sharding in shardings[:1] for device in sharding.mesh.devices.flat] or jax.local_devices()
  flags = f'{os.environ.get("XLA_FLAGS", "")} {os.environ.get("LIBTPU_INIT_ARGS", "")}'.split()
  return {
    _PROGRAM: [
      f'jax {jax.__version__}',
      *(f'mesh ({mesh})' for mesh in sorted(meshes)),
      *shapes,
      _HIDDEN + _digest(lowered.as_text()),
    ],
    'jaxlib': [JAXLIB_VERSION],
    'platform': [' '.join(devices[0].client.platform_version.split())],
    'XLA flags': sorted(flag for flag in flags if not flag.startswith(_UNUSED_FLAGS)),
    'devices': [f'{len(devices)} x {devices[0].device_kind}', f'{_HIDDEN}{[device.id for device in devices]}'],
  }


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:32]


def _report(directory: epath.Path, name: str, seconds: float, record: Record, is_hit: bool) -> None:
  """Prints the line about a program; process 0, which writes the entries, records what it depends on."""
  text = json.dumps(record, sort_keys=True)
  prefix = re.sub(r'[^\w-]+', '_', name)
  path = directory / f'{prefix}-{_digest(text)}{_SUFFIX}'
  if is_silent():  # the records, of which there may be many, need not be read
    pass
  elif is_hit:
    say(f'{name}: read from the compilation cache in {seconds:.1f} s')
  else:
    say(f'{name}: compiled in {seconds:.1f} s; {_why_missed(record, _read_records(directory, prefix))}')
  if jax.process_index() == 0 and not path.exists():
    path.write_text(text)


def _read_records(directory: epath.Path, prefix: str) -> list[Record]:
  """Returns the readable records of one program."""
  name, records = re.compile(rf'{re.escape(prefix)}-[0-9a-f]{{32}}{re.escape(_SUFFIX)}'), []
  for path in directory.glob(f'{prefix}-*{_SUFFIX}'):  # much faster than a look at each entry
    if name.fullmatch(path.name):
      try:
        records.append({key: [str(value) for value in values] for key, values in json.loads(path.read_text()).items()})
      except (ValueError, TypeError, AttributeError):  # half written
        continue
  return records


def _why_missed(record: Record, others: list[Record]) -> str:
  """Returns how a program differs from the most similar record of the same name."""
  if not others:
    return 'the compilation cache has none of this name'

  def differing(other: Record) -> list[str]:
    return [name for name in record if record[name] != other.get(name)]

  def difference(other: Record) -> tuple[int, int]:
    return len(differing(other)), len({*record[_PROGRAM]}.symmetric_difference(other.get(_PROGRAM, ())))

  nearest = min(others, key=difference)
  if changes := [_show_change(name, record[name], nearest.get(name, [])) for name in differing(nearest)]:
    return f'the compilation cache has it with other {", other ".join(changes)}'
  return 'the compilation cache has a record of it, but no entry that can be read, or one with other compiler options'


def _show_change(name: str, values: list[str], others: list[str]) -> str:
  added, gone = (
    _show([value for value in of if value not in than]) for of, than in ((values, others), (others, values))
  )
  return f'{name} ({gone or "none"}; here {added or "none"})' if added or gone else name


def _show(values: list[str]) -> str:
  values = [value for value in values if not value.startswith(_HIDDEN)]
  shown = ', '.join(_shorten(value) for value in values[:_MAX_SHOWN])
  return f'{shown} and {len(values) - _MAX_SHOWN} more' if len(values) > _MAX_SHOWN else shown


def _shorten(value: str) -> str:
  return value if len(value) <= _MAX_SHOWN_CHARS else f'{value[: _MAX_SHOWN_CHARS - 3]}...'
