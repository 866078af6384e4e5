"""A text becomes a value of the field's type or is refused; types are found, described, and checked on saved values."""

from collections.abc import Callable, Mapping, Sequence
import enum
import math
from typing import Annotated, Any, Literal, NewType, Optional

from flax.core import FrozenDict
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.config.values import DtypeName, describe_type, example_of, is_of_type, parse_value, type_of_field
from spmd_tasks.sharding import AxisRules, SplitDims
from spmd_tasks.sharding.specs import SplitDim


class Color(enum.Enum):
  RED = 1


Steps = NewType('Steps', int)

GOOD = [
  ('4', int, 4),
  ('-1', int, -1),
  ('1_000', int, 1000),
  ('1e6', int, 1_000_000),
  (' 4 ', int, 4),
  ('4', float, 4.0),
  ('1e-3', float, 1e-3),
  ('0.1', float, 0.1),
  ('inf', float, math.inf),
  ('-inf', float, -math.inf),
  ('true', bool, True),
  ('False', bool, False),
  ('some words', str, 'some words'),
  ('4', str, '4'),
  ('"None"', str, 'None'),
  ("'a,b'", str, 'a,b'),
  ('', str, ''),
  ('a=b', str, 'a=b'),
  ('None', int | None, None),
  ('4', Optional[int], 4),  # noqa: UP045 - the old spelling counts too
  ('4', int | float, 4),
  ('4.5', int | float, 4.5),
  ('true', bool | str, True),
  ('x', float | str, 'x'),
  ('1,2,4', tuple[int, ...], (1, 2, 4)),
  ('(1, 2, 4)', tuple[int, ...], (1, 2, 4)),
  ('[1,2,4]', tuple[int, ...], (1, 2, 4)),
  ('4', tuple[int, ...], (4,)),
  ('4,', tuple[int, ...], (4,)),
  ('()', tuple[int, ...], ()),
  ('1,2', list[int], [1, 2]),
  ('0.9,1', tuple[float, float], (0.9, 1.0)),
  ('1,a', tuple[int, str], (1, 'a')),
  ('"a,b",c', tuple[str, ...], ('a,b', 'c')),
  ("it's,o'clock", tuple[str, ...], ("it's", "o'clock")),
  ('(1,2),(3,4)', tuple[tuple[int, int], ...], ((1, 2), (3, 4))),
  ('data', SplitDim, 'data'),
  ('None', SplitDim, None),
  ('-1', SplitDim, -1),
  ('replica,data', SplitDim, ('replica', 'data')),
  ('data,', SplitDim, ('data',)),
  ('(data', SplitDim, '(data'),
  ('data,None,(replica,mdl)', SplitDims, ('data', None, ('replica', 'mdl'))),
  ('None', SplitDims, None),
  ('(mlp,mdl),(embed,None)', AxisRules, (('mlp', 'mdl'), ('embed', None))),
  ('1,2', Sequence[int], (1, 2)),
  ("{'a': 1}", dict[str, int], {'a': 1}),
  ("{'a': 1}", FrozenDict[str, float], {'a': 1.0}),
  ("{'a': ['b', None]}", Mapping[str, SplitDims], {'a': ('b', None)}),
  ("{'a': (1, 2)}", Mapping[str, Any], {'a': (1, 2)}),
  ('RED', Color, Color.RED),
  ('full', Literal['none', 'full'], 'full'),
  ("'full'", Literal['none', 'full'], 'full'),
  ('2', Literal[1, 2], 2),
  ('bfloat16', np.dtype, jnp.bfloat16),
  ('4', Annotated[int, 'a comment'], 4),
  ('4', Steps, 4),
  ('None', Callable[[], int] | None, None),
  ('4', Any, 4),
  ('1e6', Any, 1e6),
  ('true', Any, True),
  ('None', Any, None),
  ('word', Any, 'word'),
  ('data,None', Any, ('data', None)),
  ('(data', Any, '(data'),
  ('__import__("os").getcwd()', Any, '__import__("os").getcwd()'),  # a word like any other
]

BAD = [
  ('abc', int),
  ('2.5', int),
  ('2.0', int),
  ('1e-3', int),
  ('true', int),
  ('', int),
  ('None', int),
  ('inf', int),
  ('abc', float),
  ('None', float),
  ('1', bool),
  ('yes', bool),
  ('None', str),
  ('"open', str),
  ('1,a', tuple[int, ...]),
  ('1,2.5', tuple[int, ...]),
  ('1,2,3', tuple[int, int]),
  ('1,,2', tuple[int, ...]),
  ('(1,2', tuple[int, ...]),
  ('BLUE', Color),
  ('half', Literal['none', 'full']),
  ('float33', np.dtype),
  ('bf16', DtypeName),
  ('load', np.dtype),
  ('[1]', dict[str, int]),
  ("{'a': 'b'}", dict[str, int]),
  ("{'a': ", dict[str, int]),
  ('(1]', tuple[int, ...]),
  ('a,b)', tuple[str, ...]),
  ('relu', Callable[[], int] | None),
  ('object', type),
]


@pytest.mark.parametrize('text, kind, expected', GOOD)
def test_a_text_is_read_by_its_type(text, kind, expected):
  value = parse_value(text, kind)
  assert value == expected
  assert type(value) is type(expected)


@pytest.mark.parametrize('text, kind', BAD)
def test_a_text_of_another_type_is_refused(text, kind):
  with pytest.raises(ValueError):
    parse_value(text, kind)


@pytest.mark.parametrize('kind', [kind for _, kind, _ in GOOD if example_of(kind) is not None])
def test_the_example_of_a_type_is_a_value_of_it(kind):
  parse_value(example_of(kind), kind)


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
def test_functions_classes_and_objects_have_no_text(kind):
  assert example_of(kind) is None


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
