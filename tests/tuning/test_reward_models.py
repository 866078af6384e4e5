"""A reward model scores each text independently of its batch and the mesh."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.inputs import FolderTokenizer
from spmd_tasks.tuning import EXTENSION
from spmd_tasks.tuning.reward_models import RewardModel, is_reward_model
from tests.bridges.huggingface.test_folders import as_tree, opened
from tests.model_folders import write_llama


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = write_llama(tmp_path_factory.mktemp('reward'))
  weights = load_file(path / 'model.safetensors')
  del weights['lm_head.weight']
  head = np.random.default_rng(7).normal(size=(1, 24)).astype(np.float32)
  save_file(weights | {'score.weight': head}, path / 'model.safetensors')
  config = json.loads((path / 'config.json').read_text())
  config |= {'architectures': ['LlamaForSequenceClassification'], 'id2label': {'0': 'LABEL_0'}}
  (path / 'config.json').write_text(json.dumps(config))
  return path


def run_on(num_devices):
  """Returns the parts of a running job that a reward model reads."""
  settings = [f'ici_mesh_shape=1,{num_devices},1', 'model_dims=16', 'num_layers=1']
  job = resolve('tests.tuning.reward_experiments.Job', settings).build()
  model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[:num_devices]))
  return SimpleNamespace(job=job, experiment=job.experiment, model=model)


def test_scores_are_independent_of_the_other_texts(folder):
  calls = [('the cat', text, {}) for text in (' sat', ' sat on the mat', '', ' ate', ' x' * 40)]
  model = RewardModel(str(folder), run_on(4), batch_size=3, seq_len=32)
  scores = model.rewards(calls)
  (_, ours, weights), tokenizer = opened(folder), FolderTokenizer(path=str(folder))
  tree = as_tree(weights)
  forward = jax.jit(ours.apply)
  for score, (prompt, completion, _) in zip(scores[:4], calls, strict=False):
    ids = [*tokenizer.encode_prompt(prompt + completion), tokenizer.eos_id]
    expected = forward({'params': tree}, {'ids': np.pad(ids, (0, 32 - len(ids)))[None]})['logits'][0, len(ids) - 1, 0]
    np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-5)
  assert np.ptp(scores[:4]) > 0.1
  assert np.isnan(scores[4])  # longer than a row


def test_other_models_are_refused_as_reward_models(tmp_path):
  write_llama(tmp_path)
  assert is_reward_model(str(tmp_path))
  assert not is_reward_model('my_lab.rewards:score')
  with pytest.raises(UserError, match='must be a folder of ForSequenceClassification with one label'):
    RewardModel(str(tmp_path), run_on(1), batch_size=3, seq_len=32)


def test_a_model_that_scores_texts_cannot_generate(folder):
  with pytest.raises(UserError, match=r'without logits: use hf\.Scorer'):
    resolve('hf.Model', [f'model={folder}'])
  job = resolve('finetune.FullReward', [f'model={folder}', 'data=pairs.jsonl']).build()
  with pytest.raises(UserError, match='scores texts and cannot generate them in --mode decode_once'):
    EXTENSION.prepare_job(job, 'decode_once', None)
