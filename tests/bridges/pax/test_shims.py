"""The names that Praxis and Paxml find in JAX, and what is imported late."""

import ast
import inspect
import logging
import sys

import jax
import numpy as np
import pytest

from spmd_tasks.bridges.pax import _shims
from tests import binary


@pytest.mark.parametrize(
  'trees, result',
  [
    (((1, 2), (10, 20)), (11, 22)),
    (((1, None), (10, None)), (11, None)),
    (((1, None), (10, 20)), (11, None)),  # jax.tree.map refuses this one
    (((1, {'a': 2}), (10, {'a': 20})), (11, {'a': 22})),
  ],
)
def test_none_meets_anything_and_stays_none(trees, result):
  assert _shims._tree_map(lambda *x: sum(x), *trees) == result


def test_is_leaf_decides_about_none_too():
  assert _shims._tree_map(lambda x: 'leaf', (None, 1), is_leaf=lambda x: x is None) == ('leaf', 'leaf')


def test_reshape_takes_its_shape_by_the_earlier_name_too():
  reshape = _shims._with_newshape(np.reshape)
  for shaped in (reshape(np.arange(6), (2, 3)), reshape(np.arange(6), newshape=(2, 3))):
    assert shaped.tolist() == [[0, 1, 2], [3, 4, 5]]
  assert 'newshape' in inspect.signature(reshape).parameters  # so that no second wrapper is put around it


def test_praxis_layers_import_without_tensorflow():
  """In a process of its own. Names that JAX has are left alone."""
  program = (
    'import sys, jax; jax.tree_map = "own"; '
    'from spmd_tasks.bridges.pax import install_shims; install_shims(); import praxis.layers; '
    'assert "tensorflow" not in sys.modules; assert jax.tree_map == "own"; '
    'assert jax.tree_unflatten(jax.tree_flatten([1, 2])[1], "ab") == ["a", "b"]'
  )
  finished = binary.run_python(program, limit_s=120)
  assert finished.returncode == 0, finished.stderr
  assert not hasattr(jax, 'tree_map') or 'praxis' in sys.modules


@pytest.mark.slow
def test_every_public_name_exists(run_pax):
  program = (
    'from spmd_tasks.bridges import pax; missing = [name for name in pax.__all__ if not hasattr(pax, name)]; '
    'assert missing == [], missing'
  )
  finished = run_pax(command=('-c', program))
  assert finished.returncode == 0, finished.stderr


def test_a_pax_experiment_imports_neither_tensorflow_nor_others_until_they_are_used():
  """In a process of its own, which then asks for a name of TensorFlow by a module of Paxml."""
  program = (
    'import sys; sys.path.append("tests/data"); '
    'from spmd_tasks.bridges.pax import install_shims; install_shims(); from pax_lab import dense_lm; '
    'from paxml import summary_utils; '
    'late = {"tensorflow", "sympy", "keras", "pyglove"}; '
    'dense_lm.DenseLm().datasets(); assert not late & set(sys.modules); '
    'assert not isinstance(3, summary_utils.SummaryWriter); assert not late & set(sys.modules); '
    'assert issubclass(summary_utils.tf.errors.OutOfRangeError, Exception)'
  )
  finished = binary.run_python(program, limit_s=240)
  assert finished.returncode == 0, finished.stderr


def test_the_source_of_a_lambda_is_what_fiddle_finds():
  from fiddle._src.experimental import auto_config

  _shims._find_lambdas_quickly()
  find = auto_config._getsource_for_lambda
  one = lambda x: (x, -1)
  assert ast.dump(ast.parse(find(one), mode='eval')) == ast.dump(ast.parse('lambda x: (x, -1)', mode='eval'))
  over_lines = dict(
    é=lambda x: [
      x,
      -1,
    ]
  )
  assert ast.literal_eval(find(over_lines['é']).replace('lambda x: ', '').replace('x,', '2,')) == [2, -1]
  in_parentheses = lambda x: (x.a)  # fmt: skip
  assert find(in_parentheses) == '(lambda x: (x.a))'
  with pytest.raises(ValueError, match='multiple lambdas'):
    find([lambda: 1, lambda: 2][0])


def test_a_deprecation_of_praxis_is_logged_once(caplog):
  logger = logging.getLogger('praxis_like')
  logger.addFilter(_shims._FirstDeprecation())
  for text in ('DEPRECATION WARNING: p.weight_decay will go', 'DEPRECATION WARNING: p.weight_decay will go', 'a', 'a'):
    logger.warning(text)
  assert [record.msg[0] for record in caplog.records] == ['D', 'a', 'a']
