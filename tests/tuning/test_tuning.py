"""Jobs that tune a folder on conversations and pairs of answers: previews, references, steps and restarts."""

import io
import json

from etils import epath
import numpy as np
import pytest
import scipy.special

from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.origin import state_from_folder
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.programs import preview
from spmd_tasks.tuning import LowRankTuning, PreferenceTuning
from spmd_tasks.tuning.references import compute_references, name_references
from tests.binary import column, copy_at, run_in_process
from tests.model_folders import write_llama

TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
  "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
  '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
SMALL = ('seq_len=64', 'batch_size=4', 'trackers=()', 'log_every_steps=1', 'prefetch_batches=1')
SCHEDULE = tuple(f'task.learner.optimizer.learning_rate.{name}' for name in ('warmup_steps=0', 'total_steps=600'))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('model')
  write_llama(path, 'byte_level', chat_template=TEMPLATE)
  rows = [('the cat', 'sat'), ('a dog', 'ate that'), ('x', 'é漢'), ('the hat', 'and the mat ' * 3)]
  talks = [[{'role': 'user', 'content': a}, {'role': 'assistant', 'content': b}] for a, b in rows]
  lines = [json.dumps({'messages': talk}) + '\n' for talk in talks]
  (path / 'talks.jsonl').write_text(''.join(lines))
  pairs = [{'prompt': a, 'chosen': b, 'rejected': f' {b[::-1]} on'} for a, b in rows * 3]
  (path / 'pairs.jsonl').write_text(''.join(json.dumps(pair) + '\n' for pair in pairs))
  return path


def job_of(name, folder, data, *overrides):
  return resolve(name, [f'model={folder}', f'data={folder / data}', *SMALL, *overrides]).build()


class Terminal(io.StringIO):
  """A stream that claims to be a terminal."""

  def isatty(self):
    return True


def test_a_preview_shows_the_learned_tokens(folder, monkeypatch):
  monkeypatch.delenv('NO_COLOR', raising=False)
  job = job_of('finetune.FullSft', folder, 'talks.jsonl', 'train_input.shuffle=False', 'train_input.num_epochs=1')
  plain, colored = io.StringIO(), Terminal()
  assert preview.preview(job, 2, plain) == preview.preview(job, 2, colored) == 0
  assert '\x1b' not in plain.getvalue()
  assert plain.getvalue().startswith('--- 1: row 0, segment 1, ')
  assert '<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n«sat<|im_end|>»\n' in plain.getvalue()
  assert plain.getvalue().count('--- ') == 2
  assert '\x1b[1;32msat<|im_end|>\x1b[0m' in colored.getvalue()
  monkeypatch.setenv('NO_COLOR', '1')
  again = Terminal()
  preview.preview(job, 2, again)
  assert again.getvalue() == plain.getvalue()


def test_references_of_packed_pairs_are_those_of_single_pairs(folder, tmp_path):
  """The packed pairs are on two devices, the single pairs on one."""
  directory = epath.Path(tmp_path / 'job')
  settings = ('too_long=skip', 'seq_len=44', f'eval_data={folder / "pairs.jsonl"}', 'ici_mesh_shape=1,2,1')
  job = name_references(job_of('finetune.FullDpo', folder, 'pairs.jsonl', *settings), directory)
  model = partition_job(job, mesh_of(job))
  state = state_from_folder(model, open_folder(folder), 0)
  beats = []
  lines = compute_references(job, model, state, 0, directory, on_batch=lambda: beats.append(1))
  assert len(lines) == 2
  assert beats
  references = np.load(directory / 'reference' / 'train_input.npy')
  np.testing.assert_array_equal(references, np.load(directory / 'reference' / 'eval_valid.npy'))
  about = json.loads((directory / 'reference' / 'train_input.json').read_text())
  assert about['num_pairs'] == 12
  assert 0 < about['num_left_out'] == np.isnan(references[:, 0]).sum() < 12
  expected = log_probs_of_single_pairs(job, model, state)
  np.testing.assert_allclose(references, expected, rtol=2e-5)
  # A resumed job reads the files, and refuses files that are damaged or belong to other pairs.
  assert compute_references(job, model, state, 3, directory, on_batch=lambda: None) == []
  other = name_references(job_of('finetune.FullDpo', folder, 'pairs.jsonl', 'seq_len=45', 'too_long=skip'), directory)
  with pytest.raises(ValueError, match=r'of other pairs \(seq_len changed\)'):
    compute_references(other, model, state, 3, directory, on_batch=lambda: None)
  path = directory / 'reference' / 'train_input.npy'
  path.write_bytes(path.read_bytes()[:-4] + b'abcd')
  with pytest.raises(ValueError, match=r'train_input\.npy, .* digest has changed.*: put it back'):
    compute_references(job, model, state, 3, directory, on_batch=lambda: None)
  path.unlink()
  with pytest.raises(ValueError, match='cannot be read'):
    compute_references(job, model, state, 3, directory, on_batch=lambda: None)


