"""The search for settings: what fits is found, the fastest first; what cannot fit is never compiled; the limit holds.

The compiler is a formula of mesh, microbatches and remat policy, for lm.Dense1B on data 8 x mdl 4.
"""

import dataclasses
import functools
import itertools
import math
from types import SimpleNamespace

import pytest

from spmd_tasks.config import resolve as resolve_config
from spmd_tasks.config import to_json
from spmd_tasks.errors import UserError
from spmd_tasks.planning import search as search_module
from spmd_tasks.planning.search import MICROBATCHES, search_plans
from spmd_tasks.sharding import factorizations

GIB = 2.0**30
# By remat policy: the activations that are kept on the device, and the work with that of recomputing the others.
KEPT = {
  'none': (3.0, 1.0), 'dots': (2.0, 1.05), 'dots_no_batch': (1.0, 1.1), 'attention_and_ffn': (0.95, 1.15),
  'attention': (0.9, 1.2), 'full': (0.3, 1.33), 'attention_offloaded': (0.2, 1.35),
}  # fmt: skip
SHAPES = ('ici_mesh_shape', 'dcn_mesh_shape')


@functools.cache
def resolved(name):
  found = resolve_config(name, ('ici_mesh_shape=1,8,4',) if name == 'lm.Dense1B' else ())
  return found.build(), to_json(found)['config']


@dataclasses.dataclass(kw_only=True)
class Formula:
  """Plans an experiment; `tried` are the overrides that were planned. Sizes in GiB of all devices together."""

  name: str = 'lm.Dense1B'
  hbm: float = 15.75
  activations: float = 1700.0
  state: float = 14.0
  refused: str = '-'
  tried: list = dataclasses.field(default_factory=list)

  def resolve(self, overrides):
    if any(self.refused in override for override in overrides):
      raise UserError(f'{self.refused} is impossible.')
    job, values = resolved(self.name)
    changes = dict(override.split('=') for override in overrides)
    values = values | {path: type(values[path])(text) for path, text in changes.items() if path not in SHAPES}
    shapes = {path: tuple(map(int, text.split(','))) for path, text in changes.items() if path in SHAPES}
    return dataclasses.replace(job, experiment=dataclasses.replace(job.experiment, **shapes)), values

  def state_bytes(self, job):
    sizes = job.experiment.mesh_spec().build_abstract().shape
    return self.state / (sizes['data'] * sizes['mdl']) * GIB

  def plan_with(self, overrides):
    job, values = self.resolve(overrides)
    self.tried.append(overrides)
    sizes = job.experiment.mesh_spec().build_abstract().shape
    kept, work = KEPT[values['remat_policy']]
    microbatches = values[MICROBATCHES[0]]
    peak = self.state_bytes(job) + self.activations * GIB / math.prod(sizes.values()) * kept / microbatches
    gathering = 0.02 * sizes['data'] * microbatches / sizes['mdl']
    seconds = work + 0.05 * (sizes['mdl'] - 1) + gathering
    fits = peak <= self.hbm * GIB
    return {'fits': fits, 'peak_bytes': peak, 'predicted_step_s': seconds if fits else None}


@pytest.fixture
def search(monkeypatch):
  def run(formula, num_devices=32, *, can_offload=True, **settings):
    monkeypatch.setattr(search_module, 'state_bytes', formula.state_bytes)
    formula.tried.clear()
    lines = []
    trials, left_out = search_plans(
      formula.plan_with,
      formula.resolve,
      num_devices=num_devices,
      hbm_bytes=formula.hbm * GIB,
      can_offload=can_offload,
      progress=lines.append,
      **settings,
    )
    return lines, SimpleNamespace(trials=trials, left_out=left_out)

  return run


def best_of_all(formula, num_devices):
  """The fastest plan that fits of every setting there is."""
  plans = []
  for ici, remat, count in itertools.product(factorizations(num_devices, 3), KEPT, (1, 2, 4, 8, 16)):
    mesh = f'ici_mesh_shape={",".join(map(str, ici))}'
    plan = formula.plan_with((mesh, f'remat_policy={remat}', f'{MICROBATCHES[0]}={count}'))
    plans += [plan['predicted_step_s']] if plan['fits'] else []
  return min(plans)


def test_the_best_setting_is_found_with_a_fraction_of_the_compilations(search):
  formula = Formula(activations=500.0)
  best = best_of_all(formula, 8)
  lines, found = search(formula, 8, limit=25)
  assert found.trials[0].predicted_step_s <= 1.05 * best
  assert len(formula.tried) == len(found.trials) <= 25
  assert [trial.rank for trial in found.trials] == sorted(trial.rank for trial in found.trials)
  assert any('trying 3 of at most 25' in line for line in lines)
  assert '25 compiled; 0 settings refused' in found.left_out
  assert 'the limit left others untried' in found.left_out


def test_a_start_that_does_not_fit_leads_to_changes_that_do(search):
  formula = Formula()  # 53.6 GiB on a chip with 15.75
  lines, found = search(formula, limit=8, wanted=3)
  assert formula.tried[0] == ()  # the experiment as it is, which its plan has compiled
  fitting = [trial for trial in found.trials if trial.fits]
  assert fitting == found.trials[: len(fitting)]
  assert len(fitting) == 3
  tried = {trial.setting: trial.fits for trial in found.trials}
  assert (tried[f'{MICROBATCHES[0]}=2',], tried[f'{MICROBATCHES[0]}=4',]) == (False, True)
  assert any('does not fit: peak ' in line for line in lines)


def test_changes_together_are_tried_where_none_alone_suffices(search):
  _, found = search(Formula(activations=40_000.0), limit=12, wanted=1)
  assert found.trials[0].fits
  assert len(found.trials[0].setting) == 2


@pytest.mark.parametrize('can_offload', [True, False])
def test_the_memory_of_the_host_is_tried_where_there_is_one(search, can_offload):
  formula = Formula(activations=1.0)
  search(formula, 1, limit=40, can_offload=can_offload)
  tried = {override for overrides in formula.tried for override in overrides}
  assert ('remat_policy=attention_offloaded' in tried) == can_offload
  assert 'remat_policy=full' in tried


def test_a_pipeline_has_its_own_microbatches():
  space = search_module._Space(*resolved('pipeline.Dense70B'), True)
  own = space.start(512, 1)
  changed = {override for each in space.neighbours(own, True) for override in space.overrides(each)}
  assert f'num_microbatches={2 * dict(own.microbatches)["num_microbatches"]}' in changed


def test_what_cannot_hold_the_state_is_never_compiled(search):
  formula = Formula(state=300.0, activations=20.0)  # every device holds some: replicas do not fit
  _, found = search(formula, limit=12)
  assert ' 0 whose state' not in found.left_out
  assert found.trials[0].fits
  assert all(override != 'ici_mesh_shape=2,4,4' for tried in formula.tried for override in tried)


def test_an_impossible_setting_is_passed_over_and_costs_no_compilation(search):
  formula = Formula(refused='num_microbatches=2')
  lines, found = search(formula, limit=6)
  assert any('num_microbatches=2 is impossible' in line for line in lines)
  assert len(found.trials) == len(formula.tried) == 6
  assert '1 settings refused' in found.left_out


def test_a_model_that_fits_nowhere_is_refused_in_one_sentence(search):
  with pytest.raises(UserError, match=r'need more than 15\.75 GiB for weights and optimizer state alone'):
    search(Formula(state=50_000.0))
