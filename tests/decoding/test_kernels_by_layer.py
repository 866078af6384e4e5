"""Weights held in fewer bits: how far the logits are from float32's, and what is held in how many bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.decoding import DecodeSteps, weight_storage
from spmd_tasks.decoding.weight_storage import WeightStorage
from spmd_tasks.experiments.moe import UnevenExperts
from spmd_tasks.experiments.t5 import V11Tiny
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import Quantized
from tests.decoding.runs import draw, place
from tests.runtime.loss_curves import make_model

DATA_2_MDL_4 = (1, 2, 4)
# The median relative distance of a token's logits, and how many of the likeliest tokens may differ: bfloat16 has 8
# bits, int8 has 7 and a scale per channel, and NF4 loses a tenth of normal numbers. Medians, because a few tokens get
# other experts.
BOUNDS = {'bfloat16': (0.01, 0.05), 'int8': (0.03, 0.1), 'nf4': (0.3, 0.5), 'nf4_double': (0.3, 0.5)}
CASES = [pytest.param(each, marks=pytest.mark.exhaustive if each == 'nf4' else ()) for each in BOUNDS]


@pytest.fixture(scope='module')
def run():
  """A model with experts, uneven heads and a vocabulary of 259, padded over the mesh, and its logits in float32."""
  model, _ = make_model(UnevenExperts, DATA_2_MDL_4)
  variables = place(model, draw(model, 0))
  ids = np.random.default_rng(0).integers(0, 257, (4, 32)).astype(np.int32)
  return model, variables, ids, logits(model, WeightStorage(model, None), variables, ids)


def logits(model, storage, variables, ids):
  def forward(stored, ids):
    with sharding_scope(model.mesh, model.axis_rules):
      return model.task.model.apply(storage.true(stored), {'ids': ids}, train=False)['logits']

  return np.asarray(jax.jit(forward)(variables, ids), np.float32)


@pytest.mark.parametrize('dtype', CASES)
def test_logits_stay_near_those_of_float32(run, dtype):
  model, variables, ids, expected = run
  storage = WeightStorage(model, dtype)
  stored = storage.store(variables, free=False)
  jax.tree.map(lambda x, planned: np.testing.assert_equal((x.shape, x.dtype), (planned.shape, planned.dtype)),
               stored, storage.padded)  # fmt: skip
  actual = logits(model, storage, stored, ids)
  distance = np.median(np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1))
  differ = np.mean(actual.argmax(-1) != expected.argmax(-1))
  assert 0 < distance < BOUNDS[dtype][0]
  assert differ <= BOUNDS[dtype][1]


def test_int8_takes_a_quarter_of_the_kernels_and_leaves_what_is_sensitive(run):
  model, variables, _, _ = run
  stored = WeightStorage(model, 'int8').store(variables, free=False)['params']
  is_leaf = lambda leaf: isinstance(leaf, Quantized)
  leaves = jax.tree_util.tree_leaves_with_path(stored, is_leaf=is_leaf)
  kinds = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}
  for name, leaf in kinds.items():
    if isinstance(leaf, Quantized):
      assert leaf.values.dtype == jnp.int8
      assert leaf.scales.size <= leaf.values.size / 2
    elif 'norm' in name or 'router' in name or 'bias' in name:
      assert leaf.dtype == jnp.float32, name
  assert sum(map(is_leaf, kinds.values())) >= 6
  assert not any(is_leaf(leaf) for name, leaf in kinds.items() if 'embed' in name.split('/')[0] or 'router' in name)


def test_an_encoder_keeps_its_stack(monkeypatch):
  """Of a step on one CPU device, the decoder's kernels are one array per layer."""
  monkeypatch.setattr(weight_storage, '_LEAST', 1)
  model, _ = make_model(V11Tiny, (1, 1, 1))
  steps = DecodeSteps(model)
  arranged = steps.model.arrange(steps.model.storage.padded)
  assert set(arranged[weight_storage.LAYER_KERNELS]) == {'stack'}
  assert 'case' in steps.step.lower().as_text()
