import jax
import pytest

from spmd_tasks.bridges._operations import Concatenate, Transpose
from spmd_tasks.bridges._rules import Rule, RuleTable
from spmd_tasks.errors import UserError

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