def mesh_of(job):
  import jax

  return job.experiment.mesh_spec().build(jax.devices()[: np.prod(job.experiment.ici_mesh_shape)])


def log_probs_of_single_pairs(job, model, state):
  """Computes the references from the logits of one text at a time, float32 [N, 2]; NaN if a pair is too long."""
  import jax

  from spmd_tasks.inputs.text import Block
  from spmd_tasks.tuning.record_files import Record

  encoder = job.train_input.without_reference().block_encoder()
  source = job.train_input.source.open()
  weights = model.to_canonical(state).weights
  references = np.full((len(source), 2), np.nan, np.float32)
  predict = jax.jit(lambda weights, ids: job.task.predict({'params': weights}, {'ids': ids})['logits'])
  weights = jax.device_put(jax.tree.map(np.asarray, weights))
  for index in range(len(source)):
    block = source[index]
    assert isinstance(block, Block)
    assert isinstance(block.documents[0][0], Record)
    tokens = encoder.encode(block)
    for answer, (start, end) in enumerate(zip((0, *tokens.ends), tokens.ends)):
      ids = np.zeros((1, 44), np.int32)
      ids[0, : end - start] = tokens.ids[start:end]
      log_probs = scipy.special.log_softmax(np.asarray(predict(weights, ids))[0, : end - start], axis=-1)
      chosen = np.take_along_axis(log_probs, tokens.labels[start:end, None], axis=1)[:, 0]
      references[index, answer] = (chosen * tokens.arrays['weights'][start:end]).sum()
  return references


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, data', [('LoraDpo', 'pairs'), pytest.param('FullSft', 'talks', marks=pytest.mark.exhaustive)]
)
def test_a_job_learns_and_resumes_exactly(name, data, folder, tmp_path):
  settings = [f'model={folder}', f'data={folder}/{data}.jsonl', f'eval_data={folder}/{data}.jsonl', *SMALL]
  settings += ['learning_rate=3e-3', 'ici_mesh_shape=1,4,2', 'checkpoint_every=3', *SCHEDULE]
  flags = [
    '--exp',
    f'finetune.{name}',
    '--mode',
    'train',
    *(word for setting in settings for word in ('--set', setting)),
  ]
  flags += ['--num_train_steps', 6, '--job_log_dir']
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert run_in_process(*flags, whole) == 0
  assert run_in_process(*flags, copy_at(whole, 3, parts)) == 0
  losses = column(whole, 'loss')
  assert losses == column(parts, 'loss')
  assert losses[6] < losses[1]
  if data == 'pairs':
    assert abs(losses[1] - np.log(2)) < 1e-5  # the model is the reference
    assert column(whole, 'reward_margin')[6] > 0
    assert column(whole, 'reward_accuracy')[6] > 0.5


@pytest.mark.parametrize(
  'name, overrides, message',
  [
    ('FullDpo', ('reference=base',), 'but embedding/softmax_kernel is trained: train only adapters'),
    ('LoraDpo', ('reference=base', 'train_input.reference_free=True'), 'train_input has reference_free=True, but'),
  ],
)
def test_a_reference_that_cannot_be_the_base_is_refused(name, overrides, message, folder, tmp_path):
  def partition():
    job = job_of(f'finetune.{name}', folder, 'pairs.jsonl', 'ici_mesh_shape=1,2,4', *overrides)
    return partition_job(name_references(job, epath.Path(tmp_path)))

  with pytest.raises(UserError, match=message):
    partition()


def test_the_base_is_refused_as_the_reference_if_training_starts_from_an_adapter():
  recipe = type('Mine', (LowRankTuning, PreferenceTuning), {'__doc__': 'Adapters.'})
  with pytest.raises(UserError, match=r'is m without adapter = a, .*: merge'):
    recipe(model='m', adapter='a', reference='base').loss()


@pytest.mark.parametrize(
  'data, weights, message',
  [
    ('{"a": "talks.jsonl"}', '{}', r"data_weights must have a weight for each source of data, \['a'\], but have \[\]"),
    ('talks.jsonl', '{"a": 1.0}', r"data_weights = {'a': 1.0} need named sources, but data = 'talks.jsonl' has none"),
  ],
)
def test_weights_that_do_not_fit_the_sources_are_refused(data, weights, message, folder):
  with pytest.raises(UserError, match=message):
    resolve('finetune.FullSft', [f'model={folder}', f'data={data}', f'data_weights={weights}'])
