"""Compares logits, gradients, exports and greedy tokens of a folder with transformers, on several meshes.

The models have float32 weights, a vocabulary of 259, 3 heads, and a head_dim other than D / H. In bfloat16, medians are
compared. All cases are in one file, because importing torch takes longer than most of them.
"""

import gc
import math
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest

from spmd_tasks import load
from spmd_tasks.bridges.huggingface import PipelinedPretrainedModel, PretrainedLanguageModel, open_folder
from spmd_tasks.bridges.huggingface._folder import weights_on_mesh
from spmd_tasks.bridges.huggingface.exporting import export_folder
from spmd_tasks.bridges.huggingface.origin import state_from_folder
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.inputs import SyntheticText
from spmd_tasks.learning import FromOptax
from spmd_tasks.sharding import MeshSpec
from tests.bridges.huggingface.reference_models import (
  LEARNING_RATE,
  NUM_GENERATED,
  NUM_PROMPT,
  B,
  Reference,
  T,
  assert_close,
  load_reference,
  logits_of,
  random_ids,
  tensors_of,
)
from tests.bridges.huggingface.test_folders import opened
from tests.bridges.huggingface.tiny_configs import CONFIGS

pytestmark = pytest.mark.slow

FAST = {'llama3', 'gpt_oss', 'deepseek_v3'}
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.exhaustive) for name in CONFIGS]
MESHES = {
  '1 device': ('ici_mesh_shape=1,1,1',),
  'data 2 x mdl 4': ('ici_mesh_shape=1,2,4',),
  'stage 2 x data 2 x mdl 2': ('ici_mesh_shape=1,2,2,2', 'num_microbatches=2'),
}
ON_MESHES = [
  pytest.param(name, mesh, marks=() if (name, mesh) == ('llama3', 'data 2 x mdl 4') else pytest.mark.exhaustive)
  for name in CONFIGS
  for mesh in MESHES
  if not (name in ('gemma3n_text', 'gemma4_shared') and 'stage' in mesh)  # stages share no keys and values
]


class OneStep(PretrainedLanguageModel):
  """One step of SGD on synthetic tokens."""

  batch_size = B
  seq_len = T

  def task(self):
    task = super().task()
    task.learner.optimizer = fdl.Config(FromOptax, factory=optax.sgd, learning_rate=LEARNING_RATE)
    task.learner.clip_global_norm = None
    return task

  def train_input(self):
    return fdl.Config(SyntheticText, vocab_size=259, batch_size=self.batch_size, seq_len=self.seq_len)

  def eval_inputs(self):
    return {}


class OneStepOfPipeline(OneStep, PipelinedPretrainedModel):
  """OneStep with pipeline stages."""


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """Returns a function that returns the Reference of a name in CONFIGS."""
  references = {}

  def get(name):
    if name not in references:
      references[name] = Reference(name, tmp_path_factory.mktemp('folders'))
    return references[name]

  return get


@pytest.fixture(autouse=True)
def clear_caches_early():
  """Clears caches of compiled programs as tests/conftest.py does, but earlier: this file compiles the most programs."""
  yield
  if Path('/proc/self/maps').read_bytes().count(b'\n') > 20_000:
    jax.clear_caches()
    gc.collect()


def mesh_of(sizes):
  axes = ('replica', 'data', 'mdl') if len(sizes) == 3 else ('replica', 'stage', 'data', 'mdl')
  return MeshSpec(axis_names=axes, ici_mesh_shape=sizes).build(jax.devices()[: math.prod(sizes)])


@pytest.mark.parametrize(  # test_nextn_folders.py covers DeepSeek-V3 by default
  'name',
  [pytest.param(name, marks=() if name in ('llama3', 'gpt_oss') else pytest.mark.exhaustive) for name in CONFIGS],
)
def test_logits(name, reference):
  theirs = reference(name)
  with jax.default_matmul_precision('highest'):
    model = load(theirs.path, mesh=mesh_of((1, 1, 1)), overrides=['seq_len=128'])
    ours = np.asarray(model.logits(random_ids()))
  # Where float32 itself is not that exact, as with Gemma 4's shared keys, ours are as near to float64 as theirs.
  largest = np.abs(theirs.logits).max()
  if np.abs(ours - theirs.logits).max() > 1e-5 * largest:
    exact = logits_of(load_reference(theirs.path, 'float64')[0])
    our_error, their_error = (np.abs(logits - exact).max() / largest for logits in (ours, theirs.logits))
    assert our_error <= 1.5 * their_error < 2e-5


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=() if name == 'llama3' else pytest.mark.exhaustive) for name in CONFIGS]
)
def test_logits_in_16_bits(name, reference):
  """In bfloat16, the error against float32 is not larger than that of transformers.

  Medians are compared, because routers in 16 bits send a few tokens to other experts.
  """
  path = reference(name).in_16_bits
  exact, theirs = (logits_of(load_reference(path, dtype)[0]) for dtype in ('float32', 'bfloat16'))
  model = load(path, mesh=mesh_of((1, 1, 1)), overrides=['seq_len=128'])
  assert model.job.task.model.embedding.dtype == 'bfloat16'
  ours = np.asarray(model.logits(random_ids()))
  our_error, their_error, distance = (
    np.median(np.abs(a - b)) / np.median(np.abs(exact)) for a, b in ((ours, exact), (theirs, exact), (ours, theirs))
  )
  assert our_error <= 1.25 * their_error
  assert distance <= 2 * their_error


