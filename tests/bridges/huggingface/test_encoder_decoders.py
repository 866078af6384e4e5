"""Compares logits, gradients, greedy tokens and exports of T5's families with transformers, in float32."""

import functools
from pathlib import Path

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks import load
from spmd_tasks.bridges._lazy_arrays import lazy_array
from spmd_tasks.bridges._rules import RuleTable
from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface._describe import model_slots
from spmd_tasks.bridges.huggingface.exporting import export_folder
from spmd_tasks.decoding import Prompt
from tests.bridges.huggingface.reference_models import assert_close, quiet_transformers, random_model, tensors_of
from tests.bridges.huggingface.test_folders import abstract_weights

pytestmark = pytest.mark.slow

B, S, T, V = 3, 29, 17, 67
LENGTHS = (29, 5, 18)  # lengths of the encoder's texts
_SIZES = {
  'vocab_size': V,
  'd_model': 30,
  'd_kv': 8,
  'd_ff': 44,
  'num_layers': 3,
  'num_decoder_layers': 2,
  'num_heads': 3,
}
_SIZES |= {'relative_attention_num_buckets': 8, 'relative_attention_max_distance': 11, 'decoder_start_token_id': 0}
_EXPERTS = {'model_type': 'switch_transformers', 'num_experts': 5, 'expert_capacity': 4, 'num_layers': 4}
_EXPERTS |= {'num_decoder_layers': 3, 'num_sparse_encoder_layers': 2, 'num_sparse_decoder_layers': 1}
# name -> (config, whether the head is untied)
CASES = {
  't5': ({'layer_norm_epsilon': 1e-3}, False),
  'flan_t5': ({'model_type': 't5', 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}, True),
  'mt5': ({}, True),
  'mt5_tied': ({'model_type': 'mt5', 'feed_forward_proj': 'gated-silu'}, False),
  'umt5': ({}, True),
  'switch': (_EXPERTS, False),
  'switch_untied': (_EXPERTS | {'tie_word_embeddings': False, 'num_sparse_decoder_layers': 3}, True),
}

NAMES = [pytest.param(name, marks=() if name in ('t5', 'umt5') else pytest.mark.exhaustive) for name in CASES]


class Reference:
  """A random model of transformers, its folder and its results."""

  def __init__(self, name: str, path: Path):
    import torch

    def scale(key, value):
      return 0.1 if 'layer_norm' in key else 0.4 if key.startswith('shared') or 'bias' in key else 0.15

    config, is_untied = CASES[name]
    self.path = path
    self.model = random_model('AutoModelForSeq2SeqLM', {'model_type': name, **_SIZES, **config}, scale)
    if is_untied:
      self.model.lm_head.weight = torch.nn.Parameter(torch.randn(V, _SIZES['d_model']) * 0.4)
    with torch.no_grad():
      for stack in (self.model.encoder, self.model.decoder):  # Switch has three tables if the head is untied
        stack.embed_tokens.weight.copy_(self.model.shared.weight)
    self.model.save_pretrained(path)

  @functools.cached_property
  def computed(self):
    """The logits [B, T, V], and the gradients of the mean loss by tensor."""
    import torch

    ids, labels, encoder_ids = map(torch.tensor, texts())
    mask = (torch.arange(S)[None] < torch.tensor(LENGTHS)[:, None]).long()
    self.model.zero_grad()
    outputs = self.model(input_ids=encoder_ids, attention_mask=mask, decoder_input_ids=ids, labels=labels)
    outputs.loss.backward()
    gradients = {  # experts without tokens have no gradients
      name: np.zeros(value.shape, np.float32) if value.grad is None else value.grad.numpy()
      for name, value in self.model.named_parameters()
    }
    for copy in ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight'):
      gradients['shared.weight'] = gradients['shared.weight'] + gradients.pop(copy, 0.0)
    return outputs.logits.detach().numpy(), gradients


def texts():
  """Returns ids and labels [B, T], and encoder_ids [B, S]."""
  rng = np.random.default_rng(1)
  labels, encoder_ids = rng.integers(2, V, (B, T)), rng.integers(2, V, (B, S))
  return np.pad(labels, ((0, 0), (1, 0)))[:, :T], labels, encoder_ids


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  directory = tmp_path_factory.mktemp('folders')
  return functools.cache(lambda name: Reference(name, directory / name))


