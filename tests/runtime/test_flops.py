"""Model FLOPs equal numbers computed by hand: 2 per multiply-add, times loop lengths, without rematerialization."""

import math

import fiddle as fdl
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import pytest

from spmd_tasks.experiments.lm import StdlibTiny
from spmd_tasks.experiments.moe import StdlibTiny as MixtureTiny
from spmd_tasks.runtime.flops import count_matmul_flops, model_flops_per_train_step, peak_flops_per_device
from spmd_tasks.sharding.weights import unbox_weights


def shaped(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


X, W = shaped(8, 16), shaped(16, 16)
ONE_PRODUCT = 2 * 8 * 16 * 16


@jax.custom_vjp
def product_with_own_gradient(x, w):
  return x @ w


product_with_own_gradient.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))


def sharded_product(x, w):
  """Four devices have 2 rows each; `mdl` stays automatic."""
  mesh = jax.make_mesh((4, 2), ('data', 'mdl'), axis_types=(AxisType.Auto,) * 2)
  rows = PartitionSpec('data')
  inner = jax.shard_map(
    lambda x, w: x @ w, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, axis_names={'data'}
  )
  return inner(x, w)


def convolve(x, kernel, groups=1):
  return lax.conv_general_dilated(
    x, kernel, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'), feature_group_count=groups
  )


CASES = {
  'matrix times matrix': (lambda x, w: x @ w, (X, W), ONE_PRODUCT),
  'batched, two contracted dims': (
    lambda a, b: jnp.einsum('bthk,bshk->bts', a, b), (shaped(2, 3, 5, 7), shaped(2, 11, 5, 7)), 2 * 2 * 3 * 11 * 5 * 7
  ),
  'jit': (jax.jit(lambda x, w: x @ w), (X, W), ONE_PRODUCT),
  'remat': (jax.checkpoint(lambda x, w: x @ w), (X, W), ONE_PRODUCT),
  'custom_vjp': (product_with_own_gradient, (X, W), ONE_PRODUCT),
  'scan of 5': (lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, length=5)[0], (X, W), 5 * ONE_PRODUCT),
  'cond: the more expensive branch': (
    lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w), (X, W), 2 * ONE_PRODUCT
  ),
  'while: the body once': (lambda x, w: lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c @ w, x), (X, W), ONE_PRODUCT),
  'shard_map over 4 of 8 devices': (sharded_product, (X, W), ONE_PRODUCT),
  'ragged: each row is multiplied once': (
    lax.ragged_dot, (X, shaped(3, 16, 5), shaped(3, dtype=jnp.int32)), 2 * 8 * 16 * 5
  ),
  'convolution': (convolve, (shaped(2, 10, 8), shaped(3, 8, 4)), 2 * (2 * 10 * 4) * 3 * 8),
  'grouped convolution': (
    lambda x, k: convolve(x, k, groups=4), (shaped(2, 10, 8), shaped(3, 2, 4)), 2 * (2 * 10 * 4) * 3 * 2
  ),
}  # fmt: skip


def test_remat_of_the_newer_kind_has_the_same_flops():
  layer = jax.checkpoint(lambda x, w: jnp.sin(x @ w))
  try:
    jax.config.update('jax_remat3', True)
    assert count_matmul_flops(layer, X, W) == ONE_PRODUCT
    assert count_matmul_flops(jax.grad(lambda x, w: layer(x, w).sum(), (0, 1)), X, W) == 4 * ONE_PRODUCT
  finally:
    jax.config.update('jax_remat3', False)


@pytest.mark.parametrize('case', CASES)
def test_count_matmul_flops(case):
  fn, args, expected = CASES[case]
  assert count_matmul_flops(fn, *args) == expected


def test_a_language_model_has_the_flops_of_palms_formula():
  """6 N + 12 L H K T per token, where N counts the weights of matrix products: all except the scales of norms."""
  task, B, T = fdl.build(StdlibTiny().task()), 2, 24
  batch_spec = {name: shaped(B, T, dtype=jnp.int32) for name in ('ids', 'labels', 'segment_ids', 'segment_pos')}
  batch_spec['weights'] = shaped(B, T)
  key = jax.eval_shape(lambda: jax.random.key(0))
  boxed = jax.eval_shape(lambda rng, batch: task.model.init(rng, batch), key, batch_spec)['params']
  weights = unbox_weights(boxed)
  num_weights = sum(
    math.prod(leaf.shape) for path, leaf in jax.tree.leaves_with_path(weights) if path[-1].key != 'scale'
  )
  L, D, H, K = weights['stack']['layers']['attention']['query']['kernel'].shape
  assert num_weights > L * 4 * D * H * K
  expected = B * T * (6 * num_weights + 12 * L * H * K * T)
  assert model_flops_per_train_step(task, batch_spec, {'params': weights}) == expected


@pytest.mark.parametrize('backend', ['loop', 'ragged_dot'])
def test_a_mixture_of_experts_has_the_flops_of_selected_experts_and_the_router(backend):
  num_experts, num_selected, tokens = 8, 2, 4 * 128
  dense, mixture = (experiment(batch_size=4) for experiment in (StdlibTiny, MixtureTiny))

  def flops(experiment):
    cfg = experiment.task()
    if experiment is mixture:
      cfg.model.stack.block.ffn.computation.backend = backend
    task = fdl.build(cfg)
    batch_spec = fdl.build(experiment.train_input()).element_spec()
    weights = jax.eval_shape(
      lambda: unbox_weights(
        task.model.init(jax.random.key(0), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch_spec))
      )
    )
    return model_flops_per_train_step(task, batch_spec, weights)

  # Two experts of half the width have the FLOPs of the dense network.
  assert num_selected * mixture.hidden_dims == dense.hidden_dims
  router = 3 * 2 * tokens * dense.model_dims * num_experts * dense.num_layers
  assert flops(mixture) - flops(dense) == router


@pytest.mark.parametrize(
  'device_kind, teraflops',
  [
    *(('TPU v5 lite', 197), ('TPU v5', 459), ('NVIDIA A100-SXM4-80GB', 312), ('NVIDIA H100 80GB HBM3', 989.4)),
    *(('cpu', None), ('NVIDIA RTX A1000', None), ('TPU v9', None)),
  ],
)
def test_peaks_of_known_devices(device_kind, teraflops):
  assert peak_flops_per_device(device_kind) == (teraflops and pytest.approx(teraflops * 1e12))
