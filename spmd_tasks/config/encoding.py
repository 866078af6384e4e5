"""Encodes the values of a config as strict JSON.

None, bool, int, str and finite floats are JSON values, and a tuple is a JSON array. Any other value is an object with
the key `float` (inf, nan), `list`, `dict`, `dtype`, `enum`, `object` or `symbol` (a function or class). Values are
decoded exactly (from_saved.py), except functions, classes and objects, which can only be compared and shown: so a saved
file never decides which code is imported.
"""

from collections.abc import Mapping
import enum
import functools
import math
from typing import Any

import fiddle as fdl
import jax.numpy as jnp

from spmd_tasks.config.registry import symbol_of
from spmd_tasks.config.tree import is_node
from spmd_tasks.config.values import is_dtype

_MAX_CLOSURE_DEPTH = 8


def encode_field(value: Any) -> Any:
  """Returns the JSON of a leaf, or the kind of a node (without its fields)."""
  if isinstance(value, fdl.Buildable):
    symbol = {'symbol': symbol_of(fdl.get_callable(value))}
    return symbol if isinstance(value, fdl.Config) else symbol | {'buildable': type(value).__name__}
  if not is_node(value):
    return encode(value)
  if isinstance(value, Mapping):
    return {'symbol': 'builtins:dict', 'keys': sorted(map(str, value))}
  if type(value) in (list, tuple):
    return {'symbol': symbol_of(type(value)), 'length': len(value)}
  return {'symbol': symbol_of(type(value))}


def encode(value: Any, depth: int = 0) -> Any:
  """Returns a leaf value as JSON."""
  if value is None or type(value) in (bool, int, str):
    return value
  if type(value) is float:
    return value if math.isfinite(value) else {'float': repr(value)}
  if type(value) is tuple:
    return [encode(item, depth) for item in value]
  if type(value) is list:
    return {'list': [encode(item, depth) for item in value]}
  if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
    return {'dict': {key: encode(item, depth) for key, item in value.items()}}
  if is_dtype(value):
    return {'dtype': jnp.dtype(value).name}
  if isinstance(value, enum.Enum):
    return {'enum': symbol_of(type(value)), 'name': value.name}
  if isinstance(value, functools.partial):
    arguments = {'args': [encode(item, depth) for item in value.args]} if value.args else {}
    arguments |= {name: encode(item, depth) for name, item in value.keywords.items()}
    return encode(value.func, depth) | {'partial': arguments}
  if hasattr(value, '_asdict') and value and all(map(callable, value)):  # an optax transformation
    return {'symbol': symbol_of(type(value)), 'closure': {k: encode(f, depth) for k, f in value._asdict().items()}}
  if callable(value) and hasattr(value, '__qualname__'):
    return {'symbol': symbol_of(value)} | _closure_of(value, depth)
  shown = repr(value)
  return {'object': symbol_of(type(value))} | ({} if ' at 0x' in shown else {'repr': shown})


def one_line(name: str) -> str:
  """Returns a path or a name from a file with its newlines escaped."""
  return name.replace('\n', '\\n')


def show(encoded: Any) -> str:
  """Returns an encoded value in one line, as `--set` accepts it if it can be set."""
  return one_line(_show(encoded))


def _show(encoded: Any) -> str:
  if isinstance(encoded, list):
    return f'({", ".join(map(show, encoded))}{"," if len(encoded) == 1 else ""})'
  if not isinstance(encoded, dict):
    return repr(encoded)
  match encoded:
    case {'float': text} | {'dtype': text}:
      return text
    case {'list': items}:
      return f'[{", ".join(map(show, items))}]'
    case {'dict': items}:
      return f'{{{", ".join(f"{key!r}: {show(item)}" for key, item in items.items())}}}'
    case {'enum': _, 'name': name}:
      return name
    case {'symbol': symbol}:
      details = (encoded.get('closure') or {}) | (encoded.get('partial') or {})
      return symbol + (f'({", ".join(f"{key}={show(item)}" for key, item in details.items())})' if details else '')
  return encoded.get('repr') or f'<{encoded.get("object")}>'


def _closure_of(function: Any, depth: int) -> dict[str, Any]:
  """Returns the values that a closure has captured, such as an initializer's standard deviation."""
  cells = getattr(function, '__closure__', None)
  if not cells or depth >= _MAX_CLOSURE_DEPTH:
    return {}
  captured = {}
  for name, cell in zip(function.__code__.co_freevars, cells):
    try:
      captured[name] = encode(cell.cell_contents, depth + 1)
    except ValueError:  # the cell is still empty
      continue
  return {'closure': captured}
