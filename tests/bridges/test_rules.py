import jax
import numpy as np
import pytest

from spmd_tasks.bridges._operations import (
  Concatenate,
  Reshape,
  Stack,
  Take,
  Transpose,
)
from spmd_tasks.bridges._rules import Rule, RuleTable
from spmd_tasks.errors import UserError


def random(rng, *shape):
  return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
  'operation, shapes, result',
  [
    (Transpose((1, 2, 0)), [(5, 2, 3)], lambda x: np.moveaxis(x, 0, -1)),
    (Reshape((6,), (2, 3)), [(5, 6)], lambda x: x.reshape(5, 2, 3)),
    (Take(-1, (0, 2, 4, 1, 3, 5)), [(5, 6)], lambda x: np.concatenate([x[:, ::2], x[:, 1::2]], axis=-1)),
    (Stack(-2, 2), [(5, 3)] * 2, lambda a, b: np.stack([a, b], axis=1)),
    (Concatenate(-1, (2, 4)), [(5, 2), (5, 4)], lambda a, b: np.concatenate([a, b], axis=1)),
  ],
  ids=lambda value: type(value).__name__ if hasattr(value, 'inverse') else '',
)
def test_an_operation_has_an_inverse_also_on_a_stack_of_weights(rng, operation, shapes, result):
  inputs = tuple(random(rng, *shape) for shape in shapes)
  expected = result(*inputs)
  made = operation(inputs)
  for array, wanted in zip(made, expected if isinstance(expected, tuple) else (expected,), strict=True):
    np.testing.assert_array_equal(array, wanted)
  back = operation.inverse()(made)
  for array, wanted in zip(back, inputs, strict=True):
    np.testing.assert_array_equal(array, wanted)
  stacked = operation(tuple(np.stack([x, 2 * x]) for x in inputs))
  for array, wanted in zip(stacked, made, strict=True):
    np.testing.assert_array_equal(array[0], wanted)


# A model with layers and experts one by one, and one with stacks; fused and separate kernels; a head of its own.
NUM_LAYERS, NUM_EXPERTS = 3, 2
TABLE = RuleTable(
  rules=(
    Rule('embed', 'table'),
    Rule('head', 'head', Transpose((1, 0))),
    *(Rule(f'{i}.norm', ('norm', i)) for i in range(NUM_LAYERS)),
    *(
      Rule(f'{i}.qkv', [('q', i), ('k', i), ('v', i)], Concatenate(-2, (4, 2, 2)).inverse(), Transpose((1, 0)))
      for i in range(NUM_LAYERS)
    ),
    *(
      Rule(f'{i}.experts.{e}.up', ('up', i, e), Transpose((1, 0)))
      for i in range(NUM_LAYERS)
      for e in range(NUM_EXPERTS)
    ),
  ),
  source='the file',
  target='the model',
)
SOURCE = {'embed': (7, 4), 'head': (4, 7)}
for i in range(NUM_LAYERS):
  SOURCE |= {f'{i}.norm': (4,), f'{i}.qkv': (8, 4)}
  SOURCE |= {f'{i}.experts.{e}.up': (5, 4) for e in range(NUM_EXPERTS)}
TARGET = {'table': (7, 4), 'head': (7, 4), 'norm': (3, 4), 'q': (3, 4, 4), 'k': (3, 4, 2), 'v': (3, 4, 2)}
TARGET |= {'up': (3, 2, 4, 5)}


def abstract(shapes, dtype='float32'):
  return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def test_a_table_converts_there_and_back(rng):
  source = {name: random(rng, *shape) for name, shape in SOURCE.items()}
  TABLE.check(source, abstract(TARGET))
  model = TABLE.convert(source, abstract(TARGET))
  assert {name: array.shape for name, array in model.items()} == TARGET
  np.testing.assert_array_equal(model['norm'][2], source['2.norm'])
  np.testing.assert_array_equal(model['k'][1], source['1.qkv'][4:6].T)
  np.testing.assert_array_equal(model['up'][2, 1], source['2.experts.1.up'].T)
  back = TABLE.inverse().convert(model, source)
  assert back.keys() == source.keys()
  for name, array in back.items():
    np.testing.assert_array_equal(array, source[name])
  assert {array.dtype.name for array in TABLE.convert(source, abstract(TARGET, 'bfloat16')).values()} == {'bfloat16'}


@pytest.mark.parametrize(
  'source, target, problem',
  [
    ({'4.norm': (4,)}, {}, r'the file has 4.norm \[4\], which nothing on the other side corresponds to'),
    ({'1.norm': None}, {}, 'the file has no 1.norm'),
    ({}, {'extra': (2, 3)}, r'the model has extra \[2, 3\], which nothing on the other side corresponds to'),
    ({}, {'norm': (4, 4)}, r'the model has norm \[4, 4\], of which 3 of 4 are used'),
    ({}, {'up': (3, 3, 4, 5)}, r'the model has up \[3, 3, 4, 5\], of which 6 of 9 are used'),
    ({}, {'head': (8, 4)}, r'head -> head gives \[7, 4\], but the model has \[8, 4\]'),
  ],
  ids=['left over', 'missing', 'not filled', 'too few layers', 'too few experts', 'shape'],
)
def test_every_weight_of_both_sides_is_used_exactly_once(source, target, problem):
  shapes = {name: shape for name, shape in (SOURCE | source).items() if shape is not None}
  with pytest.raises(UserError, match=problem):
    TABLE.check(abstract(shapes), abstract(TARGET | target))
