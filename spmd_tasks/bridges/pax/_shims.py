"""Makes Praxis and Paxml importable on today's JAX, without dependencies that they import but do not need.

    install_shims()      # cheap: imports nothing of Pax
    import paxml.tasks_lib

* Names that JAX has removed are added to it when Praxis or Paxml is imported.
* Modules in `_DEFERRING` import TensorFlow and SeqIO (10 s) when they are first used. Other modules, including the
  user's, import as usual.
* If SeqIO, T5 or TensorFlow Datasets is not installed, it has a stand-in, and so have the native parts of Lingvo. So a
  module that registers SeqIO tasks can still be imported for its models or other inputs.
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
# A module or package -> modules that it imports on first use only.
_DEFERRING = {
  'praxis.base_input': ('tensorflow',),
  'paxml': ('tensorflow', 'seqio'),  # used for event files, tf.data inputs and annotations
  'clu.periodic_actions': ('clu.metric_writers',),  # imports TensorFlow
  'lingvo.core.nested_map': ('tensorflow',),
}
# Modules used only in isinstance checks, which need no import.
_ONLY_CLASSES = ('seqio', 'seqio.metrics', 'tensorflow.python.trackable.data_structures')
_DATA_PACKAGES = ('seqio', 't5', 'tensorflow_datasets')  # with all their submodules
_LINGVO = ('base_input_generator', 'generic_input', 'layers', 'ops', 'py_utils')  # need native code and TensorFlow
_DEPRECATIONS: set[str] = set()  # messages that were logged


def install_shims() -> None:
  """Installs the shims, which act when Praxis or Paxml is imported; may be called repeatedly."""
  if not any(isinstance(finder, _ShimFinder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _ShimFinder())
  if any(package in sys.modules for package in _PACKAGES):
    _add_names_to_jax()


class _ShimFinder(importlib.abc.MetaPathFinder):
  """Adds names to JAX on the first import of Pax, defers imports of `_DEFERRING`, and finds stand-ins."""

  def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    if fullname in _PACKAGES:
      _add_names_to_jax()
      _speed_up_auto_config()
      absl_logging.get_absl_logger().addFilter(_is_new_message)
    if fullname.partition('.')[0] not in _PACKAGES and not any(package in sys.modules for package in _PACKAGES):
      return None
    if names := _DEFERRING.get(fullname) or _DEFERRING.get(fullname.partition('.')[0]):
      spec = PathFinder.find_spec(fullname, path)
      if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = _DeferringLoader(fullname, spec.loader.path, names)
      return spec
    return find_stand_in(fullname)


def _is_new_message(record: logging.LogRecord) -> bool:
  """Whether a message was not logged before, if it is a deprecation of Praxis's settings; Praxis repeats these."""
  text = str(record.msg)
  is_new = text not in _DEPRECATIONS
  if text.startswith('DEPRECATION WARNING: p.'):
    _DEPRECATIONS.add(text)
  return is_new


def _add_names_to_jax() -> None:
  """Adds the names that Praxis and Paxml use and JAX has removed."""
  # praxis.base_input uses its OpSharding for `custom_device_order`.
  if importlib.util.find_spec('jax.lib.xla_client') is None and 'jax.lib.xla_client' not in sys.modules:
    from jaxlib import xla_client

    sys.modules['jax.lib.xla_client'] = jax.lib.xla_client = xla_client  # type: ignore[attr-defined]
  # praxis.py_utils uses the last two to update variables by name, and paxml.sgf for private gradients.
  removed = {'tree_map': _tree_map, 'tree_flatten': jax.tree.flatten, 'tree_unflatten': jax.tree.unflatten}
  for name, function in removed.items():
    if not hasattr(jax, name):
      setattr(jax, name, function)
  # praxis.decoder_utils passes `newshape` to jnp.reshape in beam search.
  if 'newshape' not in inspect.signature(jax.numpy.reshape).parameters:
    jax.numpy.reshape = _with_newshape(jax.numpy.reshape)


