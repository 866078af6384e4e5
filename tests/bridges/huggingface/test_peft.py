"""Compares training, reading and writing of adapters with `peft`, on small random float32 models of many families."""

import copy
import json
import re
import shutil
import types
import zlib

import fiddle as fdl
from flax import traverse_util
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from spmd_tasks.adapters.merging import merge_adapters
from spmd_tasks.bridges._lazy_arrays import lazy_array
from spmd_tasks.bridges.huggingface import open_adapter, open_folder
from spmd_tasks.bridges.huggingface._folder import weights_on_mesh
from spmd_tasks.bridges.huggingface._peft import export_adapter
from spmd_tasks.bridges.huggingface.base_digest import folder_digest
from spmd_tasks.bridges.huggingface.exporting import export_folder
from spmd_tasks.bridges.huggingface.origin import state_from_folder
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.learning import AdamW
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen
from spmd_tasks.tuning import LowRankTuning
from tests.bridges.huggingface.reference_models import (
  B,
  Reference,
  T,
  assert_close,
  load_reference,
  logits_of,
  quiet_transformers,
  random_ids,
  tensors_of,
)
from tests.bridges.huggingface.test_against_transformers import OneStep

# Warnings of `peft` about names of transformers do not concern us.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::UserWarning')]

# EPSILON is larger than gradients that are only rounding errors, by which Adam would divide.
NUM_STEPS, LEARNING_RATE, EPSILON = 20, 0.003, 1e-5
ALL, ATTENTION = 'all-linear', ['q_proj', 'v_proj']
EXPERTS = ['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']
# name -> (model, settings of LoraConfig)
CASES = {
  'llama3': ('llama3', {'target_modules': ALL}),
  'rslora of two': ('llama', {'target_modules': ATTENTION, 'use_rslora': True}),
  'dora': ('qwen2', {'target_modules': ALL, 'use_dora': True}),
  'rotated in pairs': ('glm4', {'target_modules': [*ATTENTION, 'k_proj', 'o_proj', 'down_proj']}),
  'norms of heads': ('gemma3_text', {'target_modules': ALL}),
  'latent': ('deepseek_v3', {'target_modules': ['q_a_proj', 'q_b_proj', 'kv_a_proj_with_mqa', 'o_proj']}),
  'of kv_up too': ('deepseek_v2', {'target_modules': ['q_proj', 'kv_b_proj', 'o_proj'], 'use_dora': True}),
  'keys of earlier layers': ('gemma4_shared', {'target_modules': ALL}),
  'streams': ('gemma3n_text', {'target_modules': [*ATTENTION, 'linear_left', 'per_layer_input_gate', 'down_proj']}),
  'two alphas': ('llama3', {'target_modules': ALL, 'rank_pattern': {'o_proj': 2}, 'alpha_pattern': {'o_proj': 3}}),
}
# Fused modules, whose kernels share an A in `peft`, and parameters of experts.
FUSED = {
  'qkv and gate_up': ('phi3', {'target_modules': ALL, 'use_dora': True}),
  'conv': ('gpt2', {'target_modules': ['c_attn', 'c_fc', 'c_proj'], 'fan_in_fan_out': True}),
  'experts': ('qwen3_moe', {'target_modules': ATTENTION, 'target_parameters': EXPERTS}),
  'rslora of experts alone': ('mixtral', {'target_modules': [], 'target_parameters': EXPERTS[:1], 'use_rslora': True}),
  'recurrent layers': ('qwen3_5_text', {'target_modules': ALL}),
  'experts beside a network': (
    'gemma4_moe',
    {'target_modules': ['q_proj', 'up_proj'], 'target_parameters': ['experts.gate_up_proj', 'experts.down_proj']},
  ),
  'decays of features': ('kimi_linear', {'target_modules': ALL}),
  'recurrent layers by head': ('qwen3_next', {'target_modules': ['q_proj', 'in_proj_qkvz', 'in_proj_ba', 'out_proj']}),
  'columns in turns': ('gpt_oss', {'target_modules': ['o_proj'], 'target_parameters': EXPERTS}),
}
# Learning rates of models that amplify rounding errors: the first by 100, and by 2 per step at a higher rate.
LOW_LEARNING_RATES = {'norms of heads': 0.0001, 'keys of earlier layers': 0.0001, 'streams': 0.0003}
NAMES = [pytest.param(name, marks=() if name == 'llama3' else pytest.mark.exhaustive) for name in CASES]
MESHES = [(1, 1, 1), pytest.param((1, 2, 4), marks=pytest.mark.exhaustive)]


class Tuned(LowRankTuning, OneStep):
  """Adam without clipping on rows of the test."""

  adapter = 'given'
  learning_rate = LEARNING_RATE

  def task(self):
    task = super().task()
    task.learner.optimizer = fdl.Config(AdamW, learning_rate=self.learning_rate, epsilon=EPSILON)
    return task


