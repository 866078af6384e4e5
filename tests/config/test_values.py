"""A text becomes a value of the field's type, or is refused."""

from collections.abc import Callable, Mapping, Sequence
import enum
import math
from typing import Annotated, Any, Literal, NewType, Optional

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.config.field_types import DtypeName, example_of, is_settable
from spmd_tasks.config.values import TypeMismatchError, parse_value
from spmd_tasks.sharding import AxisRules, SplitDim, SplitDims


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
  ('(1,2),(3,4)', tuple[tuple[int, int], ...], ((1, 2), (3, 4))),
  ('data', SplitDim, 'data'),
  ('None', SplitDim, None),
  ('-1', SplitDim, -1),
  ('replica,data', SplitDim, ('replica', 'data')),
  ('data,None,(replica,mdl)', SplitDims, ('data', None, ('replica', 'mdl'))),
  ('None', SplitDims, None),
  ('(mlp,mdl),(embed,None)', AxisRules, (('mlp', 'mdl'), ('embed', None))),
  ('1,2', Sequence[int], (1, 2)),
  ("{'a': 1}", dict[str, int], {'a': 1}),
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
  with pytest.raises(TypeMismatchError):
    parse_value(text, kind)


@pytest.mark.parametrize('kind', [kind for _, kind, _ in GOOD if is_settable(kind)])
def test_the_example_of_a_type_is_a_value_of_it(kind):
  parse_value(example_of(kind), kind)
