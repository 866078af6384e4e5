"""Runs of 20 steps on a mesh, for the tests that compare meshes: one loss curve and one state, whatever the mesh.

Tolerances: reductions are summed in another order on another mesh, which costs a few units in the last place (6e-8) a
step; 1e-5 relative is the promise. Weights after 20 steps are compared at 1e-4 of each weight's largest entry, for Adam
divides by the square root of second moments that start near zero.
"""

from collections.abc import Collection, Sequence
import functools
import typing

import jax
import numpy as np
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiment import Experiment, partition_job
from spmd_tasks.runtime import PartitionedModel, TrainState

NUM_STEPS = 20


class Run(typing.NamedTuple):
  """What one run leaves behind: losses [20], gradient norms [20], the live state and its canonical copy in numpy."""

  losses: np.ndarray
  grad_norms: np.ndarray
  model: PartitionedModel
  state: TrainState
  canonical: TrainState


def table(cases: Sequence[tuple], exhaustive: Sequence[tuple] = (), *, fast: Collection[str]) -> list:
  """The parameters of a test from rows that begin with their names: few are fast, and some only for `--all`."""
  params = [pytest.param(*case, id=case[0], marks=() if case[0] in fast else pytest.mark.slow) for case in cases]
  marks = (pytest.mark.slow, pytest.mark.exhaustive)
  return params + [pytest.param(*case, id=case[0], marks=marks) for case in exhaustive]


def make_model(
  experiment_class: type[Experiment], shape: tuple[int, ...], *, dcn=None, overrides=()
) -> tuple[PartitionedModel, typing.Any]:
  """The experiment's model, partitioned over the first devices, and its training input."""
  sizes = [f'ici_mesh_shape={",".join(map(str, shape))}'] + (
    [f'dcn_mesh_shape={",".join(map(str, dcn))}'] if dcn else []
  )
  job = resolve(experiment_class, [*sizes, *overrides]).build()
  num_devices = int(np.prod(shape) * np.prod(dcn or (1,)))
  model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[:num_devices]))
  return model, job.train_input


@functools.lru_cache(maxsize=6)  # not all: compiled programs take memory maps, see conftest.py
def run(experiment_class: type[Experiment], shape: tuple[int, ...], *, dcn=None, overrides=()) -> Run:
  """Trains 20 steps; the runs that cases share are cached."""
  model, train_input = make_model(experiment_class, shape, dcn=dcn, overrides=overrides)
  state = model.init(0)
  iterator = train_input.make_iterator()
  metrics = []
  for _ in range(NUM_STEPS):
    state, step_metrics = model.train_step(state, model.train_step.place(next(iterator)))
    metrics.append(jax.device_get(step_metrics))
  losses, norms = (np.array([float(m[name]) for m in metrics]) for name in ('loss', 'grad_norm'))
  return Run(losses, norms, model, state, jax.device_get(model.to_canonical(state)))


def assert_same_run(other: Run, reference: Run) -> None:
  """One loss curve that falls, and the same state at its end."""
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
