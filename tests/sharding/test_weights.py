"""What a layer declares about a weight arrives, through scans and without allocating anything."""

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


def test_weights_of_linens_own_layers_are_split_by_their_partitioning_or_not_at_all():
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
