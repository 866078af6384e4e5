"""Models of sequences that are no language models: speech by a Conformer, translation by an encoder and a decoder."""

import jax.numpy as jnp
import numpy as np
import optax
from praxis import base_input, base_model, layers, optimizers, pax_fiddle, py_utils, schedules
from praxis.layers import conformers

from pax_cases import classifiers

NestedMap = py_utils.NestedMap


class Speech(base_input.BaseInput):
  """Random frames and labels, with names, 64-bit labels and flags."""

  seed: int = 0

  def __post_init__(self):
    super().__post_init__()
    self._number = 0

  def get_next(self):
    rng = np.random.default_rng([self.seed, self._number])
    self._number += 1
    rows, frames, labels = self.batch_size, 12, 5
    paddings = np.zeros((rows, frames), np.float32)
    paddings[0, 9:] = 1
    return NestedMap(
      frames=rng.normal(size=(rows, frames, 6)).astype(np.float32),
      frame_paddings=paddings,
      labels=rng.integers(1, 8, (rows, labels)),
      label_paddings=np.zeros((rows, labels), np.float32),
      is_clean=np.ones(rows, bool),
    )

  def reset(self):
    self._number = 0


class SpeechModel(base_model.BaseModel):
  """Two Conformer layers with batch normalization, trained by the CTC loss, with masks of the spectrum."""

  def setup(self):
    self.create_child('into', pax_fiddle.Config(layers.FeedForward, input_dims=6, output_dims=16))
    augmenter = pax_fiddle.Config(layers.SpectrumAugmenter, freq_mask_max_bins=2, time_mask_max_frames=2)
    self.create_child('augmenter', augmenter.set(use_dynamic_time_mask_max_frames=False))
    layer = pax_fiddle.Config(
      conformers.Conformer, input_dims=16, model_dims=16, kernel_size=3, atten_num_heads=2, dropout_prob=0.1
    )
    layer.lconv_tpl.conv_norm_layer_tpl = pax_fiddle.Config(layers.BatchNorm)
    self.create_children('encoder', [layer.clone().set(name=f'layer_{i}') for i in range(2)])
    self.create_child('out', pax_fiddle.Config(layers.Linear, input_dims=16, output_dims=8))

  def compute_predictions(self, input_batch):
    x, paddings = input_batch.frames, input_batch.frame_paddings
    if not self.do_eval:
      x, paddings = self.augmenter(x, paddings)
    x = self.into(x)
    for layer in self.encoder:
      x = layer(x, paddings)
    return self.out(x)

  def compute_loss(self, predictions, input_batch):
    loss = optax.ctc_loss(
      predictions.astype(jnp.float32), input_batch.frame_paddings, input_batch.labels, input_batch.label_paddings
    )
    rows = jnp.array(len(loss), jnp.float32)
    return NestedMap(loss=(jnp.mean(loss), rows), clean=(jnp.mean(input_batch.is_clean), rows)), NestedMap(loss=loss)


class Conformer(classifiers.Classifier):
  """Speech in bfloat16."""

  LOSS_NAME = 'loss'

  def datasets(self):
    return [
      pax_fiddle.Config(Speech, name='train', batch_size=8, is_training=True, seed=1),
      pax_fiddle.Config(Speech, name='dev', batch_size=8, is_training=False, seed=2, reset_for_eval=True),
    ]

  def model(self):
    return pax_fiddle.Config(SpeechModel, name='speech', fprop_dtype=jnp.bfloat16)

  def task(self):
    task = super().task()
    batch = ('replica', 'data')
    task.train.inputs_split_mapping = NestedMap(map_1d=(batch,), map_2d=(batch, None), map_3d=(batch, None, None))
    return task


class Pairs(Speech):
  """Random sources and targets."""

  def get_next(self):
    rng = np.random.default_rng([self.seed, self._number])
    self._number += 1

    def draw(length):
      ids = rng.integers(1, 32, (self.batch_size, length + 1)).astype(np.int32)
      ones = np.ones((self.batch_size, length), np.float32)
      return NestedMap(
        ids=ids[:, :-1],
        labels=ids[:, 1:],
        paddings=1 - ones,
        weights=ones,
        segment_ids=ones.astype(np.int32),
        segment_pos=np.tile(np.arange(length, dtype=np.int32), (self.batch_size, 1)),
      )

    return NestedMap(src=draw(7), tgt=draw(9))


class Translation(Conformer):
  """An encoder and a decoder with label smoothing, Adafactor, averages."""

  LOSS_NAME = 'total_loss'

  def datasets(self):
    return [
      pax_fiddle.Config(Pairs, name='train', batch_size=8, is_training=True, seed=1),
      pax_fiddle.Config(Pairs, name='dev', batch_size=8, is_training=False, seed=2, reset_for_eval=True),
    ]

  def model(self):
    model = pax_fiddle.Config(layers.SequenceModel, name='translation', label_smoothing_prob=0.1)
    stack = pax_fiddle.Config(
      layers.StackedTransformer, num_layers=1, model_dims=16, hidden_dims=32, num_heads=2, dropout_prob=0.1
    )
    model.model_tpl.encoder_stacked_transformer_tpl = stack.clone().set(mask_self_attention=False)
    model.model_tpl.decoder_stacked_transformer_tpl = stack.clone().set(
      mask_self_attention=True, use_cross_attention=True
    )
    model.model_tpl.model_dims, model.model_tpl.packed_input = 16, True
    model.model_tpl.softmax_tpl.num_classes = 32
    return model

  def task(self):
    task = super().task()
    task.train.learner.optimizer = pax_fiddle.Config(
      optimizers.ShardedAdafactor,
      decay_method='adam',
      decay_adam=0.99,
      learning_rate=0.1,
      ema_decay=0.8,
      lr_schedule=pax_fiddle.Config(schedules.Transformer, warmup_steps=3, model_dim=16),
    )
    task.train.eval_use_ema_states = True
    return task
