"""Batches of Pax by flat names and back: branches, lists, keys with a slash."""

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import jax
import numpy as np
from praxis.py_utils import NestedMap
from spmd_tasks.bridges.pax._batches import flatten_batch, to_nested_map

batch = {
  'y_w/ids': np.ones(2), 'a~b': np.ones(2, bool), 'name': np.array(['a', 'b']),
  'views': [np.ones((2, k)) for k in range(11)] + [NestedMap(x=np.zeros(2, np.int64))],
  'meta': NestedMap(label=np.zeros(2, np.uint8)),
}
flat = flatten_batch(batch)
assert {'y_w~1ids', 'a~0b', 'views/[10]', 'views/[11]/x', 'meta/label'} < set(flat), list(flat)
assert flat['views/[11]/x'].dtype == np.int32
del batch['name']
again = jax.jit(to_nested_map)(flat)
assert jax.tree.structure(again) == jax.tree.structure(NestedMap(batch)), again
assert [view.shape for view in again.views[:11]] == [(2, k) for k in range(11)]
"""


def test_a_batch_has_its_structure_again(run_pax):
  finished = run_pax(command=('-c', PROGRAM))
  assert finished.returncode == 0, finished.stderr
