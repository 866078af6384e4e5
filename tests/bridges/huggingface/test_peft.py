"""The library `peft` as reference: its folders in, the same curve and weights, ours out, on torch's numbers.

Float32, small random models of several families, adapters of all Linears.
"""

import copy
import json
import shutil

import fiddle as fdl
import jax
import numpy as np
import pytest

from spmd_tasks.bridges.huggingface import export_adapter, export_folder, open_adapter, open_folder, weights_on_mesh
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.inputs import SyntheticText
from spmd_tasks.learning import AdamW
from spmd_tasks.programs.pretrained import state_from_folder
from spmd_tasks.recipes import LowRankTuning, PipelinedPretrainedModel
from spmd_tasks.runtime import merge_adapters
from tests.bridges.huggingface.reference_models import (
  B,
  Reference,
  T,
  load_reference,
  logits_of,
  quiet_transformers,
  random_ids,
  tensors_of,
)

# What `peft` says of transformers' names is not ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::UserWarning')]

# Adam divides by the root of gradients that are zero but for rounding: EPSILON is above these.
NUM_STEPS, LEARNING_RATE, EPSILON = 20, 0.003, 1e-5
ALL, ATTENTION = 'all-linear', ['q_proj', 'v_proj']
# name -> model, settings of LoraConfig
CASES = {
  'llama3': ('llama3', {'target_modules': ALL}),
  'rslora of two': ('llama', {'target_modules': ATTENTION, 'use_rslora': True}),
  'dora': ('qwen2', {'target_modules': ALL, 'use_dora': True}),
  'rotated in pairs': ('glm4', {'target_modules': [*ATTENTION, 'k_proj', 'o_proj', 'down_proj']}),
  'norms of heads': ('gemma3_text', {'target_modules': ALL}),
  'latent': ('deepseek_v3', {'target_modules': ['q_a_proj', 'q_b_proj', 'kv_a_proj_with_mqa', 'o_proj']}),
  'two alphas': ('llama3', {'target_modules': ALL, 'rank_pattern': {'o_proj': 2}, 'alpha_pattern': {'o_proj': 3}}),
}
SLOWLY = {
  'norms of heads': 0.0001
}  # this model multiplies rounding by a hundred, and by two in each step at a higher rate
NAMES = [pytest.param(name, marks=() if name == 'llama3' else pytest.mark.exhaustive) for name in CASES]
MESHES = [(1, 1, 1), pytest.param((1, 2, 4), marks=pytest.mark.exhaustive)]


class Tuned(LowRankTuning):
  """Adam without clipping on rows that the test gives."""

  batch_size = B
  seq_len = T
  adapter = 'given'
  learning_rate = LEARNING_RATE

  def task(self):
    task = super().task()
    task.learner.optimizer = fdl.Config(AdamW, learning_rate=self.learning_rate, epsilon=EPSILON)
    task.learner.clip_global_norm = None
    return task

  def train_input(self):
    return fdl.Config(SyntheticText, vocab_size=259, batch_size=self.batch_size, seq_len=self.seq_len)

  def eval_inputs(self):
    return {}


class TunedInStages(Tuned, PipelinedPretrainedModel):
  """The same, over stages."""


class Peft:
  """A model of `peft` with random adapters: its folder, and what 20 steps of Adam make of it."""

  def __init__(self, name, directory):
    import peft
    import torch

    model, settings = CASES[name]
    self.base = Reference(model, directory)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type='CAUSAL_LM', lora_dropout=0.0, **settings)
    self.model = peft.get_peft_model(copy.deepcopy(self.base.model), config)
    with torch.no_grad():
      for key, value in self.model.named_parameters():
        if 'lora_B' in key:
          value.copy_(torch.randn_like(value) * 0.05)
    self.adapter = directory / f'{model}_adapter'
    self.model.save_pretrained(self.adapter)
    self.first_logits = logits_of(self.model)
    self.losses = []
    ids = torch.tensor(random_ids())
    trained = [value for value in self.model.parameters() if value.requires_grad]
    self.learning_rate = SLOWLY.get(name, LEARNING_RATE)
    optimizer = torch.optim.AdamW(trained, lr=self.learning_rate, betas=(0.9, 0.999), eps=EPSILON, weight_decay=0.0)
    self.model.train()
    for _ in range(NUM_STEPS):
      loss = self.model(ids, labels=ids).loss
      optimizer.zero_grad()
      loss.backward()
      optimizer.step()
      self.losses.append(loss.item())
    self.model.eval()
    self.last_logits = logits_of(self.model)
    self.tuned = directory / f'{model}_tuned'
    self.model.save_pretrained(self.tuned)


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """Returns the Peft of a name in CASES, made once."""
  made = {}

  def get(name):
    if name not in made:
      quiet_transformers()
      made[name] = Peft(name, tmp_path_factory.mktemp('peft'))
    return made[name]

  return get


