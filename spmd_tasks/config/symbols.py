"""Names classes and functions in saved configs.

    symbol_of(Dropless)                                           # 'spmd_tasks.layers.moe:Dropless'

A saved name is `package:QualName` of the nearest package that exports the object, so files can move inside a package.
"""

import sys
from typing import Any


def symbol_of(value: Any) -> str:
  """The name of a class or function as `package:QualName`.

  The package is the nearest one around the object's module that exports the object by its own name. Without such a
  package it is the module, up to its first private part: `jax:relu` for `jax._src.nn.functions.relu`.
  """
  return f'{public_module_of(value)}:{value.__qualname__}'


def public_module_of(value: Any) -> str:
  """The nearest package that exports a class or function, else its module up to the first private part."""
  module = value.__module__ or 'builtins'
  name = value.__qualname__.partition('.')[0]
  public = module.partition('._')[0]
  outermost = _loaded(module).get(name)
  packages = public.split('.') if public != module else public.split('.')[:-1]
  for end in range(len(packages), 0, -1):
    package = '.'.join(packages[:end])
    if outermost is not None and _exports(package, name, outermost):
      return package
  return public


def _exports(package: str, name: str, value: Any) -> bool:
  found = _loaded(package)
  if name in found:
    return found[name] is value
  return name in found.get('__all__', ()) and getattr(sys.modules[package], name, None) is value  # a lazy face


def _loaded(module: str) -> dict[str, Any]:
  """The names in a module that was imported already; nothing is imported."""
  return vars(sys.modules[module]) if module in sys.modules else {}
