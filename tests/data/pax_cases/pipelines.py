"""Pipelines of Praxis, on meshes with a stage axis."""

import jax.numpy as jnp
from paxml.tasks.lm import model_params
from praxis import layers

from pax_cases import transformers


class Pipelined(model_params.TransformerLmSpmdPipelineAdafactor):
  """Two stages of one layer, four microbatches."""

  NUM_LAYERS = 2
  VOCAB_SIZE = 40
  MODEL_DIMS = 16
  HIDDEN_DIMS = 24
  NUM_HEADS = 2
  DIMS_PER_HEAD = 8
  FPROP_DTYPE = jnp.float32
  ACTIVATION_CLS = layers.GELU
  LEARNING_RATE = 1e-2
  NUM_STAGES = 2
  NUM_MICROBATCHES = 4
  ICI_MESH_SHAPE = [2, 1, 1, 2]
  BATCH_SIZE = 8
  SEQ_LEN = 16
  EVAL_INTERVAL_STEPS = 0

  datasets = transformers.SmallLm.datasets

  def task(self):
    task = super().task()
    task.train.num_train_steps = 6
    model_params.set_default_adam(task, self.LEARNING_RATE, self.WEIGHT_DECAY, warmup_steps=2, decay_start=3)
    self.change(task)
    return task

  def change(self, task):
    """Changes other settings."""


class PipelinedStreams(Pipelined):
  """Inputs and outputs streamed through the stages, dropout, and a microbatch size."""

  STREAM_IO = True
  NUM_MICROBATCHES = None
  MICROBATCH_SIZE = 2
  DROPOUT_PROB = 0.1


class PipelinedBroadcast(Pipelined):
  """Passes padding and positions from stage to stage, in bfloat16."""

  PIPELINE_BROADCAST_INPUTS = True
  FPROP_DTYPE = jnp.bfloat16


class Circular(Pipelined):
  """Two stages through which every microbatch passes twice."""

  NUM_LAYERS = 4
  CIRCULAR_REPEAT = 2


class PipelinedMoe(Pipelined):
  """Experts in every layer of a pipeline."""

  def change(self, task):
    stack = task.model.lm_tpl.stacked_transformer_tpl
    stage = stack.pipeline_stage
    stage.num_experts, stage.num_groups, stage.gating_func, stage.moe_layers = 4, 2, 'top2', [0]
    final = stack.activation_split_dims_mapping.final_out
    task.model.lm_tpl = layers.TransformerLm.set_sharding_params_v1(
      task.model.lm_tpl,
      replica_axis='replica',
      data_axis='data',
      mdl_axis='mdl',
      ici_mesh_shape=self.ICI_MESH_SHAPE,
      dcn_mesh_shape=self.DCN_MESH_SHAPE,
      mesh_axis_names=['stage', 'replica', 'data', 'mdl'],
      training_optimized=True,
    )
    stack = task.model.lm_tpl.stacked_transformer_tpl
    stack.weight_split_dims_mapping.stages = ['stage']
    stack.activation_split_dims_mapping.final_out = final
    model_params.maybe_setup_moe_params(stack.pipeline_stage)