def partitioned(theirs, sizes, cls=Tuned, *overrides):
  mesh = ','.join(map(str, sizes))
  job = resolve(
    cls,
    [
      f'model={theirs.base.path}',
      f'adapter={theirs.adapter}',
      f'ici_mesh_shape={mesh}',
      f'learning_rate={theirs.learning_rate}',
      *overrides,
    ],
  ).build()
  devices = jax.devices()[: int(np.prod(sizes))]
  return partition_job(job, job.experiment.mesh_spec().build(devices)), job


def near(ours, theirs, tolerance, what=''):
  assert ours.shape == theirs.shape
  assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max(), what


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


@pytest.mark.parametrize('sizes', MESHES)
@pytest.mark.parametrize('name', NAMES)
def test_the_same_curve_and_each_reads_what_the_other_wrote(name, sizes, reference, tmp_path):
  import peft

  theirs = reference(name)
  model, job = partitioned(theirs, sizes)
  assert model.task.trained == ('lora_',)
  state = state_from_folder(model, str(theirs.base.path), 0, str(theirs.adapter))
  step = model.forward_step({'ids': jax.ShapeDtypeStruct((B, T), np.int32)})
  ids = random_ids().astype(np.int32)
  near(np.asarray(step(state.variables, step.place({'ids': ids}))['logits']), theirs.first_logits, 1e-4)

  batch = next(iter(job.train_input.make_iterator()))
  batch['ids'], batch['labels'] = ids, np.roll(ids, -1, 1)
  batch['weights'][:, -1] = 0.0
  losses = []
  for _ in range(NUM_STEPS):
    state, metrics = model.train_step(state, model.train_step.place(batch))
    losses.append(float(metrics['cross_entropy']))
  assert losses[-1] < 0.97 * losses[0]
  np.testing.assert_allclose(losses, theirs.losses, rtol=1e-4)

  base, target = open_folder(theirs.base.path), tmp_path / 'ours'
  export_adapter(target, model.task.model, weights_on_mesh(model, state.weights), base=base, digest='')
  ours, tuned = tensors_of(target), tensors_of(theirs.tuned)
  assert ours.keys() == tuned.keys()
  for key, value in tuned.items():
    near(ours[key], value, 5e-3, key)  # Adam divides by the root of gradients that are almost 0
  loaded = peft.PeftModel.from_pretrained(copy.deepcopy(theirs.base.model), target).eval()
  near(logits_of(loaded), np.asarray(step(state.variables, step.place({'ids': ids}))['logits']), 1e-4)

  merged = weights_on_mesh(model, merge_adapters(model, state.weights))
  export_folder(tmp_path / 'merged', model.task.model, merged, origin=base)
  alone, amiss = load_reference(tmp_path / 'merged', 'float32')
  assert not amiss
  near(logits_of(alone), logits_of(loaded), 1e-4 if name in SLOWLY else 1e-5)


@pytest.mark.exhaustive
def test_the_same_curve_in_a_pipeline(reference):
  theirs = reference('llama3')
  model, job = partitioned(theirs, (1, 2, 2, 2), TunedInStages, 'num_microbatches=2')
  state = state_from_folder(model, str(theirs.base.path), 0, str(theirs.adapter))
  batch = next(iter(job.train_input.make_iterator()))
  batch['ids'], batch['labels'] = random_ids().astype(np.int32), np.roll(random_ids(), -1, 1).astype(np.int32)
  batch['weights'][:, -1] = 0.0
  for expected in theirs.losses:
    state, metrics = model.train_step(state, model.train_step.place(batch))
    np.testing.assert_allclose(float(metrics['cross_entropy']), expected, rtol=1e-4)


def test_what_cannot_be_read_is_one_sentence(reference, tmp_path):
  theirs = reference('llama3')
  changes = [
    ('peft_type', 'IA3', 'only .LORA.'),
    ('bias', 'all', 'only .LORA.'),
    ('modules_to_save', ['lm_head'], 'modules_to_save'),
    ('lora_bias', True, 'lora_bias'),
  ]
  for number, (key, value, said) in enumerate(changes):
    shutil.copytree(theirs.adapter, tmp_path / str(number))
    file = tmp_path / str(number) / 'adapter_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=said):
      open_adapter(file.parent)
  with pytest.raises(UserError, match='does not exist'):
    open_adapter(tmp_path)
