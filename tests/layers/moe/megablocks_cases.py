"""The cases of MegaBlocks' own layer tests, at sizes of a test, and the numbers that each begins with.

`scripts/run_megablocks.py` computes them with MegaBlocks' real layers; test_megablocks.py with ours.
"""

import dataclasses

import numpy as np

# MegaBlocks' own parametrisation: (batch, sequence, hidden, E, k), of which the first three are shrunk here.
_SHAPES = (
  *((16, 1024, 512, e, 1) for e in (1, 2, 4, 8)),
  *((8, 2048, 512, e, 1) for e in (1, 2, 4)),
  *((16, 1024, 512, e, k) for e, k in ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8))),
)
_SMALL = {16: 2, 8: 1, 1024: 12, 2048: 24, 512: 8, 128: 4}
HIDDEN = 128  # the least that its dropless layers take
BALANCE_WEIGHT, Z_WEIGHT = 0.1, 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
  """One case.

  Fields:
    kind: 'moe' (with a capacity), 'dmoe' (dropless); 'ffn' and 'glu' are the dense layers that these must equal.
    sizes: batch, sequence, D, E, k.
    layer: which of MegaBlocks' layers a dense one is the measure of.
    settings: further fields of MegaBlocks' Arguments.
  """

  kind: str
  sizes: tuple[int, int, int, int, int]
  layer: str = ''
  settings: tuple[tuple[str, object], ...] = ()

  @property
  def is_gated(self):
    return self.kind == 'glu' or dict(self.settings).get('mlp_type') == 'glu'


def _case(kind, shape, layer='', **settings):
  sizes = (*(_SMALL[size] for size in shape[:3]), *shape[3:])
  suffix = ''.join(f' {name}={value}' for name, value in settings.items()) + layer
  return f'{kind} {"x".join(map(str, shape))}{suffix}', Case(kind, sizes, layer, tuple(settings.items()))


_DENSE = ((16, 1024, 512, 1, 1), (8, 2048, 512, 1, 1))
OWN = dict(
  [
    *(_case('dmoe', shape) for shape in (*_SHAPES, (16, 1024, 128, 1, 1))),
    *(_case('moe', shape) for shape in _SHAPES),
    *(_case('ffn', shape, layer) for layer in (' moe', ' moe backward', ' dmoe') for shape in _DENSE),
    *(_case('glu', shape, layer) for layer in (' dmoe', ' dmoe memory optimized') for shape in _DENSE),
  ]
)
_CROWDED = (16, 1024, 512, 8, 2)
CORNERS = dict(
  [
    _case('moe', _CROWDED, moe_capacity_factor=0),
    _case('moe', _CROWDED, moe_capacity_factor=1.3),
    _case('moe', _CROWDED, moe_capacity_factor=0.1),  # rounds to 0, which drops nothing
    _case('moe', _CROWDED, moe_normalize_expert_weights=2),
    _case('dmoe', _CROWDED, shared_expert=True),
    _case('dmoe', _CROWDED, shared_expert=True, shared_expert_weighted_sum=True),
    _case('dmoe', _CROWDED, mlp_type='glu', moe_normalize_expert_weights=1),
  ]
)
CASES = OWN | CORNERS


def draw(name):
  """Name -> float32 array: x and the cotangent [S, B, D], router [E, D], w1, v1 and w2 [E, F, D], and shared parts."""
  batch, length, dim, num_experts, _ = CASES[name].sizes
  rng = np.random.default_rng(sorted(CASES).index(name))
  hidden = HIDDEN
  shapes = {'x': (length, batch, dim), 'cotangent': (length, batch, dim), 'router': (num_experts, dim), 'bias': (dim,)}
  shapes |= {part: (num_experts, hidden, dim) for part in ('w1', 'v1', 'w2')}
  shapes |= {'up': (hidden, dim), 'up_bias': (hidden,), 'down': (dim, hidden), 'down_bias': (dim,)}
  return {part: rng.normal(size=shape, scale=0.3).astype(np.float32) for part, shape in shapes.items()} | {
    'x': rng.normal(size=shapes['x']).astype(np.float32)
  }


def digest(gradient):
  """The norm of a gradient and its product with a fixed direction."""
  flat = np.asarray(gradient, np.float64).ravel()
  return np.array([np.sqrt(np.sum(flat**2)), flat @ np.cos(np.arange(flat.size))])
