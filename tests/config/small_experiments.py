"""Experiments of simple dataclasses and small Linen modules, for the tests of config."""

from collections.abc import Callable
import dataclasses
import enum
from typing import Any, Literal

import fiddle as fdl
from flax import linen as nn
import jax.numpy as jnp

from spmd_tasks.config import register
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment


class Reduction(enum.Enum):
  MEAN = 'mean'
  SUM = 'sum'


class FeedForward(nn.Module):
  width: int = 8
  dtype: Any = jnp.float32
  activation: Callable = nn.relu
  init: Callable = nn.initializers.normal(0.02)
  split_dims: tuple = ('embed', 'mlp')


class Model(nn.Module):
  num_layers: int
  ffn: nn.Module
  dropout: float | None = None
  remat: Literal['none', 'full'] = 'none'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  learning_rate: float = 1e-3
  betas: tuple[float, float] = (0.9, 0.99)
  low: int = 1
  high: int = 2

  def __post_init__(self):
    if self.low > self.high:  # no UserError: stands for a bug
      raise ValueError(f'low = {self.low} must not be above high = {self.high}.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  model: nn.Module
  optimizer: Optimizer | None = Optimizer()
  scales: dict[str, float] = dataclasses.field(default_factory=lambda: {'a': 1.0, 'b': 2.0})
  reduction: Reduction = Reduction.MEAN
  clip: float = float('inf')
  freeze: bool = False
  name: str = 'lm'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
  batch_size: int
  files: tuple[str, ...] = ()

  def __post_init__(self):
    if self.batch_size < 1:
      raise UserError(f'batch_size = {self.batch_size} must be positive.')


@register
class Small(Experiment):
  """Two layers."""

  num_train_steps = 20
  num_layers: int = 2
  schedule: Optimizer = Optimizer()

  def task(self):
    model = fdl.Config(Model, num_layers=self.num_layers, ffn=fdl.Config(FeedForward))
    return fdl.Config(Task, model=model)

  def train_input(self):
    return fdl.Config(Input, batch_size=4)

  def eval_inputs(self):
    return {'dev': fdl.Config(Input, batch_size=2), 'test': fdl.Config(Input, batch_size=2)}


class Built(Small):
  """Returns built objects instead of configs."""

  def task(self):
    return Task(model=Model(num_layers=self.num_layers, ffn=FeedForward()))

  def train_input(self):
    return Input(batch_size=4)


class Incomplete(Small):
  """An experiment with a hyperparameter without a value, and an input without a batch size."""

  width: int

  def task(self):
    config = super().task()
    config.model.ffn.width = self.width
    return config

  def train_input(self):
    return fdl.Config(Input)


class Raising(Small):
  """An experiment whose task() raises the error that `error` names."""

  error: str = 'ValueError'

  def task(self):
    raise {'ValueError': ValueError, 'UserError': UserError}[self.error]('num_layers=2 must be odd.')
