"""Models other than language models: images, batch normalization, a Flax module, several losses."""

from clu import metrics as clu_metrics
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from pax_lab import dense_lm
from paxml import base_experiment, base_metrics, learners, tasks_lib
from praxis import base_model, layers, optimizers, pax_fiddle, py_utils, schedules
from praxis.layers import flax_adapter

NestedMap = py_utils.NestedMap


class Images(dense_lm.NumberedInput):
  """Small images in four classes, by the position of a bright spot."""

  seed: int = 0

  def make_batch(self, number):
    return draw_images(self.seed, number, self.batch_size)


def draw_images(seed, number, num_rows):
  rng = np.random.default_rng([seed, number])
  labels = rng.integers(0, 4, num_rows)
  images = rng.normal(0, 0.3, (num_rows, 8, 8, 3)).astype(np.float32)
  for image, label in zip(images, labels, strict=True):
    image[4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 1
  return NestedMap(
    image=images,
    label_probs=np.eye(4, dtype=np.float32)[labels],
    weight=(np.arange(num_rows) > 0).astype(np.float32),
    meta=NestedMap(label=labels.astype(np.int32)),
  )


class Classifier(base_experiment.BaseExperiment):
  """ResNet-5 with batch normalization, data parallel on four devices."""

  LOSS_NAME = 'avg_xent'
  ICI_MESH_SHAPE = [1, 4, 1]

  def datasets(self):
    return [
      pax_fiddle.Config(Images, name='train', batch_size=8, is_training=True, seed=1),
      pax_fiddle.Config(
        Images, name='valid', batch_size=8, is_training=False, seed=2, reset_for_eval=True, eval_loop_num_batches=2
      ),
    ]

  def model(self):
    network = layers.ResNet.HParamsResNet5()
    network.channels, network.entryflow_conv_kernel = [8], (3, 3, 3)
    softmax = pax_fiddle.Config(layers.FullSoftmax, input_dims=8, num_classes=4)
    return pax_fiddle.Config(layers.ClassificationModel, name='model', network_tpl=network, softmax_tpl=softmax)

  def task(self):
    task = pax_fiddle.Config(tasks_lib.SingleTask, name='classify')
    task.model = self.model()
    task.model.ici_mesh_shape, task.model.mesh_axis_names = self.ICI_MESH_SHAPE, ['replica', 'data', 'mdl']
    batch = ('replica', 'data')
    task.train.inputs_split_mapping = NestedMap(map_1d=(batch,), map_2d=(batch, None), map_4d=(batch, None, None, None))
    task.train.num_train_steps = 6
    task.train.eval_interval_steps = 3
    task.train.learner = pax_fiddle.Config(
      learners.Learner,
      loss_name=self.LOSS_NAME,
      optimizer=pax_fiddle.Config(
        optimizers.ShardedSgd, momentum=0.9, learning_rate=0.05, lr_schedule=pax_fiddle.Config(schedules.Constant)
      ),
    )
    return task


class Averaged(Classifier):
  """Evaluates averages of the weights and of the statistics of batch normalization."""

  def task(self):
    task = super().task()
    task.train.learner.optimizer.ema_decay = 0.8
    task.train.eval_use_ema_states = True
    return task


class Bfloat16(Averaged):
  """Computes in bfloat16, including batch normalization."""

  def task(self):
    task = super().task()
    task.model.fprop_dtype = jnp.bfloat16
    return task


class PerceptronModel(base_model.BaseModel):
  """Two layers with batch normalization and dropout between them, and two losses, one of which is trained."""

  def setup(self):
    self.create_child('first', pax_fiddle.Config(layers.FeedForward, input_dims=192, output_dims=16))
    self.create_child('norm', pax_fiddle.Config(layers.BatchNorm, dim=16, decay=0.8, force_eval_mode=False))
    self.create_child('drop', pax_fiddle.Config(layers.Dropout, keep_prob=0.8))
    self.create_child('last', pax_fiddle.Config(layers.FeedForward, input_dims=16, output_dims=4))

  def compute_predictions(self, input_batch):
    hidden = self.norm(self.first(input_batch.image.reshape(-1, 192))[:, None])[:, 0]
    return self.last(self.drop(hidden))

  def compute_loss(self, predictions, input_batch):
    xent = -jnp.sum(jax.nn.log_softmax(predictions) * input_batch.label_probs, -1)
    loss = jnp.mean(xent)
    penalty = 1e-3 * jnp.mean(jnp.square(predictions))
    return NestedMap(loss=(loss + penalty, 1.0), xent=(loss, 8.0), penalty=(penalty, 1), rows=(8.0, 1)), NestedMap(
      labels=input_batch.meta.label
    )


class Perceptron(Classifier):
  """A model of the user's own."""

  LOSS_NAME = 'loss'

  def model(self):
    return pax_fiddle.Config(PerceptronModel, name='perceptron')


@flax.struct.dataclass
class Perplexity(clu_metrics.Average):
  """The exponential of a mean."""

  def compute(self):
    return jnp.exp(super().compute())


class CluMetricsModel(PerceptronModel):
  """Returns clu metrics in place of weighted scalars."""

  def compute_loss(self, predictions, input_batch):
    xent = -jnp.sum(jax.nn.log_softmax(predictions) * input_batch.label_probs, -1)
    rows = jnp.array(float(len(xent)))
    return NestedMap(
      loss=base_metrics.WeightedScalarCluMetric.create(jnp.mean(xent), rows),
      perplexity=Perplexity.from_model_output(xent),
      accuracy=clu_metrics.Accuracy.from_model_output(logits=predictions, labels=input_batch.meta.label),
    ), NestedMap()


class CluMetrics(Perceptron):
  """A model with clu metrics."""

  def model(self):
    return pax_fiddle.Config(CluMetricsModel, name='perceptron')


class FlaxNetwork(nn.Module):
  """A Flax module with non-trainable variables and dropout."""

  @nn.compact
  def __call__(self, images, train=False):
    x = nn.Conv(4, (3, 3))(images)
    x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(x)
    x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
    return nn.Dense(4)(x.reshape(x.shape[0], -1))


class FlaxModel(base_model.BaseModel):
  """A Flax module in a model of Praxis."""

  def setup(self):
    self.create_child('network', pax_fiddle.Config(flax_adapter.FlaxModuleAdapter, module_factory_method=FlaxNetwork))

  def compute_predictions(self, input_batch):
    return self.network(input_batch.image, train=not self.do_eval)

  def compute_loss(self, predictions, input_batch):
    loss = jnp.mean(-jnp.sum(jax.nn.log_softmax(predictions) * input_batch.label_probs, -1))
    return NestedMap(loss=(loss, 1.0)), NestedMap()


class Flax(Classifier):
  """A Flax module in Praxis's adapter."""

  LOSS_NAME = 'loss'

  def model(self):
    return pax_fiddle.Config(FlaxModel, name='flax')
