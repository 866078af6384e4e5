"""Which settings may change when a job is resumed."""

import json

import optax
import pytest
from small_experiments import Small

from spmd_tasks.config import resolve, to_json
from spmd_tasks.config.changes import refuse_changed_config
from spmd_tasks.learning import Learner
from spmd_tasks.programs.job_directory import has_trained


@pytest.fixture
def job_log_dir(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(to_json(resolve('synthetic.Tiny'))))
  (tmp_path / 'checkpoints' / 'checkpoint_00000010').mkdir(parents=True)
  return tmp_path


@pytest.mark.parametrize(
  'override, in_train, in_eval',
  [
    ('seed=1', 'refused', 'free'),
    ('task.learner.clip_global_norm=0.5', 'refused', 'free'),
    ('model_dims=64', 'refused', 'refused'),
    ('task.loss.z_loss_weight=0', 'refused', 'refused'),
    ('ici_mesh_shape=1,2,4', 'free', 'free'),
    ('checkpoint_every=7', 'free', 'free'),
    ('task.learner.max_consecutive_skips=2', 'free', 'free'),
  ],
)
def test_a_change_of_the_numbers_is_refused(job_log_dir, override, in_train, in_eval):
  config = to_json(resolve('synthetic.Tiny', [override]))
  for mode, verdict in (('train', in_train), ('eval', in_eval)):
    if verdict == 'free':
      refuse_changed_config(job_log_dir, config, mode=mode)
    else:
      with pytest.raises(ValueError, match=rf'begun with another config:\n.*{override.partition("=")[0][:4]}'):
        refuse_changed_config(job_log_dir, config, mode=mode)


class WithOptax(Small):
  """Has an optimizer without fields, and so a config of 1.5 kB for the functions that it captured."""

  learning_rate: float = 0.01

  def task(self):
    return Learner(optimizer=optax.adamw(self.learning_rate))


def test_a_change_inside_a_value_without_fields_names_the_field_of_the_experiment(job_log_dir):
  (job_log_dir / 'config.json').write_text(json.dumps(to_json(resolve(WithOptax))))
  changed = to_json(resolve(WithOptax, ['learning_rate=0.001', 'num_train_steps=80']))
  with pytest.raises(ValueError) as error:
    refuse_changed_config(job_log_dir, changed, mode='train')
  assert str(error.value).splitlines()[1:3] == [
    '  learning_rate: 0.01 -> 0.001',
    '  task.optimizer.factory: ...update=optax:scale.<locals>.update_fn(step_size=-0.01... -> '
    '...update=optax:scale.<locals>.update_fn(step_size=-0.001...',
  ]
  free = to_json(resolve(WithOptax, ['num_layers=3', 'num_train_steps=80']))
  refuse_changed_config(job_log_dir, free, mode='train')  # nothing reads num_layers


def test_a_new_field_that_is_off_is_not_a_change(job_log_dir):
  config = to_json(resolve('synthetic.Tiny'))
  off = {'task.new': None, 'train_input.newer': False}
  refuse_changed_config(job_log_dir, {**config, 'config': config['config'] | off}, mode='train')
  with pytest.raises(ValueError, match='new: absent -> 0'):
    refuse_changed_config(job_log_dir, {**config, 'config': config['config'] | {'task.new': 0.5}}, mode='train')


def test_a_pipeline_may_change_its_stages_and_schedule_but_not_its_microbatches(job_log_dir):
  (job_log_dir / 'config.json').write_text(json.dumps(to_json(resolve('pipeline.StdlibTiny'))))
  free = ['ici_mesh_shape=1,2,2,2', 'schedule=circular', 'num_repeats=2']
  refuse_changed_config(job_log_dir, to_json(resolve('pipeline.StdlibTiny', free)), mode='train')
  with pytest.raises(ValueError, match='num_microbatches: 8 -> 16'):
    refuse_changed_config(job_log_dir, to_json(resolve('pipeline.StdlibTiny', ['num_microbatches=16'])), mode='train')


@pytest.mark.parametrize(
  'path, verdict',
  [
    ('task.train.learner.optimizer.beta1', 'refused'),
    ('task.model.lm_tpl.vocab_size', 'refused'),
    ('train_input.num_infeed_hosts', 'refused'),
    ('train_input.infeed_host_index', 'free'),  # each process has its own
    ('task.train.num_train_steps', 'free'),
    ('task.model.lm_tpl.softmax_tpl.ici_mesh_shape', 'free'),
  ],
)
def test_pax_fields_that_change_no_numbers_may_change(job_log_dir, path, verdict):
  saved = to_json(resolve('synthetic.Tiny'))
  changed = saved | {'config': saved['config'] | {path: 1}}
  (job_log_dir / 'config.json').write_text(json.dumps(saved | {'config': saved['config'] | {path: 0}}))
  if verdict == 'free':
    refuse_changed_config(job_log_dir, changed, mode='train')
  else:
    with pytest.raises(ValueError, match=f'{path}: 0 -> 1'):
      refuse_changed_config(job_log_dir, changed, mode='train')


def test_jax_settings_that_change_numbers_may_not_change(job_log_dir):
  config = to_json(resolve('synthetic.Tiny'))
  (job_log_dir / 'config.json').write_text(json.dumps(config | {'environment': {'jax_enable_x64': False}}))
  refuse_changed_config(job_log_dir, config | {'environment': {'jax_enable_x64': False, 'a_new_one': 1}}, mode='train')
  refuse_changed_config(job_log_dir, config, mode='train')
  for mode in ('train', 'eval'):
    with pytest.raises(ValueError, match=r"jax_enable_x64 of JAX's settings: False -> True"):
      refuse_changed_config(job_log_dir, config | {'environment': {'jax_enable_x64': True}}, mode=mode)


def test_a_job_has_trained_once_it_has_a_checkpoint(job_log_dir):
  assert has_trained(job_log_dir)
  (job_log_dir / 'checkpoints' / 'checkpoint_00000010').rmdir()
  assert not has_trained(job_log_dir)
