"""A researcher's file of 25 lines trains, evaluates, resumes bit for bit, is sharded and padded."""

import dataclasses
import io
from pathlib import Path
import re

import fiddle as fdl
import flax.linen as nn
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.programs.evaluator import Evaluator
from spmd_tasks.programs.preview import preview
from tests import binary
from tests.programs.plain_experiment import Shapes, batches, loss

NAME = 'tests.programs.plain_experiment.Shapes'
FLAGS = ('--exp', NAME, '--mode', 'train', '--set', 'log_every_steps=1', '--set', 'trackers=()')


def test_the_file_has_at_most_25_lines():
  lines = Path('tests/programs/plain_experiment.py').read_text().splitlines()
  assert len([line for line in lines if line]) <= 25


def test_it_trains_evaluates_and_resumes_bit_for_bit(tmp_path, capsys):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert binary.run_in_process(*FLAGS, '--job_log_dir', whole) == 0
  assert '3,300 of them in kernels without split dims, sharded on their largest dim over' in capsys.readouterr().err
  for steps in (13, 40):  # 20 batches are a pass
    assert binary.run_in_process(*FLAGS, '--job_log_dir', parts, '--num_train_steps', steps) == 0
  assert binary.column(parts, 'loss') == binary.column(whole, 'loss')
  assert binary.column(whole, 'top1')[40] > 0.9
  assert binary.column(parts / 'eval' / 'valid', 'loss')[40] == binary.column(whole / 'eval' / 'valid', 'loss')[40]


def test_another_mesh_gives_the_same_numbers(tmp_path):
  losses = []
  for shape in ('8,1,1', '1,4,2'):
    flags = ('--set', f'ici_mesh_shape={shape}', '--num_train_steps', 6, '--job_log_dir', tmp_path / shape)
    assert binary.run_in_process(*FLAGS, *flags) == 0
    losses.append([*binary.column(tmp_path / shape, 'loss').values()])
  np.testing.assert_allclose(losses[1:], [losses[0]], rtol=1e-5)


@pytest.mark.parametrize('name, rows', [('embed', (32, 10)), ('mlp', (30, 10)), ('None', (30, 10))])
def test_the_largest_dim_of_a_plain_kernel_is_split_as_the_experiment_says(name, rows):
  model = partition_job(resolve(NAME, [f'default_split_dim={name}']).build())
  assert model.padded_state.weights['Dense_0']['kernel'].shape == rows
  assert str(model.state_specs.weights['Dense_0']['kernel'][0]) == {'embed': 'data', 'mlp': 'mdl'}.get(name, name)


def test_fields_of_built_objects_can_be_set():
  job = resolve(NAME, ['task.learner.clip_global_norm=0.5', 'task.eval_with_ema=true', 'task.learner.ema_decay=0.9'])
  assert job.build().task.learner.clip_global_norm == 0.5
  with pytest.raises(ValueError, match='write FromOptax'):
    resolve(NAME, ['task.learner.optimizer.learning_rate=0.1']).build()


class Yields(Shapes):
  """Its input is a generator of its own, and its eval set a config of one."""

  def train_input(self):
    for label in np.random.default_rng(self.seed).integers(0, 10, (3, 60)):
      yield {'image': np.eye(10)[label], 'label': label}

  def eval_inputs(self):
    return {'valid': fdl.Config(batches, seed=1)}


def test_a_generator_is_asked_for_again_and_the_arguments_of_its_function_can_be_set():
  job = resolve(Yields, ['eval_inputs.valid.seed=0']).build()
  two = [next(job.train_input.make_iterator())['label'] for _ in range(2)]
  np.testing.assert_array_equal(*two)
  for _ in range(2):
    first = next(job.eval_inputs['valid'].make_iterator())
    np.testing.assert_array_equal(first['label'], next(batches(0))['label'])


