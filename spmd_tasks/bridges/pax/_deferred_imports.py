"""Defers what Pax imports and a run seldom needs to its first use: TensorFlow, SymPy and others, 15 s of imports.

    sys.meta_path.insert(0, DeferringFinder())
    import paxml.summary_utils      # imports no TensorFlow
    paxml.summary_utils.tf.io       # imports it now

Only the modules of `_DEFERRED` see a deferred module; in all others, those of the user too, an import is an import.
"""

import builtins
from collections.abc import Callable
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import typing
from typing import Any

# By the module, or the package, that imports: the modules that it names and does not need to be imported itself.
_DEFERRED = {
  'praxis.base_input': ('tensorflow',),
  'paxml.tasks_lib': ('tensorflow', 'orbax'),  # Orbax, to restore in annotations' texts alone
  'paxml': ('tensorflow',),  # for event files and inputs of tf.data; otherwise named in annotations
  'paxml.automl_interfaces': ('pyglove',),  # whose values an experiment may have as attributes
  'clu.periodic_actions': ('clu.metric_writers',),  # which imports TensorFlow
  'lingvo.core.nested_map': ('tensorflow',),
  'lingvo.core.hyperparams': ('lingvo.core.symbolic',),  # which imports SymPy, for symbols in Lingvo's own configs
  'praxis.layers.ngrammer': ('sympy',),
  'optax_shampoo': ('jax.experimental.sparse', 'chex'),
  # To write configs as code.
  'fiddle._src.extensions.jax': ('libcst',),
  'fiddle._src.codegen.import_manager': ('libcst',),
  'fiddle._src.codegen.py_val_to_cst_converter': ('libcst',),
}
# An instance of this one, made by a module's body, is made when it is used.
_MADE_LATER = 'libcst.Module'
# Of these, functions ask too whether a value is an instance of some class, which needs no import.
_ONLY_CLASSES = ('tensorflow.python.trackable.data_structures', 'pyglove', 'pyglove.hyper')


class DeferringFinder(importlib.abc.MetaPathFinder):
  """Finds the importing modules of `_DEFERRED`, to be loaded with an `__import__` of their own."""

  def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
    names = _DEFERRED.get(fullname) or _DEFERRED.get(fullname.partition('.')[0]) or ()
    spec = importlib.machinery.PathFinder.find_spec(fullname, path) if names else None
    if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
      spec.loader = _DeferringLoader(fullname, spec.loader.path, names)
    return spec


class _DeferringLoader(importlib.machinery.SourceFileLoader):
  def __init__(self, fullname: str, path: str, names: tuple[str, ...]):
    super().__init__(fullname, path)
    self._names = names

  def exec_module(self, module: types.ModuleType) -> None:
    def is_deferred(name: str) -> bool:
      return any(name == deferred or name.startswith(f'{deferred}.') for deferred in self._names)

    def import_(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
      if level == 0 and is_deferred(name):  # without a fromlist, the statement takes the rest of the path by itself
        return _Deferred(name if fromlist else name.partition('.')[0], module)
      if level == 0 and fromlist and all(is_deferred(f'{name}.{item}') for item in fromlist):
        return _Deferred(name, module)
      return builtins.__import__(name, globals_, locals_, fromlist, level)

    # Python takes `__import__` from here, when the module's body or one of its functions imports.
    vars(module)['__builtins__'] = vars(builtins) | {'__import__': import_}
    super().exec_module(module)
    for name, value in list(vars(module).items()):  # Praxis' own deferred modules are imported by an annotation's text
      if type(value).__name__ == 'LazyLoader' and is_deferred(value.__name__):
        vars(module)[name] = _Deferred(value.__name__, module)


class _Deferred:
  """A module, or a name in one, that is imported when the code that named it uses it.

  An attribute that the body of the code's module or the text of an annotation names is deferred as well:
  `SummaryWriter = tf.summary.SummaryWriter`.
  """

  def __init__(self, path: str, importer: types.ModuleType):
    self._path, self._importer = path, importer

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):  # asked for by `inspect` and the like
      raise AttributeError(name)
    if self._path in _ONLY_CLASSES or self._is_being_defined(sys._getframe(1)):
      return _Deferred(f'{self._path}.{name}', self._importer)
    return getattr(_named(self._path), name)

  def _is_being_defined(self, caller: types.FrameType) -> bool:
    """Whether the module's body or the text of an annotation asks: Python runs both under the name `<module>`."""
    scopes = caller.f_globals, caller.f_locals  # typing gives the module's names as the one or the other
    is_text = caller.f_code.co_name == '<module>' and any(scope is vars(self._importer) for scope in scopes)
    return is_text or getattr(self._importer.__spec__, '_initializing', False)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    if self._path == _MADE_LATER and self._is_being_defined(sys._getframe(1)):
      return _DeferredInstance(lambda: _named(self._path)(*args, **kwargs))
    return _named(self._path)(*args, **kwargs)

  def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_named(self._path),)

  def __instancecheck__(self, value: Any) -> bool:
    return self._path.partition('.')[0] in sys.modules and isinstance(value, _named(self._path))

  def __or__(self, other: Any) -> Any:
    return typing.Union[self, other]  # noqa: UP007

  __ror__ = __or__

  def __repr__(self) -> str:
    return self._path


class _DeferredInstance:
  """An object that is made when one of its attributes is used."""

  def __init__(self, make: Callable[[], Any]):
    self._make = functools.cache(make)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._make(), name)


def _named(path: str) -> Any:
  """Returns the module of this path, or the name in a module."""
  parent, _, name = path.rpartition('.')
  try:
    return importlib.import_module(path)
  except ModuleNotFoundError:
    if not parent:
      raise
  return getattr(_named(parent), name)
