"""DPO on a folder: the loss and every weight's gradient are those of TRL's formula in torch on the same weights."""

import json

import fiddle as fdl
import jax
import numpy as np
import pytest

from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface._folder import weights_on_mesh
from spmd_tasks.bridges.huggingface.exporting import export_folder
from spmd_tasks.bridges.huggingface.origin import state_from_folder
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.inputs import FolderTokenizer
from spmd_tasks.learning import Sgd
from spmd_tasks.tuning import PreferenceTuning
from tests.bridges.huggingface.reference_models import LEARNING_RATE, load_reference, tensors_of
from tests.model_folders import write_llama

pytestmark = pytest.mark.slow

PAIRS = [
  {'prompt': 'the cat', 'chosen': ' sat on the mat', 'rejected': ' ate'},
  {'prompt': 'a dog', 'chosen': ' and', 'rejected': ' {"name": "cat"}'},
  {'prompt': 'def f(x):', 'chosen': ' return x', 'rejected': ' the hat'},
]
BETA = 0.3


class OneStep(PreferenceTuning):
  """One step of SGD on three pairs, packed in two rows."""

  batch_size = 2
  seq_len = 48
  beta = BETA

  def task(self):
    task = super().task()
    task.learner.optimizer = fdl.Config(Sgd, learning_rate=LEARNING_RATE)
    task.learner.clip_global_norm = None
    return task


def of_trl(model, tokenizer, references):
  """Loss and gradients by TRL's formula, one text at a time. `references`: [3, 2]."""
  import torch
  import torch.nn.functional as F

  def log_prob(pair, name):
    prompt = [1, *tokenizer.encode(pair['prompt'])]
    answer = [*tokenizer.encode(pair['prompt'] + pair[name])[len(prompt) - 1 :], 2]
    ids = torch.tensor([prompt + answer])
    log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return torch.gather(log_probs, 1, torch.tensor(answer)[:, None]).sum()

  model.zero_grad()
  policy = torch.stack([torch.stack([log_prob(pair, name) for name in ('chosen', 'rejected')]) for pair in PAIRS])
  ratios = policy - torch.tensor(references)
  loss = -F.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()
  loss.backward()
  return loss.item(), {name: value.grad.numpy() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.exhaustive  # tests/tuning/test_preference_loss.py holds the formula at the logits in every run
@pytest.mark.parametrize('mesh', ['1,1,1', '1,2,4'])
def test_loss_and_every_gradient_are_those_of_trl(mesh, tmp_path):
  folder = write_llama(tmp_path / 'model')
  theirs, _ = load_reference(folder, 'float32')
  tokenizer = FolderTokenizer(path=str(folder))
  (tmp_path / 'pairs.jsonl').write_text(''.join(json.dumps(pair) + '\n' for pair in PAIRS))
  references = np.array([[-20.0, -9.0], [-11.0, -30.0], [-25.0, -14.0]], np.float32)
  np.save(tmp_path / 'reference.npy', references)
  expected, gradients = of_trl(theirs, tokenizer, references)
  overrides = [f'model={folder}', f'data={tmp_path}/pairs.jsonl', f'ici_mesh_shape={mesh}']
  overrides += [f'train_input.reference={tmp_path}/reference.npy', 'train_input.num_epochs=1']
  job = resolve(OneStep, overrides).build()
  model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[: np.prod(job.experiment.ici_mesh_shape)]))
  batch = next(job.train_input.make_iterator())
  assert batch['segment_ids'].max(axis=1).sum() == 6
  with jax.default_matmul_precision('highest'):
    state, metrics = model.train_step(state_from_folder(model, str(folder), 0), model.train_step.place(batch))
  np.testing.assert_allclose(float(metrics['loss']), expected, rtol=1e-4)
  export_folder(tmp_path / 'ours', model.task.model, weights_on_mesh(model, state.weights), origin=open_folder(folder))
  before, after = tensors_of(folder), tensors_of(tmp_path / 'ours')
  assert gradients.keys() == before.keys()
  largest = max(np.abs(each).max() for each in gradients.values())
  for name, gradient in gradients.items():
    found = (before[name] - after[name]) / LEARNING_RATE
    assert np.abs(found - gradient).max() <= 1e-4 * largest, name
