"""Runs of 12 steps on a mesh, for the tests that compare meshes: the same steps and one loss curve, whatever the mesh.

`spmd_tasks.verification` compares them, as `--mode verify` does: metrics, every gradient, weights and optimizer state
of each step, from the reference's state before it, and the losses of training without a stop.
"""

from collections.abc import Collection, Sequence
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
# Steps that are compared number by number; the curve of losses has all of them.
COMPARED = (0, 1, 5, 11)


def table(cases: Sequence[tuple], exhaustive: Sequence[tuple] = (), *, fast: Collection[str]) -> list:
  """The parameters of a test from rows that begin with their names: few are fast, and some only for `--all`."""
  params = [pytest.param(*case, id=case[0], marks=() if case[0] in fast else pytest.mark.slow) for case in cases]
  marks = (pytest.mark.slow, pytest.mark.exhaustive)
  return params + [pytest.param(*case, id=case[0], marks=marks) for case in exhaustive]


@functools.cache
def source_of(experiment_class: type[Experiment]) -> Source:
  """The experiment, for any overrides."""

  def build(overrides: Sequence[str]):
    resolved = resolve(experiment_class, overrides)
    return resolved.build(), to_json(resolved)['config']

  return Source(flags=('--exp', registry.name_of(experiment_class)), resolve=build)


def setting_of(experiment_class: type[Experiment], shape: tuple[int, ...], dcn=None, overrides=()) -> Setting:
  """The experiment's axes with these sizes."""
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
  """The experiment's compiled step; those that cases share are cached."""
  return Runner(source_of(experiment_class), setting_of(experiment_class, shape, dcn, overrides))


def drawn_weights(shapes: typing.Any) -> typing.Any:
  """Weights of width 30 with these shapes, float32 of numpy."""
  rng = np.random.default_rng(0)

  def draw(path, shape):
    noise = rng.normal(0, 30**-0.5, shape.shape)
    return {'scale': 1 + 0 * noise, 'bias': 0 * noise}.get(path[-1].key.rpartition('_')[2], noise).astype('float32')

  return jax.tree_util.tree_map_with_path(draw, shapes)


def first_state(alone: Runner) -> TrainState:
  """The canonical state at step 0, with weights of numpy where all are trained: to compile their init takes long."""
  model, specs = alone.model, jax.tree.leaves(alone.model.weight_specs)
  are_trained = not any('frozen' in spec.tags for spec in specs)
  if not are_trained or model.canonical_state.non_trainable or isinstance(alone.task.loss, ReferenceLoss):
    return alone.init()
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.canonical_state)
  weights = drawn_weights(zeros.weights)
  ema_weights = None if zeros.learner.ema_weights is None else weights
  rng_data = np.asarray(jax.random.key_data(alone.job.task.make_key(alone.job.experiment.seed)))
  return zeros.replace(rng=rng_data, weights=weights, learner=zeros.learner.replace(ema_weights=ema_weights))


@functools.lru_cache(maxsize=4)
def reference(experiment_class: type[Experiment], overrides=()) -> Trajectory:
  """12 steps on one device, which learn something: untrained models would agree on anything."""
  alone = runner(experiment_class, (1,), overrides=overrides)
  expected = Trajectory(alone, first_state(alone), draw_batches(alone.job.train_input, NUM_STEPS, seed=0))
  assert expected.losses.min() < 0.95 * expected.losses[0]
  return expected


def assert_same_run(other: Runner, expected: Trajectory, metrics: Sequence[str] | None = None) -> None:
  """Four of the steps are the reference's, and so is the whole loss curve."""
  found = agree(other, expected, metrics=metrics, steps=COMPARED)
  assert found.first is None, f'{found.first}; {found.notes}'
  # Rounding alone may decide between two experts, in one step at most.
  assert found.num_steps >= len(COMPARED) - 1, found.notes