@pytest.mark.parametrize('mode', ['decode_once', 'decode', 'serve'])
def test_it_is_not_asked_for_prompts(mode, tmp_path, capsys):
  assert binary.run_in_process('--exp', NAME, '--mode', mode, '--job_log_dir', tmp_path) == exit_codes.USAGE
  sentence = capsys.readouterr().err
  assert 'the model generates no text, because its batches have image, label and no `ids`' in sentence
  assert 'decode_input' not in sentence
  assert 'tokenizer' not in sentence


class Unnamed(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(10)(x.reshape(len(x), -1))


class TakesX(Shapes):
  """Its model's argument has the name of no entry of the batch."""

  def task(self):
    return dataclasses.replace(super().task(), model=Unnamed())


def test_an_argument_that_is_no_entry_is_named_beside_the_entries():
  with pytest.raises(UserError, match=r'Unnamed\(x\), .* whole batch because no entry \(image, label\) is named x'):
    partition_job(resolve(f'{__name__}.TakesX', []).build())


EVAL_BATCHES = {
  'width': {'image': np.zeros((4, 9)), 'label': np.zeros(4, int)},
  'entry': {'image': np.zeros((4, 10, 10, 1))},
  'size': {'image': np.zeros((4, 10, 10, 1)), 'label': np.zeros(4, int)},
}
TRACED: list[int] = []  # the rows of each batch for which the loss is traced


def traced_loss(logits, batch):
  TRACED.append(len(logits))
  return loss(logits, batch)


class OtherEvals(Shapes):
  other: str = 'size'

  def task(self):
    return dataclasses.replace(super().task(), loss=traced_loss)

  def eval_inputs(self):
    return {'valid': batches(1), self.other: [EVAL_BATCHES[self.other]]}


class OneBatch(Shapes):
  def train_input(self):
    return next(batches(0))


@pytest.mark.parametrize(
  'name, words',
  [
    ('width', r"eval_inputs.width has 'image' \[4, 9\], train_input \[60, 10, 10, 1\] .*ScopeParamShapeError"),
    ('entry', r"eval_inputs.entry has no 'label', which train_input has .*KeyError: 'label'"),
  ],
)
def test_an_eval_set_that_the_model_does_not_take_is_refused_before_the_first_step(name, words, tmp_path, capsys):
  job = ('--exp', f'{__name__}.OtherEvals', '--mode', 'train', '--job_log_dir', tmp_path / 'job')
  assert binary.run_in_process(*job, '--set', f'other={name}') == exit_codes.USAGE
  assert re.search(words, capsys.readouterr().err)
  assert not (tmp_path / 'job').exists()


def test_only_eval_sets_with_other_batches_are_traced_before_the_first_step_and_only_once(tmp_path):
  job = resolve(OtherEvals).build()
  evaluator = Evaluator(job, partition_job(job), tmp_path)
  TRACED.clear()
  evaluator.check()
  assert TRACED == [4]
  evaluator.compile()
  assert TRACED == [4, 60]


def test_a_single_batch_is_refused():
  with pytest.raises(UserError, match=r'train_input is a dict, a single batch: return a list of batches, \[batch\]'):
    partition_job(resolve(OneBatch).build())


class NotFinite(Shapes):
  def train_input(self):
    return [{'image': np.array([[0.5] * 9, [1.0] * 8 + [np.nan]]), 'label': np.array([3, 1]), 'scale': np.float64(2)}]


def test_a_preview_of_arrays_shows_their_ranges_and_first_values():
  out = io.StringIO()
  assert preview(resolve(NotFinite).build(), 3, out) == exit_codes.OK
  assert out.getvalue() == (
    'the arrays of the first batch:\n'
    'image  float32[2, 9]  min 0.5  mean 0.73529  max 1  1 not finite\n'
    'label  int32[2]  min 1  mean 2  max 3\n'
    'scale  float32[]  min 2  mean 2  max 2\n'
    '--- 1: row 0\nimage  0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...\nlabel  3\n'
    '--- 2: row 1\nimage  1, 1, 1, 1, 1, 1, 1, 1, ...\nlabel  1\n'
    '--- 3: row 0\nimage  0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...\nlabel  3\n'
  )
