"""Optuna chooses the jobs of a sweep: by their results, and the same ones after a kill."""

import dataclasses

import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.errors import UserError
from spmd_tasks.sweeps import by_optuna
from tests import binary
from tests.sweeps.small_sweeps import Shapes

optuna = pytest.importorskip('optuna')


def sweep(count=3, **settings):
  rates = optuna.distributions.FloatDistribution(0.01, 1.0, log=True)
  notes = optuna.distributions.CategoricalDistribution(('a', 'b'))
  return by_optuna({'learning_rate': rates, 'note': notes}, count, **{'metric': 'eval/valid/loss'} | settings)


class Chosen(Shapes):
  ici_mesh_shape = (1, 8, 1)

  def sweep(self):
    return sweep()


class OtherMetric(Chosen):
  def sweep(self):
    return sweep(1, metric='eval/valid/los')


class OtherSet(Chosen):
  def sweep(self):
    return sweep(1, metric='eval/test/loss')


def run(directory, *flags, exp='Chosen'):
  job = ('--exp', f'{__name__}.{exp}', '--mode', 'train', '--job_log_dir', directory)
  return binary.run_in_process(*job, *(flags or ('--sweep', 'all')))


def test_results_are_told_and_a_killed_sweep_continues_with_the_same_job(tmp_path, capfd):
  assert run(tmp_path) == exit_codes.OK
  storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / 'optuna.log')))
  trials = optuna.load_study(storage=storage, study_name='sweep').trials
  losses = [binary.column(tmp_path / f'trial_{i:04d}' / 'eval' / 'valid', 'loss')[6] for i in range(3)]
  assert [trial.value for trial in trials] == losses
  assert len({trial.params['learning_rate'] for trial in trials}) == 3
  best = f'trial_{np.argmin(losses):04d} is the best: eval/valid/loss = {min(losses):.4g} with learning_rate='
  assert best in capfd.readouterr().err
  assert run(tmp_path) == exit_codes.OK
  printed = capfd.readouterr().err
  assert 'spmd-tasks: job' not in printed
  assert best in printed
  number, killed = next(sweep(4).jobs(str(tmp_path)))  # asked for, and never told
  assert (number, killed.name) == (4, 'trial_0003')
  assert next(sweep(4).jobs(str(tmp_path))) == (number, killed)


@pytest.mark.parametrize(
  'changed',
  [
    {'direction': 'maximize'},
    {'metric': 'loss'},
    {'distributions': {'note': optuna.distributions.CategoricalDistribution(('a', 'c'))}},
    {'distributions': {'learning_rate': optuna.distributions.FloatDistribution(0.01, 1.0)}},
  ],
)
def test_a_study_is_not_continued_as_another_one(tmp_path, changed):
  _, begun = next(sweep().jobs(str(tmp_path)))
  changed_sweep = dataclasses.replace(sweep(), **changed)
  [name] = changed.get('distributions', changed)
  with pytest.raises(
    UserError, match=rf'^by_optuna\(\) has {name} .*, but the study in {tmp_path} has .*: change it back'
  ):
    next(changed_sweep.jobs(str(tmp_path)))
  assert next(sweep().jobs(str(tmp_path))) == (1, begun)
  wider = sweep().distributions | {'learning_rate': optuna.distributions.FloatDistribution(0.001, 2.0, log=True)}
  assert next(dataclasses.replace(sweep(), distributions=wider).jobs(str(tmp_path))) == (1, begun)


def test_a_metric_that_no_job_has_is_refused_with_those_that_it_has(tmp_path, capfd):
  assert run(tmp_path, exp='OtherMetric') == exit_codes.USAGE
  printed = capfd.readouterr().err
  assert f'which {tmp_path}/trial_0000 does not have: the nearest are eval/valid/loss' in printed
  assert run(tmp_path / 'other', exp='OtherSet') == exit_codes.USAGE
  assert "the metric 'eval/test/loss', but eval_inputs() has valid: write" in capfd.readouterr().err
  assert not (tmp_path / 'other').exists()


def test_a_single_job_cannot_be_chosen(tmp_path, capfd):
  assert run(tmp_path, '--sweep_index', 1) == exit_codes.USAGE
  assert '--mode train --sweep all runs them' in capfd.readouterr().err


def test_a_direction_is_one_of_two_words():
  with pytest.raises(UserError, match="direction 'min': write 'minimize' or 'maximize'"):
    sweep(direction='min')
