"""Uneven hybrids, for tests that compare meshes: 3 recurrent heads of values and 1 of keys, and gated attention."""

import fiddle as fdl

from spmd_tasks.recipes import HybridLanguageModel, PipelinedLanguageModel
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, context_axis_rules
from tests.runtime import moe_experiments, uneven_experiments


class _Sizes(HybridLanguageModel):
  attention_interval = 2
  num_value_heads = 3
  num_key_heads = 1
  key_head_dim = 6
  value_head_dim = 10

  def block(self, ffn):
    group = super().block(ffn)
    group.blocks[0].attention.chunk_tokens = 4  # of 16 tokens
    return group


class Hybrid(_Sizes, uneven_experiments.AdamW):
  """The axes are (replica, data, mdl)."""

  num_layers = 2
  batch_size = 16


class HybridContext(Hybrid):
  """With tokens over an axis `context`, over which the recurrence splits heads."""

  mesh_axis_names = ('replica', 'data', 'context', 'mdl')
  ici_mesh_shape = (1, 1, 2, 4)
  axis_rules = context_axis_rules(DEFAULT_AXIS_RULES)


class HybridPipelined(PipelinedLanguageModel, Hybrid):
  """The axes are (replica, stage, data, mdl); stages have groups of two layers."""

  num_layers = 6


class HybridExperts(_Sizes, moe_experiments.AlongData):
  """6 experts, top 2, along data."""

  num_layers = 2


class RecurrentExperts(HybridExperts, uneven_experiments.Adafactor):
  """Without attention, which takes half of the time to compile; with Adafactor and averaged weights."""

  def block(self, ffn):
    return super().block(ffn).blocks[0]

  def stack(self):
    return fdl.copy_with(super().stack(), num_layers=self.num_layers)


class RecurrentExpertAxis(RecurrentExperts, moe_experiments.ExpertAxis):
  """With experts split over an axis of their own."""