class Peft:
  """A model of `peft` with random adapters, its folder, and the results of 20 steps of Adam."""

  def __init__(self, name, directory):
    import peft
    import torch

    model, settings = (CASES | FUSED)[name]
    self.base = Reference(model, directory)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type='CAUSAL_LM', lora_dropout=0.0, **settings)
    self.model = peft.get_peft_model(copy.deepcopy(self.base.model), config)
    with torch.no_grad():
      for key, value in self.model.named_parameters():
        if 'lora_B' in key:
          value.copy_(torch.randn_like(value) * 0.05)
    self.adapter = directory / f'{model}_adapter'
    self.gradients = {}
    self.model.save_pretrained(self.adapter)
    self.first_logits = logits_of(self.model)
    self.losses = []
    ids = torch.tensor(random_ids())
    trained = [value for value in self.model.parameters() if value.requires_grad]
    self.learning_rate = LOW_LEARNING_RATES.get(name, LEARNING_RATE)
    optimizer = torch.optim.AdamW(trained, lr=self.learning_rate, betas=(0.9, 0.999), eps=EPSILON, weight_decay=0.0)
    self.model.train()
    for module in self.model.modules():
      if isinstance(module, torch.nn.Dropout):  # GPT-2 has dropout in torch; our models of folders have none
        module.p = 0.0
    for _ in range(NUM_STEPS):
      loss = self.model(ids, labels=ids).loss
      optimizer.zero_grad()
      loss.backward()
      self.gradients = self.gradients or {
        re.sub(r'(?<=vector)\.default\.weight|\.default', '', key): value.grad.numpy().copy()
        for key, value in self.model.named_parameters()
        if value.requires_grad
      }
      optimizer.step()
      self.losses.append(loss.item())
    self.model.eval()
    self.last_logits = logits_of(self.model)
    self.tuned = directory / f'{model}_tuned'
    self.model.save_pretrained(self.tuned)


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """Returns a function that returns the Peft of a name in CASES."""
  references = {}

  def get(name):
    if name not in references:
      quiet_transformers()
      references[name] = Peft(name, tmp_path_factory.mktemp('peft'))
    return references[name]

  return get


def partitioned(theirs, sizes, *overrides):
  settings = [f'model={theirs.base.path}', f'adapter={theirs.adapter}', f'learning_rate={theirs.learning_rate}']
  settings.append(f'ici_mesh_shape={",".join(map(str, sizes))}')
  job = resolve(Tuned, [*settings, *overrides]).build()
  devices = jax.devices()[: int(np.prod(sizes))]
  return partition_job(job, job.experiment.mesh_spec().build(devices)), job


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


def batch_of(job):
  """Returns a batch with the rows of the reference, on which the loss is the reference's."""
  batch, ids = next(iter(job.train_input.make_iterator())), random_ids().astype(np.int32)
  batch['ids'], batch['labels'] = ids, np.roll(ids, -1, 1)
  batch['weights'][:, -1] = 0.0
  return batch


def gradients_of(model, state, batch):
  """Returns the gradients of the trained weights at the first step, in the checkpoint layout."""

  def gradients(variables, batch):
    def loss(trained):
      return model.task.compute_loss({'params': fill_in(trained, variables['params'])}, batch, train=True).loss

    return jax.grad(loss)(without_frozen(variables['params'], model.weight_specs))

  step = model.batch_step('gradients', model.input_layout.spec, gradients)
  gradients_by_name = traverse_util.flatten_dict(step(state.variables, step.place(batch)), sep='/')
  return {name: lazy_array(np.asarray(array)) for name, array in gradients_by_name.items() if array is not None}


