"""muP: which fields `with_mup` sets, the learning rates by fan-in, and the sizes of weights at the start.

That padding does not count as fan-in is a row of tests/runtime/test_numbers_agree.py.
"""

import math

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.config import resolve, to_json
from spmd_tasks.errors import UserError
from spmd_tasks.layers import TokenEmbedding
from spmd_tasks.learning import Adafactor, AdamW, Muon
from spmd_tasks.recipes import SyntheticLanguageModel
from spmd_tasks.sharding import WeightSpec


def changes(name: str, *overrides: str) -> dict[str, object]:
  """The fields of the task that the overrides change, by path."""
  old, new = (to_json(resolve(name, settings))['config'] for settings in ((), overrides))
  return {path: value for path, value in new.items() if path.startswith('task.') and value != old.get(path)}


def test_what_it_sets_in_a_dense_model():
  assert changes('lm.StdlibTiny', 'mup_base_width=32', 'mup_base_depth=1') == {
    'task.learner.optimizer.base_width': 32,
    'task.learner.optimizer.epsilon': 1e-8 / 4 / 4,
    'task.model.embedding.embedding_multiplier': math.sqrt(32),
    'task.model.embedding.logits_multiplier': 1 / 4,
    'task.model.embedding.scale_sqrt_depth': False,
    'task.model.embedding.table_init': {'symbol': 'spmd_tasks.layers:FanInNormal'},
    'task.model.embedding.table_init.num_input_dims': 0,
    'task.model.embedding.table_init.num_stacked_dims': 0,
    'task.model.embedding.table_init.scale': 1 / 32,
    'task.model.stack.block.attention.softmax_scale': 8 / 32,
    'task.model.stack.block.residual_multiplier': 1 / 4,
  }


@pytest.mark.parametrize(
  'name, fields',
  [
    ('moe.StdlibTiny', {'stack.block.ffn.router.init_scale': 1 / 4}),
    ('moe.DeepSeekV3Like', {
      'embedding.softmax_init.scale': 1 / 32,
      'embedding.logits_multiplier': 32 / 7168,
      'stack.stacks.0.block.attention.softmax_scale': 8 / 192,  # nope_head_dim + rope_head_dim
      'stack.stacks.1.block.ffn.router.init_scale': 32 / 7168,
    }),
    ('pipeline.StdlibTiny', {'stack.block.attention.softmax_scale': 8 / 32}),
  ],
)  # fmt: skip
def test_what_it_sets_in_other_models(name, fields):
  new = changes(name, 'mup_base_width=32')
  assert {path: new[f'task.model.{path}'] for path in fields} == fields


def test_muon_has_its_own_rule():
  new = changes('lm.MuonTiny', 'mup_base_width=32')
  assert new['task.learner.optimizer.scale'] == 'spectral_unclamped'
  with pytest.raises(UserError, match="it must be 'spectral_unclamped' with base_width"):
    Muon(learning_rate=1.0, base_width=32)


@pytest.mark.parametrize(
  'name, overrides, message',
  [
    ('lm.StdlibTiny', ('mup_base_depth=2',), 'mup_base_depth = 2 needs mup_base_width: set it'),
    ('lm.StdlibTiny', ('mup_base_width=0',), 'mup_base_width = 0 must be at least 1'),
    ('lm.Dense70BOnH200', ('mup_base_width=128',), 'mup_base_width needs the fdl.Config of AdamW or Muon'),
    ('lm.HybridTiny', ('mup_base_width=128',), 'mup_base_width = 128 has no rule for recurrent layers'),
    ('t5.V11Tiny', ('mup_base_width=128',), 'recipes of T5 have no muP: set None'),
  ],
)
def test_parts_without_a_rule_are_refused(name, overrides, message):
  with pytest.raises(UserError, match=message):
    resolve(name, overrides).build()


def test_a_built_layer_and_adafactor_are_refused():
  class Built(SyntheticLanguageModel):
    mup_base_width = 32

    def embedding(self):
      return TokenEmbedding(vocab_size=64, embed_dim=64)

  with pytest.raises(UserError, match='cannot change a TokenEmbedding that is built'):
    Built().task()
  with pytest.raises(UserError, match='Adafactor has no rule for base_width'):
    Adafactor(learning_rate=1.0, base_width=32)


SPECS = {
  'query': (WeightSpec(shape=(3, 32, 2, 5), init=None, stacked=1, num_input_dims=1), 16 / 32),
  'out': (WeightSpec(shape=(3, 2, 5, 32), init=None, stacked=1, num_input_dims=2), 16 / 10),
  'expert': (WeightSpec(shape=(3, 4, 7, 32), init=None, stacked=1, num_input_dims=1, tags=('expert',)), 16 / 7),
  'router': (WeightSpec(shape=(32, 4), init=None, num_input_dims=1), 16 / 32),
  'gate': (WeightSpec(shape=(32,), init=None, num_input_dims=1), 16 / 32),
  'table': (WeightSpec(shape=(9, 32), init=None, num_input_dims=0), 1),
  'scale': (WeightSpec(shape=(3, 32), init=None, stacked=1, tags=('no_decay',)), 1),
}


@pytest.mark.parametrize('optimizer', [AdamW, Muon], ids=lambda optimizer: optimizer.__name__)
def test_a_kernels_learning_rate_follows_its_true_fan_in(optimizer):
  """Muon's rule is its scale, so only the weights that AdamW updates have a factor there. The decay has none."""
  specs, factors = ({name: pair[i] for name, pair in SPECS.items()} for i in (0, 1))
  rng = np.random.default_rng(0)
  grads, weights = ({name: rng.normal(size=spec.shape) for name, spec in specs.items()} for _ in range(2))
  settings = {'learning_rate': 1.0} | ({'scale': 'spectral_unclamped', 'adam_scale': 0.5} if optimizer is Muon else {})

  def step(**more):
    transformation = optimizer(**settings, **more).transformation(specs)

    @jax.jit
    def update(grads, weights):
      return transformation.update(grads, transformation.init(weights), weights, is_finite=True)

    directions, state = update(grads, weights)
    return {name: np.asarray(direction) for name, direction in directions.items()}, jax.tree.structure(state)

  (plain, structure), (scaled, same_structure) = step(), step(base_width=16)
  assert structure == same_structure
  decayed, plainly_decayed = step(base_width=16, weight_decay=0.1)[0], step(weight_decay=0.1)[0]
  for name, factor in factors.items():
    expected = plain[name] * (1 if optimizer is Muon and name not in ('gate', 'table', 'scale') else factor)
    np.testing.assert_allclose(scaled[name], expected, rtol=1e-6, err_msg=name)
    decay = plainly_decayed[name] - plain[name]
    np.testing.assert_allclose(decayed[name] - scaled[name], decay, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('tied', [True, False])
def test_tables_and_output_kernels_start_with_the_variance_of_the_base_width(tied):
  class Model(SyntheticLanguageModel):
    vocab_size = 512
    model_dims = 128
    num_layers = 1
    mup_base_width = 16

    def embedding(self):
      return fdl.copy_with(super().embedding(), tied=tied)

  embedding = fdl.build(Model().task()).model.embedding
  weights = jax.jit(embedding.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))['params']
  assert len(weights) == (1 if tied else 2)
  for weight in jax.tree.leaves(weights):
    assert float(jnp.std(weight)) == pytest.approx(1 / math.sqrt(16), rel=0.03)  # of 65,536 draws
