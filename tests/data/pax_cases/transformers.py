"""Attention, positions, dropout, dtypes and the other settings of a dense language model, on a mesh 1 x 2 x 2."""

import jax.numpy as jnp
from praxis import layers, pax_fiddle
from praxis.layers import grouped_query_attention

from pax_lab import dense_lm



class SmallLm(dense_lm.DenseLm):
  """The base of the cases: 2 repeated layers."""

  BATCH_SIZE = 8
  SEQ_LEN = 16
  VOCAB_SIZE = 40
  MODEL_DIMS = 16
  HIDDEN_DIMS = 24
  NUM_HEADS = 2
  ICI_MESH_SHAPE = [1, 2, 2]
  NUM_TRAIN_STEPS = 6
  EVAL_INTERVAL_STEPS = 0

  def task(self):
    task = super().task()
    task.train.eval_interval_steps = self.EVAL_INTERVAL_STEPS
    lm = task.model.lm_tpl
    self.change_layer(lm.stacked_transformer_tpl.block.transformer_layer_params_tpl)
    self.change(task, lm)
    return task

  def change_layer(self, layer):
    """Changes the template of a layer."""

  def change(self, task, lm):
    """Changes anything else."""


class Dropout(SmallLm):
  """Every dropout that a transformer has; evaluated without it."""

  EVAL_INTERVAL_STEPS = 3

  def change_layer(self, layer):
    layer.tr_atten_tpl.atten_dropout_prob = 0.1
    layer.tr_fflayer_tpl.relu_dropout_prob = 0.2
    layer.tr_fflayer_tpl.residual_dropout_prob = 0.1
    layer.residual_dropout_prob = 0.1

  def change(self, task, lm):
    lm.stacked_transformer_tpl.block.input_dropout_prob = 0.1
    lm.stacked_transformer_tpl.block.dropout_prob = 0.1


class Bfloat16Dropout(Dropout):
  """Computes in bfloat16, with dropout."""

  FPROP_DTYPE = jnp.bfloat16


class Unscanned(SmallLm):
  """Three layers with weights of their own, remat by dots."""

  def change(self, task, lm):
    block = lm.stacked_transformer_tpl.block
    block.num_layers = 3
    lm.stacked_transformer_tpl = block


class Rotary(SmallLm):
  """Rotary positions."""

  def change_layer(self, layer):
    layer.tr_atten_tpl.use_rotary_position_emb = True


class RelativeBias(SmallLm):
  """T5's relative positions; trainable absolute ones are off."""

  def change_layer(self, layer):
    layer.tr_atten_tpl.relative_bias_tpl = pax_fiddle.Config(
      layers.RelativeBias, relative_attention_num_buckets=8, relative_attention_max_distance=12
    )

  def change(self, task, lm):
    lm.position_emb_tpl = None


class LocalAttention(SmallLm):
  """A window of 4 tokens in blocks of 4."""

  def change_layer(self, layer):
    attention = pax_fiddle.Config(layers.LocalSelfAttention)
    attention.copy_fields_from(layer.tr_atten_tpl)
    attention.block_size, attention.left_context, attention.right_context = 4, 4, 0
    layer.tr_atten_tpl = attention


class Alibi(SmallLm):
  """Linear biases by distance, in a window."""

  def change_layer(self, layer):
    attention = pax_fiddle.Config(layers.LocalSelfAttentionAlibi)
    attention.copy_fields_from(layer.tr_atten_tpl)
    attention.block_size, attention.left_context, attention.right_context = 4, 4, 0
    layer.tr_atten_tpl = attention


class GroupedQuery(SmallLm):
  """Four heads, two of keys and values; rotary."""

  NUM_HEADS = 4

  def change_layer(self, layer):
    layer.tr_atten_tpl = pax_fiddle.Config(
      grouped_query_attention.GroupedQueryAttention, num_kv_heads=2, rope_min_max_timescales=(1, 10_000)
    )


class Convolved(SmallLm):
  """Depthwise convolutions of queries, keys and values, gated SiLU, bias, RmsNorm before and after the sublayers."""

  def change_layer(self, layer):
    layer.tr_atten_tpl.combine_qkv = False
    layer.tr_atten_tpl.dconv_qkv = True
    layer.tr_atten_tpl.use_bias = True
    layer.tr_fflayer_tpl.use_gated_activation = True
    layer.tr_fflayer_tpl.activation_tpl = pax_fiddle.Config(layers.SiLU)
    layer.norm_policy = 'primer_hybrid'
    layer.ln_tpl = pax_fiddle.Config(layers.RmsNorm)
    layer.tr_fflayer_tpl.ln_tpl = pax_fiddle.Config(layers.RmsNorm)


class Separate(SmallLm):
  """An embedding apart from the softmax, trainable positions, label smoothing, z-loss, five heads on a mesh of two."""

  NUM_HEADS = 5
  MODEL_DIMS = 15
  VOCAB_SIZE = 41

  def change(self, task, lm):
    lm.separate_embedding_tpl = pax_fiddle.Config(layers.Embedding, scale_sqrt_depth=True)
    lm.softmax_tpl = pax_fiddle.Config(layers.FullSoftmax, label_smoothing_prob=0.1, z_loss_weight=1e-3)
    lm.position_emb_tpl = pax_fiddle.Config(layers.TrainablePositionalEmbedding, max_seq_length=16)
    type(self).shard(self, task)

  def shard(self, task):
    """Sets the split dims anew, now that the templates are others."""
    layers.TransformerLm.set_sharding_params_v1(
      task.model.lm_tpl,
      replica_axis='replica',
      data_axis='data',
      mdl_axis='mdl',
      ici_mesh_shape=self.ICI_MESH_SHAPE,
      mesh_axis_names=self.MESH_AXIS_NAMES,
      training_optimized=True,
    )


class VariationalNoise(SmallLm):
  """Noise on the weights of the feed-forward layers from step 2 on."""

  def change(self, task, lm):
    task.vn.vn_scale = 0.05
    task.vn.vn_regex = '.*ff_layer.*'
    task.vn.vn_start_step = 2


class Bert(SmallLm):
  """Masked tokens, bidirectional: random masks by Praxis' own augmenter."""

  def change(self, task, lm):
    lm.model_type = layers.LanguageModelType.BIDIRECTIONAL
    task.model = pax_fiddle.Config(
      layers.BertModel,
      name='bert',
      lm_tpl=lm,
      mask_token_id=3,
      force_mask_generation=True,
      mesh_axis_names=self.MESH_AXIS_NAMES,
      ici_mesh_shape=self.ICI_MESH_SHAPE,
      dcn_mesh_shape=self.DCN_MESH_SHAPE,
    )
