"""Attention, positions, dropout, dtypes and other settings of a dense language model, on a mesh 1 x 2 x 2."""

import jax.numpy as jnp
from pax_lab import dense_lm


class SmallLm(dense_lm.DenseLm):
  """The base class of the cases, with 2 repeated layers."""

  BATCH_SIZE = 8
  SEQ_LEN = 16
  VOCAB_SIZE = 40
  MODEL_DIMS = 16
  HIDDEN_DIMS = 24
  NUM_HEADS = 2
  ICI_MESH_SHAPE = [1, 2, 2]
  NUM_TRAIN_STEPS = 6
  EVAL_INTERVAL_STEPS = 0

  def task(self):
    task = super().task()
    task.train.eval_interval_steps = self.EVAL_INTERVAL_STEPS
    lm = task.model.lm_tpl
    self.change_layer(lm.stacked_transformer_tpl.block.transformer_layer_params_tpl)
    self.change(task, lm)
    return task

  def change_layer(self, layer):
    """Changes the layer template."""

  def change(self, task, lm):
    """Changes other settings."""


class Dropout(SmallLm):
  """All kinds of dropout of a transformer, which evals do not have."""

  EVAL_INTERVAL_STEPS = 3

  def change_layer(self, layer):
    layer.tr_atten_tpl.atten_dropout_prob = 0.1
    layer.tr_fflayer_tpl.relu_dropout_prob = 0.2
    layer.tr_fflayer_tpl.residual_dropout_prob = 0.1
    layer.residual_dropout_prob = 0.1

  def change(self, task, lm):
    lm.stacked_transformer_tpl.block.input_dropout_prob = 0.1
    lm.stacked_transformer_tpl.block.dropout_prob = 0.1


class Bfloat16Dropout(Dropout):
  """Computes in bfloat16, with dropout."""

  FPROP_DTYPE = jnp.bfloat16


class Unscanned(SmallLm):
  """Three unrolled layers with remat that saves dots."""

  def change(self, task, lm):
    block = lm.stacked_transformer_tpl.block
    block.num_layers = 3
    lm.stacked_transformer_tpl = block


class VariationalNoise(SmallLm):
  """Variational noise on the weights of the feed-forward layers from step 2 on."""

  def change(self, task, lm):
    task.vn.vn_scale = 0.05
    task.vn.vn_regex = '.*ff_layer.*'
    task.vn.vn_start_step = 2
