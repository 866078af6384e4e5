"""Defines language models as Paxml users write them, dense and with experts, pipelined and not, for bench_pax.py.

4 layers, width 256, feed-forward 1024, 8 heads, 256 positions, batch 16. Mesh: replica 1 x data 4 x mdl 2, or stage 4 x
replica 1 x data 1 x mdl 2.
"""

import jax.numpy as jnp
import numpy as np
from paxml.tasks.lm import model_params
from praxis import base_input, layers, pax_fiddle, py_utils


class AffineText(base_input.BaseInput):
  """Token t + 1 is 5 t + 7, except one in ten, which is random."""

  seq_len: int = 256
  vocab_size: int = 512

  def __post_init__(self):
    super().__post_init__()
    self._index = 0

  def get_next(self):
    rng = np.random.default_rng([17, self._index])
    self._index += 1
    shape = self.batch_size, self.seq_len
    ids = np.empty((shape[0], shape[1] + 1), np.int32)
    ids[:, 0] = rng.integers(1, self.vocab_size, shape[0])
    drawn, is_drawn = rng.integers(1, self.vocab_size, shape), rng.random(shape) < 0.1
    for t in range(self.seq_len):
      ids[:, t + 1] = np.where(is_drawn[:, t], drawn[:, t], (ids[:, t] * 5 + 7) % (self.vocab_size - 1) + 1)
    return py_utils.NestedMap(
      ids=ids[:, :-1],
      labels=ids[:, 1:],
      paddings=np.zeros(shape, np.float32),
      weights=np.ones(shape, np.float32),
      segment_ids=np.ones(shape, np.int32),
      segment_pos=np.tile(np.arange(self.seq_len, dtype=np.int32), (shape[0], 1)),
    )

  def reset(self):
    self._index = 0


def add_experts(transformer, num_groups):
  """Replaces every feed-forward layer of a StackedTransformer's config by a mixture of 8 experts, top 2."""
  transformer.num_experts, transformer.num_groups, transformer.gating_func = 8, num_groups, 'top2'
  transformer.moe_layers = list(range(transformer.num_layers))


class Common:
  """Adam, full remat."""

  NUM_LAYERS = 4
  VOCAB_SIZE = 512
  NUM_HEADS = 8
  DIMS_PER_HEAD = 32
  MODEL_DIMS = 256
  HIDDEN_DIMS = 1024
  FPROP_DTYPE = jnp.float32
  ACTIVATION_CLS = layers.GELU
  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_NOTHING
  LEARNING_RATE = 1e-3
  SUMMARY_INTERVAL_STEPS = 1000
  BATCH_SIZE = 16
  SEQ_LEN = 256

  def datasets(self):
    text = pax_fiddle.Config(AffineText, name='train', batch_size=self.BATCH_SIZE, is_training=True)
    text.seq_len, text.vocab_size = self.SEQ_LEN, self.VOCAB_SIZE
    return [text]

  def task(self):
    task = super().task()  # type: ignore[misc]  # of Paxml's class beside this one, as WEIGHT_DECAY
    weight_decay = self.WEIGHT_DECAY  # type: ignore[attr-defined]
    model_params.set_default_adam(task, self.LEARNING_RATE, weight_decay, warmup_steps=10, decay_start=11)
    return task


class Dense(Common, model_params.TransformerLmSpmdAdafactor):
  """Scanned layers."""

  USE_REPEATED_LAYER = True
  ICI_MESH_SHAPE = [1, 4, 2]


class Moe(Dense):
  """Dense with 8 experts in every layer, top 2."""

  def task(self):
    task = super().task()
    stack = task.model.lm_tpl.stacked_transformer_tpl
    block = stack.block
    add_experts(block, num_groups=8)
    model_params.set_sharding_annotations_v1(task, True, self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE)
    model_params.maybe_setup_moe_params(stack)
    return task


class Pipeline(Common, model_params.TransformerLmSpmdPipelineAdafactor):
  """4 stages of one layer, 8 microbatches of 2 rows."""

  NUM_STAGES = 4
  NUM_MICROBATCHES = 8
  ICI_MESH_SHAPE = [4, 1, 1, 2]
  TRAINING_OPTIMIZED_SHARDING = True


class PipelineMoe(Pipeline):
  """Pipeline with experts."""

  def task(self):
    task = super().task()
    add_experts(task.model.lm_tpl.stacked_transformer_tpl.pipeline_stage, num_groups=2)
    final_out = task.model.lm_tpl.stacked_transformer_tpl.activation_split_dims_mapping.final_out
    task.model.lm_tpl = pax_fiddle.get_callable(task.model.lm_tpl).set_sharding_params_v1(
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
    stack.activation_split_dims_mapping.final_out = final_out
    model_params.maybe_setup_moe_params(stack.pipeline_stage)
    return task