def _with_newshape(reshape: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a jnp.reshape that also accepts the shape as `newshape`."""

  @functools.wraps(reshape)
  def with_newshape(a: Any, *args: Any, newshape: Any = None, **kwargs: Any) -> Any:
    return reshape(a, *args, **kwargs) if newshape is None else reshape(a, newshape, *args, **kwargs)

  del with_newshape.__wrapped__  # so that its signature has `newshape`
  return with_newshape


def _tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
  """jax.tree_map of earlier versions: a None in the first tree stays None, whatever the other trees have there."""

  def is_user_leaf(x: Any) -> bool:
    return is_leaf is not None and is_leaf(x)

  def apply(x: Any, *others: Any) -> Any:
    return None if x is None and not is_user_leaf(x) else f(x, *others)

  return jax.tree.map(apply, tree, *rest, is_leaf=lambda x: x is None or is_user_leaf(x))


def _speed_up_auto_config() -> None:
  """Makes Fiddle's auto_config parse a module once; Praxis applies it to many lambdas in defaults of fields.

  Fiddle parses and copies the whole module for each lambda: 7 s for praxis.optimizers and paxml.tasks_lib.
  """
  auto_config: Any = importlib.import_module('fiddle._src.experimental.auto_config')
  find = getattr(auto_config, '_getsource_for_lambda', None)
  if find is None or hasattr(find, '__wrapped__'):
    return

  @functools.wraps(find)
  def get_source(fn: Callable[..., Any]) -> str:
    source = ''.join(inspect.findsource(fn)[0])
    at_line = [node for node in _lambdas(source) if node.lineno == fn.__code__.co_firstlineno]
    text = ast.get_source_segment(source, at_line[0]) if len(at_line) == 1 else None
    return find(fn) if text is None else f'({text})'  # in parentheses, because it may have several lines

  auto_config._getsource_for_lambda = get_source


@functools.lru_cache(maxsize=2)
def _lambdas(source: str) -> list[ast.Lambda]:
  return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Lambda)]


class _DeferringLoader(SourceFileLoader):
  """Loads a module whose imports of some names are deferred."""

  def __init__(self, fullname: str, path: str, names: tuple[str, ...]):
    super().__init__(fullname, path)
    self._names = names

  def exec_module(self, module: types.ModuleType) -> None:
    def is_deferred(name: str) -> bool:
      return any(name == deferred or name.startswith(f'{deferred}.') for deferred in self._names)

    def import_(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
      if level == 0 and is_deferred(name):  # without a fromlist, `import a.b` binds `a`
        return _Deferred(name if fromlist else name.partition('.')[0], module)
      if level == 0 and fromlist and all(is_deferred(f'{name}.{item}') for item in fromlist):
        return _Deferred(name, module)
      return builtins.__import__(name, globals_, locals_, fromlist, level)

    # Python looks up `__import__` here for imports in the module's body and in its functions.
    vars(module)['__builtins__'] = vars(builtins) | {'__import__': import_}
    super().exec_module(module)
    for name, value in list(vars(module).items()):  # Praxis's own LazyLoaders are imported to evaluate annotations
      if type(value).__name__ == 'LazyLoader' and is_deferred(value.__name__):
        vars(module)[name] = _Deferred(value.__name__, module)


class _Deferred:
  """A module, or a name in a module, that is imported on first use.

  Attributes accessed in the body of the importing module, such as `SummaryWriter = tf.summary.SummaryWriter`, or in a
  string annotation are deferred as well.
  """

  def __init__(self, path: str, importer: types.ModuleType):
    self._path, self._importer = path, importer

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):  # accessed by `inspect`, for example
      raise AttributeError(name)
    caller = sys._getframe(1)
    # Module bodies and string annotations run under the name `<module>`.
    scopes = caller.f_globals, caller.f_locals  # typing passes the module's names as either
    is_annotation = caller.f_code.co_name == '<module>' and any(scope is vars(self._importer) for scope in scopes)
    is_body = is_annotation or getattr(self._importer.__spec__, '_initializing', False)
    if is_body or self._path in _ONLY_CLASSES:
      return _Deferred(f'{self._path}.{name}', self._importer)
    return getattr(_resolve(self._path), name)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return _resolve(self._path)(*args, **kwargs)

  def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_resolve(self._path),)

  def __instancecheck__(self, value: Any) -> bool:
    return self._path.partition('.')[0] in sys.modules and isinstance(value, _resolve(self._path))

  def __or__(self, other: Any) -> Any:
    return typing.Union[self, other]  # noqa: UP007

  __ror__ = __or__


def _resolve(path: str) -> Any:
  """Imports the module or the attribute of a module with this dotted path."""
  parent, _, name = path.rpartition('.')
  try:
    return importlib.import_module(path)
  except ModuleNotFoundError:
    if not parent:
      raise
  return getattr(_resolve(parent), name)


def find_stand_in(fullname: str) -> ModuleSpec | None:
  """Returns the spec of a stand-in if the module needs one, or else None."""
  top = fullname.partition('.')[0]
  is_missing = top in _DATA_PACKAGES and PathFinder.find_spec(top) is None
  needs_stand_in = is_missing or fullname.removeprefix('lingvo.core.') in _LINGVO
  return ModuleSpec(fullname, _StandInLoader(), is_package=True) if needs_stand_in else None


class _StandInLoader(importlib.abc.Loader):
  def create_module(self, spec: ModuleSpec) -> types.ModuleType:
    return StandIn(spec.name)

  def exec_module(self, module: types.ModuleType) -> None:
    if module.__name__ == 'lingvo.core.base_input_generator':
      module.BaseInputGenerator = _make_base_input_generator()  # type: ignore[attr-defined]


class StandIn(types.ModuleType):
  """A module in which every name is a class of the type StandInClass."""

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    cls = _make_class(self.__name__, name)
    setattr(self, name, cls)
    return cls


class StandInClass(abc.ABCMeta):
  """The metaclass of stand-in classes, which work in annotations, `isinstance`, as bases and as decorators.

  Their attributes are stand-in classes too. They can be called only during an import.
  """

  def __getattr__(cls, name: str) -> Any:
    if name.startswith('_'):
      raise AttributeError(name)
    return _make_class(f'{cls.__module__}.{cls.__name__}', name)

  def __call__(cls, *args: Any, **kwargs: Any) -> Any:
    if not _is_importing():
      _raise_missing(cls)
    return object.__new__(cls)  # type: ignore[arg-type]  # does not call __init__ of a subclass


class _Instance(metaclass=StandInClass):
  """An instance of a stand-in class, which can be called during an import, like a decorator."""

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):  # accessed by `copy`, for example
      raise AttributeError(name)
    return _raise_missing(type(self))

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self if _is_importing() else _raise_missing(type(self))


def _make_class(module: str, name: str) -> StandInClass:
  return StandInClass(name, (_Instance,), {'__module__': module})


def _is_importing() -> bool:
  """Whether a module is being imported, that is, importlib is on the stack."""
  frame: types.FrameType | None = sys._getframe(1)
  while frame is not None and not frame.f_code.co_filename.startswith('<frozen importlib'):
    frame = frame.f_back
  return frame is not None


def _raise_missing(cls: type) -> NoReturn:
  """Raises a UserError with the package that a stand-in class needs."""
  base = cls.__mro__[cls.__mro__.index(_Instance) - 1]
  raise UserError(
    f'{cls.__module__}.{cls.__qualname__} needs {base.__module__}, which is not installed: use inputs without it, by '
    'overriding datasets() in a subclass of the experiment.'
  )


def _make_base_input_generator() -> type:
  """Returns a minimal BaseInputGenerator of Lingvo.

  paxml.tasks.lm.input_generator.SyntheticLmData, the input of lm_cloud, extends it.
  """
  from lingvo.core import hyperparams

  class BaseInputGenerator:
    """The part of Lingvo's class that inputs with `_InputBatch` need."""

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
