"""Folders that score or embed texts: the server's answers match transformers."""

import json

import numpy as np
import pytest

from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.sentence_transformers import read_text_reading
from spmd_tasks.errors import UserError
from tests import binary
from tests.bridges.huggingface.reference_models import quiet_transformers
from tests.model_folders import write_llama
from tests.serving.served import client_of_binary

pytestmark = pytest.mark.slow
LENGTH = ('--set', 'seq_len=32')
TEXTS = ['the cat sat on the mat', 'a dog ate', 'def f(x): return x', 'a']


def write_pooling(folder, mode, kinds):
  modules = [
    {'idx': i, 'name': str(i), 'path': f'{i}_{kind}' if i else '', 'type': f'sentence_transformers.models.{kind}'}
    for i, kind in enumerate(kinds)
  ]
  (folder / 'modules.json').write_text(json.dumps(modules))
  (folder / '1_Pooling').mkdir(exist_ok=True)
  modes = {f'pooling_mode_{name}': name == mode for name in ('cls_token', 'mean_tokens', 'lasttoken', 'max_tokens')}
  (folder / '1_Pooling' / 'config.json').write_text(json.dumps(modes | {'word_embedding_dimension': 24}))
  return folder


def write_classifier(folder, num_labels):
  """Gives a folder a head of random numbers."""
  import torch

  transformers = quiet_transformers()
  torch.manual_seed(0)
  model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels, pad_token_id=0)
  model.save_pretrained(folder)
  return folder


def client_of_folder(folder, directory):
  return client_of_binary('--exp', 'hf.Scorer', '--set', f'model={folder}', '--job_log_dir', directory, *LENGTH)


def vectors_of(folder, texts, pooling):
  """What sentence-transformers computes, with transformers alone."""
  import torch

  transformers = quiet_transformers()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModel.from_pretrained(folder).eval()
  vectors = []
  for text in texts:
    with torch.no_grad():
      hidden = model(**tokenizer(text, return_tensors='pt', return_token_type_ids=False)).last_hidden_state[0].numpy()
    vector = hidden.mean(axis=0) if pooling == 'mean' else hidden[-1]
    vectors.append(vector / np.linalg.norm(vector))
  return np.array(vectors)


def test_an_embedding_is_trained_served_and_exported_for_sentence_transformers(tmp_path):
  """Tuned with the end of text behind each text: the exported tokenizer puts it there."""
  base = write_llama(tmp_path / 'base')
  pairs = tmp_path / 'pairs.jsonl'
  pairs.write_text(''.join(json.dumps({'anchor': text, 'positive': text + ' and more'}) + '\n' for text in TEXTS))
  job = ('--exp', 'finetune.FullEmbedding', '--set', f'model={base}', '--set', f'data={pairs}')
  job += ('--set', 'batch_size=2', '--set', 'pooling=last', '--set', 'seq_len=32', '--set', 'learning_rate=0.01')
  directory = ('--job_log_dir', tmp_path / 'job')
  out = tmp_path / 'made'
  job += ('--ici_mesh_shape', '1,2,4', '--num_train_steps', 3)
  assert binary.run_in_process(*job, *directory, '--mode', 'train') == 0
  assert binary.run_in_process(*directory, '--mode', 'export', '--format', 'hf', '--out', out) == 0
  with client_of_binary(*LENGTH, *directory) as client:
    embeddings = [item.embedding for item in client.embeddings.create(model='finetune.FullEmbedding', input=TEXTS).data]
  np.testing.assert_allclose(embeddings, vectors_of(out, TEXTS, 'last'), rtol=1e-4, atol=1e-5)
  before = vectors_of(base, TEXTS, 'last')
  assert np.abs(np.array(embeddings) - before).max() > 0.1
  modules = json.loads((out / 'modules.json').read_text())
  assert [module['type'].rpartition('.')[2] for module in modules] == ['Transformer', 'Pooling', 'Normalize']
  reading = read_text_reading(open_folder(out).with_score_head(0))
  assert (reading.pooling, reading.normalize) == ('last', True)


@pytest.mark.exhaustive  # by default a job is served, and what a folder says is read
def test_a_sentence_transformers_folder_is_served_as_transformers_computes_it(tmp_path):
  folder = write_pooling(write_llama(tmp_path / 'emb'), 'mean_tokens', ('Transformer', 'Pooling', 'Normalize'))
  with client_of_folder(folder, tmp_path / 'job') as client:
    embeddings = [item.embedding for item in client.embeddings.create(model='emb', input=TEXTS).data]
  np.testing.assert_allclose(embeddings, vectors_of(folder, TEXTS, 'mean'), rtol=1e-4, atol=1e-6)


def test_poolings_and_activations_of_old_and_new_folders(tmp_path):
  folder = write_llama(tmp_path)

  def read(mode, *kinds):
    write_pooling(folder, mode, ('Transformer', 'Pooling', *kinds))
    reading = read_text_reading(open_folder(folder).with_score_head(0))
    return reading.pooling, reading.normalize

  assert read('mean_tokens', 'Normalize') == ('mean', True)
  assert read('lasttoken') == ('last', False)
  (folder / '1_Pooling' / 'config.json').write_text('{"embedding_dimension": 24, "pooling_mode": "mean"}')
  assert read_text_reading(open_folder(folder).with_score_head(0)).pooling == 'mean'
  with pytest.raises(UserError, match=r"modes \['cls_token'\]"):
    read('cls_token')
  with pytest.raises(UserError, match='Transformer, Pooling, Normalize in this order'):
    read('mean_tokens', 'Dense')
  config = json.loads((folder / 'config.json').read_text()) | {'architectures': ['LlamaForSequenceClassification']}
  for added, activation in (
    ({'id2label': {'0': 'a'}}, 'sigmoid'),
    ({'id2label': {'0': 'a'}, 'problem_type': 'regression'}, 'none'),
    ({'id2label': {'0': 'a'}, 'sentence_transformers': {'activation_fn': 'torch.nn.modules.linear.Identity'}}, 'none'),
    ({'id2label': {'0': 'a', '1': 'b'}}, 'softmax'),
  ):
    (folder / 'config.json').write_text(json.dumps(config | added))
    reading = read_text_reading(open_folder(folder))
    assert (reading.labels, reading.activation) == (('a', 'b')[: len(added['id2label'])], activation)


def test_a_cross_encoder_scores_pairs_as_transformers_does(tmp_path):
  import torch

  folder = write_classifier(write_llama(tmp_path / 'cross'), 1)
  transformers = quiet_transformers()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
  with torch.no_grad():
    expected = [
      float(model(**tokenizer(TEXTS[0], text, return_tensors='pt', return_token_type_ids=False)).logits[0, 0].sigmoid())
      for text in TEXTS[1:]
    ]
  with client_of_folder(folder, tmp_path / 'job') as client:
    body = {'query': TEXTS[0], 'documents': TEXTS[1:]}
    answer = client.post('/rerank', body=body, cast_to=object)
  results = answer['results']
  assert [result['index'] for result in results] == np.argsort(-np.array(expected)).tolist()
  np.testing.assert_allclose(
    [result['relevance_score'] for result in results], sorted(expected, reverse=True), rtol=1e-5, atol=1e-6
  )
