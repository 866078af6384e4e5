import flax.linen as nn
import numpy as np
import optax

from spmd_tasks import Experiment, Task


class Classifier(nn.Module):
  @nn.compact
  def __call__(self, image):
    return nn.Dense(10)(nn.relu(nn.Dense(30)(image.reshape(len(image), -1))))


def loss(logits, batch):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch['label'])
  return losses.mean(), {'top1': (logits.argmax(-1) == batch['label']).mean()}


def batches(seed):
  for label in np.random.default_rng(seed).integers(0, 10, (20, 60)):
    yield {'image': np.eye(10)[label][:, None, :, None] * np.ones((10, 1, 1)), 'label': label}


class Shapes(Experiment):
  ici_mesh_shape = (1, 4, 2)
  num_train_steps = 40

  def task(self):
    return Task(model=Classifier(), loss=loss, learner=optax.adamw(0.01))

  def train_input(self):
    return batches(0)

  def eval_inputs(self):
    return {'valid': batches(1)}
