"""Trains pipelined language models.

    spmd-tasks --exp pipeline.StdlibTiny --mode train --num_fake_devices 8 --job_log_dir runs/pipeline

pipeline.StdlibTiny has the same losses as lm.StdlibTiny: from 6.6 to 1.45 nats per byte in 300 steps.
"""

from spmd_tasks import register
from spmd_tasks.experiments import lm, moe
from spmd_tasks.recipes import PipelinedLanguageModel
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, DataExpertModelMesh, residual_axis_rules, stage_axis_rules


@register
class StdlibTiny(PipelinedLanguageModel, lm.StdlibTiny):
  """lm.StdlibTiny over 4 stages x data 2, in 8 microbatches (GPipe)."""

  ici_mesh_shape = (1, 4, 2, 1)


@register
class CircularTiny(PipelinedLanguageModel, lm.StdlibTiny):
  """lm.StdlibTiny over 2 stages with 2 repeats, circular; data 2 x mdl 2."""

  ici_mesh_shape = (1, 2, 2, 2)
  schedule = 'circular'
  num_repeats = 2


@register
class OneForwardOneBackwardTiny(PipelinedLanguageModel, lm.StdlibTiny):
  """lm.StdlibTiny with 10 layers over 4 stages x data 2, one forward, one backward: uneven stages, bounded memory."""

  ici_mesh_shape = (1, 4, 2, 1)
  num_layers = 10
  schedule = 'one_forward_one_backward'


@register
class MoeTiny(PipelinedLanguageModel, moe.StdlibTiny):
  """moe.StdlibTiny, dropless, over 2 stages x data 2 x expert 2."""

  mesh = DataExpertModelMesh(num_devices=8, num_stages=2, num_expert_partitions=2)
  num_microbatches = 4


@register
class Dense70B(PipelinedLanguageModel, lm.Dense70B):
  """lm.Dense70B over 4 stages, each a slice of 256 chips, circular; stage 4 x data 128 x mdl 2."""

  ici_mesh_shape = (1, 1, 128, 2)
  dcn_mesh_shape = (1, 4, 1, 1)
  # The residual stream is sharded over mdl between layers, so that a stage saves and sends half of it.
  axis_rules = stage_axis_rules(residual_axis_rules(DEFAULT_AXIS_RULES))
  num_microbatches = 8
  schedule = 'circular'
  num_repeats = 5
  remat_policy = 'dots_no_batch'


@register
class Dense70BOnH200(PipelinedLanguageModel, lm.Dense70BOnH200):
  """lm.Dense70BOnH200 over 8 stages of one GPU each, one forward, one backward, in 64 microbatches of one row."""

  ici_mesh_shape = (1, 8, 1, 1)
  batch_size = 64
  num_microbatches = 64
  schedule = 'one_forward_one_backward'
  remat_policy = 'attention_and_ffn'
  num_logit_chunks = 8
