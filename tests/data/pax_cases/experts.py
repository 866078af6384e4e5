"""Mixtures of experts of Praxis: gating, uneven dims, dropout, bfloat16."""

import jax.numpy as jnp
from pax_lab import moe_lm
from paxml.tasks.lm import model_params
from praxis import pax_fiddle


class SmallMoe(moe_lm.MoeLm):
  """The base class of the cases: MoeLm with 6 steps on four devices."""

  MODEL_DIMS = 16
  HIDDEN_DIMS = 24
  NUM_HEADS = 2
  VOCAB_SIZE = 40
  ICI_MESH_SHAPE = [1, 2, 2]
  NUM_TRAIN_STEPS = 6

  def datasets(self):
    return [
      pax_fiddle.Config(moe_lm.ToyMoeInput, name='train', batch_size=8, seq_len=16, is_training=True, vocab_size=40)
    ]

  def task(self):
    task = super().task()
    self.change(task, task.model.lm_tpl.stacked_transformer_tpl)
    return task

  def change(self, task, stack):
    """Changes other settings."""


class UnevenExperts(SmallMoe):
  """Three experts and 25 features on mesh axes of size 2."""

  NUM_EXPERTS = 3
  HIDDEN_DIMS = 25
  VOCAB_SIZE = 41
  NUM_GROUPS = 2


class NoisyMoe(SmallMoe):
  """Random second expert, dropout, bfloat16, gated activations."""

  FPROP_DTYPE = jnp.bfloat16

  def change(self, task, stack):
    moe = stack.block.moe_layer_tpl
    moe.second_expert_policy = 'random'
    moe.use_gated_activation = True
    moe.residual_dropout_prob = 0.1
    moe.relu_dropout_prob = 0.1


class ExpertChoice(SmallMoe):
  """Experts choose their tokens."""

  def change(self, task, stack):
    stack.block.gating_func = 'expert_choice'
    stack.block.moe_layer_tpl.gating_func = 'expert_choice'


class MoeEverySecond(SmallMoe):
  """Four layers without a scan, with experts in the second and the fourth; Adam with averages."""

  NUM_LAYERS = 4
  USE_REPEATED_LAYER = False

  def task(self):
    task = model_params.TransformerLmSpmdAdafactor.task(self)
    stack = task.model.lm_tpl.stacked_transformer_tpl
    stack.num_experts, stack.num_groups, stack.gating_func, stack.moe_layers = 4, 4, 'top2', [1, 3]
    model_params.set_sharding_annotations_v1(task, True, self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE)
    model_params.maybe_setup_moe_params(stack)
    model_params.set_default_adam(task, self.LEARNING_RATE, self.WEIGHT_DECAY, warmup_steps=2, decay_start=3)
    task.train.learner.optimizer.ema_decay = 0.9
    task.train.num_train_steps = self.NUM_TRAIN_STEPS
    return task
