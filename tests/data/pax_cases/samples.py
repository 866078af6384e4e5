"""Paxml's other experiments, scaled down: BERT, slices of chips, pipelines of C4, ResNet on ImageNet."""

import jax.numpy as jnp
from paxml.tasks.lm.params import bert, c4, c4_multislice
from paxml.tasks.vision.params import imagenet_resnets
from praxis import layers, pax_fiddle

from pax_cases import classifiers, transformers


class Small:
  """Small sizes and an input."""

  PERCORE_BATCH_SIZE = 2
  MAX_SEQ_LEN = 16
  NUM_LAYERS = 2
  NUM_HEADS = 4
  DIMS_PER_HEAD = 8
  MODEL_DIMS = 32
  HIDDEN_DIMS = 48
  VOCAB_SIZE = 40
  LEARNING_RATE = 1e-2
  FPROP_DTYPE = jnp.float32
  ENABLE_BFLOAT16 = False
  SEQ_LEN, BATCH_SIZE = 16, 8
  EVAL_INTERVAL_STEPS = 0

  datasets = transformers.SmallLm.datasets

  def task(self):
    task = super().task()
    task.train.num_train_steps = 6
    task.train.eval_interval_steps = 1000
    return task


class Masked(Small):
  """Random masks, because the input has none."""

  def task(self):
    task = super().task()
    task.model.force_mask_generation, task.model.mask_token_id = True, 3
    return task


class Bert(Masked, bert.BertSpmdL4H128):
  """Masked tokens, also in evals, capped logits, Adafactor."""

  NUM_LAYERS = 1
  MESH_SHAPE = [1, 2, 2]


class TwoSlices(Small, c4_multislice.C4Spmd22BAdam2xv4_128):
  """Two slices of two chips, connected by the data center network."""

  ICI_MESH_SHAPE = [1, 2, 1]


class C4Pipeline(Small, c4.C4SpmdPipelineGpt3SmallAdam8Replicas):
  """A pipeline of C4."""

  NUM_STAGES = 2
  NUM_MICROBATCHES = 4
  MICROBATCH_SIZE = None
  ICI_MESH_SHAPE = [2, 1, 1, 2]


class ImageNet(imagenet_resnets.ResNet50Pjit):
  """ResNet's learner, schedule and splits, on images of 8 x 8 pixels."""

  MESH_SHAPE = [1, 4, 1]
  datasets = classifiers.Classifier.datasets
  get_input_specs_provider_params = classifiers.Classifier.get_input_specs_provider_params

  def _network(self):
    network = layers.ResNet.HParamsResNet5()
    network.channels, network.entryflow_conv_kernel = [8], (3, 3, 3)
    network.block_params = pax_fiddle.Config(layers.ResNetBlock, zero_init_residual=True)
    return network

  def task(self):
    task = super().task()
    task.model.softmax_tpl.input_dims, task.model.softmax_tpl.num_classes = 8, 4
    task.train.num_train_steps = 6
    return task