@pytest.mark.parametrize('name', NAMES)
def test_transformers_loads_what_is_exported(name, reference, tmp_path):
  """The logits are bitwise equal; without an origin, up to rounding if an earlier family expresses the model, too."""
  theirs = reference(name)
  folder, model, weights = opened(theirs.path)
  for directory, origin in (('with_origin', folder), ('without_origin', None)):
    export_folder(tmp_path / directory, model, weights, origin=origin)
    again, problems = load_reference(tmp_path / directory, 'float32')
    assert not problems, directory
    if type(again) is type(theirs.model):
      np.testing.assert_array_equal(logits_of(again), theirs.logits, err_msg=directory)
    else:
      assert origin is None
      assert_close(logits_of(again), theirs.logits, 1e-5, directory)


def take_one_step(path, mesh):
  """Returns the loss, the model and the state after one step."""
  cls = OneStepOfPipeline if 'stage' in mesh else OneStep
  job = resolve(cls, [f'model={path}', *MESHES[mesh]]).build()
  model = partition_job(job, mesh_of(job.experiment.ici_mesh_shape))
  batch = next(iter(job.train_input.make_iterator()))
  batch['ids'], batch['labels'] = (random_ids().astype(np.int32), np.roll(random_ids(), -1, 1).astype(np.int32))
  batch['weights'][:, -1] = 0.0
  state = state_from_folder(model, open_folder(path), 0)
  state, metrics = model.train_step(state, model.train_step.place(batch))
  return float(metrics['loss']), model, state


@pytest.mark.parametrize('name, mesh', ON_MESHES)
def test_an_exported_step_has_the_same_loss_and_gradients(name, mesh, reference, tmp_path):
  """After one step of SGD, both write the same folder."""
  path = reference(name).path
  their_loss, theirs = reference(name).step
  with jax.default_matmul_precision('highest'):
    our_loss, model, state = take_one_step(path, mesh)
  assert abs(our_loss - their_loss) <= 1e-4 * their_loss
  export_folder(tmp_path / 'ours', model.task.model, weights_on_mesh(model, state.weights), origin=open_folder(path))
  ours, before = tensors_of(tmp_path / 'ours'), tensors_of(path)
  assert ours.keys() == theirs.keys()
  for key in theirs:
    if key.endswith(('e_score_correction_bias', 'k_proj.bias')):
      continue  # our router balances the load; the gradient of a key's bias is only rounding error
    assert_close(ours[key] - before[key], theirs[key] - before[key], 1e-4, key)


# Tests of pipelines cover generation, which runs the stages in sequence.
GENERATING = {'1 device': (1, 1, 1), 'data 2 x mdl 4': (1, 2, 4)}


@pytest.mark.parametrize(
  'name, mesh',
  [  # by default on one device: tests/decoding compares meshes
    pytest.param(*case.values, marks=() if case.values == ('llama3', '1 device') else pytest.mark.exhaustive)
    for case in ON_MESHES
    if case.values[1] in GENERATING
  ],
)
def test_greedy_tokens_with_a_cache(name, mesh, reference):
  settings = ['seq_len=128', 'task.decode.max_len=96', 'task.decode.num_slots=2', 'task.decode.min_bucket=32']
  with jax.default_matmul_precision('highest'):
    model = load(reference(name).path, mesh=mesh_of(GENERATING[mesh]), overrides=settings)
    prompts = [' '.join(map(str, row)) for row in random_ids()[:2, :NUM_PROMPT].tolist()]
    texts = model.generate(prompts, max_tokens=NUM_GENERATED)
  assert [[int(word) for word in text.split()] for text in texts] == reference(name).greedy_tokens
