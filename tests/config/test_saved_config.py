"""A resolved config is saved as JSON and restored exactly, even if the code's defaults have changed."""

from collections.abc import Callable
import dataclasses
import functools
import json
import math
import re
from typing import Any

import fiddle as fdl
from flax import linen as nn
from flax.core import FrozenDict
import jax.numpy as jnp
import numpy as np
import pytest
import small_experiments
from small_experiments import Built, Input, Reduction, Small

from spmd_tasks.config import resolve, to_json
from spmd_tasks.config.changes import diff
from spmd_tasks.config.encoding import encode, show
from spmd_tasks.config.from_saved import decode, from_json
from spmd_tasks.config.saved_config import checked_config, format_config
from spmd_tasks.errors import UserError


def through_text(saved):
  return json.loads(json.dumps(saved, allow_nan=False))


def name(value):
  """Returns an id without addresses, so that every pytest process has the same ids."""
  return re.sub(r' at 0x[0-9a-f]+', '', repr(value))


VALUES = [None, True, 3, 2**70, 1 / 3, 5e-324, -0.0, -math.inf, 'text', (), (1, (2.0, None), 'a'), [1, [2]]]
VALUES += [{'a': (1,), 'b': {'c': math.inf}}, jnp.bfloat16]


@pytest.mark.parametrize('value', VALUES, ids=name)
def test_a_leaf_value_is_restored_exactly(value):
  back = decode(through_text(encode(value)))
  assert back == value
  assert type(back) is type(value)
  assert repr(back) == repr(value)  # -0.0, and 1 against 1.0 inside tuples


def test_nan_is_restored():
  assert math.isnan(decode(through_text(encode(math.nan))))


@pytest.mark.parametrize(
  'value', [FrozenDict({'a': (1, 2)}), np.dtype('float32'), Reduction.SUM], ids=['FrozenDict', 'dtype', 'enum']
)
def test_the_kind_of_the_current_value_is_kept(value):
  back = decode(through_text(encode(value)), value)
  assert back == value
  assert type(back) is type(value)


def a_function():
  pass


DIFFERENT = [
  (1, 1.0),
  ((1,), [1]),
  (nn.relu, nn.gelu),
  (functools.partial(a_function, 1), functools.partial(a_function, 2)),
  (jnp.float32, 'float32'),
  (Reduction.SUM, Reduction.MEAN),
]


@pytest.mark.parametrize('a, b', DIFFERENT, ids=name)
def test_different_values_are_saved_differently(a, b):
  assert json.dumps(encode(a)) != json.dumps(encode(b))
  assert show(encode(a)) != show(encode(b)) or type(a) is not type(b)


@pytest.mark.parametrize('value', [a_function, int, functools.partial(a_function), object(), np.zeros(2)], ids=name)
def test_code_and_objects_are_never_read_back(value):
  with pytest.raises(ValueError, match='cannot be decoded'):
    decode(through_text(encode(value)))


def test_a_saved_dtype_cannot_name_anything_else():
  with pytest.raises(ValueError, match='cannot be decoded'):
    decode({'dtype': 'load'})


OVERRIDES = [
  'num_layers=4',
  'ici_mesh_shape=1,4,2',
  'inputs_split_mapping.map_2d=data,None',
  'schedule.learning_rate=0.1',
  'task.model.ffn.dtype=bfloat16',
  'task.model.dropout=0.30000000000000004',
  'task.optimizer.learning_rate=inf',
  'task.scales.b=3',
  'task.reduction=SUM',
  'train_input.files=a,b',
  'eval_inputs.dev.batch_size=16',
]


@pytest.mark.parametrize('cls', [Small, Built])
@pytest.mark.parametrize('overrides', [[], OVERRIDES, ['task.optimizer=None', 'inputs_split_mapping=None']])
def test_a_config_is_restored_from_its_json(cls, overrides):
  resolved = resolve(cls, overrides)
  saved = through_text(to_json(resolved))
  again = from_json(saved)
  assert to_json(again) == to_json(resolved) == saved
  assert again.experiment == resolved.experiment
  job, expected = again.build(), resolved.build()
  assert (job.train_input, dict(job.eval_inputs)) == (expected.train_input, dict(expected.eval_inputs))
  assert repr(job.task) == repr(expected.task)


