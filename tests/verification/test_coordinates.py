"""The claim `coordinates` holds for muP, dense and with experts, and names what is wrong in planted mistakes."""

import dataclasses

import fiddle as fdl
import jax
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.learning import AdamW
from spmd_tasks.recipes import MoeLanguageModel, SyntheticLanguageModel
from spmd_tasks.recipes.ladder import Ladder
from spmd_tasks.sharding.weights import leaf_name
from spmd_tasks.verification import Bench
from spmd_tasks.verification._coordinate_claims import (
  _growths,
  _overrides,
  _Sizes,
  _verdict,
  coordinate_cases,
  parse_widths,
)
from tests.runtime.loss_curves import source_of

WIDTHS = (16, 128)


class Dense(SyntheticLanguageModel):
  mup_base_width = 32
  vocab_size = 64
  model_dims = 16
  num_layers = 2
  num_heads = 2
  num_kv_heads = 1
  hidden_dims = 32
  seq_len = 8
  batch_size = 8
  num_train_steps = 20
  learning_rate = 1e-2


class WrongFanIn(Dense):
  """`down` starts as if it had as many inputs at every width."""

  def ffn(self):
    return fdl.copy_with(super().ffn(), down_init_scale=self.hidden_dims / 32)


class NoOutputMultiplier(Dense):
  def task(self):
    task = super().task()
    task.model.embedding.logits_multiplier = 1.0
    return task


class Experts(Dense, MoeLanguageModel):
  num_experts = 4
  num_layers = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneAtFullRate(AdamW):
  """The learning rate of `kernel` does not follow its fan-in."""

  kernel: str

  def _width_factors(self, weight_specs):
    factors = super()._width_factors(weight_specs)
    return jax.tree_util.tree_map_with_path(
      lambda path, factor: 1.0 if self.kernel in leaf_name(path) else factor, factors
    )


def unscaled(kernel):
  """The method `optimizer` of an experiment with OneAtFullRate."""

  def optimizer(self):
    adam = fdl.copy_with(SyntheticLanguageModel.optimizer(self))
    fdl.update_callable(adam, OneAtFullRate)
    adam.kernel = kernel
    return adam

  return optimizer


class TwoMistakes(WrongFanIn):
  optimizer = unscaled('ffn/up')


class UnscaledRouter(Experts):
  optimizer = unscaled('router')


class TinyLadder(Ladder):
  depth = 2
  width_per_layer = 8
  head_dim = 8


def verdict_of(experiment, widths=WIDTHS):
  bench = Bench(source_of(experiment), num_devices=1, widths=widths)
  [case] = coordinate_cases(bench)
  verdict = case.decide(bench)
  bench.close()
  return verdict


@pytest.mark.parametrize(
  'experiment', [Dense, pytest.param(Experts, marks=pytest.mark.exhaustive)], ids=lambda cls: cls.__name__
)
def test_mup_holds(experiment):
  verdict = verdict_of(experiment)
  assert verdict.status == 'held', verdict


@pytest.mark.parametrize(
  'experiment, leaf, when',
  [
    pytest.param(NoOutputMultiplier, 'embedding/attend', 'start', marks=pytest.mark.exhaustive),
    pytest.param(UnscaledRouter, 'stack/layers/ffn/router/kernel', 'weight', marks=pytest.mark.exhaustive),
  ],
  ids=lambda value: getattr(value, '__name__', ''),
)
def test_a_planted_mistake_is_found_and_named(experiment, leaf, when):
  verdict = verdict_of(experiment)
  assert verdict.status == 'BROKEN', verdict
  assert (verdict.failure['leaf'], verdict.failure['when']) == (leaf, when)
  assert verdict.failure['exponent'] > 0.25
  assert leaf in verdict.detail


def test_of_two_mistakes_the_start_is_named_first():
  bench = Bench(source_of(TwoMistakes), num_devices=1, widths=WIDTHS)
  growths = _growths([_Sizes.measure(bench, width) for width in WIDTHS], WIDTHS)
  bench.close()
  worst = {
    when: max((growth for growth in growths if growth.when == when), key=lambda growth: growth.excess)
    for when in ('start', 'weight')
  }
  assert (worst['start'].name, worst['weight'].name) == ('stack/layers/ffn/down', 'stack/layers/ffn/up/kernel')
  assert min(growth.exponent for growth in worst.values()) > 0.25
  verdict = _verdict(growths, WIDTHS)
  assert verdict.status == 'BROKEN', verdict
  assert (verdict.failure['leaf'], verdict.failure['when']) == ('stack/layers/ffn/down', 'start')
  assert 'stack/layers/ffn/down' in verdict.detail


def test_only_the_widths_of_a_ladder_change():
  """Its batch and steps would follow from them."""
  values = source_of(TinyLadder).values
  changed = dict(override.split('=') for override in _overrides(values, 64))
  assert {name: int(value) / values[name] for name, value in changed.items() if int(value) != values[name]} == {
    'model_dims': 4,
    'num_heads': 4,
    'hidden_dims': 4,
  }
  wide = resolve(TinyLadder, [f'{name}={value}' for name, value in changed.items()]).experiment
  assert (wide.batch_size, wide.num_train_steps) == (values['batch_size'], values['num_train_steps'])


@pytest.mark.parametrize('text', ['64', '64,64', '64,x', '0,64', ''])
def test_wrong_widths_are_refused(text):
  with pytest.raises(UserError, match='must be two different positive numbers or more'):
    parse_widths(text)
