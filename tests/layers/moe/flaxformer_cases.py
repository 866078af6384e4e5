"""Settings of Flaxformer's MoeLayer, and the numbers that each case begins with.

`scripts/run_flaxformer.py` computes them with Flaxformer's real layer, which sees 8 devices; test_flaxformer.py with
ours.
"""

import numpy as np

DIM, HIDDEN, EXPERTS = 8, 16, 4
AUX_WEIGHT, Z_WEIGHT = 0.1, 0.01
# Name -> (rows, length, router, settings). Every second row ends with padding, which is zeros there.
CASES = {
  'switch, top-1': (4, 12, 'masked', {'k': 1}),
  'top-2': (4, 12, 'masked', {'k': 2}),
  'top-2 by priority': (4, 12, 'masked', {'k': 2, 'by_score': True}),
  'top-2 by scatter': (4, 12, 'scatter', {'k': 2}),
  'experts choose': (4, 12, 'experts', {}),
  'top-2, padding ignored': (4, 12, 'masked', {'k': 2, 'ignores_padding': True}),
  'top-2, groups across rows': (6, 6, 'masked', {'k': 2, 'max_group_size': 9}),
  'top-2, groups within rows': (4, 12, 'masked', {'k': 2, 'max_group_size': 7}),
  'top-2, groups of 2 replicas': (4, 16, 'masked', {'k': 2, 'expert_partitions': 1}),
  'top-2 by priority, padding ignored': (4, 12, 'masked', {'k': 2, 'by_score': True, 'ignores_padding': True}),
  'experts choose, padding ignored': (4, 12, 'experts', {'ignores_padding': True}),
  'top-2, evaluated': (4, 12, 'masked', {'k': 2, 'train': False}),
}  # fmt: skip


def setting(name, key):
  """A setting of a case, or its default."""
  defaults = {'k': 2, 'by_score': False, 'ignores_padding': False, 'max_group_size': 64, 'expert_partitions': 4}
  return CASES[name][3].get(key, (defaults | {'train': True}).get(key))


def draw(name):
  """Name -> float32 array: x and the cotangent [B, T, D], router [D, E], wi_0 and wi_1 [E, D, F], wo [E, F, D]."""
  rows, length, _, _ = CASES[name]
  rng = np.random.default_rng(list(CASES).index(name))
  shapes = {'cotangent': (rows, length, DIM), 'router': (DIM, EXPERTS), 'wo': (EXPERTS, HIDDEN, DIM)}
  shapes |= {'wi_0': (EXPERTS, DIM, HIDDEN), 'wi_1': (EXPERTS, DIM, HIDDEN)}
  arrays = {part: rng.normal(size=shape, scale=0.5) for part, shape in shapes.items()}
  x = rng.normal(size=(rows, length, DIM)) + 0.5  # some experts are crowded
  x[1::2, length // 2 + 1 :] = 0.0
  return {part: array.astype(np.float32) for part, array in (arrays | {'x': x}).items()}
