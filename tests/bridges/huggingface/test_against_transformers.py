"""Folders that transformers has written: the same logits, gradients, exports and greedy tokens, on any mesh.

Float32, vocabulary 259, 3 heads, head_dim unlike D / H; and bfloat16 by medians. One file: importing torch takes longer
than most of the cases.
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
]


class OneStep(PretrainedLanguageModel):
  """One step of SGD on made-up tokens."""

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
  """The same, over stages."""


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """Returns the Reference of a name in CONFIGS, made once."""
  made = {}

  def get(name):
    if name not in made:
      made[name] = Reference(name, tmp_path_factory.mktemp('folders'))
    return made[name]

  return get


@pytest.fixture(autouse=True)
def compiled_programs_are_given_up_sooner():
  """As in tests/conftest.py, within this file, which has more programs than any other."""
  yield
  if Path('/proc/self/maps').read_bytes().count(b'\n') > 20_000:
    jax.clear_caches()
    gc.collect()


def mesh_of(sizes):
  axes = ('replica', 'data', 'mdl') if len(sizes) == 3 else ('replica', 'stage', 'data', 'mdl')
  return MeshSpec(axis_names=axes, ici_mesh_shape=sizes).build(jax.devices()[: math.prod(sizes)])


@pytest.mark.parametrize(  # by default test_nextn_folders.py has those of DeepSeek-V3
  'name',
  [pytest.param(name, marks=() if name in ('llama3', 'gpt_oss') else pytest.mark.exhaustive) for name in CONFIGS],
)
def test_logits(name, reference):
  theirs = reference(name)
  with jax.default_matmul_precision('highest'):
    model = load(theirs.path, mesh=mesh_of((1, 1, 1)), overrides=['seq_len=128'])
    assert_close(np.asarray(model.logits(random_ids())), theirs.logits, 1e-5)


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=() if name == 'llama3' else pytest.mark.exhaustive) for name in CONFIGS]
)
def test_logits_in_16_bits(name, reference):
  """In bfloat16 we are as near to float32's logits as transformers is, and near to transformers.

  Medians, because routers in 16 bits send a few tokens to other experts.
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
  """Nothing is missing or unexpected, and the logits have the same bits; also where no folder was the origin."""
  theirs = reference(name)
  folder, model, weights = opened(theirs.path)
  for place, origin in (('there', folder), ('here', None)):
    export_folder(tmp_path / place, model, weights, origin=origin)
    again, amiss = load_reference(tmp_path / place, 'float32')
    assert not amiss, place
    assert type(again) is type(theirs.model)
    np.testing.assert_array_equal(logits_of(again), theirs.logits, err_msg=place)


def take_one_step(path, mesh):
  """Returns loss and the model after one step, ours."""
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
def test_loss_and_every_gradient_in_what_is_exported(name, mesh, reference, tmp_path):
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
      continue  # balanced by the load here; and of a key's bias, the gradient is 0 but for rounding
    assert_close(ours[key] - before[key], theirs[key] - before[key], 1e-4, key)


# A pipeline generates text with its layers in sequence: tests of pipelines show that.
GENERATING = {'1 device': (1, 1, 1), 'data 2 x mdl 4': (1, 2, 4)}


@pytest.mark.parametrize('name, mesh', [case for case in ON_MESHES if case.values[1] in GENERATING])
def test_greedy_tokens_with_a_cache(name, mesh, reference):
  settings = ['seq_len=128', 'task.decode.max_len=96', 'task.decode.num_slots=2', 'task.decode.min_bucket=32']
  with jax.default_matmul_precision('highest'):
    model = load(reference(name).path, mesh=mesh_of(GENERATING[mesh]), overrides=settings)
    prompts = [' '.join(map(str, row)) for row in random_ids()[:2, :NUM_PROMPT].tolist()]
    texts = model.generate(prompts, max_tokens=NUM_GENERATED)
  assert [[int(word) for word in text.split()] for text in texts] == reference(name).greedy_tokens
