"""FrozenFields: classes whose attributes are fields of a frozen dataclass, which subclasses set by plain assignment.

    class Run(FrozenFields):
      steps: int = 100

    class Long(Run):
      steps = 1000            # a new default; an attribute that no base has needs a type

    Long(steps=5).setter_rank('steps')     # 0: by the constructor, 1: by Long, 2: by Run

Lists become tuples and dicts FrozenDicts. Experiment is one (experiment.py).
"""

from collections.abc import Container, Mapping
import dataclasses
import functools
import inspect
import math
import types
from typing import Any, ClassVar, dataclass_transform, get_type_hints

from flax.core import FrozenDict

from spmd_tasks.errors import UserError


def freeze(value: Any) -> Any:
  """Returns the value with lists as tuples and dicts as FrozenDicts, all the way down."""
  if isinstance(value, Mapping):
    return FrozenDict({key: freeze(item) for key, item in value.items()})
  if type(value) in (list, tuple):
    return tuple(freeze(item) for item in value)
  return value


_hints_of = functools.cache(get_type_hints)  # each takes a millisecond, and a class asks for dozens


def _field_type(cls: type, name: str) -> Any:
  """Returns the annotation of an inherited field, resolved in its own module if possible."""
  for base in cls.__mro__[1:]:
    annotations = inspect.get_annotations(base)
    if name in annotations:
      try:
        return _hints_of(base)[name]
      except NameError:  # a name that exists for type checkers only
        return annotations[name]
  raise AssertionError(name)


def _is_plain_value(name: str, value: Any) -> bool:
  """Returns whether a class attribute is public, and no method, property or nested class."""
  return not name.startswith('_') and not callable(value) and not hasattr(type(value), '__get__')


@dataclass_transform(kw_only_default=True, frozen_default=True)
class FrozenFields:
  """Makes every subclass a frozen, keyword-only dataclass; its plain class attributes re-default inherited fields."""

  # Earlier names of fields, by which a class, an override or a saved config may still set them.
  _renamed: ClassVar[Mapping[str, str]] = types.MappingProxyType({})
  # Removed fields, and what to do instead: a class or an override that sets one is refused, a saved value ignored. A
  # subclass may declare a field of the same name.
  _removed: ClassVar[Mapping[str, str]] = types.MappingProxyType({})
  _fields_set_here: ClassVar[frozenset[str]] = frozenset()
  _given: ClassVar[frozenset[str]]  # of each object: the fields that its constructor was given

  def __new__(cls, *args: Any, **kwargs: Any):
    self = super().__new__(cls)
    object.__setattr__(self, '_given', frozenset(kwargs))
    return self

  def setter_rank(self, name: str) -> float:
    """Returns where a field was set, so that the later of two can win: 0 constructor, 1 the class, 2, ... its bases."""
    if name in self._given:
      return 0
    setters = (vars(cls).get('_fields_set_here', ()) for cls in type(self).__mro__)
    return next((rank for rank, names in enumerate(setters, 1) if name in names), math.inf)

  @classmethod
  def fields_of_today(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns saved values by the field names of today; removed fields are left out."""
    values = {cls._renamed.get(name, name): value for name, value in saved.items()}
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass
    removed = cls._removed.keys() - {field.name for field in fields}
    return {name: value for name, value in values.items() if name not in removed}

  @classmethod
  def refuse_removed(cls, name: str, fields: Container[str]) -> None:
    """Raises a UserError if `name` is a field that is gone, and none of `fields`."""
    if name in cls._removed and name not in fields:
      raise UserError(f'{cls.__qualname__} has no field {name!r} any more: {cls._removed[name]}.')

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    annotations = dict(inspect.get_annotations(cls))
    for old, new in cls._renamed.items():
      if old in vars(cls):
        setattr(cls, new, vars(cls)[old])
        delattr(cls, old)
        annotations.pop(old, None)
    # Of all bases: with several, the attribute itself would be the first one's.
    inherited = {name for base in cls.__mro__[1:] for name in getattr(base, '__dataclass_fields__', ())}
    for name in annotations:
      for base in cls.__mro__[1:]:
        if isinstance(vars(base).get(name), types.FunctionType):
          raise UserError(
            f'{cls.__qualname__}.{name} is a method of {base.__name__}: define it with `def {name}(self)`, or give the '
            'field another name.'
          )
      if name not in vars(cls) and isinstance(getattr(cls, name, None), property):  # which a dataclass would default to
        raise UserError(
          f'{cls.__qualname__}.{name} is a property of a base, so that the field needs a default: `{name}: ... = ...`.'
        )
    for name, value in list(vars(cls).items()):
      if _is_plain_value(name, value):
        cls.refuse_removed(name, {*inherited, *annotations})
      if name in inherited:
        if isinstance(value, (types.FunctionType, property, functools.cached_property, classmethod, staticmethod)):
          raise UserError(
            f'{cls.__qualname__}.{name} overrides a field of the experiment by a {type(value).__name__}: give it a '
            f'value, `{name} = ...`.'
          )
        if name not in annotations:
          annotations[name] = _field_type(cls, name)
      elif name not in annotations and _is_plain_value(name, value):
        raise UserError(
          f'{cls.__qualname__}.{name} = {value!r} is a new attribute without a type, so that the command line could '
          f'not set it: annotate it, `{name}: {"int | None" if value is None else type(value).__name__} = {value!r}`.'
        )
      if name in annotations:
        setattr(cls, name, freeze(value))
    cls._fields_set_here = frozenset(annotations)
    if len(cls.__bases__) > 1:
      # A dataclass takes all fields of its first base, even inherited ones. Here, as elsewhere in Python, the first
      # class in the method resolution order that sets a field wins.
      for name in sorted(inherited.difference(annotations)):
        setter = next(base for base in cls.__mro__[1:] if name in vars(base).get('_fields_set_here', ()))
        if name in vars(setter):
          annotations[name] = _field_type(cls, name)
          setattr(cls, name, vars(setter)[name])
    cls.__annotations__ = annotations
    dataclasses.dataclass(frozen=True, kw_only=True)(cls)
