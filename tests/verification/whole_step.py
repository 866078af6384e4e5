"""Tiny experiments with all features of a train step, for tests that plant faults in the framework."""

import fiddle as fdl

from spmd_tasks.recipes import MoeLanguageModel, PipelinedLanguageModel, SyntheticLanguageModel
from tests.layers.tiny_model import DroppedFfn


class WholeStep(SyntheticLanguageModel):
  """Dropout, label smoothing, z-loss, a schedule, decay, clipping, and averaged weights."""

  vocab_size = 12
  model_dims = 8
  num_layers = 2
  num_heads = 2
  hidden_dims = 12
  seq_len = 8
  batch_size = 8
  eval_batches = 2
  num_train_steps = 8
  warmup_fraction = 0.25
  learning_rate = 3e-2
  dropout_rate: float = 0.25
  num_learner_microbatches: int = 1

  def block(self, ffn):
    return fdl.Config(DroppedFfn, ffn=ffn, norm=super().block(ffn).norm, dropout_rate=self.dropout_rate)

  def loss(self):
    return fdl.copy_with(super().loss(), label_smoothing=0.1, z_loss_weight=0.01)

  def task(self):
    task = super().task()
    task.learner.num_microbatches = self.num_learner_microbatches
    task.learner.clip_global_norm = 0.5
    task.learner.ema_decay = 0.9
    task.eval_with_ema = True
    return task


class WholeStepWithAttention(WholeStep):
  """With attention."""

  def block(self, ffn):
    return fdl.copy_with(SyntheticLanguageModel.block(self, ffn), dropout_rate=self.dropout_rate)


class WholeStepOfExperts(MoeLanguageModel, WholeStep):
  """With experts and aux losses."""

  num_experts, num_selected_experts = 2, 1
  load_balance_weight = 0.2
  router_z_weight = 0.1


class StagedStep(PipelinedLanguageModel, SyntheticLanguageModel):
  """A pipeline with dropout."""

  vocab_size = 12
  model_dims = 8
  num_layers = 4
  num_heads = 2
  hidden_dims = 12
  seq_len = 8
  batch_size = 8
  num_microbatches = 2
  eval_batches = 2
  num_train_steps = 8
  dropout_rate: float = 0.25

  def block(self, ffn):
    return fdl.copy_with(super().block(ffn), dropout_rate=self.dropout_rate)
