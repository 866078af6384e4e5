"""A text is parsed as a value of the field's type, or refused with an example."""

from collections.abc import Callable, Mapping
import enum
import math
from typing import Annotated, Any, Literal, NewType, Optional

from flax.core import FrozenDict
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.config.refusals import example_of
from spmd_tasks.config.values import parse_value
from spmd_tasks.sharding import AxisRules, SplitDims
from spmd_tasks.sharding.specs import SplitDim


class Color(enum.Enum):
  RED = 1


Steps = NewType('Steps', int)

GOOD = [
  ('1_000', int, 1000),
  ('1e6', int, 1_000_000),
  ('1e-3', float, 1e-3),
  ('inf', float, math.inf),
  ('some words', str, 'some words'),
  ('"None"', str, 'None'),
  ('a=b', str, 'a=b'),
  ('None', int | None, None),
  ('4', Optional[int], 4),  # noqa: UP045 - the old spelling counts too
  ('4.5', int | float, 4.5),
  ('true', bool | str, True),
  ('1,2,4', tuple[int, ...], (1, 2, 4)),
  ('4', tuple[int, ...], (4,)),
  ('()', tuple[int, ...], ()),
  ('0.9,1', tuple[float, float], (0.9, 1.0)),
  ('"a,b",c', tuple[str, ...], ('a,b', 'c')),
  ('replica,data', SplitDim, ('replica', 'data')),
  ('(data', SplitDim, '(data'),
  ('data,None,(replica,mdl)', SplitDims, ('data', None, ('replica', 'mdl'))),
  ('(mlp,mdl),(embed,None)', AxisRules, (('mlp', 'mdl'), ('embed', None))),
  ("{'a': 1}", FrozenDict[str, float], {'a': 1.0}),
  ("{'a': ['b', None]}", Mapping[str, SplitDims], {'a': ('b', None)}),
  ('RED', Color, Color.RED),
  ('full', Literal['none', 'full'], 'full'),
  ('bfloat16', np.dtype, jnp.bfloat16),
  ('4', Annotated[int, 'a comment'], 4),
  ('4', Steps, 4),
  ('None', Callable[[], int] | None, None),
  ('4', Any, 4),
  ('word', Any, 'word'),
  ('__import__("os").getcwd()', Any, '__import__("os").getcwd()'),  # a word like any other
]

BAD = [
  ('2.5', int),
  ('None', int),
  ('1', bool),
  ('None', str),
  ('1,a', tuple[int, ...]),
  ('1,2,3', tuple[int, int]),
  ('(1,2', tuple[int, ...]),
  ('BLUE', Color),
  ('float33', np.dtype),
  ("{'a': 'b'}", dict[str, int]),
  ('(1]', tuple[int, ...]),
  ('relu', Callable[[], int] | None),
  ('object', type),
]


@pytest.mark.parametrize('text, kind, expected', GOOD)
def test_a_text_is_parsed_by_its_type(text, kind, expected):
  value = parse_value(text, kind)
  assert value == expected
  assert type(value) is type(expected)


@pytest.mark.parametrize('text, kind', BAD)
def test_a_text_of_another_type_is_refused(text, kind):
  with pytest.raises(ValueError):
    parse_value(text, kind)


@pytest.mark.parametrize('kind', [kind for _, kind, _ in GOOD if example_of(kind) is not None])
def test_the_example_of_a_type_can_be_parsed(kind):
  parse_value(example_of(kind), kind)


@pytest.mark.parametrize('kind', [Callable, Callable[[int], int], type, object(), Callable[[], int] | None])
def test_functions_classes_and_objects_have_no_text(kind):
  assert example_of(kind) is None
