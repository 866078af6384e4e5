"""Adapters of an NNX module agree with merged kernels, start as their base, and are trained alone."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks import Task
from spmd_tasks.adapters import LowRankAdapter
from spmd_tasks.adapters.low_rank import merge_low_rank
from spmd_tasks.adapters.nnx_adapters import add_nnx_adapters
from spmd_tasks.errors import UserError
from spmd_tasks.runtime import partition_spmd_model
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec

ADAPTER = LowRankAdapter(rank=2, alpha=6.0)


class Base(nnx.Module):
  """Three layers; the second one has two names."""

  def __init__(self, *, rngs: nnx.Rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ('embed', 'mlp'))
    self.layers = nnx.List([nnx.Linear(6, 10, kernel_init=init, rngs=rngs), nnx.Linear(10, 10, rngs=rngs)])
    self.again = self.layers[1]
    self.out = nnx.Linear(10, 3, rngs=rngs)

  def __call__(self, x):
    for layer in (*self.layers, self.again):
      x = nnx.tanh(layer(x))
    return self.out(x)


class Tuned(Base):
  def __init__(self, adapter: LowRankAdapter = ADAPTER, *, rngs: nnx.Rngs):
    super().__init__(rngs=rngs)
    self.names = tuple(add_nnx_adapters(self, ('layers/0/', 'again/'), adapter, rngs=rngs))


def partitioned(model, **settings):
  task = Task(model=model, loss=lambda y, batch: jnp.mean(jnp.square(y)), learner=optax.sgd(0.1), **settings)
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 4, 2)).build()
  spec = {'x': jax.ShapeDtypeStruct((8, 6), jnp.float32)}
  return partition_spmd_model(task, mesh, spec, axis_rules=DEFAULT_AXIS_RULES, default_split_dim='embed')


def test_adapters_alone_are_trained_and_agree_with_merged_kernels():
  model, base = partitioned(Tuned, trained=('lora_',)), partitioned(Base)
  assert model.num_trained_params == 6 * 2 + 2 * 10 + 10 * 2 + 2 * 10
  assert model.state_specs.weights['layers']['0']['lora_b'] == jax.P(None, 'mdl')
  x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
  state = model.init(0)
  first = jax.device_get(model.to_canonical(state).weights)
  plain = jax.device_get(base.to_canonical(base.init(0)).weights)
  predict = lambda model, weights: model.task.predict({'params': weights}, {'x': x})
  np.testing.assert_array_equal(predict(model, first), predict(base, plain))
  for _ in range(2):
    state, _ = model.train_step(state, model.train_step.place({'x': x}))
  tuned = jax.device_get(model.to_canonical(state).weights)
  merged = jax.tree.map(np.asarray, plain)
  for old, new in ((merged['layers']['0'], tuned['layers']['0']), (merged['again'], tuned['again'])):
    np.testing.assert_array_equal(old['kernel'], new['kernel'])
    assert np.any(new['lora_b'])
    old['kernel'] = merge_low_rank(ADAPTER, new['kernel'], new['lora_a'], new['lora_b'])
  np.testing.assert_allclose(predict(model, tuned), predict(base, merged), rtol=1e-5, atol=1e-6)


def test_what_has_no_adapter_is_refused():
  with nnx.use_eager_sharding(False):
    assert Tuned(rngs=nnx.Rngs(0)).names == ('again/kernel', 'layers/0/kernel')
    with pytest.raises(UserError, match="'nothing', which matches no weight"):
      add_nnx_adapters(Base(rngs=nnx.Rngs(0)), ('nothing',), ADAPTER, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='use_dora of an adapter needs a Linear'):
      Tuned(LowRankAdapter(rank=2, alpha=6.0, use_dora=True), rngs=nnx.Rngs(0))
