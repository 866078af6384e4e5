"""Makes Praxis and Paxml importable on today's JAX, without what they import and do not need.

    install_shims()      # cheap: nothing of Pax is imported yet
    import paxml.tasks_lib

* Names that JAX no longer has are added to it when Praxis or Paxml is imported, each only where it is missing.
* TensorFlow and SeqIO, 10 s of imports, are imported when a module of `_DEFERRING` uses them. In all others, those of
  the user too, an import is an import.
* SeqIO, T5, TensorFlow Datasets, where they are not installed, and Lingvo's native parts have stand-ins, so that a
  module that registers SeqIO tasks when it is imported can be imported for its models, and for other inputs.
"""

import abc
import ast
import builtins
from collections.abc import Callable
import functools
import importlib
import importlib.abc
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
import importlib.util
import inspect
import logging
import sys
import types
import typing
from typing import Any, NoReturn

from absl import logging as absl_logging
import jax

from spmd_tasks.errors import UserError

_PACKAGES = ('praxis', 'paxml')
# By the module, or the package, that imports: what it names and does not need to be imported itself.
_DEFERRING = {
  'praxis.base_input': ('tensorflow',),
  'paxml': ('tensorflow', 'seqio'),  # for event files and inputs of tf.data; otherwise named in annotations
  'clu.periodic_actions': ('clu.metric_writers',),  # which imports TensorFlow
  'lingvo.core.nested_map': ('tensorflow',),
}
# Of these, functions ask whether a value is an instance of some class, which needs no import.
_ONLY_CLASSES = ('seqio', 'seqio.metrics', 'tensorflow.python.trackable.data_structures')
_DATA_PACKAGES = ('seqio', 't5', 'tensorflow_datasets')  # with all their submodules
_LINGVO = ('base_input_generator', 'generic_input', 'layers', 'ops', 'py_utils')  # need native parts and TensorFlow
_DEPRECATIONS: set[str] = set()  # that were logged


