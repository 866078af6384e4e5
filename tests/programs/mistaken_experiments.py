"""Experiments of a new user: what is taken, and what is a mistake."""

import dataclasses
import sys

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from spmd_tasks import Learner, Task
from spmd_tasks.inputs import JsonLines
from spmd_tasks.layers import Linear
from spmd_tasks.learning import FromOptax
from spmd_tasks.programs.hooks import TrainHook
from spmd_tasks.recipes import SyntheticLanguageModel
from tests.programs.own_experiments import Points, PointsIterator, Regression


def mean_of(predictions, batch):
  return jnp.mean(jnp.square(predictions - batch['y']))


# name -> a loss (predictions, batch)
LOSSES = {
  'alone': mean_of,
  'with_metrics': lambda p, b: (mean_of(p, b), {'mean': jnp.mean(p)}),
  'with_weights': lambda p, b: (mean_of(p, b), {'mean': (jnp.mean(p), 8)}),
  'number': lambda p, b: 1.5,
  'per_row': lambda p, b: jnp.mean(jnp.square(p - b['y']), axis=-1),
  'metric_per_row': lambda p, b: (mean_of(p, b), {'error': p[:, 0]}),
  'metric_by_number': lambda p, b: (mean_of(p, b), {'mean': jnp.mean(p), 1: jnp.max(p)}),
  'wrong_key': lambda p, b: jnp.mean(b['labels']),
  'float': lambda p, b: (mean_of(p, b), {'mean': float(jnp.mean(p))}),
  'library': optax.softmax_cross_entropy_with_integer_labels,
}


class Plain(nn.Module):
  """Linen's own layers; no argument but the batch."""

  @nn.compact
  def __call__(self, batch):
    init = nn.with_partitioning(nn.initializers.ones, ('embed', 'mlp'))
    return nn.Dense(3)(nn.relu(nn.Dense(8, kernel_init=init)(batch['x'])))


class NoCompact(nn.Module):
  def __call__(self, batch, train=False):
    return Linear(output_dims=3)(batch['x'])


class TakesArray(nn.Module):
  @nn.compact
  def __call__(self, points, train=False):
    return jnp.tanh(points.reshape(-1, 6))


class NoCall(nn.Module):
  def forward(self, batch):
    return batch['x']


class ForgottenInit(nn.Module):
  def __init__(self, width=3):
    self.width = width

  @nn.compact
  def __call__(self, batch, train=False):
    return Linear(output_dims=3)(batch['x'])


MODELS = {cls.__name__: cls for cls in (Plain, NoCompact, TakesArray, NoCall, ForgottenInit)}


class Feed(nn.Module):
  """A feed-forward layer that takes and returns what `how` says."""

  how: str

  @nn.compact
  def __call__(self, x, train=False):  # without segment_ids
    if self.how == 'dense':
      return nn.Dense(x.shape[-1])(x)
    y = Linear(output_dims=7 if self.how == 'shape' else x.shape[-1])(x)
    returned = {'number': (y, {'balance': jnp.float32(1)}), 'nothing': None}
    return returned.get(self.how, y)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input(Points):
  """Points with the mistake that `how` says."""

  how: str = ''

  @property
  def make_iterator(self):
    if self.how == 'files':
      return lambda *shard: JsonLines(pattern='none*.jsonl').open()
    return (lambda: iter([])) if self.how == 'shards' else super().make_iterator

  def element_spec(self):
    spec = super().element_spec()
    return spec | ({'y': jax.ShapeDtypeStruct(spec['y'].shape, '>f4')} if self.how == 'byte_order' else {})


class Mistaken(Regression):
  """An own experiment whose loss, model or other part is `what`."""

  loss: str = 'alone'
  model: str = ''
  what: str = ''
  num_train_steps = 2

  def task(self):
    if self.what == 'attribute':
      return self.widht
    model = fdl.Config(MODELS[self.model]) if self.model else super().task().model
    model = Plain if self.what == 'class' else model
    learner = fdl.Config(Learner, optimizer=fdl.Config(FromOptax, factory=optax.sgd, learning_rate=0.1))
    return fdl.Config(Task, model=model, loss=LOSSES[self.loss], learner=learner)

  def train_input(self):
    if self.what == 'list':
      return [1, 2]
    return fdl.Config(Input, how=self.what)

  def eval_inputs(self):
    return {'valid': fdl.Config(Input, how='files')} if self.what == 'eval_files' else {}


class OwnFeed(SyntheticLanguageModel):
  """A language model with the feed-forward layer Feed(how)."""

  how: str = 'array'
  model_dims = 8
  num_layers = 2
  num_heads = 2
  seq_len = 4
  batch_size = 2

  def ffn(self):
    return fdl.Config(Feed, how=self.how)


def end_at(place: str) -> None:
  """Ends as `at` says if that begins with the place: by sys.exit, or by an exception."""
  name, _, code = END['at'].partition(':')
  if name == place:
    if code == 'raise':
      raise OSError('the disk of the hook is full')
    sys.exit(None if code == '' else int(code) if code.isdecimal() else code)


END = {'at': ''}  # no field: what the classes do as they are made depends on it


class EndingModel(Plain):
  @nn.compact
  def __call__(self, batch):
    end_at('model')
    return super().__call__(batch)


class EndingHook(TrainHook):
  def prepare(self, run):
    end_at('prepare')

  def after_step(self, run, outcome):
    end_at('after_step')


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndingInput(Points):
  def make_iterator(self, shard_index=0, shard_count=1):
    return EndingIterator(self, shard_index, shard_count)


class EndingIterator(PointsIterator):
  def __next__(self):
    if self._index == 1:
      end_at('batch')
    return super().__next__()


def ending_loss(predictions, batch):
  end_at('loss')
  return mean_of(predictions, batch)


class Ending(Regression):
  """An own experiment that calls sys.exit at one place."""

  num_train_steps = 3

  def __post_init__(self):
    end_at('init')

  def task(self):
    end_at('task')
    learner = fdl.Config(Learner, optimizer=fdl.Config(FromOptax, factory=optax.sgd, learning_rate=0.1))
    return fdl.Config(Task, model=fdl.Config(EndingModel), loss=ending_loss, learner=learner)

  def train_input(self):
    return fdl.Config(EndingInput)

  def eval_inputs(self):
    return {}

  def hooks(self):
    return [EndingHook()]