@pytest.mark.parametrize('name', ['pipeline.StdlibTiny', 'pipeline.MoeTiny'])
def test_microbatches_that_fit_only_the_saved_stages_are_restored(name):
  """The second one has a mesh layout."""
  sizes = (1,) * len(resolve(name).experiment.mesh_axis_names)
  with pytest.raises(UserError, match='num_microbatches=3 must be a multiple of'):
    resolve(name, ['num_microbatches=3'])
  saved = through_text(to_json(resolve(name, ['num_microbatches=3', f'ici_mesh_shape={sizes}'])))
  assert to_json(from_json(saved)) == saved
  again = from_json(saved, ['ici_mesh_shape=' + str((*sizes[:-1], 2))])
  assert again.experiment.ici_mesh_shape == (*sizes[:-1], 2)


def test_overrides_apply_on_top_of_a_saved_config():
  saved = through_text(to_json(resolve(Small, ['task.optimizer.learning_rate=0.5', 'seed=3'])))
  again = from_json(saved, ['num_layers=9', 'train_input.batch_size=1'])
  job = again.build()
  assert (job.experiment.seed, job.task.optimizer.learning_rate) == (3, 0.5)
  assert (job.experiment.num_layers, job.task.model.num_layers) == (9, 9)
  first, further = {'task.optimizer.learning_rate': 0.5, 'seed': 3}, {'num_layers': 9, 'train_input.batch_size': 1}
  assert to_json(again)['overrides'] == first | further


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
  z_loss: float = 0.0
  reduce: Callable = sum
  smoothing: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossAfter:
  z_loss: float = 1e-4
  reduce: Callable = sum
  smoothing: Any = 0.1
  added: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossWithout:
  reduce: Callable = sum
  smoothing: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOfAnotherFunction:
  z_loss: float = 0.0
  reduce: Callable = max
  smoothing: Any = None


for cls in (LossAfter, LossWithout, LossOfAnotherFunction):
  cls.__module__, cls.__qualname__ = Loss.__module__, Loss.__qualname__


def define(monkeypatch, loss=Loss, **fields):
  """Defines small_experiments.Changing as in one version of the code."""

  class Changing(Small):
    batch_size: int = fields.get('batch_size', 4)
    num_layers = fields.get('num_layers', 2)
    eval_names: tuple[str, ...] = ('dev',)

    def task(self):
      return fdl.Config(loss)

    def train_input(self):
      return fdl.Config(Input, batch_size=self.batch_size)

    def eval_inputs(self):
      return {name: fdl.Config(Input, batch_size=2) for name in fields.get('eval_names', ('dev',))}

  Changing.__module__ = 'small_experiments'
  monkeypatch.setattr(small_experiments, 'Changing', Changing, raising=False)
  return Changing


def test_overrides_and_saved_configs_may_use_earlier_names_of_fields():
  saved = through_text(to_json(resolve(Small, ['checkpoint_every_steps=9'])))
  assert saved['config']['checkpoint_every'] == saved['overrides']['checkpoint_every'] == 9
  for part in ('config', 'overrides'):
    saved[part]['checkpoint_every_steps'] = saved[part].pop('checkpoint_every')
  again = from_json(saved)
  assert again.experiment.checkpoint_every == again.overrides['checkpoint_every'] == 9
  assert from_json(saved, ['checkpoint_every_steps=2h']).experiment.checkpoint_every == '2h'


@pytest.mark.parametrize(
  'old, trackers',
  [({'tensorboard': True}, ('tensorboard',)), ({'tensorboard': False, 'trackers': ['wandb']}, ('wandb',))],
)
def test_removed_fields_are_ignored_in_saved_configs_and_refused_as_overrides(old, trackers):
  saved = through_text(to_json(resolve(Small)))
  del saved['config']['trackers']
  saved['config'] |= {'heartbeat_timeout_s': 30, 'target': 'h200:8', 'tpu_options': {'dict': {'a': 'b'}}} | old
  saved['overrides'] = {'shutdown_timeout_s': 9}
  again = from_json(saved)
  assert again.experiment.trackers == trackers
  assert again.overrides == {}
  with pytest.raises(UserError, match='give the flag --heartbeat_timeout_s'):
    from_json(saved, ['heartbeat_timeout_s=9'])


