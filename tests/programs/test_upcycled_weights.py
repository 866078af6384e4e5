"""Which weights of a checkpoint become which of a new model: names, shapes, layouts, and what is refused."""

import numpy as np
import pytest

from spmd_tasks.checkpoints.manifest import LeafEntry
from spmd_tasks.programs.upcycling import find_origins

L, D, F, E = 4, 6, 10, 3
FFN = 'stack/layers/ffn'

DENSE = {
  'embedding/table': (7, D),
  'stack/layers/norm/scale': (L, D),
  f'{FFN}/up/kernel': (L, D, F),
  f'{FFN}/gate/kernel': (L, D, F),
  f'{FFN}/down/kernel': (L, F, D),
}
EXPERTS = {f'{FFN}/experts/up': (L, E, D, F), f'{FFN}/experts/gate': (L, E, D, F), f'{FFN}/experts/down': (L, E, F, D)}
ROUTER = {f'{FFN}/router/kernel': (L, D, E), f'{FFN}/router/balance_bias': (L, E)}
SHARED = {f'{FFN}/shared_expert/{name}/kernel': DENSE[f'{FFN}/{name}/kernel'] for name in ('up', 'gate', 'down')}
OTHERS = {name: shape for name, shape in DENSE.items() if not name.startswith(FFN)}
MIXTURE = OTHERS | EXPERTS | ROUTER


def saved(shapes):
  return [LeafEntry(name=name, shape=shape, dtype='float32') for name, shape in shapes.items()]


def values(shapes):
  """A different value in every element of every weight."""
  sizes = np.cumsum([0, *map(np.prod, shapes.values())])
  return {
    name: np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
    for start, (name, shape) in zip(sizes, shapes.items())
  }


def upcycle(source, target):
  given = values(source)
  return {name: np.asarray(o.take(given[o.name])) for name, o in find_origins(saved(source), target).items()}


def test_a_shared_expert_is_it_too():
  new, dense = upcycle(DENSE, MIXTURE | SHARED), values(DENSE)
  for name in SHARED:
    np.testing.assert_array_equal(new[name], dense[name.replace('/shared_expert', '')])


def test_every_second_layer_is_a_mixture():
  target = {'embedding/table': (7, D)}
  for name, shape in (OTHERS | EXPERTS | ROUTER).items():
    if name.startswith('stack/layers/'):
      target[name.replace('layers/', 'layers/block_1/')] = (L // 2, *shape[1:])
  for name, shape in DENSE.items():
    if name.startswith('stack/layers/'):
      target[name.replace('layers/', 'layers/block_0/')] = (L // 2, *shape[1:])
  new, dense = upcycle(DENSE, target), values(DENSE)
  up = dense[f'{FFN}/up/kernel']
  np.testing.assert_array_equal(new['stack/layers/block_0/ffn/up/kernel'], up[0::2])
  np.testing.assert_array_equal(new['stack/layers/block_1/norm/scale'], dense['stack/layers/norm/scale'][1::2])
  for expert in range(E):
    np.testing.assert_array_equal(new['stack/layers/block_1/ffn/experts/up'][:, expert], up[1::2])


def without(shapes, name):
  return {other: shape for other, shape in shapes.items() if other != name}


@pytest.mark.parametrize(
  'source, target, lines',
  [
    (
      DENSE | {f'{FFN}/up/kernel': (L, D, 12)},
      MIXTURE,
      [f'{FFN}/experts/up [4, 3, 6, 10] needs {FFN}/up/kernel [4, 6, 10], but the checkpoint has [4, 6, 12]'],
    ),
    (
      without(DENSE, f'{FFN}/gate/kernel'),
      MIXTURE,
      [f'{FFN}/experts/gate [4, 3, 6, 10] needs {FFN}/gate/kernel [4, 6, 10], which the checkpoint lacks'],
    ),
    (
      DENSE | {f'{FFN}/up/bias': (L, F)},
      MIXTURE,
      [f'the experiment has no use for {FFN}/up/bias [4, 10] of the checkpoint: experts have no biases'],
    ),
    # Another number of experts is another model: which of them should be dropped?
    (MIXTURE, MIXTURE | {f'{FFN}/experts/up': (L, 5, D, F)}, ['but the checkpoint has [4, 3, 6, 10]']),
    # A dense model has no use for a mixture.
    (MIXTURE, DENSE, [f'{FFN}/up/kernel [4, 6, 10] needs', f'no use for {FFN}/router/kernel [4, 6, 3]']),
  ],
)
def test_what_does_not_fit_is_named(source, target, lines):
  with pytest.raises(ValueError, match='cannot start from the weights of that checkpoint') as caught:
    find_origins(saved(source), target)
  for line in lines:
    assert line in str(caught.value)
  assert 'config.json' in str(caught.value)
