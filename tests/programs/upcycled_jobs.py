"""The experiments of test_upcycling.py: a tiny dense model, and the same one with mixtures of experts in its place."""

import fiddle as fdl

from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter
from spmd_tasks.recipes import SyntheticLanguageModel
from spmd_tasks.sharding import DataExpertModelMesh

AXES = DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_partitions=2).axes()


class Dense(SyntheticLanguageModel):
  """Two layers of width 6 with 9 hidden units, padded nearly everywhere on data 2 x mdl 4."""

  ici_mesh_shape = (1, 2, 4)
  vocab_size = 64
  model_dims = 6
  num_layers = 2
  num_heads = 3
  hidden_dims = 9
  seq_len = 8
  batch_size = 8
  num_train_steps = 4
  log_every_steps = 1
  checkpoint_every_steps = 2
  eval_batches = 1
  tensorboard = False

  def task(self):
    task = super().task()
    task.learner.optimizer.learning_rate = 0.03
    task.learner.ema_decay = 0.9
    return task

  def eval_inputs(self):
    return {}


class Upcycled(Dense):
  """Every layer a mixture of equal experts, whose gates sum to 1: the dense model, until it is trained."""

  mesh_axis_names = AXES.mesh_axis_names
  ici_mesh_shape = AXES.ici_mesh_shape  # data 2 x expert 2 x mdl 2
  axis_rules = AXES.axis_rules
  num_train_steps = 2
  num_experts: int = 4
  num_selected_experts: int = 2
  has_shared_expert: bool = False

  def ffn(self):
    return fdl.Config(
      MixtureOfExperts,
      router=fdl.Config(
        TopKRouter, num_experts=self.num_experts, num_selected=self.num_selected_experts, normalize_gates=1.0
      ),
      experts=fdl.Config(Experts, num_experts=self.num_experts, hidden_dim=self.hidden_dims),
      computation=fdl.Config(Dropless),
      shared_expert=super().ffn() if self.has_shared_expert else None,
    )