@pytest.mark.parametrize('name', NAMES)
def test_logits_and_every_gradient(name, reference):
  logits, gradients = reference(name).computed
  folder = open_folder(reference(name).path)
  model = folder.build_model()
  lazy = folder.lazy_weights(model, abstract_weights(model))
  weights = traverse_util.unflatten_dict({key: np.asarray(value) for key, value in lazy.items()}, sep='/')
  ids, labels, encoder_ids = texts()
  real = np.arange(S)[None] < np.array(LENGTHS)[:, None]
  batch = {'ids': ids, 'encoder_ids': encoder_ids, 'encoder_segment_ids': real.astype(np.int32)}
  batch |= {'encoder_segment_pos': np.broadcast_to(np.arange(S), (B, S)), 'segment_ids': np.ones((B, T), np.int32)}
  batch |= {'segment_pos': np.broadcast_to(np.arange(T), (B, T))}

  def loss(weights):
    logits = model.apply({'params': weights}, batch)['logits']
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)), logits

  with jax.default_matmul_precision('highest'):
    (_, ours), our_gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
  assert_close(np.asarray(ours), logits, 1e-5)
  flat = {name: lazy_array(x) for name, x in traverse_util.flatten_dict(our_gradients, sep='/').items()}
  rules = folder.family.rules(folder.decoder, model_slots(model))
  inverse = RuleTable(rules=rules, source='theirs', target='ours').inverse()
  converted = inverse.convert_lazily(flat, {key: np.zeros((), np.float32) for key in folder.tensors})
  assert converted.keys() == gradients.keys()
  for key, value in converted.items():
    assert_close(np.asarray(value), gradients[key], 1e-5, key)


def seq2seq(path):
  """Loads a folder with transformers; returns the model, and the missing and unexpected tensors."""
  loaded, report = quiet_transformers().AutoModelForSeq2SeqLM.from_pretrained(path, output_loading_info=True)
  return loaded.eval(), {kind: names for kind, names in report.items() if names}


def logits_of(model):
  import torch

  ids, _, encoder_ids = map(torch.tensor, texts())
  with torch.no_grad():
    return model(input_ids=encoder_ids, decoder_input_ids=ids).logits.numpy()


@pytest.mark.parametrize('name', NAMES)
def test_exports_have_the_same_tensors_and_the_same_logits(name, reference, tmp_path):
  """With the folder as origin, and without, when another family may be chosen."""
  folder = open_folder(reference(name).path)
  model = folder.build_model()
  weights = folder.lazy_weights(model, abstract_weights(model))
  for directory, origin in (('with_origin', folder), ('without_origin', None)):
    export_folder(tmp_path / directory, model, weights, origin=origin)
    again, problems = seq2seq(tmp_path / directory)
    assert not problems
    # Not bitwise: torch's products depend on the memory alignment of tensors.
    np.testing.assert_allclose(logits_of(again), logits_of(reference(name).model), rtol=1e-5, atol=1e-5)
  theirs, ours = tensors_of(folder.path), tensors_of(tmp_path / 'with_origin')
  assert theirs.keys() == ours.keys()
  for key, value in theirs.items():
    np.testing.assert_array_equal(ours[key], value)


def test_unscaled_logits_are_exported_as_a_scaled_head(reference, tmp_path):
  """UMT5 of T5X does not divide logits by sqrt(D); UMT5 of transformers does."""
  folder = open_folder(reference('umt5').path)
  model = folder.build_model()
  weights = folder.lazy_weights(model, abstract_weights(model))
  weights['embedding/softmax_kernel'] *= 30**-0.5
  model = model.clone(embedding=model.embedding.clone(scale_logits=False))
  assert export_folder(tmp_path / 'out', model, weights) == 'UMT5ForConditionalGeneration'
  again, problems = seq2seq(tmp_path / 'out')
  assert not problems
  assert_close(logits_of(again), logits_of(reference('umt5').model), 1e-5)


@pytest.mark.exhaustive  # tests/bridges/t5x/test_seqio_metrics.py covers decoding by default
@pytest.mark.parametrize('name', ['flan_t5', 'switch'])
def test_greedy_tokens_and_logits_from_the_folder(name, reference):
  import torch

  settings = ['encoder_len=32', 'seq_len=24', 'task.decode.num_slots=2', 'task.decode.min_bucket=8']
  rows = [row[:length].tolist() for row, length in zip(texts()[2], LENGTHS)]
  with jax.default_matmul_precision('highest'):
    model = load(reference(name).path, mesh=(1, 2, 4), overrides=settings)
    ids, _, encoder_ids = texts()
    assert_close(np.asarray(model.logits(ids, encoder_ids)), logits_of(reference(name).model), 1e-5)
    texts_of_rows = model.generate([Prompt(prompt_ids=tuple(row)) for row in rows], max_tokens=24)
  for row, text in zip(rows, texts_of_rows):
    theirs = reference(name).model.generate(torch.tensor([row]), do_sample=False, max_new_tokens=24)[0, 1:].tolist()
    assert [int(word) for word in text.split()] == (theirs[: theirs.index(1)] if 1 in theirs else theirs)
