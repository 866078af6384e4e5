"""Experiments of ours whose models are Praxis'."""

import fiddle as fdl
import jax.numpy as jnp
from praxis import base_layer, base_model, layers, pax_fiddle, py_utils

from spmd_tasks.bridges.pax import PraxisLayer, PraxisTask
from spmd_tasks.experiment import Experiment
from spmd_tasks.inputs import SyntheticText
from spmd_tasks.learning import AdamW, Learner
from spmd_tasks.recipes import DenseLanguageModel


class SmallLm(Experiment):
  """Praxis' TransformerLm with our AdamW on our input."""

  ici_mesh_shape = (1, 4, 2)
  model_dims: int = 20
  fprop_dtype: str = 'float32'

  def task(self):
    lm = pax_fiddle.Config(layers.TransformerLm, model_dims=self.model_dims, vocab_size=31)
    block = lm.stacked_transformer_tpl
    block.num_layers, block.num_heads, block.hidden_dims, block.model_dims = 1, 2, 30, self.model_dims
    model = pax_fiddle.Config(layers.LanguageModel, name='lm', lm_tpl=lm, fprop_dtype=jnp.dtype(self.fprop_dtype))
    layers.TransformerLm.set_sharding_params_v1(
      lm,
      replica_axis='replica',
      data_axis='data',
      mdl_axis='mdl',
      ici_mesh_shape=self.ici_mesh_shape,
      mesh_axis_names=self.mesh_axis_names,
      training_optimized=True,
    )
    model.mesh_axis_names, model.ici_mesh_shape = list(self.mesh_axis_names), list(self.ici_mesh_shape)
    learner = fdl.Config(Learner, optimizer=fdl.Config(AdamW, learning_rate=1e-2))
    return fdl.Config(PraxisTask, model=model, learner=learner)

  def train_input(self):
    return fdl.Config(SyntheticText, batch_size=6, seq_len=8, vocab_size=31)


class NormedModel(base_model.BaseModel):
  """Predicts `labels` from `ids` by a projection of features that are normalized over the batch."""

  def setup(self):
    self.create_child('norm', pax_fiddle.Config(layers.BatchNorm, dim=4, use_moving_avg_in_training=False))
    self.create_child('out', pax_fiddle.Config(layers.Linear, input_dims=4, output_dims=1))

  def compute_predictions(self, batch):
    features = jnp.stack([jnp.sin(k * batch.ids.astype(jnp.float32)) for k in range(1, 5)], -1)
    return self.out(self.norm(features, 1.0 - batch.weights))

  def compute_loss(self, predictions, batch):
    errors = jnp.square(predictions[..., 0] - batch.labels)
    weight = jnp.sum(batch.weights)
    loss = jnp.sum(errors * batch.weights) / weight
    return py_utils.NestedMap(total_loss=(loss, weight)), py_utils.NestedMap()


class Normed(Experiment):
  """A model with moving averages beside its weights."""

  ici_mesh_shape = (1, 2, 1)

  def task(self):
    model = pax_fiddle.Config(NormedModel, name='normed')
    return fdl.Config(
      PraxisTask, model=model, learner=fdl.Config(Learner, optimizer=fdl.Config(AdamW, learning_rate=1e-2))
    )

  def train_input(self):
    return fdl.Config(SyntheticText, batch_size=4, seq_len=8, vocab_size=31)


class WithPraxisNorms(DenseLanguageModel):
  """A language model of ours, scanned over 2 layers, whose norms are Praxis'."""

  batch_size = 6
  seq_len = 8
  vocab_size = 31
  model_dims = 20
  num_layers = 2
  num_heads = 2
  hidden_dims = 30
  ici_mesh_shape = (1, 2, 1)

  def task(self):
    task = super().task()
    norm = pax_fiddle.Config(layers.LayerNorm, dim=self.model_dims, mesh_axis_names=list(self.mesh_axis_names))
    task.model.stack.block.norm = fdl.Config(PraxisLayer, config=norm)
    return task

  def train_input(self):
    return fdl.Config(SyntheticText, batch_size=self.batch_size, seq_len=self.seq_len, vocab_size=self.vocab_size)


NON_TRAINABLE = base_layer.NON_TRAINABLE
