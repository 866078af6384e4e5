"""One truth for numbers: the same experiment on any mesh, padded or not, accumulated or not, gives one loss curve.

20 steps in float32 of a model none of whose dims divides an axis of 4 (width 30, 3 heads, 90 hidden, vocabulary 257).
Tolerances: reductions are summed in another order on another mesh, which costs a few units in the last place (6e-8) a
step; 1e-5 relative is the promise. Weights after 20 steps are compared at 1e-4 of each weight's largest entry, for Adam
divides by the square root of second moments that start near zero.
"""

import functools
import typing

import jax
import numpy as np
import pytest

from spmd_tasks.config.resolve import resolve
from spmd_tasks.runtime.partition import PartitionedModel, partition_spmd_model
from spmd_tasks.runtime.train_state import TrainState
from tests.runtime import uneven_experiments

NUM_STEPS = 20


class Run(typing.NamedTuple):
  """What one run leaves behind: losses [20], gradient norms [20], the live state and its canonical copy in numpy."""

  losses: np.ndarray
  grad_norms: np.ndarray
  model: PartitionedModel
  state: TrainState
  canonical: TrainState


def make_model(
  optimizer: str, shape: tuple[int, ...], *, dcn=None, overrides=()
) -> tuple[PartitionedModel, typing.Any]:
  """The model of synthetic.Uneven, partitioned over the first devices, and its training input."""
  sizes = [f'ici_mesh_shape={",".join(map(str, shape))}'] + (
    [f'dcn_mesh_shape={",".join(map(str, dcn))}'] if dcn else []
  )
  experiment_class = getattr(uneven_experiments, optimizer)
  job = resolve(experiment_class, [*sizes, *overrides]).build()
  experiment = job.experiment
  num_devices = int(np.prod(shape) * np.prod(dcn or (1,)))
  model = partition_spmd_model(
    job.task,
    experiment.mesh_spec().build(jax.devices()[:num_devices]),
    job.train_input.element_spec(),
    axis_rules=experiment.axis_rules,
    inputs_split_mapping=experiment.inputs_split_mapping,
  )
  return model, job.train_input


@functools.cache
def run(optimizer: str, shape: tuple[int, ...], *, dcn=None, overrides=()) -> Run:
  """Trains 20 steps; cached, so that cases share runs."""
  model, train_input = make_model(optimizer, shape, dcn=dcn, overrides=overrides)
  state = model.init(0)
  iterator = train_input.make_iterator()
  metrics = []
  for _ in range(NUM_STEPS):
    state, step_metrics = model.train_step(state, model.train_step.place(next(iterator)))
    metrics.append(jax.device_get(step_metrics))
  losses, norms = (np.array([float(m[name]) for m in metrics]) for name in ('loss', 'grad_norm'))
  return Run(losses, norms, model, state, jax.device_get(model.to_canonical(state)))


DROPOUT = ('task.model.stack.block.dropout_rate=0.1',)
FAST = ('data 2 x mdl 4', 'Adafactor, data 2 x mdl 4')
CASES = [
  ('data 8', 'AdamW', (1, 8, 1), {}),
  ('mdl 8', 'AdamW', (1, 1, 8), {}),
  ('data 2 x mdl 4', 'AdamW', (1, 2, 4), {}),
  ('replica 2 x data 2 x mdl 2', 'AdamW', (2, 2, 2), {}),
  ('two slices of data 2 x mdl 2', 'AdamW', (1, 2, 2), {'dcn': (1, 2, 1)}),
  ('2 microbatches', 'AdamW', (1, 2, 4), {'overrides': ('task.learner.num_microbatches=2',)}),
  ('4 microbatches on one device', 'AdamW', (1, 1, 1), {'overrides': ('task.learner.num_microbatches=4',)}),
  ('full remat', 'AdamW', (1, 2, 4), {'overrides': ('remat_policy=full',)}),
  ('layers unrolled', 'AdamW', (1, 2, 4), {'overrides': ('task.model.stack.scan=False',)}),
  ('dropout', 'AdamW', (1, 2, 4), {'overrides': DROPOUT, 'reference': DROPOUT}),
  ('Adafactor, data 2 x mdl 4', 'Adafactor', (1, 2, 4), {}),
  ('Adafactor, mdl 8', 'Adafactor', (1, 1, 8), {}),
]


@pytest.mark.parametrize(
  'name, optimizer, shape, settings',
  [pytest.param(*case, id=case[0], marks=() if case[0] in FAST else pytest.mark.slow) for case in CASES],
)
def test_one_loss_curve_and_one_state(name, optimizer, shape, settings):
  reference = run(optimizer, (1, 1, 1), overrides=settings.get('reference', ()))
  other = run(optimizer, shape, dcn=settings.get('dcn'), overrides=settings.get('overrides', ()))

  assert reference.losses[-1] < 0.9 * reference.losses[0]  # it learns: untrained models would agree on anything
  np.testing.assert_allclose(other.losses, reference.losses, rtol=1e-5)
  np.testing.assert_allclose(other.grad_norms, reference.grad_norms, rtol=1e-4)
  leaves, structure = jax.tree_util.tree_flatten_with_path(other.canonical)
  expected_leaves, expected_structure = jax.tree_util.tree_flatten_with_path(reference.canonical)
  assert structure == expected_structure
  for (path, leaf), (_, expected) in zip(leaves, expected_leaves):
    np.testing.assert_allclose(
      leaf, expected, rtol=0, atol=1e-4 * np.max(np.abs(expected)), err_msg=jax.tree_util.keystr(path)
    )


@pytest.mark.parametrize('optimizer, shape', [('AdamW', (1, 2, 4)), ('Adafactor', (1, 2, 4))])
def test_padding_is_reported_and_stays_zero(optimizer, shape):
  result = run(optimizer, shape)
  padded_leaves = 0
  for live, true in zip(jax.tree.leaves(result.state), jax.tree.leaves(result.model.abstract_state)):
    if live.shape != true.shape:
      padded_leaves += 1
      values = np.array(jax.device_get(live))
      values[tuple(slice(0, size) for size in true.shape)] = 0
      assert not values.any()
  assert padded_leaves >= 12  # weights, both moments (or factors) and the average
  assert 0.05 < result.model.padding_waste < 0.15


def test_factored_moments_are_sharded_like_the_weight():
  specs = run('Adafactor', (1, 2, 4)).model.state_specs
  assert specs.weights['stack']['layers']['ffn']['up']['kernel'] == jax.P(None, 'data', 'mdl')  # [L, D, F]
  factored = specs.learner.opt_state[0] if isinstance(specs.learner.opt_state, tuple) else specs.learner.opt_state
  rows, columns = (getattr(factored, name)['stack']['layers']['ffn']['up']['kernel'] for name in ('v_row', 'v_col'))
  assert rows == jax.P(None, 'data')  # the mean over F, the larger dim
  assert columns == jax.P(None, 'mdl')


@pytest.mark.parametrize('batch_size', [4, 12])
def test_a_batch_that_the_devices_do_not_divide(batch_size):
  overrides = (f'batch_size={batch_size}',)
  model, train_input = make_model('AdamW', (1, 2, 4), overrides=overrides)
  alone, _ = make_model('AdamW', (1, 1, 1), overrides=overrides)
  assert model.input_layout.padded['ids'].shape[0] == {4: 8, 12: 16}[batch_size]
  batch = next(train_input.make_iterator())
  _, metrics = model.train_step(model.init(0), model.train_step.place(batch))
  _, expected = alone.train_step(alone.init(0), alone.train_step.place(batch))
  for name in ('loss', 'grad_norm', 'loss_weight', 'accuracy'):
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
