"""What a field may hold is found from its annotation or its present value, described, and checked."""

from collections.abc import Callable, Mapping, Sequence
import enum
from typing import Any, Literal

from flax.core import FrozenDict
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.config.field_types import DtypeName, describe_type, is_of_type, is_settable, type_of_field
from spmd_tasks.sharding import AxisRules, SplitDims


class Color(enum.Enum):
  RED = 1


TYPES = [
  ('x', int, None, int),
  ('x', int | None, 4, int | None),
  ('x', Any, 4, int),
  ('x', Any, True, bool),
  ('x', 'Unresolvable', 0.5, float),
  ('x', Any, ('a', 'b'), tuple[str, ...]),
  ('x', Any, ('a', None), tuple[Any, ...]),
  ('x', Any, None, Any),
  ('dtype', str, 'float32', DtypeName),
  ('momentum_dtype', Any, 'float32', DtypeName),
  ('x', Any, jnp.float32, np.dtype),
  ('x', Any, np.dtype('float32'), np.dtype),
  ('dtype', Any, None, np.dtype | None),
  ('weight_dtype', Any, None, np.dtype | None),
]


@pytest.mark.parametrize('name, annotation, present, expected', TYPES)
def test_the_type_is_the_annotation_or_else_that_of_the_present_value(name, annotation, present, expected):
  assert type_of_field(name, annotation, present) == expected


@pytest.mark.parametrize(
  'kind, expected',
  [
    (int, 'int'),
    (int | None, 'int | None'),
    (tuple[int, ...], 'tuple[int, ...]'),
    (Sequence[str], 'Sequence[str]'),
    (Color, 'one of RED'),
    (Literal['none', 'full'], 'one of none, full'),
    (np.dtype, 'dtype'),
    (Callable[[], int], 'Callable[[], int]'),
  ],
)
def test_types_are_described_as_people_write_them(kind, expected):
  assert describe_type(kind) == expected


@pytest.mark.parametrize('kind', [Callable, Callable[[int], int], type, object(), Callable[[], int] | None])
def test_functions_classes_and_objects_are_not_settable(kind):
  assert not is_settable(kind)


@pytest.mark.parametrize(
  'value, kind, expected',
  [
    (4, int, True),
    (True, int, False),
    (4.0, int, False),
    (4, float, True),
    (True, float, False),
    ('4', float, False),
    (True, bool, True),
    (1, bool, False),
    (None, int | None, True),
    (None, int, False),
    (None, None, True),
    ('a', str, True),
    ('a', Literal['a', 'b'], True),
    ('c', Literal['a', 'b'], False),
    (True, Literal[1], False),
    (Color.RED, Color, True),
    ('RED', Color, False),
    (jnp.bfloat16, np.dtype, True),
    ('bfloat16', np.dtype, False),
    ('bfloat16', DtypeName, True),
    ('load', DtypeName, False),
    ((1, 2), tuple[int, ...], True),
    ([1, 2], tuple[int, ...], True),
    ((1, 'a'), tuple[int, ...], False),
    ((1, 2, 3), tuple[int, int], False),
    ('ab', Sequence[str], False),
    (('mdl', None, ('a', 'b')), SplitDims, True),
    (('mdl', 0.5), SplitDims, False),
    ((('mlp', 'mdl'), ('embed', None)), AxisRules, True),
    (5, AxisRules, False),
    (FrozenDict({'a': 1}), Mapping[str, int], True),
    ({'a': 'b'}, Mapping[str, int], False),
    ({'a': 'b'}, dict, True),
    ([], dict, False),
    (4, Callable[[], int], False),
    (object(), Any, True),
  ],
)
def test_values_are_told_from_values_of_other_types(value, kind, expected):
  assert is_of_type(value, kind) == expected
