"""weight_specs reads the boxes of Linen's own layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.sharding.weights import unbox_weights, weight_specs


def boxed(module):
  key, x = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((2, 3), jnp.float32)
  return jax.eval_shape(module.init, key, x)['params']


def declared(spec):
  return spec.shape, spec.split_dims, np.dtype(spec.dtype), spec.tags, spec.stacked, spec.init


def test_linen_partitioning_is_read_and_plain_weights_are_replicated():
  class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
      init = nn.with_partitioning(nn.initializers.ones, ('embed', 'mlp'))
      return nn.Dense(5, kernel_init=init, name='partitioned')(nn.Dense(3, name='plain')(x))

  specs = weight_specs(boxed(Outer()))
  assert declared(specs['partitioned']['kernel'])[:2] == ((3, 5), ('embed', 'mlp'))
  assert declared(specs['plain']['kernel'])[:2] == ((3, 3), (None, None))
  plain = unbox_weights(boxed(Outer()))
  assert jax.tree.map(jnp.shape, plain['partitioned']) == {'kernel': (3, 5), 'bias': (5,)}
