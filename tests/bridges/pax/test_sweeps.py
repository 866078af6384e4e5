"""What a Pax experiment tunes becomes a sweep: `pg.oneof`, `automl.parameter_sweep` and sub-experiments."""

import sys

import pytest

from spmd_tasks.config.resolution import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.sweeps.jobs import jobs_of
from tests.bridges.pax.conftest import PAX_EXPERIMENTS

pytestmark = pytest.mark.slow  # the import of Paxml


@pytest.fixture(scope='module')
def dense():
  sys.path.insert(0, str(PAX_EXPERIMENTS))
  from pax_lab.dense_lm import DenseLm

  yield DenseLm
  sys.path.remove(str(PAX_EXPERIMENTS))


def overrides_of(pax_class):
  return {job.name: dict(text.split('=') for text in job.overrides) for job in jobs_of(resolve(pax_class).experiment)}


def test_each_choice_is_a_job_and_an_override(dense):
  import pyglove as pg

  class Tuned(dense):
    LEARNING_RATE = pg.oneof([0.1, 0.01])
    NUM_LAYERS = pg.oneof([1, 2], name='layers')

  assert list(overrides_of(Tuned)) == [
    f'LEARNING_RATE={rate},NUM_LAYERS={layers}' for rate in (0.1, 0.01) for layers in (1, 2)
  ]
  first, third = resolve(Tuned), resolve(Tuned, ['LEARNING_RATE=0.01'])
  assert [each.parts['task'].train.learner.optimizer.learning_rate for each in (first, third)] == [0.1, 0.01]
  assert first.name.endswith('.Tuned')


def test_max_num_trials_of_search_bounds_the_sweep(dense):
  from paxml import automl
  import pyglove as pg

  class Tuned(dense):
    LEARNING_RATE = pg.oneof([0.1, 0.01, 0.001])

    def search(self):
      return automl.hyperparameter_tuning(metric=automl.Metric.train('loss'), max_num_trials=2)

  assert list(overrides_of(Tuned)) == ['LEARNING_RATE=0.1', 'LEARNING_RATE=0.01']


def test_rows_of_a_parameter_sweep_are_jobs(dense):
  from paxml import automl

  class Base(dense):
    pass

  swept = automl.parameter_sweep([('LEARNING_RATE', 'BATCH_SIZE'), (0.1, 16), (0.2, 32)])(Base)
  assert overrides_of(swept) == {
    'LEARNING_RATE=0.1,BATCH_SIZE=16': {'LEARNING_RATE': '0.1', 'BATCH_SIZE': '16'},
    'LEARNING_RATE=0.2,BATCH_SIZE=32': {'LEARNING_RATE': '0.2', 'BATCH_SIZE': '32'},
  }


def test_sub_experiments_that_differ_in_plain_attributes_are_jobs(dense):
  class Both(dense):
    def sub_experiments(self):
      return {'deep': Deep, 'shallow': type(self)}

  class Deep(Both):
    NUM_LAYERS = 3

  assert overrides_of(Both) == {'deep': {'NUM_LAYERS': '3'}, 'shallow': {}}

  class Other(Both):
    def task(self):
      return super().task()

  Both.sub_experiments = lambda self: {'other': Other}
  with pytest.raises(UserError, match=r"sub-experiment 'other' of Both is .*Other, which differs in more than numbers"):
    overrides_of(Both)


def test_what_cannot_be_listed_is_refused(dense):
  import pyglove as pg

  class Tuned(dense):
    LEARNING_RATE = pg.floatv(0.1, 1.0)

  with pytest.raises(UserError, match=r'Tuned\.LEARNING_RATE = .* is not a list of choices: write pg\.oneof'):
    resolve(Tuned)
  with pytest.raises(UserError, match='DenseLm has no sweep'):
    overrides_of(dense)
