"""A teacher's log-probabilities are computed in microbatches, and placed and padded like the batch."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tasks import exit_codes
from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.origin import variables_from_folder
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.tuning.distillation import AskTeacher
from tests import binary
from tests.model_folders import write_llama

OVERRIDES = ('seq_len=24', 'batch_size=6', 'temperature=2.0')


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """A student and a teacher, whose logits are twice the student's."""
  student, teacher = (tmp_path_factory.mktemp(name) for name in ('student', 'teacher'))
  for folder in (student, teacher):
    write_llama(folder)
  weights = load_file(teacher / 'model.safetensors')
  save_file(weights | {'lm_head.weight': 2 * weights['lm_head.weight']}, teacher / 'model.safetensors')
  talk = [{'role': 'user', 'content': 'the cat'}, {'role': 'assistant', 'content': 'sat'}]
  (student / 'talks.jsonl').write_text((json.dumps({'messages': talk}) + '\n') * 3)
  return student, teacher


def job_of(folders, *overrides, name='finetune.FullDistill'):
  student, teacher = folders
  settings = [f'model={student}', f'teacher={teacher}', f'data={student / "talks.jsonl"}', *OVERRIDES, *overrides]
  settings += ['max_tokens=8'] if name == 'tune.Distill' else ['too_long=truncate']
  return resolve(name, settings).build()


def prepare(job, mesh_shape):
  """Returns the job's model, the hook after `prepare`, and a batch from the host."""
  model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[: int(np.prod(mesh_shape))]))
  hook = AskTeacher()
  hook.prepare(SimpleNamespace(job=job, experiment=job.experiment, model=model))
  return model, hook, next(job.train_input.make_iterator())


def test_log_probabilities_are_the_teacher_s_on_any_mesh(folders):
  job = job_of(folders, 'teacher_top_k=3', 'task.learner.num_microbatches=2', 'ici_mesh_shape=1,4,1')
  model, hook, batch = prepare(job, (1, 4, 1))  # 6 rows on 4 devices
  hook._variables = variables_from_folder(hook._model, open_folder(folders[1]))
  answer = hook.answer(hook.place(batch))
  for name, padded in model.input_layout.padded.items():
    assert (answer[name].shape, answer[name].sharding) == (padded.shape, padded.sharding)
  student = partition_job(job_of(folders), job.experiment.mesh_spec().build_abstract())
  logits = jax.jit(student.task.predict)(variables_from_folder(model, open_folder(folders[0])), batch)['logits']
  expected = np.asarray(jax.nn.log_softmax(2 * logits / 2.0))
  np.testing.assert_allclose(answer['teacher_log_probs'][:6], -np.sort(-expected)[..., :3], atol=1e-5)
  ids = np.asarray(answer['teacher_ids'])[:6]
  np.testing.assert_allclose(np.take_along_axis(expected, ids, -1), answer['teacher_log_probs'][:6], atol=1e-5)


@pytest.mark.parametrize(
  'name, overrides, message',
  [
    ('finetune.FullDistill', ('teacher=""',), 'FullDistill needs a teacher .* --set teacher=FOLDER'),
    ('finetune.FullDistill', ('teacher_top_k=440',), r'teacher_top_k = 440 must be in \[0, 440\)'),
    ('finetune.FullDistill', ('beta=1.5',), 'beta=1.5 and label_weight=0.0 must be from 0 to 1'),
    ('tune.Distill', ('method=dapo', 'kl_weight=0.1'), 'ignores method, kl_weight: remove'),
    ('tune.Distill', ('clip_low=0.3', 'sampler_cap=2.0'), 'ignores clip_low, sampler_cap: remove'),
  ],
)
def test_settings_that_distillation_cannot_use_are_refused(folders, name, overrides, message):
  with pytest.raises(UserError, match=message):
    job_of(folders, *overrides, name=name)


def test_a_teacher_of_another_vocabulary_is_refused(folders, tmp_path):
  config = json.loads((folders[1] / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(config | {'vocab_size': 441}))
  with pytest.raises(UserError, match=r"a vocabulary of 441 tokens: .* the model's vocabulary of 440"):
    prepare(job_of(folders, f'teacher={tmp_path}'), (1, 1, 1))


def test_a_teacher_with_other_tokens_is_refused(folders, tmp_path):
  (tmp_path / 'config.json').write_text((folders[1] / 'config.json').read_text())
  tokenizer = json.loads((folders[1] / 'tokenizer.json').read_text())
  turn = tokenizer['added_tokens'][0] | {'id': len(tokenizer['model']['vocab']), 'content': '<turn>'}
  tokenizer['added_tokens'].append(turn)
  (tmp_path / 'tokenizer.json').write_text(json.dumps(tokenizer))
  prepare(job_of(folders, f'teacher={tmp_path}'), (1, 1, 1))  # a token that only the teacher's templates write
  ids = tokenizer['model']['vocab']
  ids['sat'], ids['cat'] = ids['cat'], ids['sat']
  (tmp_path / 'tokenizer.json').write_text(json.dumps(tokenizer))
  with pytest.raises(UserError, match=rf"{tmp_path} has other tokens than the model: its token \d+ is '(sat|cat)'"):
    prepare(job_of(folders, f'teacher={tmp_path}'), (1, 1, 1))


@pytest.mark.slow
def test_a_job_learns_a_teacher_s_distributions_of_its_own_samples(folders, tmp_path):
  """The data have prompts without answers; the divergence of a step is computed on its samples."""
  (tmp_path / 'prompts.jsonl').write_text(''.join(json.dumps({'prompt': text}) + '\n' for text in ('the cat', 'a dog')))
  settings = [f'model={folders[0]}', f'teacher={folders[1]}', f'data={tmp_path / "prompts.jsonl"}', 'trackers=()']
  settings += ['batch_size=16', 'seq_len=16', 'max_tokens=8', 'num_rollout_slots=16', 'log_every_steps=1', 'beta=1.0']
  flags = [flag for setting in (*settings, 'learning_rate=1e-2', 'teacher_top_k=300') for flag in ('--set', setting)]
  directory = tmp_path / 'job'
  flags += ['--ici_mesh_shape', '1,4,2', '--job_log_dir', directory, '--num_train_steps', '32']
  assert binary.run_in_process('--exp', 'tune.Distill', '--mode', 'train', *flags) == exit_codes.OK
  lines = {line['step']: line for line in binary.metric_lines(directory)}
  assert lines[32]['divergence'] < 0.5 * lines[1]['divergence']
  assert lines[1]['sampler_mismatch_max'] < 1e-4
  assert 'reward' not in lines[1]