def test_saved_values_replace_changed_defaults(monkeypatch):
  saved = through_text(to_json(resolve(define(monkeypatch))))
  now = define(monkeypatch, LossAfter, batch_size=32, num_layers=6)
  changed = to_json(resolve(now))['config']
  assert (changed['task.z_loss'], changed['batch_size'], changed['num_layers']) == (1e-4, 32, 6)
  again = from_json(saved)
  job = again.build()
  assert (job.experiment.batch_size, job.experiment.num_layers, job.train_input.batch_size) == (4, 2, 4)
  assert (job.task.z_loss, job.task.smoothing) == (0.0, None)
  assert job.task.added == 1  # did not exist then
  assert diff(saved, to_json(again)) == ['task.added: absent -> 1']


def test_fields_that_no_longer_exist_are_refused_by_name(monkeypatch):
  saved = through_text(to_json(resolve(define(monkeypatch, eval_names=('dev', 'gone')), ['task.z_loss=0.5'])))
  define(monkeypatch, LossWithout)
  with pytest.raises(ValueError, match=r'task.z_loss \(saved as 0.5\) no longer exists') as error:
    from_json(saved)
  assert 'eval_inputs.gone.batch_size' in str(error.value)


def test_a_removed_optimizer_names_its_replacement():
  saved = through_text(to_json(resolve(Small)))
  saved['config']['task.optimizer'] = {'symbol': 'spmd_tasks.learning:Sgd'}
  with pytest.raises(ValueError, match=r'spmd_tasks.learning:Sgd at task.optimizer.*FromOptax.*optax.sgd'):
    from_json(saved)


def test_another_function_or_class_is_refused_with_both_sides(monkeypatch):
  saved = through_text(to_json(resolve(define(monkeypatch))))
  define(monkeypatch, LossOfAnotherFunction)
  with pytest.raises(ValueError, match=r'task.reduce was builtins:sum and is builtins:max now'):
    from_json(saved)
  define(monkeypatch, Input)
  with pytest.raises(ValueError, match=r'task was test_saved_config:Loss and is small_experiments:Input now'):
    from_json(saved)


def test_diff_names_each_path_with_both_values():
  old = to_json(resolve(Small))
  new = to_json(resolve(Small, ['num_layers=4', 'task.optimizer=None', 'task.model.ffn.dtype=bfloat16']))
  assert diff(old, old) == []
  assert diff(old, new) == [
    'num_layers: 2 -> 4',
    'task.model.ffn.dtype: float32 -> bfloat16',
    'task.model.num_layers: 2 -> 4',
    'task.optimizer: small_experiments:Optimizer -> None',
    'task.optimizer.betas: (0.9, 0.99) -> absent',
    *(f'task.optimizer.{name} -> absent' for name in ('high: 2', 'learning_rate: 0.001', 'low: 1')),
  ]
  assert diff(old, old | {'experiment': 'x.Y'}) == ['experiment: small_experiments.Small -> x.Y']


def test_the_printed_config_has_one_line_per_path_and_its_values_can_be_set():
  saved = to_json(resolve(Small, OVERRIDES))
  lines = format_config(saved).splitlines()
  assert lines[0] == 'experiment = small_experiments.Small'
  assert len(lines) == len(saved['config']) + 1
  assert lines.index('num_layers = 4') < lines.index('task = small_experiments:Task')
  assert 'task.model.ffn.init = jax:normal.<locals>.init(stddev=0.02)' in lines
  texts = dict(line.split(' = ', 1) for line in lines[1:])
  settable = [path for path, value in saved['config'].items() if not (isinstance(value, dict) and 'symbol' in value)]
  again = resolve(Small, [f'{path}={texts[path]}' for path in settable])
  assert to_json(again)['config'] == saved['config']


def test_a_class_may_move_to_another_package():
  saved = {
    'experiment': 'a.B',
    'overrides': {},
    'config': {'task.adapter': {'symbol': 'spmd_tasks.tuning:LowRankAdapter'}},
  }
  assert checked_config(saved)['config'] == {'task.adapter': {'symbol': 'spmd_tasks.adapters:LowRankAdapter'}}
