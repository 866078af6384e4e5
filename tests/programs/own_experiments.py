"""An experiment as a user writes one without the recipes: own layer, own loss, own input; nothing can be shrunk."""

from collections.abc import Iterator, Mapping
import dataclasses

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks import Experiment, Learner, Task
from spmd_tasks.layers import LossOutput, declare_weight
from spmd_tasks.learning import AdamW


class Regressor(nn.Module, kw_only=True):
  """Two layers of uneven width from x [B, 6] to y [B, 3]."""

  width: int = 10
  dropout_rate: float = 0.0

  @nn.compact
  def __call__(self, batch, *, train: bool = False):
    init = nn.initializers.lecun_normal()
    up = declare_weight(self, 'up', shape=(6, self.width), init=init, split_dims=('embed', 'mlp'))
    down = declare_weight(self, 'down', shape=(self.width, 3), init=init, split_dims=('mlp', 'embed'))
    return nn.Dropout(self.dropout_rate)(jnp.tanh(batch['x'] @ up), deterministic=not train) @ down


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquaredError:
  """The mean over rows with weight."""

  def __call__(self, predictions: jax.Array, batch: Mapping[str, jax.Array]) -> LossOutput:
    errors, weights = jnp.sum(jnp.square(predictions - batch['y']), axis=-1), batch['row_weights']
    weight = jnp.sum(weights)
    loss = jnp.sum(errors * weights) / jnp.maximum(weight, 1e-6)
    return LossOutput(loss=loss, weight=weight, metrics={}, per_example={})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Points:
  """Random points, rows of different weight; a batch is a function of its number."""

  batch_size: int = 8
  num_batches: int | None = None

  def element_spec(self):
    shapes = {'x': (6,), 'y': (3,), 'row_weights': ()}
    return {name: jax.ShapeDtypeStruct((self.batch_size, *shape), jnp.float32) for name, shape in shapes.items()}

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'PointsIterator':
    return PointsIterator(self, shard_index, shard_count)

  def reshard_states(self, states, shard_count):
    return [states[0]] * shard_count


class PointsIterator:
  """Yields this shard's rows."""

  def __init__(self, points: Points, shard_index: int, shard_count: int):
    rows = points.batch_size // shard_count
    self._points, self._rows, self._index = points, slice(shard_index * rows, (shard_index + 1) * rows), 0

  def __iter__(self) -> Iterator:
    return self

  def __next__(self):
    if self._index == self._points.num_batches:
      raise StopIteration
    rng = np.random.default_rng(self._index)
    self._index += 1
    x = rng.normal(size=(self._points.batch_size, 6)).astype(np.float32)
    batch = {'x': x, 'y': np.sin(x[:, :3]), 'row_weights': rng.integers(0, 3, len(x)).astype(np.float32)}
    return {name: values[self._rows] for name, values in batch.items()}

  def get_state(self):
    return {'index': self._index}

  def set_state(self, state):
    self._index = state['index']

  def close(self):
    pass


class Regression(Experiment):
  """A regression over data 2 x mdl 2."""

  ici_mesh_shape = (1, 2, 2)
  num_train_steps = 20

  def task(self):
    learner = fdl.Config(Learner, optimizer=fdl.Config(AdamW, learning_rate=0.03), clip_global_norm=1.0)
    return fdl.Config(Task, model=fdl.Config(Regressor), loss=fdl.Config(SquaredError), learner=learner)

  def train_input(self):
    return fdl.Config(Points)

  def eval_inputs(self):
    return {'held_out': fdl.Config(Points, num_batches=2)}
