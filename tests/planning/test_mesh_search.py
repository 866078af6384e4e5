"""--plan_search: the best mesh, microbatches and remat policy are found, what cannot fit is never compiled."""

import itertools

import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.planning import search as mesh_search
from spmd_tasks.planning.search import Setting, format_search, search_plans
from spmd_tasks.sharding._mesh_shapes import factorizations
from tests.planning.formula_plans import GIB, KEPT, Formula


@pytest.fixture
def states(monkeypatch):
  """The bytes of state by the formula of `Formula`, in place of abstract shapes of the model."""

  def use(formula):
    def state_bytes(job):
      _, data, mdl = job.experiment.ici_mesh_shape
      return formula.state / (data * mdl) * GIB

    monkeypatch.setattr(mesh_search, 'state_bytes', state_bytes)

  return use


def run(formula, num_devices=32, **settings):
  lines = []
  found = search_plans(
    formula.plan_with,
    formula.resolve,
    num_devices=num_devices,
    hbm_bytes=formula.hbm * GIB,
    can_offload=True,
    progress=lines.append,
    **settings,
  )
  return found, lines


def best_of_all(formula, num_devices):
  """The fastest plan that fits of every setting there is."""
  _, values = formula.resolve(())
  plans = []
  for ici, remat, count in itertools.product(factorizations(num_devices, 3), KEPT, (1, 2, 4, 8, 16)):
    plan = formula.plan_with(Setting(ici=ici, dcn=None, remat=remat, microbatches=count).overrides(values))
    plans += [plan['predicted_step_s']] if plan['fits'] else []
  formula.tried.clear()
  return min(plans)


def test_the_best_setting_is_found_with_a_fraction_of_the_compilations(states):
  formula = Formula(activations=500.0)
  states(formula)
  best = best_of_all(formula, 8)
  found, lines = run(formula, 8, limit=25)
  assert found.trials[0].predicted_step_s <= 1.05 * best
  assert len(formula.tried) == len(found.trials) <= 25
  assert [trial.rank for trial in found.trials] == sorted(trial.rank for trial in found.trials)
  assert any('trying 3 of at most 25' in line for line in lines)


def test_a_start_that_does_not_fit_leads_to_one_that_does(states):
  formula = Formula()
  states(formula)
  assert not formula.plan_with(())['fits']
  found, _ = run(formula, limit=8)
  assert found.trials[0].fits


@pytest.mark.parametrize(
  'present, can_offload, tried',
  [
    ('full', True, {'attention', 'attention_offloaded'}),
    ('full', False, {'attention'}),
    ('attention_offloaded', True, {'full'}),
    ('attention_offloaded', False, {'attention_and_ffn', 'full'}),
  ],
)
def test_the_memory_of_the_host_is_tried_where_there_is_one(present, can_offload, tried):
  job, _ = Formula().resolve(())
  setting = Setting(ici=(1, 8, 4), dcn=None, remat=present, microbatches=1)
  for needs_less in (False, True):
    neighbours = mesh_search._neighbours(setting, job, needs_less, can_offload)
    assert {neighbour.remat for neighbour in neighbours} - {present} == tried


def test_what_cannot_hold_the_state_is_never_compiled(states):
  formula = Formula(state=300.0, activations=20.0)  # every device holds some: replicas do not fit
  states(formula)
  found, _ = run(formula, limit=12)
  assert found.num_pruned > 0
  assert found.trials[0].fits
  assert all(override != 'ici_mesh_shape=2,4,4' for tried in formula.tried for override in tried)


def test_other_numbers_of_devices_start_from_the_nearest_mesh(states):
  formula = Formula(activations=500.0)
  states(formula)
  _, lines = run(formula, 64, limit=2)
  assert 'ici_mesh_shape=1,16,4' in lines[0]


def test_several_slices_keep_a_dcn_part(states):
  formula = Formula(activations=1.0)
  states(formula)
  found, lines = run(formula, 64, num_slices=2, limit=40)
  assert 'ici_mesh_shape=1,8,4 dcn_mesh_shape=2,1,1' in lines[0]
  assert any('dcn_mesh_shape=1,2,1' in trial.setting for trial in found.trials)
  _, values = formula.resolve(())
  setting = Setting(ici=(1, 8, 4), dcn=(1, 2, 1), remat='full', microbatches=2)
  assert setting.overrides(values) == (
    'ici_mesh_shape=1,8,4',
    'dcn_mesh_shape=1,2,1',
    'remat_policy=full',
    'task.learner.num_microbatches=2',
  )


def test_a_model_that_fits_nowhere_is_refused_in_one_sentence(states):
  formula = Formula(state=50_000.0)
  states(formula)
  with pytest.raises(UserError, match=r'need more than 15\.75 GiB for weights and optimizer state alone'):
    run(formula)


def test_the_ranking_is_a_table_that_says_what_was_left_out(states):
  formula = Formula(activations=500.0)
  states(formula)
  text = format_search(run(formula, 8, limit=4)[0])
  lines = text.splitlines()
  assert lines[0].split() == ['predicted', 'step', 'peak', 'setting']
  assert lines[1].startswith('1  ')
  assert '4 compiled; 0 settings refused' in lines[-1]
  assert 'the limit left others untried' in lines[-1]
