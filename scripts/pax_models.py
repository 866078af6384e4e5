"""Two language models as a user of Paxml writes them, dense and with experts, for bench_pax.py.

4 layers, width 256, feed-forward 1024, 8 heads, 256 positions, batch 16, mesh replica 1 x data 4 x mdl 2.
"""

import jax.numpy as jnp
import numpy as np
from paxml.tasks.lm import model_params
from praxis import base_input, layers, pax_fiddle, py_utils


class AffineText(base_input.BaseInput):
  """Token t + 1 is 5 t + 7, and every tenth one is drawn."""

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


class Dense(model_params.TransformerLmSpmdAdafactor):
  """Adam, layers repeated by a scan, everything recomputed in the backward pass."""

  NUM_LAYERS = 4
  VOCAB_SIZE = 512
  NUM_HEADS = 8
  DIMS_PER_HEAD = 32
  MODEL_DIMS = 256
  HIDDEN_DIMS = 1024
  FPROP_DTYPE = jnp.float32
  ACTIVATION_CLS = layers.GELU
  USE_REPEATED_LAYER = True
  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_NOTHING
  ICI_MESH_SHAPE = [1, 4, 2]
  LEARNING_RATE = 1e-3
  SUMMARY_INTERVAL_STEPS = 1000
  BATCH_SIZE = 16
  SEQ_LEN = 256

  def datasets(self):
    text = pax_fiddle.Config(AffineText, name='train', batch_size=self.BATCH_SIZE, is_training=True)
    text.seq_len, text.vocab_size = self.SEQ_LEN, self.VOCAB_SIZE
    return [text]

  def task(self):
    task = super().task()
    model_params.set_default_adam(task, self.LEARNING_RATE, self.WEIGHT_DECAY, warmup_steps=10, decay_start=11)
    return task


class Moe(Dense):
  """The same with 8 experts in every layer, top 2."""

  def task(self):
    task = super().task()
    stack = task.model.lm_tpl.stacked_transformer_tpl
    block = stack.block
    block.num_experts, block.num_groups, block.gating_func = 8, 8, 'top2'
    block.moe_layers = list(range(block.num_layers))
    model_params.set_sharding_annotations_v1(task, True, self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE)
    model_params.maybe_setup_moe_params(stack)
    return task
