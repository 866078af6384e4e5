"""Defines the models of pax_models.py as native experiments, with equal shapes, mesh, batch, remat and dtype.

4 layers, width 256, feed-forward 1024, 8 heads, 256 positions, batch 16; 8 devices.
"""

import fiddle as fdl

from spmd_tasks.layers import FeedForward
from spmd_tasks.layers.moe import CapacityGather, Experts, MixtureOfExperts
from spmd_tasks.recipes import MoeLanguageModel, PipelinedLanguageModel, SyntheticLanguageModel


class Dense(SyntheticLanguageModel):
  """Adam, scanned layers, full remat."""

  ici_mesh_shape = (1, 4, 2)
  vocab_size = 512
  model_dims = 256
  num_layers = 4
  num_heads = 8
  hidden_dims = 1024
  seq_len = 256
  batch_size = 16
  remat_policy = 'full'
  learning_rate = 1e-3
  trackers = ()

  def ffn(self):
    return fdl.Config(FeedForward, hidden_dim=self.hidden_dims, activation='gelu', use_bias=True, dtype=self.dtype)

  def eval_inputs(self):
    return {}


class MoeDropless(Dense, MoeLanguageModel):
  """Dense with 8 experts in every layer, top 2, dropless."""

  num_experts = 8

  def ffn(self):
    experts = fdl.Config(
      Experts,
      num_experts=self.num_experts,
      hidden_dim=self.hidden_dims,
      gated=False,
      activation='gelu',
      dtype=self.dtype,
    )
    return fdl.Config(MixtureOfExperts, router=self.router(), experts=experts, computation=self.computation())

  def loss(self):
    return MoeLanguageModel.loss(self)


class MoeCapacity(MoeDropless):
  """With a capacity, as Paxml's."""

  def computation(self):
    return fdl.Config(CapacityGather, capacity_factor=2.0)


class Pipeline(PipelinedLanguageModel, Dense):
  """4 stages, 8 microbatches."""

  ici_mesh_shape = (1, 4, 1, 2)
  num_microbatches = 8


class OneForwardOneBackward(Pipeline):
  """Pipeline with the other order of ticks."""

  schedule = 'one_forward_one_backward'


class PipelineMoeDropless(PipelinedLanguageModel, MoeDropless):
  """Pipeline with experts."""

  ici_mesh_shape = (1, 4, 1, 2)
  num_microbatches = 8


class PipelineMoeCapacity(PipelineMoeDropless):
  """With a capacity, as Paxml's."""

  def computation(self):
    return fdl.Config(CapacityGather, capacity_factor=2.0)
