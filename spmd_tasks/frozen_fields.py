"""FrozenFields: makes subclasses frozen dataclasses whose fields a plain assignment in a subclass re-defaults.

    class Run(FrozenFields):
      steps: int = 100

    class Long(Run):
      steps = 1000            # a new default; a new attribute needs a type

    Long(steps=5).setter_rank('steps')     # 0: set by the constructor, 1: by Long, 2: by Run

Lists become tuples and dicts FrozenDicts. Experiment is a subclass (experiment.py).
"""

from collections.abc import Container, Mapping
import dataclasses
import difflib
import functools
import inspect
import math
import types
from typing import Any, ClassVar, dataclass_transform, get_type_hints

from flax.core import FrozenDict

from spmd_tasks.errors import UserError


def freeze(value: Any) -> Any:
  """Returns the value with lists as tuples and dicts as FrozenDicts, at every depth."""
  if isinstance(value, Mapping):
    return FrozenDict({key: freeze(item) for key, item in value.items()})
  if type(value) in (list, tuple):
    return tuple(freeze(item) for item in value)
  return value


_hints_of = functools.cache(get_type_hints)  # a call takes a millisecond, and a class needs dozens


def _field_type(cls: type, name: str) -> Any:
  """Returns the annotation of an inherited field, resolved in its own module if possible."""
  for base in cls.__mro__[1:]:
    annotations = inspect.get_annotations(base)
    if name in annotations:
      try:
        return _hints_of(base)[name]
      except NameError:  # a name that only type checkers import
        return annotations[name]
  raise AssertionError(name)


def _is_plain_value(name: str, value: Any) -> bool:
  """Returns whether a class attribute is public, and not a method, property or nested class."""
  return not name.startswith('_') and not callable(value) and not hasattr(type(value), '__get__')


@dataclass_transform(kw_only_default=True, frozen_default=True)
class FrozenFields:
  """Makes every subclass a frozen, keyword-only dataclass; its plain class attributes re-default inherited fields."""

  # Fields by their earlier names, which classes, overrides and saved configs may still use.
  _renamed: ClassVar[Mapping[str, str]] = types.MappingProxyType({})
  # Removed fields, and what to do instead. A class or override that sets one is refused, a saved value is ignored. A
  # subclass may declare a field of the same name.
  _removed: ClassVar[Mapping[str, str]] = types.MappingProxyType({})
  # Refused when an object is made, and not with the class, because a module's other classes can be used.
  _mistake: ClassVar[str] = ''
  _fields_set_here: ClassVar[frozenset[str]] = frozenset()
  _constructor_fields: ClassVar[frozenset[str]]  # of an object: the fields that were passed to its constructor

  def __new__(cls, *args: Any, **kwargs: Any):
    if cls._mistake:
      raise UserError(cls._mistake)
    self = super().__new__(cls)
    object.__setattr__(self, '_constructor_fields', frozenset(kwargs))
    return self

  def setter_rank(self, name: str) -> float:
    """Returns where a field was set: 0 in the constructor, 1 in the class, 2, ... in its bases, inf nowhere."""
    if name in self._constructor_fields:
      return 0
    setters = (vars(cls).get('_fields_set_here', ()) for cls in type(self).__mro__)
    return next((rank for rank, names in enumerate(setters, 1) if name in names), math.inf)

  @classmethod
  def current_fields(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns saved values by the current names of their fields, without removed fields."""
    values = {cls._renamed.get(name, name): value for name, value in saved.items()}
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass
    removed = cls._removed.keys() - {field.name for field in fields}
    return {name: value for name, value in values.items() if name not in removed}

  @classmethod
  def refuse_removed(cls, name: str, fields: Container[str]) -> None:
    """Raises a UserError if `name` is a removed field, and not one of `fields`."""
    if name in cls._removed and name not in fields:
      raise UserError(f'{cls.__qualname__} no longer has a field {name!r}: {cls._removed[name]}.')

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    annotations = dict(inspect.get_annotations(cls))
    for old, new in cls._renamed.items():
      if old in vars(cls):
        setattr(cls, new, vars(cls)[old])
        delattr(cls, old)
        annotations.pop(old, None)
    inherited = {name for base in cls.__mro__[1:] for name in getattr(base, '__dataclass_fields__', ())}
    for name in annotations:
      overridden = None if name in inherited else getattr(super(cls, cls), name, None)
      if isinstance(overridden, types.FunctionType):
        raise UserError(
          f'{cls.__qualname__}.{name} is a field, but {overridden.__qualname__} is a method: define '
          f'`def {name}(self)`, or rename the field.'
        )
      if isinstance(overridden, property) and name not in vars(cls):  # a dataclass would take it as the default
        raise UserError(f'{cls.__qualname__}.{name} overrides a property: give it a default, `{name}: ... = ...`.')
    for name, value in list(vars(cls).items()):
      if _is_plain_value(name, value):
        cls.refuse_removed(name, {*inherited, *annotations})
      if name in inherited:
        if isinstance(value, (types.FunctionType, property, functools.cached_property, classmethod, staticmethod)):
          raise UserError(
            f'{cls.__qualname__}.{name} overrides a field with a {type(value).__name__}: give it a value, `{name} = '
            '...`.'
          )
        if name not in annotations:
          annotations[name] = _field_type(cls, name)
      elif name not in annotations and _is_plain_value(name, value):
        near = difflib.get_close_matches(name, inherited, n=1, cutoff=0.8)
        cls._mistake = (
          f'{cls.__qualname__}.{name} = {value!r} is a new attribute without a type, which --set needs: annotate it, '
          f'`{name}: {"int | None" if value is None else type(value).__name__} = {value!r}`'
          f'{f", or did you mean {near[0]}?" if near else "."}'
        )
      if name in annotations:
        setattr(cls, name, freeze(value))
    cls._fields_set_here = frozenset(annotations)
    if len(cls.__bases__) > 1:
      # A dataclass takes all fields from its first base, even inherited ones. Here the first class in the method
      # resolution order that sets a field wins, as for other attributes.
      for name in sorted(inherited.difference(annotations)):
        setter = next(base for base in cls.__mro__[1:] if name in vars(base).get('_fields_set_here', ()))
        if name in vars(setter):
          annotations[name] = _field_type(cls, name)
          setattr(cls, name, vars(setter)[name])
    cls.__annotations__ = annotations
    dataclasses.dataclass(frozen=True, kw_only=True)(cls)