def install_shims() -> None:
  """Applies the shims as soon as Praxis or Paxml is imported; may be called again and again."""
  if not any(isinstance(finder, _ShimFinder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _ShimFinder())
  if any(package in sys.modules for package in _PACKAGES):
    _add_names_to_jax()


class _ShimFinder(importlib.abc.MetaPathFinder):
  """Looks at every import: adds names to JAX, gives stand-ins, and lets the modules of `_DEFERRING` defer theirs."""

  def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    if fullname in _PACKAGES:
      _add_names_to_jax()
      _find_lambdas_quickly()
      absl_logging.get_absl_logger().addFilter(_is_news)
    if fullname.partition('.')[0] not in _PACKAGES and not any(package in sys.modules for package in _PACKAGES):
      return None
    if names := _DEFERRING.get(fullname) or _DEFERRING.get(fullname.partition('.')[0]):
      spec = PathFinder.find_spec(fullname, path)
      if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = _DeferringLoader(fullname, spec.loader.path, names)
      return spec
    return find_stand_in(fullname)


def _is_news(record: logging.LogRecord) -> bool:
  """Lets a deprecation of Praxis' settings be logged once; Praxis does at each of a dozen instantiations."""
  text = str(record.msg)
  is_news = text not in _DEPRECATIONS
  if text.startswith('DEPRECATION WARNING: p.'):
    _DEPRECATIONS.add(text)
  return is_news


def _add_names_to_jax() -> None:
  # praxis.base_input names OpSharding of this module, for `custom_device_order`.
  if importlib.util.find_spec('jax.lib.xla_client') is None and 'jax.lib.xla_client' not in sys.modules:
    from jaxlib import xla_client

    sys.modules['jax.lib.xla_client'] = jax.lib.xla_client = xla_client  # type: ignore[attr-defined]
  # The last two: praxis.py_utils, for updates of variables by name, and paxml.sgf, for private gradients.
  earlier = {'tree_map': _tree_map, 'tree_flatten': jax.tree.flatten, 'tree_unflatten': jax.tree.unflatten}
  for name, function in earlier.items():
    if not hasattr(jax, name):
      setattr(jax, name, function)
  # praxis.decoder_utils, for beam search, gives jnp.reshape its shape by an earlier name.
  if 'newshape' not in inspect.signature(jax.numpy.reshape).parameters:
    jax.numpy.reshape = _with_newshape(jax.numpy.reshape)


def _with_newshape(reshape: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a jnp.reshape that takes its shape as `newshape` too."""

  @functools.wraps(reshape)
  def with_newshape(a: Any, *args: Any, newshape: Any = None, **kwargs: Any) -> Any:
    return reshape(a, *args, **kwargs) if newshape is None else reshape(a, newshape, *args, **kwargs)

  del with_newshape.__wrapped__  # so that its signature has the name
  return with_newshape


def _tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
  """jax.tree_map of earlier versions: a None in the first tree may meet anything in the others, and stays None."""

  def is_given(x: Any) -> bool:
    return is_leaf is not None and is_leaf(x)

  def apply(x: Any, *others: Any) -> Any:
    return None if x is None and not is_given(x) else f(x, *others)

  return jax.tree.map(apply, tree, *rest, is_leaf=lambda x: x is None or is_given(x))


def _find_lambdas_quickly() -> None:
  """Lets Fiddle's auto_config, which Praxis applies to lambdas in defaults of fields, parse each module once.

  Fiddle's own way parses and copies the whole module in Python for each of them: 7 s for those in praxis.optimizers and
  paxml.tasks_lib.
  """
  auto_config: Any = importlib.import_module('fiddle._src.experimental.auto_config')  # Praxis' Fiddle: we use none here
  find = getattr(auto_config, '_getsource_for_lambda', None)
  if find is None or hasattr(find, '__wrapped__'):
    return

  @functools.wraps(find)
  def find_quickly(fn: Callable[..., Any]) -> str:
    source = ''.join(inspect.findsource(fn)[0])
    at_line = [node for node in _lambdas(source) if node.lineno == fn.__code__.co_firstlineno]
    text = ast.get_source_segment(source, at_line[0]) if len(at_line) == 1 else None
    return find(fn) if text is None else f'({text})'  # may have several lines

  auto_config._getsource_for_lambda = find_quickly


@functools.lru_cache(maxsize=2)
def _lambdas(source: str) -> list[ast.Lambda]:
  return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Lambda)]


class _DeferringLoader(SourceFileLoader):
  """Loads a module with an `__import__` of its own."""

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
    caller = sys._getframe(1)
    # Python runs a module's body and the text of an annotation under the name `<module>`.
    scopes = caller.f_globals, caller.f_locals  # typing gives the module's names as the one or the other
    is_text = caller.f_code.co_name == '<module>' and any(scope is vars(self._importer) for scope in scopes)
    is_body = is_text or getattr(self._importer.__spec__, '_initializing', False)
    if is_body or self._path in _ONLY_CLASSES:
      return _Deferred(f'{self._path}.{name}', self._importer)
    return getattr(_named(self._path), name)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return _named(self._path)(*args, **kwargs)

  def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_named(self._path),)

  def __instancecheck__(self, value: Any) -> bool:
    return self._path.partition('.')[0] in sys.modules and isinstance(value, _named(self._path))

  def __or__(self, other: Any) -> Any:
    return typing.Union[self, other]  # noqa: UP007

  __ror__ = __or__


def _named(path: str) -> Any:
  """Returns the module of this path, or the name in a module."""
  parent, _, name = path.rpartition('.')
  try:
    return importlib.import_module(path)
  except ModuleNotFoundError:
    if not parent:
      raise
  return getattr(_named(parent), name)


def find_stand_in(fullname: str) -> ModuleSpec | None:
  """Returns the spec of a stand-in for a module that cannot be imported; None for every other module."""
  top = fullname.partition('.')[0]
  is_missing = top in _DATA_PACKAGES and PathFinder.find_spec(top) is None
  is_needed = is_missing or fullname.removeprefix('lingvo.core.') in _LINGVO
  return ModuleSpec(fullname, _StandInLoader(), is_package=True) if is_needed else None


class _StandInLoader(importlib.abc.Loader):
  def create_module(self, spec: ModuleSpec) -> types.ModuleType:
    return StandIn(spec.name)

  def exec_module(self, module: types.ModuleType) -> None:
    if module.__name__ == 'lingvo.core.base_input_generator':
      module.BaseInputGenerator = _make_base_input_generator()  # type: ignore[attr-defined]


class StandIn(types.ModuleType):
  """A module whose every unknown name is a `StandInClass`."""

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    made = _make_class(self.__name__, name)
    setattr(self, name, made)
    return made


class StandInClass(abc.ABCMeta):
  """The class of such a class, good for annotations, `isinstance`, bases and decorators; its names are classes too.

  It can be called only while a module is imported.
  """

  def __getattr__(cls, name: str) -> Any:
    if name.startswith('_'):
      raise AttributeError(name)
    return _make_class(f'{cls.__module__}.{cls.__name__}', name)

  def __call__(cls, *args: Any, **kwargs: Any) -> Any:
    if not _is_importing():
      _refuse(cls)
    return object.__new__(cls)  # type: ignore[arg-type]  # without the __init__ of a class that extends it


class _Instance(metaclass=StandInClass):
  """What a module's body gets when it calls a StandInClass: it can be called there too, as decorators are."""

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):  # asked for by `copy` and the like
      raise AttributeError(name)
    return _refuse(type(self))

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self if _is_importing() else _refuse(type(self))


def _make_class(module: str, name: str) -> StandInClass:
  return StandInClass(name, (_Instance,), {'__module__': module})


def _is_importing() -> bool:
  """Whether a module is being imported: importlib is on the stack."""
  frame: types.FrameType | None = sys._getframe(1)
  while frame is not None and not frame.f_code.co_filename.startswith('<frozen importlib'):
    frame = frame.f_back
  return frame is not None


def _refuse(cls: type) -> NoReturn:
  """Raises a UserError that names a class and the package that it needs."""
  base = cls.__mro__[cls.__mro__.index(_Instance) - 1]
  raise UserError(
    f'{cls.__module__}.{cls.__qualname__} needs {base.__module__}, which is not installed: give the experiment inputs '
    'that do without it, by datasets() of a subclass.'
  )


def _make_base_input_generator() -> type:
  """paxml.tasks.lm.input_generator.SyntheticLmData, the input of lm_cloud, extends Lingvo's BaseInputGenerator."""
  from lingvo.core import hyperparams

  class BaseInputGenerator:
    """As much of Lingvo's class as an input needs that defines `_InputBatch`."""

    @classmethod
    def Params(cls) -> Any:  # noqa: N802
      params = hyperparams.InstantiableParams(cls)
      params.Define('name', 'input', 'Name of this input.')
      params.Define('batch_size', 0, 'Rows per process.')
      return params

    def __init__(self, params: Any):
      self.params = params

    def GetPreprocessedInputBatch(self) -> Any:  # noqa: N802
      return self._InputBatch()  # type: ignore[attr-defined]

  return BaseInputGenerator
