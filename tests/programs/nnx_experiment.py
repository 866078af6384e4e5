"""A researcher's NNX module with BatchNorm, dropout, a layer that is used twice, split dims and uneven sizes."""

import functools

from flax import nnx
import numpy as np
import optax

from spmd_tasks import Experiment, Task


class Classifier(nnx.Module):
  def __init__(self, width: int = 30, rate: float = 0.3, *, rngs: nnx.Rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ('embed', 'mlp'))
    self.inputs = nnx.Linear(100, width, use_bias=False, kernel_init=init, rngs=rngs)
    self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
    self.dropouts = nnx.List([nnx.Dropout(rate, rngs=rngs) for _ in range(2)])
    self.hidden = nnx.Linear(width, width, rngs=rngs)
    self.again = self.hidden
    self.outputs = nnx.Linear(width, 10, rngs=rngs)

  def __call__(self, image):
    x = nnx.relu(self.norm(self.inputs(image.reshape(len(image), -1))))
    for layer, dropout in zip((self.hidden, self.again), self.dropouts):
      x = x + dropout(nnx.tanh(layer(x)))
    return self.outputs(x)


def loss(logits, batch):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch['label'])
  return losses.mean(), {'top1': (logits.argmax(-1) == batch['label']).mean()}


def batches(seed):
  rng = np.random.default_rng(seed)
  for label in rng.integers(0, 10, (20, 60)):
    image = np.eye(10)[label][:, None, :, None] * np.ones((10, 1, 1)) + rng.normal(size=(60, 10, 10, 1))
    yield {'image': image, 'label': label}


class Shapes(Experiment):
  ici_mesh_shape = (1, 4, 2)
  num_train_steps = 6
  checkpoint_every_steps = 3

  def task(self):
    return Task(model=functools.partial(Classifier, width=30), loss=loss, learner=optax.adamw(0.01))

  def train_input(self):
    return batches(0)

  def eval_inputs(self):
    return {'valid': batches(1)}
