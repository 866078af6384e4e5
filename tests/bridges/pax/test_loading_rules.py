"""`task.train.init_from_checkpoint_rules` loads variables from checkpoints of Paxml and of this package."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.bridges.pax import open_pax_checkpoint
from tests.bridges.pax.test_checkpoints import real  # noqa: F401  a fixture

pytestmark = pytest.mark.exhaustive


def train(run_pax, name, job, other, num_steps):
  flags = ('--exp', f'pax_cases.warm_start.{name}', '--mode', 'train', '--job_log_dir', job, '--num_fake_devices', 8)
  flags += ('--num_train_steps', num_steps, '--set', 'eval_every_steps=100', '--set', 'trackers=()')
  return run_pax(*flags, env={'OTHER_JOB': str(other)})


def saved(job, step):
  return ocp.PyTreeCheckpointHandler().restore(job / 'checkpoints' / f'checkpoint_{step:08d}' / 'state')


def at(tree, name):
  for part in name.split('.'):
    tree = tree[part]
  return np.asarray(tree)


@pytest.mark.filterwarnings('ignore:Sharding info not provided when restoring')
def test_rules_load_variables_and_optimizer_state(run_pax, real, tmp_path):  # noqa: F811
  """A second job loads all of the first: the optimizer's count has Paxml's 3 steps and one of each job."""
  finished = train(run_pax, 'SomeWeights', tmp_path / 'some', real, 1)
  assert finished.returncode == 0, finished.stderr
  assert 'starting with ' in finished.stderr
  stored = open_pax_checkpoint(real).arrays
  state = saved(tmp_path / 'some', 1)
  layer = 'transformer.repeat.sub.x_layers_0.ff_layer.ffn_layer1'

  def theirs(name):
    return np.asarray(stored[name].store.read().result())

  def ours(name):
    return at(state['weights']['lm'], name)

  softmax = 'softmax.logits_ffn.linear.w'
  np.testing.assert_array_equal(ours(softmax), theirs(f'opt_states_0.no_prefix_4.ema.params.lm.{softmax}'))
  np.testing.assert_array_equal(ours(f'{layer}.linear.w'), theirs(f'mdl_vars.params.lm.{layer}.linear.w'))
  for ignored in (f'{layer}.bias.b', 'softmax.logits_ffn.bias.b', 'final_ln.bias'):
    assert not ours(ignored).any()

  for job, other, num_steps in (('all', real, 4), ('again', tmp_path / 'all', 5)):
    finished = train(run_pax, 'Everything', tmp_path / job, other, num_steps)
    assert finished.returncode == 0, finished.stderr
  state = saved(tmp_path / 'again', 5)
  assert state['step'] == 5
  name = f'lm.{softmax}'
  np.testing.assert_array_equal(at(state['weights'], name), theirs(f'mdl_vars.params.{name}'))
  assert at(state['learner']['opt_state'], '0.no_prefix.2.count') == 5


@pytest.mark.parametrize(
  'name, words',
  [
    ('Misspelled', "['params/lm/sofmax/(.*)']"),
    ('Missing', "'params/encoder/logits_ffn/bias/b' and 1 others"),
  ],
)
def test_rules_that_do_not_fit_are_refused(run_pax, real, tmp_path, name, words):  # noqa: F811
  finished = train(run_pax, name, tmp_path / 'job', real, 1)
  assert finished.returncode == exit_codes.USAGE
  assert words in finished.stderr