def sum_of_ranks(ours, theirs, num_experts=1):
  """Returns the gradient of an A or B that several kernels share: the sum of the kernels' gradients, side by side."""
  if ours.shape[0] == theirs.shape[0]:  # B [out, rank and expert]
    return ours.reshape(ours.shape[0], -1, theirs.shape[1]).sum(1)
  return ours.reshape(num_experts, -1, theirs.shape[0] // num_experts, theirs.shape[1]).sum(1).reshape(theirs.shape)


def assert_same_gradients(model, state, job, theirs, directory):
  """Asserts that all gradients of adapters equal the reference's, in fused modules those of the shared A."""
  gradients = gradients_of(model, state, batch_of(job))
  export_adapter(directory, model.task.model, gradients, base=open_folder(theirs.base.path), digest='')
  ours = tensors_of(directory)
  assert ours.keys() == theirs.gradients.keys()
  mixture = open_folder(theirs.base.path).decoder.mixture
  num_experts = 1 if mixture is None else mixture.routing.num_experts
  for key, gradient in theirs.gradients.items():
    own = ours[key]
    if own.shape != gradient.shape:
      own = sum_of_ranks(own, gradient, num_experts if '.experts.' in key else 1)
    assert np.abs(gradient).max() > 0, key
    assert_close(own, gradient, 1e-4 if theirs.base.name != 'gemma3_text' else 1e-3, key)


@pytest.mark.parametrize('sizes', MESHES)
@pytest.mark.parametrize('name', NAMES)
def test_the_same_curve_and_each_reads_what_the_other_wrote(name, sizes, reference, tmp_path):
  import peft

  theirs = reference(name)
  model, job = partitioned(theirs, sizes)
  assert model.task.trained == ('lora_',)
  state = state_from_folder(model, open_folder(theirs.base.path), 0, str(theirs.adapter))
  step = model.forward_step({'ids': jax.ShapeDtypeStruct((B, T), np.int32)})
  ids = random_ids().astype(np.int32)
  assert_close(np.asarray(step(state, step.place({'ids': ids}))['logits']), theirs.first_logits, 1e-4)

  assert_same_gradients(model, state, job, theirs, tmp_path / 'gradients')
  batch = batch_of(job)
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
    assert_close(ours[key], value, 5e-3, key)  # Adam divides by the square root of tiny gradients
  # In float64, because the float32 error of torch reaches 8e-5.
  loaded = peft.PeftModel.from_pretrained(copy.deepcopy(theirs.base.model), target).eval().double()
  assert_close(logits_of(loaded), np.asarray(step(state, step.place({'ids': ids}))['logits']), 1e-4)

  merged = weights_on_mesh(model, merge_adapters(model, state.weights))
  export_folder(tmp_path / 'merged', model.task.model, merged, origin=base)
  merged_model, problems = load_reference(tmp_path / 'merged', 'float32')
  assert not problems
  assert_close(logits_of(merged_model.double()), logits_of(loaded), 1e-4 if name in LOW_LEARNING_RATES else 1e-5)


@pytest.fixture(scope='module')
def with_head(tmp_path_factory):
  """A base and an adapter of its lm_head, beside which `peft` saves the kernel of the base."""
  import peft
  import torch

  directory = tmp_path_factory.mktemp('with_head')
  base = Reference('llama', directory)
  config = peft.LoraConfig(r=4, target_modules=['q_proj', 'lm_head'], init_lora_weights=False, task_type='CAUSAL_LM')
  torch.manual_seed(1)
  model = peft.get_peft_model(copy.deepcopy(base.model), config)
  model.save_pretrained(directory / 'adapter')
  return types.SimpleNamespace(base=base, adapter=directory / 'adapter', learning_rate=0.1, logits=logits_of(model))


def test_an_adapter_of_the_head(with_head, tmp_path):
  assert 'base_model.model.lm_head.base_layer.weight' in tensors_of(with_head.adapter)
  model, _ = partitioned(with_head, (1, 1, 1))
  state = state_from_folder(model, open_folder(with_head.base.path), 0, str(with_head.adapter))
  step = model.forward_step({'ids': jax.ShapeDtypeStruct((B, T), np.int32)})
  ids = step.place({'ids': random_ids().astype(np.int32)})
  assert_close(np.asarray(step(state, ids)['logits']), with_head.logits, 1e-4)


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_an_adapter_with_a_head_of_another_base_is_refused(dtype, with_head, tmp_path):
  shutil.copytree(with_head.adapter, tmp_path, dirs_exist_ok=True)
  tensors, name = tensors_of(with_head.adapter), 'base_model.model.lm_head.base_layer.weight'
  head = tensors[name]
  base = open_folder(with_head.base.path)
  save_file(tensors | {name: head.astype(dtype)}, tmp_path / 'adapter_model.safetensors')
  assert any('softmax' in weight for weight in open_adapter(tmp_path).adapters(base))
  for other in (head * 1.01, head[:-1]):
    save_file(tensors | {name: other.astype(dtype)}, tmp_path / 'adapter_model.safetensors')
    with pytest.raises(UserError, match=r'lm_head\.base_layer\.weight, which differs from .*merge_and_unload'):
      open_adapter(tmp_path).adapters(base)


def perturb(path, weight):
  """Multiplies an adapter's weight by random factors, so that kernels no longer share an A."""
  name = jax.tree_util.keystr(path)
  if 'lora_' not in name:
    return weight
  factors = np.random.default_rng(zlib.crc32(name.encode())).uniform(0.9, 1.1, weight.shape).astype(np.float32)
  return jax.device_put(np.asarray(weight) * factors, weight.sharding)


# `peft` warns that no module has these keys, but uses them for parameters.
@pytest.mark.filterwarnings('ignore:The following (rank|alpha)_pattern keys:RuntimeWarning')
@pytest.mark.parametrize(
  'name, sizes',
  [
    pytest.param(name, sizes, marks=() if (name, sizes) == ('experts', (1, 1, 1)) else pytest.mark.exhaustive)
    for name in FUSED
    for sizes in ((1, 1, 1), (1, 2, 4))
  ],
)
def test_fused_modules(name, sizes, reference, tmp_path):
  """Adapters with a shared A are exported unchanged; perturbed ones have the sum of the kernels' ranks."""
  import peft

  theirs = reference(name)
  model, job = partitioned(theirs, sizes)
  base = open_folder(theirs.base.path)
  state = state_from_folder(model, open_folder(theirs.base.path), 0, str(theirs.adapter))
  step = model.forward_step({'ids': jax.ShapeDtypeStruct((B, T), np.int32)})
  ids = step.place({'ids': random_ids().astype(np.int32)})
  assert_close(np.asarray(step(state, ids)['logits']), theirs.first_logits, 1e-4)
  assert_same_gradients(model, state, job, theirs, tmp_path / 'gradients')

  export_adapter(tmp_path / 'first', model.task.model, weights_on_mesh(model, state.weights), base=base, digest='')
  ours, original = tensors_of(tmp_path / 'first'), tensors_of(theirs.adapter)
  assert ours.keys() == original.keys()
  for key, value in original.items():
    np.testing.assert_array_equal(ours[key], value, key)

  state = state.replace(weights=jax.tree_util.tree_map_with_path(perturb, state.weights))
  digest = folder_digest(str(theirs.base.path))  # checked when the adapter is read again
  export_adapter(tmp_path / 'ours', model.task.model, weights_on_mesh(model, state.weights), base=base, digest=digest)
  expected = np.asarray(step(state, ids)['logits'])
  loaded = peft.PeftModel.from_pretrained(copy.deepcopy(theirs.base.model), tmp_path / 'ours').eval()
  assert_close(logits_of(loaded), expected, 1e-4)
  again, _ = partitioned(theirs, sizes, f'adapter={tmp_path / "ours"}')
  state = state_from_folder(again, open_folder(theirs.base.path), 0, str(tmp_path / 'ours'))
  step = again.forward_step({'ids': jax.ShapeDtypeStruct((B, T), np.int32)})
  assert_close(np.asarray(step(state, ids)['logits']), expected, 1e-5)


# Values with which `peft` changes the base when it loads an adapter; corda, loftq and lora_ga cannot be created here.
CHANGING_INITS = ('pissa', 'pissa_niter_2', 'olora', 'corda', 'loftq', 'lora_ga')


@pytest.mark.parametrize('init', ['pissa', 'olora', 'orthogonal', 'mica', 'gaussian', 'eva'])
def test_inits_are_refused_if_peft_changes_the_base(init, reference, tmp_path):
  import peft

  base = reference('llama3').base
  before = {name: value.clone() for name, value in base.model.named_parameters()}
  model = copy.deepcopy(base.model)
  config = peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=init, task_type='CAUSAL_LM')
  peft_model = peft.get_peft_model(model, config)
  after = {name.replace('base_layer.', ''): value for name, value in peft_model.get_base_model().named_parameters()}
  changes = any((after[name] != before[name]).any() for name in before)
  assert changes == (init in CHANGING_INITS)
  peft_model.save_pretrained(tmp_path)
  if not changes:
    assert open_adapter(tmp_path).adapters(open_folder(base.path))
    return
  with pytest.raises(UserError, match='changes the base'):
    open_adapter(tmp_path)


