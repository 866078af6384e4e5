"""Runs 12 steps on a mesh and compares them with a reference, for tests that compare meshes.

`spmd_tasks.verification` compares them as `--mode verify` does: it starts each step from the reference's state, and
compares metrics, gradients, weights and optimizer state; and it compares the losses of uninterrupted training.
"""

from collections.abc import Sequence
import functools
import typing

import jax
import numpy as np
import pytest

from spmd_tasks.config import registry, resolve, to_json
from spmd_tasks.experiment import Experiment, partition_job
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.tuning.preference_loss import ReferenceLoss
from spmd_tasks.verification import Setting, Source
from spmd_tasks.verification._agreement import Trajectory, agree
from spmd_tasks.verification._runner import Runner
from spmd_tasks.verification._settings import build_job, draw_batches

NUM_STEPS = 12
# Steps whose arrays are compared; losses are compared for all steps.
COMPARED = (0, 1, 5, 11)


def table(cases: Sequence[tuple], exhaustive: Sequence[tuple] = ()) -> list:
  """The parameters of a test from rows that start with their names."""
  params = [pytest.param(*case, id=case[0], marks=pytest.mark.slow) for case in cases]
  marks = (pytest.mark.slow, pytest.mark.exhaustive)
  return params + [pytest.param(*case, id=case[0], marks=marks) for case in exhaustive]


@functools.cache
def source_of(experiment_class: type[Experiment]) -> Source:
  """The Source that resolves the experiment with any overrides."""

  def build(overrides: Sequence[str]):
    resolved = resolve(experiment_class, overrides)
    return resolved.build(), to_json(resolved)['config']

  return Source(flags=('--exp', registry.name_of(experiment_class)), resolve=build)


def setting_of(experiment_class: type[Experiment], shape: tuple[int, ...], dcn=None, overrides=()) -> Setting:
  """The Setting with these sizes of the experiment's axes."""
  mesh = tuple(zip(source_of(experiment_class).base.experiment.mesh_axis_names, shape))
  return Setting(mesh=mesh, slices=dcn, overrides=tuple(overrides))


def make_model(
  experiment_class: type[Experiment], shape: tuple[int, ...], *, dcn=None, overrides=()
) -> tuple[PartitionedModel, typing.Any]:
  """The experiment's model, partitioned over the first devices, and its training input."""
  setting = setting_of(experiment_class, shape, dcn, overrides)
  job = build_job(source_of(experiment_class), setting)
  model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[: setting.num_devices]))
  return model, job.train_input


@functools.lru_cache(maxsize=6)  # not all: compiled programs take memory maps, see conftest.py
def runner(experiment_class: type[Experiment], shape: tuple[int, ...], *, dcn=None, overrides=()) -> Runner:
  """The Runner with the experiment's compiled step; cached, because cases share references."""
  return Runner(source_of(experiment_class), setting_of(experiment_class, shape, dcn, overrides))


def random_weights(shapes: typing.Any) -> typing.Any:
  """Random float32 numpy weights with these shapes, for a model of width 30."""
  rng = np.random.default_rng(0)

  def draw(path, shape):
    noise = rng.normal(0, 30**-0.5, shape.shape)
    return {'scale': 1 + 0 * noise, 'bias': 0 * noise}.get(path[-1].key.rpartition('_')[2], noise).astype('float32')

  return jax.tree_util.tree_map_with_path(draw, shapes)


def first_state(runner: Runner) -> TrainState:
  """The canonical state at step 0; with numpy's random weights if all are trained, because init is slow to compile."""
  model, specs = runner.model, jax.tree.leaves(runner.model.weight_specs)
  are_trained = not any('frozen' in spec.tags for spec in specs)
  if not are_trained or model.canonical_state.non_trainable or isinstance(runner.task.loss, ReferenceLoss):
    return runner.init()
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.canonical_state)
  weights = random_weights(zeros.weights)
  ema_weights = None if zeros.learner.ema_weights is None else weights
  rng_data = np.asarray(jax.random.key_data(runner.job.task.make_key(runner.job.experiment.seed)))
  return zeros.replace(rng=rng_data, weights=weights, learner=zeros.learner.replace(ema_weights=ema_weights))


@functools.lru_cache(maxsize=4)
def reference(experiment_class: type[Experiment], overrides=()) -> Trajectory:
  """12 steps on one device; checks that they learn something, because untrained models agree on anything."""
  one_device = runner(experiment_class, (1,), overrides=overrides)
  batches = draw_batches(one_device.job.train_input, NUM_STEPS, seed=0)
  expected = Trajectory(one_device, first_state(one_device), batches)
  assert expected.losses.min() < 0.95 * expected.losses[0]
  return expected


def assert_same_run(other: Runner, expected: Trajectory, metrics: Sequence[str] | None = None) -> None:
  """Checks that four steps and the whole loss curve agree with the reference."""
  agreement = agree(other, expected, metrics=metrics, steps=COMPARED)
  assert agreement.first is None, f'{agreement.first}; {agreement.notes}'
  # In at most one step, rounding may decide between two experts.
  assert agreement.num_steps >= len(COMPARED) - 1, agreement.notes
