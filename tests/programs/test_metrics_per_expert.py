"""Metrics with one value per expert through an evaluation and its files.

Shapes: B batch rows, T positions, V ids, L layers, E experts.
"""

import types

from etils import epath
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.inputs import as_input
from spmd_tasks.layers import LanguageModelLoss, declare_weight
from spmd_tasks.learning import AdamW, Learner
from spmd_tasks.programs.evaluator import Evaluator
from spmd_tasks.runtime import Task, partition_spmd_model
from spmd_tasks.runtime.metric_files import read_jsonl
from spmd_tasks.sharding import MeshSpec

B, T, V, L, E = 8, 4, 6, 2, 3
TOKENS_PER_ROW = (T, 1) * (B // 2)


class Bigrams(nn.Module):
  """Logits [V] by id. Layer l has id i at expert (i + l) mod E."""

  @nn.compact
  def __call__(self, batch, train=False):
    ids, weights, zeros = batch['ids'], batch['weights'], nn.initializers.zeros
    table = declare_weight(self, 'table', shape=(V, V), init=zeros, split_dims=('data', None))
    experts = (ids[None] + jnp.arange(L)[:, None, None]) % E
    chosen = jax.nn.one_hot(experts, E) * weights[None, :, :, None]
    aux = {
      'balance': jnp.arange(1.0, 1 + L),
      'expert_load': jnp.sum(chosen, axis=(1, 2)) / jnp.maximum(jnp.sum(weights), 1.0),
    }
    return {'logits': table[ids], 'aux': aux}


def draw_batch(seed, tokens_per_row):
  rng = np.random.default_rng(seed)
  ids, labels = rng.integers(0, V, (2, B, T), np.int32)
  weights = (np.arange(T)[None] < np.array(tokens_per_row)[:, None]).astype(np.float32)
  return {'ids': ids, 'labels': labels, 'weights': weights}


def load_by_hand(*batches):
  """The mean over layers of each expert's fraction of all tokens."""
  counts = np.zeros(E)
  for batch in batches:
    for i, weight in zip(batch['ids'].ravel(), batch['weights'].ravel()):
      for layer in range(L):
        counts[(i + layer) % E] += weight
  return counts / counts.sum()


def partitioned():
  loss = LanguageModelLoss(aux_loss_weights={'balance': 0.1}, num_aux_layers=L)
  learner = Learner(optimizer=AdamW(learning_rate=0.1))
  mesh = MeshSpec(axis_names=('data',), ici_mesh_shape=(8,)).build()
  spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in draw_batch(0, TOKENS_PER_ROW).items()}
  return partition_spmd_model(Task(model=Bigrams(), loss=loss, learner=learner), mesh, spec)


def test_evaluation_averages_vectors_over_batches(tmp_path):
  """Batches with 20, 1 and no tokens, and one of three rows."""
  batches = [draw_batch(1, TOKENS_PER_ROW), draw_batch(2, (1, *[0] * (B - 1))), draw_batch(3, [0] * B)]
  batches.append({name: rows[:3] for name, rows in draw_batch(4, TOKENS_PER_ROW).items()})
  valid = as_input('eval_inputs.valid', batches, repeats=False)
  experiment = types.SimpleNamespace(tensorboard=False, input_timeout_s=60)
  job, model = types.SimpleNamespace(eval_inputs={'valid': valid}, experiment=experiment), partitioned()
  evaluator = Evaluator(job, model, epath.Path(tmp_path))
  ((name, metrics),) = evaluator.evaluate(model.init(0).variables, 7)
  evaluator.record(name, 7, metrics)
  evaluator.close()
  record = read_jsonl(epath.Path(tmp_path / 'eval' / 'valid'))[7]
  assert record['expert_load'] == metrics['expert_load']
  np.testing.assert_allclose(record['expert_load'], load_by_hand(*batches), rtol=1e-6)
  np.testing.assert_allclose(record['loss'], np.log(V) + 0.15, rtol=1e-6)
