"""The experiments for GPUs that come with Paxml (paxml.tasks.lm.params.nvidia), made small: GPT, Llama 2, experts."""

import jax.numpy as jnp
from paxml.tasks.lm.params import nvidia
from praxis import pax_fiddle

from pax_lab import dense_lm


class Small:
  """Sizes and an input. In float32: the tests' quick compilation rounds bfloat16 differently."""

  PERCORE_BATCH_SIZE = 2
  MAX_SEQ_LEN = 16
  NUM_LAYERS = 2
  NUM_HEADS = 4
  DIMS_PER_HEAD = 8
  MODEL_DIMS = 32
  HIDDEN_DIMS = 48
  VOCAB_SIZE = 40
  TRAINABLE_PE_MAX_SEQ_LEN = 16
  ICI_MESH_SHAPE = [1, 2, 2]
  DCN_MESH_SHAPE = [1, 1, 1]
  LEARNING_RATE = 1e-2
  LR_COS_WARMUP = 2
  LR_COS_DECAY_START = 3
  NUM_STEPS = 6
  FPROP_DTYPE = jnp.float32

  def datasets(self):
    text = pax_fiddle.Config(dense_lm.ToyLmInput, name='train', is_training=True, seed=1, batch_size=8)
    text.seq_len, text.vocab_size = self.MAX_SEQ_LEN, self.VOCAB_SIZE
    return [text]

  def task(self):
    task = super().task()
    task.train.num_train_steps = self.NUM_STEPS
    task.train.eval_interval_steps = 1000
    return task


class Gpt(Small, nvidia.NVIDIA1_3B):
  """Adam with a cap of its updates, a cosine schedule."""


class LlamaGrouped(Small, nvidia.Llama2_70B):
  """Two heads share a key head."""

  NUM_KV_HEADS = 2


class Experts(Small, nvidia.MoELarge):
  """Experts in every layer."""

  NUM_EXPERTS = 4
  NUM_GROUPS = 4


class Pipelined(Small, nvidia.TestSmallConfig):
  """Two stages of two layers."""

  NUM_STAGES = 2
  NUM_LAYERS = 4
  MICROBATCH_SIZE = 2
  ICI_MESH_SHAPE = [2, 1, 1, 2]
  DCN_MESH_SHAPE = [1, 1, 1, 1]
