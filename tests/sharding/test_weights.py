"""What a layer declares about a weight arrives, through scans and without allocating anything."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import STACK_DIM, unbox_weights, weight_specs


class Dense(nn.Module):
  """[B, 3] -> [B, 3] with a declared kernel and scale."""

  @nn.compact
  def __call__(self, x):
    kernel = self.param(
      'kernel', WeightSpec(shape=(3, 3), init=nn.initializers.normal(), split_dims=('embed', ('data', 'mdl')))
    )
    scale = self.param(
      'scale', WeightSpec(shape=(3,), init=nn.initializers.ones, dtype=jnp.bfloat16, tags=('no_decay',))
    )
    assert isinstance(kernel, jax.Array)
    return x @ kernel * scale.astype(x.dtype)[None]


class Step(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return Dense(name='dense')(x), None


def scan(module, length, stack_dim):
  return nn.scan(
    module,
    variable_axes={'params': 0},
    split_rngs={'params': True},
    length=length,
    metadata_params={STACK_DIM: stack_dim},
  )


class Inner(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return scan(Step, 2, 'inner_layers')(name='steps')(x, None)


class Stack(nn.Module):
  """A scan of 4 over a scan of 2: kernels [4, 2, 3, 3]."""

  @nn.compact
  def __call__(self, x):
    return scan(Inner, 4, 'layers')(name='stack')(x, None)[0]


def boxed(module):
  key, x = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((2, 3), jnp.float32)
  return jax.eval_shape(module.init, key, x)['params']


def declared(spec):
  return spec.shape, spec.split_dims, np.dtype(spec.dtype), spec.tags, spec.stacked, spec.init


FLOAT32, BFLOAT16 = np.dtype('float32'), np.dtype(jnp.bfloat16)


def test_specs_are_read_back_from_abstract_weights():
  specs = weight_specs(boxed(Dense()))
  assert {name: declared(spec) for name, spec in specs.items()} == {
    'kernel': ((3, 3), ('embed', ('data', 'mdl')), FLOAT32, (), 0, None),
    'scale': ((3,), (None,), BFLOAT16, ('no_decay',), 0, None),
  }


def test_a_scan_adds_its_dim_in_front_and_counts_it():
  specs = weight_specs(boxed(Stack()))
  dense = specs['stack']['steps']['dense']
  assert {name: declared(spec) for name, spec in dense.items()} == {
    'kernel': ((4, 2, 3, 3), ('layers', 'inner_layers', 'embed', ('data', 'mdl')), FLOAT32, (), 2, None),
    'scale': ((4, 2, 3), ('layers', 'inner_layers', None), BFLOAT16, ('no_decay',), 2, None),
  }


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
