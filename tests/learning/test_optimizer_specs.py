"""Optimizer state is sharded like the weights: moments have the split dims of the dims that they keep."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.learning import Adafactor, AdamW, Learner
from spmd_tasks.sharding import WeightSpec, split_dims_to_partition_spec

SPECS = {
  'ffn': {
    'kernel': WeightSpec(shape=(9, 4, 6), init=None, split_dims=('layers', 'embed', 'mlp'), stacked=1),
    'bias': WeightSpec(shape=(9, 6), init=None, split_dims=('layers', 'mlp'), stacked=1, tags=('no_decay',)),
  },
  'square': WeightSpec(shape=(4, 4), init=None, split_dims=('embed', 'mlp')),
  'query': WeightSpec(shape=(6, 2, 4), init=None, split_dims=('embed', 'heads', 'head_dim')),
  'scale': WeightSpec(shape=(4,), init=None, split_dims=None),
  'experts': {
    # The number of experts is larger than the kernel's largest dim, and equal to it.
    'up': WeightSpec(shape=(9, 4, 6), init=None, split_dims=('expert', 'expert_embed', 'expert_mlp'), tags=('expert',)),
    'down': WeightSpec(
      shape=(2, 6, 6, 4),
      init=None,
      split_dims=('layers', 'expert', 'expert_mlp', 'expert_embed'),
      tags=('expert',),
      stacked=1,
    ),
    'bias': WeightSpec(shape=(9, 6), init=None, split_dims=('expert', 'expert_mlp'), tags=('expert',)),
  },
}
WEIGHTS = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), SPECS)

ADAMW = AdamW(learning_rate=0.1, weight_decay=0.1)
ADAFACTOR = Adafactor(learning_rate=0.1, min_dim_size_to_factor=3, momentum=0.9, weight_decay=0.1)


def specs_of(optimizer):
  learner = Learner(optimizer=optimizer)
  return learner.state_split_dims(jax.eval_shape(lambda w: learner.init(w, SPECS), WEIGHTS), SPECS)


def test_moments_of_experts_are_sharded_by_expert():
  """T5X needs a filter on names for this."""
  t5x_rules = (('expert', 'data'), ('expert_mlp', 'model'), ('expert_embed', None), ('layers', None))
  specs = specs_of(ADAFACTOR)
  factored = specs.opt_state[0]
  for moments, dims in [
    (factored.v_row, {'up': ('expert', 'expert_embed'), 'down': ('layers', 'expert', 'expert_embed')}),
    (factored.v_col, {'up': ('expert', 'expert_mlp'), 'down': ('layers', 'expert', 'expert_mlp')}),
  ]:
    for name, split_dims in dims.items():
      moment = moments['experts'][name]
      assert moment.split_dims == split_dims
      spec = split_dims_to_partition_spec(split_dims, ('data', 'model'), t5x_rules)
      assert spec[moment.stacked] == 'data'
      assert 'expert' in moment.tags
  assert factored.v['experts']['bias'].split_dims == ('expert', 'expert_mlp')
  assert factored.v['experts']['up'].shape == (9, 1)
  for momentum in (specs.opt_state[1].ema, specs_of(ADAMW).opt_state[0].nu):
    assert momentum['experts']['up'].split_dims == ('expert', 'expert_embed', 'expert_mlp')


DIMS = ('first', 'second', 'third', 'fourth')
FACTORED = {  # shape -> number of stacked dims
  **{(3, 5): 0, (4, 4): 0, (3, 3, 3): 0, (5, 3, 5): 0, (4, 3, 4, 4): 0},
  **{(4, 4, 4): 1, (6, 4, 2, 4): 1},
}


def test_factored_moments_have_the_split_dims_of_the_dims_that_they_keep():
  """A gradient that varies along one dim of the weight shows which dim of each moment this is; there are ties."""
  specs = {
    str(shape): WeightSpec(shape=shape, init=None, split_dims=DIMS[: len(shape)], stacked=stacked)
    for shape, stacked in FACTORED.items()
  }
  learner = Learner(optimizer=Adafactor(learning_rate=0.1, min_dim_size_to_factor=2))
  weights = {str(shape): jnp.ones(shape) for shape in FACTORED}
  state = learner.init(weights, specs)
  state_specs = learner.state_split_dims(jax.eval_shape(lambda: state), specs).opt_state[0]
  update = jax.jit(lambda g: learner.update(g, jnp.float32(1), jnp.int32(0), state, weights, specs)[1].opt_state[0])
  for dim, name in enumerate(DIMS):
    ramp = lambda shape, dim=dim: 1 + np.indices(shape)[dim] if dim < len(shape) else np.ones(shape)
    moments = update({str(shape): ramp(shape).astype(np.float32) for shape in FACTORED})
    for shape, moment in itertools.product(FACTORED, ('v_row', 'v_col')):
      value = np.asarray(getattr(moments, moment)[str(shape)])
      split_dims = getattr(state_specs, moment)[str(shape)].split_dims
      assert len(split_dims) == value.ndim == len(shape) - 1
      varies = [bool(np.ptp(value, axis=i).max() > 0.1) for i in range(value.ndim)]
      assert varies == [entry == name for entry in split_dims], f'{moment} of {shape} has {split_dims}, varied {name}'
