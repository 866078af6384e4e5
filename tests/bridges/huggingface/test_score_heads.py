"""Compares scores of ForSequenceClassification and headless models with transformers, and exports them."""

import jax
import numpy as np
import pytest

from spmd_tasks.bridges._lazy_arrays import lazy_array
from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.exporting import export_folder
from spmd_tasks.errors import UserError
from tests.bridges.huggingface.reference_models import quiet_transformers, random_ids, random_model
from tests.bridges.huggingface.test_folders import abstract_weights, as_tree, opened
from tests.bridges.huggingface.tiny_configs import CONFIGS

pytestmark = pytest.mark.slow  # it imports torch

CASES = [('qwen3', 1), ('gpt2', 3), ('llama3', 0)]
CASES += [pytest.param(*case, marks=pytest.mark.exhaustive) for case in (('gemma3_text', 2), ('gpt2', 0))]


def write_model(name, num_labels, path):
  """Writes the folder of a random model of transformers; returns the model and its outputs for random tokens."""
  settings = (
    CONFIGS[name] | {'eos_token_id': 258, 'pad_token_id': 0} | ({'num_labels': num_labels} if num_labels else {})
  )
  kind = 'AutoModelForSequenceClassification' if num_labels else 'AutoModel'
  model = random_model(kind, settings, lambda key, value: 0.1)
  model.save_pretrained(path)
  return model, outputs_of(model)


def outputs_of(model):
  """Returns the scores at the last token of each row [B, N], or the final activations [B, T, D]."""
  import torch

  with torch.no_grad():
    outputs = model(torch.tensor(random_ids() + 1))
  return (outputs.logits if 'logits' in outputs else outputs.last_hidden_state).numpy()


@pytest.mark.parametrize('name, num_labels', CASES)
def test_scores_and_exports_equal_transformers(name, num_labels, tmp_path):
  model, expected = write_model(name, num_labels, tmp_path / 'original')
  folder, ours, weights = opened(tmp_path / 'original')
  logits = np.asarray(jax.jit(ours.apply)({'params': as_tree(weights)}, {'ids': random_ids() + 1})['logits'])
  np.testing.assert_allclose(
    logits[:, -1] if num_labels else logits, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
  )

  architecture = export_folder(tmp_path / 'exported', ours, weights, origin=folder)
  assert architecture == type(model).__name__
  np.testing.assert_array_equal(outputs_of(type(model).from_pretrained(tmp_path / 'exported').eval()), expected)
  assert open_folder(tmp_path / 'exported').decoder == folder.decoder


def test_a_language_model_gets_a_head_of_zeros_and_is_exported_with_it(tmp_path):
  transformers = quiet_transformers()
  model, _ = write_model('llama3', 0, tmp_path / 'body')
  language_model = transformers.LlamaForCausalLM(model.config)
  language_model.save_pretrained(tmp_path / 'original')
  folder = open_folder(tmp_path / 'original')
  ours = folder.with_score_head(3).build_model()
  weights = folder.lazy_weights(ours, abstract_weights(ours))
  assert not np.asarray(weights['embedding/score_kernel']).any()
  head = np.random.default_rng(0).normal(size=weights['embedding/score_kernel'].shape).astype(np.float32)
  weights |= {'embedding/score_kernel': lazy_array(head)}
  export_folder(tmp_path / 'exported', ours, weights, origin=folder)
  exported = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'exported')
  assert exported.config.num_labels == 3
  np.testing.assert_array_equal(exported.score.weight.detach().numpy(), head.T)
  hidden = language_model.model.state_dict()['layers.0.mlp.up_proj.weight']
  np.testing.assert_array_equal(exported.model.state_dict()['layers.0.mlp.up_proj.weight'], hidden)


def test_other_heads_are_refused(tmp_path):
  write_model('qwen3', 1, tmp_path)
  config = (tmp_path / 'config.json').read_text().replace('ForSequenceClassification', 'ForTokenClassification')
  (tmp_path / 'config.json').write_text(config)
  with pytest.raises(UserError, match='ForSequenceClassification'):
    open_folder(tmp_path)
