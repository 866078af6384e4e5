"""Changes that make a run fit: the weakest of each setting, alone or together, each one compiled, within the limit."""

import pytest

from spmd_tasks.planning.search import changes_that_fit, levers
from tests.planning.formula_plans import GIB, Formula


def search(formula, *, can_offload=True, **settings):
  lines = []
  base = formula.plan_with(())
  assert not base['fits']
  formula.tried.clear()
  trials = changes_that_fit(
    formula.plan_with, formula.resolve, base, can_offload=can_offload, progress=lines.append, **settings
  )
  assert len(trials) == len(set(formula.tried))
  return trials, lines


def test_the_levers_of_dense1b_are_in_the_order_of_their_cost():
  formula = Formula()
  job, values = formula.resolve(())
  found = {lever.name: lever.options for lever in levers(job, values, can_offload=True)}
  assert list(found) == ['remat policy', 'microbatches', 'mesh', 'optimizer dtype', 'batch']
  policies = 'attention_and_ffn', 'attention', 'full', 'attention_offloaded'
  assert found['remat policy'] == tuple((f'remat_policy={policy}',) for policy in policies)
  assert [option[0] for option in found['microbatches']] == [
    f'task.learner.num_microbatches={count}' for count in (2, 4, 8, 16, 32, 64)
  ]
  assert found['mesh'] == (('ici_mesh_shape=1,4,8',), ('ici_mesh_shape=1,2,16',))
  assert found['batch'][0] == ('batch_size=256',)


@pytest.mark.parametrize(
  'present, remedies', [('attention', ['full']), ('attention_offloaded', ['full']), ('full', [])]
)
def test_without_a_memory_of_the_host_offloading_is_attention_and_no_remedy(present, remedies):
  job, values = Formula().resolve([f'remat_policy={present}'])
  options = [lever.options for lever in levers(job, values) if lever.name == 'remat policy']
  assert [option for each in options for (option,) in each] == [f'remat_policy={policy}' for policy in remedies]


def test_a_target_of_the_cpu_compiler_is_not_offered_the_memory_of_the_host():
  trials, _ = search(Formula(activations=40_000.0), can_offload=False, limit=9)
  assert trials[0].fits
  assert trials[0].setting[0] == 'remat_policy=full'  # the strongest
  assert not any('remat_policy=attention_offloaded' in trial.setting for trial in trials)


def test_a_pipeline_has_its_own_microbatches_and_schedule():
  job, values = Formula('pipeline.Dense70B').resolve(())
  options = next(lever.options for lever in levers(job, values) if lever.name == 'pipeline')
  assert options == (
    ('num_microbatches=16',),
    ('num_microbatches=32',),
    ('schedule=one_forward_one_backward', 'num_repeats=1'),
  )


def test_the_weakest_change_of_each_setting_is_found_and_the_fastest_comes_first():
  formula = Formula()  # 53.6 GiB on a chip with 15.75
  trials, lines = search(formula)
  fitting = [trial for trial in trials if trial.fits]
  assert fitting == trials[: len(fitting)]
  assert len(fitting) >= 2
  assert [trial.predicted_step_s for trial in fitting] == sorted(trial.predicted_step_s for trial in fitting)
  settings = {' '.join(trial.setting): trial for trial in trials}
  assert not any('batch_size' in setting for setting in settings)  # nothing else is learned
  assert settings['task.learner.num_microbatches=4'].fits
  assert not settings['task.learner.num_microbatches=2'].fits
  for trial in trials:
    assert trial.fits == (trial.peak_bytes <= 15.75 * GIB)
    assert trial.note
  assert any('trying 1 of at most 8: remat_policy=' in line for line in lines)
  assert any('does not fit: peak' in line for line in lines)


def test_settings_together_are_tried_where_none_alone_suffices():
  trials, _ = search(Formula(activations=40_000.0), limit=9)
  assert trials[0].fits
  assert len(trials[0].setting) == 2
  assert trials[0].setting[0] == 'remat_policy=attention_offloaded'  # the strongest
  assert 'num_microbatches' in trials[0].setting[1]
  assert 'on the device' in trials[0].note
  assert 'accumulated' in trials[0].note


def test_a_state_that_is_too_large_by_little_takes_another_dtype_and_no_microbatches():
  trials, _ = search(Formula(state=510.0, activations=10.0), limit=8)
  assert trials[0].fits
  assert trials[0].setting == ('task.learner.optimizer.momentum_dtype=bfloat16',)
  assert not any('microbatches' in override or 'remat' in override for trial in trials for override in trial.setting)


def test_the_limit_holds_and_nothing_that_fits_is_invented():
  trials, _ = search(Formula(state=5000.0), limit=4)
  assert len(trials) <= 4
  assert not any(trial.fits for trial in trials)


def test_an_impossible_setting_is_passed_over_and_costs_no_compilation():
  formula = Formula(refused='num_microbatches=4')
  trials, lines = search(formula)
  assert any('impossible: num_microbatches=4 is impossible' in line for line in lines)
  assert any(trial.fits and 'num_microbatches=8' in trial.setting[0] for trial in trials)


@pytest.mark.parametrize('wanted', [1, 2])
def test_the_search_ends_with_as_many_as_are_wanted(wanted):
  trials, _ = search(Formula(activations=900.0), wanted=wanted)
  settings = {tuple(part.partition('=')[0] for part in trial.setting) for trial in trials if trial.fits}
  assert len(settings) == wanted
