"""Imports Fiddle without LibCST, which takes as long as the rest of Fiddle five times over.

    import_fiddle()      # before the first `import fiddle`

Fiddle needs LibCST to find the source of a lambda that `auto_config` is applied to. It is imported then.
"""

from collections.abc import Callable
import functools
import importlib
import importlib.util
import sys
import types
from typing import Any

_AUTO_CONFIG = 'fiddle._src.experimental.auto_config'


def import_fiddle() -> None:
  """Imports Fiddle, with LibCST deferred unless one of them is imported already."""
  if 'fiddle' in sys.modules or 'libcst' in sys.modules:
    return
  # All that the body of Fiddle's module names: the base and a field of the class that looks for lambdas.
  stand_in: Any = types.ModuleType('libcst')
  stand_in.CSTVisitor, stand_in.metadata = object, types.SimpleNamespace(PositionProvider=None)
  sys.modules['libcst'] = stand_in
  try:
    auto_config: Any = importlib.import_module(_AUTO_CONFIG)
    auto_config._getsource_for_lambda = source_of_lambda
  except AttributeError:  # a Fiddle that names more: it is imported again, with LibCST
    for name in [name for name in sys.modules if name.partition('.')[0] == 'fiddle']:
      del sys.modules[name]
  finally:
    del sys.modules['libcst']
  importlib.import_module('fiddle')


def source_of_lambda(fn: Callable[..., Any]) -> str:
  """Returns the source of a lambda as Fiddle finds it. Raises ValueError if it begins on a line with another one."""
  return _fiddles_own()._getsource_for_lambda(fn)


@functools.cache
def _fiddles_own() -> Any:
  """Loads Fiddle's module once more, with LibCST."""
  spec = importlib.util.find_spec(_AUTO_CONFIG)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
