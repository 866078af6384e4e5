"""Modules that stand in for those that Pax imports and that cannot be installed or loaded: SeqIO, T5, Lingvo's inputs.

    find_stand_in('seqio')                      # the spec of a stand-in, or None where the real module is there
    import t5.data                              # now works, in paxml.tasks.lm.params.c4 and in modules like it
    VOCABULARY = t5.data.SentencePieceVocabulary('...')   # in a module's body: made, and of no use
    t5.data.SentencePieceVocabulary('...')      # anywhere else: a UserError that names it

So a module that registers SeqIO tasks when it is imported can be imported for its models, and for other inputs.
"""

import abc
from collections.abc import Callable
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, NoReturn

from spmd_tasks.errors import UserError

# With all their submodules.
_DATA_PACKAGES = ('seqio', 't5', 'tensorflow_datasets')


def find_stand_in(fullname: str) -> importlib.machinery.ModuleSpec | None:
  """Returns the spec of a stand-in for a module that cannot be imported; None for every other module."""
  top = fullname.partition('.')[0]
  if top in _DATA_PACKAGES:
    is_needed = importlib.machinery.PathFinder.find_spec(top) is None
  else:
    is_needed = fullname in LINGVO_STAND_INS
    if fullname in NEED_SENTENCEPIECE:
      is_needed = is_needed and importlib.machinery.PathFinder.find_spec('sentencepiece') is None
  if not is_needed:
    return None
  loader = _StandInLoader(LINGVO_STAND_INS.get(fullname, lambda module: None))
  return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)


class _StandInLoader(importlib.abc.Loader):
  def __init__(self, fill: Callable[[types.ModuleType], None]):
    self._fill = fill

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    return StandIn(spec.name)

  def exec_module(self, module: types.ModuleType) -> None:
    self._fill(module)


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
  while frame is not None:
    if frame.f_code.co_filename.startswith('<frozen importlib'):
      return True
    frame = frame.f_back
  return False


def _refuse(cls: type) -> NoReturn:
  """Raises a UserError that names a class and the package that it needs."""
  base = cls.__mro__[cls.__mro__.index(_Instance) - 1]
  raise UserError(
    f'{cls.__module__}.{cls.__qualname__} needs {base.__module__}, which is not installed beside spmd_tasks: give the '
    'experiment inputs that do without it, by datasets() of a subclass.'
  )


def _fill_base_input_generator(module: types.ModuleType) -> None:
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

  module.BaseInputGenerator = BaseInputGenerator  # type: ignore[attr-defined]


def _fill_py_utils(module: types.ModuleType) -> None:
  module.NestedMap = importlib.import_module('lingvo.core.nested_map').NestedMap  # type: ignore[attr-defined]


# The real ones load native parts, Matplotlib and TensorFlow. By module: what adds names that more than imports use.
LINGVO_STAND_INS: dict[str, Callable[[types.ModuleType], None]] = {
  'lingvo.core.base_input_generator': _fill_base_input_generator,
  'lingvo.core.generic_input': lambda module: None,
  'lingvo.core.layers': lambda module: None,
  'lingvo.core.ops': lambda module: None,
  'lingvo.core.py_utils': _fill_py_utils,
}
NEED_SENTENCEPIECE = ('lingvo.core.generic_input', 'lingvo.core.py_utils')