def test_unsupported_adapters_are_refused(reference, tmp_path):
  theirs = reference('llama3')
  changes = [
    ('peft_type', 'IA3', "peft_type = 'IA3'.*must be 'LORA'"),
    ('modules_to_save', ['lm_head'], 'modules_to_save'),
    ('lora_alpha', 'x', "lora_alpha = 'x'.*number"),
    ('use_rslora', 'false', "use_rslora = 'false'.*bool"),
    ('rank_pattern', {'q_proj' * 999: 1}, 'name the modules'),
    ('target_parameters', 5, 'type list'),
    ('r', 77, 'rank 77'),
    *(('init_lora_weights', init, f'{init}.*changes the base.*merge_and_unload') for init in CHANGING_INITS),
  ]
  for key, value, message in changes:
    shutil.copytree(theirs.adapter, tmp_path / key, dirs_exist_ok=True)
    file = tmp_path / key / 'adapter_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=message):
      open_adapter(file.parent).adapters(open_folder(theirs.base.path))
  with pytest.raises(UserError, match='does not exist'):
    open_adapter(tmp_path)
  save_file({}, tmp_path / 'r' / 'adapter_model.safetensors')
  with pytest.raises(UserError, match='has no tensors'):
    open_adapter(tmp_path / 'r').adapters(open_folder(theirs.base.path))
