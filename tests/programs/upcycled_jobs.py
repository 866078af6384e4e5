"""The experiments of test_upcycling.py: a tiny dense model, and the same one with mixtures of experts in its place."""

import fiddle as fdl

from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter
from spmd_tasks.recipes import SyntheticLanguageModel
from spmd_tasks.sharding import DataExpertModelMesh
from tests.programs.small_jobs import Small

AXES = DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_partitions=2).axes()


class Dense(Small):
  """Two layers, without dropout; padded nearly everywhere on data 2 x mdl 4."""

  num_layers = 2
  num_train_steps = 4

  def task(self):
    task = super().task()
    task.learner.optimizer.learning_rate = 0.03
    task.model.stack.block.dropout_rate = 0.0
    return task

  def train_input(self):
    return SyntheticLanguageModel.train_input(self)

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
