"""Makes Praxis and Paxml importable on today's JAX: adds the names that they use and that no longer exist.

    install_shims()      # cheap: nothing of Pax is imported yet
    import praxis.layers

Each shim acts when the module that needs it is imported, and only where a name is missing, so newer versions of Praxis
and Paxml, which need fewer shims, get fewer. `install_shims` may be called again and again.
"""

import ast
from collections.abc import Callable, Sequence
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
import types
from typing import Any

from absl import logging as absl_logging
import jax

from spmd_tasks.bridges.pax._deferred_imports import DeferringFinder
from spmd_tasks.bridges.pax._stand_ins import find_stand_in

_PACKAGES = ('praxis', 'paxml')


def install_shims() -> None:
  """Applies the shims for Praxis and Paxml as soon as one of them is imported."""
  if not any(isinstance(finder, _ShimFinder) for finder in sys.meta_path):
    sys.meta_path[:0] = [_ShimFinder(), DeferringFinder()]
  if any(package in sys.modules for package in _PACKAGES):
    _add_names_to_jax()


class _ShimFinder(importlib.abc.MetaPathFinder):
  """Looks at every import: gives stand-ins for modules that Pax imports and does not need, and adds names to JAX."""

  def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
    if fullname in _PACKAGES:
      _add_names_to_jax()
      _find_lambdas_quickly()
      if _FirstDeprecation not in map(type, absl_logging.get_absl_logger().filters):
        absl_logging.get_absl_logger().addFilter(_FirstDeprecation())
    is_pax_there = any(package in sys.modules for package in _PACKAGES)
    return find_stand_in(fullname) if is_pax_there else None


class _FirstDeprecation(logging.Filter):
  """Lets a deprecation of Praxis' settings be logged once; Praxis does at each of a dozen instantiations."""

  def __init__(self):
    super().__init__()
    self._logged: set[str] = set()

  def filter(self, record: logging.LogRecord) -> bool:
    text = str(record.msg)
    if not text.startswith('DEPRECATION WARNING: p.'):
      return True
    is_first = text not in self._logged
    self._logged.add(text)
    return is_first


def _add_names_to_jax() -> None:
  # praxis.base_input names OpSharding of this module, for `custom_device_order`.
  if importlib.util.find_spec('jax.lib.xla_client') is None and 'jax.lib.xla_client' not in sys.modules:
    from jaxlib import xla_client

    sys.modules['jax.lib.xla_client'] = xla_client
    jax.lib.xla_client = xla_client  # type: ignore[attr-defined]
  if not hasattr(jax, 'tree_map'):
    jax.tree_map = _tree_map  # type: ignore[attr-defined]
  # praxis.py_utils, for updates of variables by name, and paxml.sgf, for private gradients.
  for name in ('tree_flatten', 'tree_unflatten'):
    if not hasattr(jax, name):
      setattr(jax, name, getattr(jax.tree_util, name))
  # praxis.decoder_utils, for beam search, gives jnp.reshape its shape by an earlier name.
  if 'newshape' not in inspect.signature(jax.numpy.reshape).parameters:
    jax.numpy.reshape = _with_newshape(jax.numpy.reshape)


def _find_lambdas_quickly() -> None:
  """Lets Fiddle's auto_config, which Praxis applies to lambdas in defaults of fields, find their source by its place.

  Fiddle's own way parses and copies the whole module in Python for each of them: 7 s for those in praxis.optimizers and
  paxml.tasks_lib.
  """
  auto_config: Any = importlib.import_module('fiddle._src.experimental.auto_config')  # Praxis' Fiddle: we use none here
  find = getattr(auto_config, '_getsource_for_lambda', None)
  if find is None or hasattr(find, '__wrapped__'):
    return

  @functools.wraps(find)
  def find_quickly(fn: Callable[..., Any]) -> str:
    lines = inspect.findsource(fn)[0]
    return _lambda_at_its_place(fn.__code__, lines) or _lambda_on_its_line(fn.__code__, lines) or find(fn)

  auto_config._getsource_for_lambda = find_quickly


def _lambda_at_its_place(code: types.CodeType, lines: Sequence[str]) -> str | None:
  """Returns the text of a lambda, from its word to where its instructions end; None if that is another function."""
  ends = [(line, col) for _, line, _, col in code.co_positions() if line is not None and col is not None]
  first = lines[code.co_firstlineno - 1].encode()
  if not ends or first.count(b'lambda') != 1:
    return None
  end_line, end_col = max(ends)
  before = ''.join(lines[code.co_firstlineno - 1 : end_line - 1]).encode()
  text = (before + lines[end_line - 1].encode()[:end_col])[first.index(b'lambda') :].decode()
  try:
    made = compile(f'({text})', '<lambda>', 'eval').co_consts[0]
  except SyntaxError:  # the body is in parentheses of its own
    return None
  same = isinstance(made, types.CodeType) and (made.co_code, made.co_consts) == (code.co_code, code.co_consts)
  return f'({text})' if same and made.co_names == code.co_names else None


def _lambda_on_its_line(code: types.CodeType, lines: Sequence[str]) -> str | None:
  """Returns the text of the only lambda that begins on its line, by parsing its module; None if there are several."""
  source = ''.join(lines)
  at_line = [
    node for node in ast.walk(_parse(source)) if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno
  ]
  text = ast.get_source_segment(source, at_line[0]) if len(at_line) == 1 else None
  return None if text is None else f'({text})'  # may have several lines


_parse = functools.lru_cache(maxsize=2)(ast.parse)


def _with_newshape(reshape: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a jnp.reshape that takes its shape as `newshape` too."""

  @functools.wraps(reshape)
  def with_newshape(a: Any, *args: Any, **kwargs: Any) -> Any:
    if 'newshape' in kwargs:
      kwargs['shape'] = kwargs.pop('newshape')
    return reshape(a, *args, **kwargs)

  signature = inspect.signature(reshape)
  newshape = inspect.Parameter('newshape', inspect.Parameter.KEYWORD_ONLY, default=None)
  with_newshape.__signature__ = signature.replace(  # type: ignore[attr-defined]
    parameters=[*signature.parameters.values(), newshape]
  )
  return with_newshape


def _tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
  """jax.tree_map of earlier versions: a None in the first tree may meet anything in the others, and stays None."""

  def is_none_or_leaf(x: Any) -> bool:
    return x is None or (is_leaf is not None and is_leaf(x))

  def apply(x: Any, *others: Any) -> Any:
    return None if x is None and not (is_leaf is not None and is_leaf(x)) else f(x, *others)

  return jax.tree.map(apply, tree, *rest, is_leaf=is_none_or_leaf)
