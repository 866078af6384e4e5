"""States for the tests of checkpoints, which depend only on the step, and functions to compare and damage them."""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.checkpoints.checkpointer import Restored


class Moments(NamedTuple):
  mu: Any
  nu: Any


def sharding(mesh_shape: tuple[int, ...], *axes: str | None) -> NamedSharding:
  names = ('data', 'mdl')[: len(mesh_shape)]
  devices = jax.devices()[: int(np.prod(mesh_shape))]
  mesh = jax.make_mesh(mesh_shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
  return NamedSharding(mesh, PartitionSpec(*axes))


def host_state(step: int) -> Any:
  """Returns the state of `step`, with every kind of container and dtype of a train state."""
  rng = np.random.default_rng(step)
  weights = {
    'ffn': {'kernel': rng.normal(size=(8, 16)).astype(np.float32), 'bias': rng.normal(size=16).astype(jnp.bfloat16)},
    'emb': rng.normal(size=(16, 8)).astype(np.float32),
  }
  return {
    'step': np.int32(step),
    'rng': rng.integers(2**32, size=2, dtype=np.uint32),
    'weights': weights,
    'learner': (Moments(mu=jax.tree.map(lambda x: x * 2, weights), nu=None), ()),
  }


def abstract_state(mesh_shape: tuple[int, ...] = (2, 4)) -> Any:
  def abstract(leaf):
    axes = ('data', 'mdl')[: len(mesh_shape)] if leaf.ndim == 2 else ()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(mesh_shape, *axes))

  return jax.tree.map(abstract, host_state(0))


def device_state(step: int, mesh_shape: tuple[int, ...] = (2, 4)) -> Any:
  return jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), host_state(step), abstract_state(mesh_shape))


def assert_is_state(state: Any, step: int) -> None:
  expected = host_state(step)
  assert jax.tree.structure(state) == jax.tree.structure(expected)
  for restored, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected)):
    assert restored.dtype == wanted.dtype
    assert np.asarray(restored).tobytes() == np.asarray(wanted).tobytes()


def assert_restores(restored: Restored | None, step: int) -> None:
  assert restored is not None
  assert restored.step == step
  assert_is_state(restored.state, step)


def names(directory: pathlib.Path) -> list[str]:
  return sorted(path.name for path in directory.iterdir())


def array_file(step_directory: pathlib.Path) -> pathlib.Path:
  return max((step_directory / 'state').glob('weights.ffn.kernel/c.*'), key=lambda path: path.stat().st_size)


def flip_bit(path: pathlib.Path, position: float = 0.5) -> None:
  data = bytearray(path.read_bytes())
  data[int(position * (len(data) - 1))] ^= 4
  path.write_bytes(bytes(data))
