"""Learners: optimizers, schedules, clipping, skipping, decay, averages, accumulation, frozen weights."""

import optax
from paxml import learners, sgf
from praxis import optimizers as opt
from praxis import pax_fiddle, schedules

from pax_cases import transformers


class Learned(transformers.SmallLm):
  """The base class of the cases; the default `OPTIMIZER` is Adam with a constant rate and clipping."""

  LEARNING_RATE = 1e-2
  OPTIMIZER = dict(cls=opt.Adam, beta1=0.9, beta2=0.99, clip_gradient_norm_to_value=1.0)

  def optimizer(self, **settings):
    return self.configured(**(self.OPTIMIZER | settings))

  def configured(self, cls, **settings):
    constant = pax_fiddle.Config(schedules.Constant, value=1.0)
    return pax_fiddle.Config(cls, **(dict(learning_rate=self.LEARNING_RATE, lr_schedule=constant) | settings))

  def change(self, task, lm):
    task.train.learner.optimizer = self.optimizer()


class ShardedAdafactor(Learned):
  """Adafactor as in the largest Pax models: factored, no momentum, power decay, weight decay."""

  OPTIMIZER = dict(cls=opt.ShardedAdafactor, decay_method='pow', decay_pow=0.8, weight_decay=1e-3)
  OPTIMIZER |= dict(min_dim_size_to_factor=4, multiply_by_parameter_scale=True, per_var_learning_summary=True)


class AdafactorInt8(Learned):
  """Momentum in int8, and weight decay by names of weights."""

  OPTIMIZER = dict(cls=opt.ShardedAdafactor, decay_method='adam', decay_adam=0.99, beta1=0.9, quantized_dtype='int8')
  OPTIMIZER |= dict(weight_decay={'.*ff_layer.*': 1e-2, '.*': 0.0}, layerwise_adaptation=True)


class Sgd(Learned):
  """Nesterov momentum, an L2 regularizer, and clipping of each gradient by its norm."""

  OPTIMIZER = dict(cls=opt.ShardedSgd, momentum=0.9, nesterov=True)
  OPTIMIZER |= dict(l2_regularizer_weight=1e-2, clip_gradient_single_norm_to_value=0.3)


class Decoupled(Learned):
  """Decoupled weight decay, cosine with a linear ramp-up."""

  SCHEDULE = dict(warmup_steps=2, decay_start=3, decay_end=8, min_ratio=0.1, max=1.0)

  def optimizer(self):
    schedule = pax_fiddle.Config(schedules.LinearRampupCosineDecay, **self.SCHEDULE)
    return super().optimizer(decoupled_weight_decay=0.1, lr_schedule=schedule)


class AccumulatedAverages(Learned):
  """Adafactor on the sum of the gradients of two batches, and evals of averaged weights."""

  EVAL_INTERVAL_STEPS = 3

  def change(self, task, lm):
    factored = self.configured(opt.ShardedAdafactor, decay_method='adam', decay_adam=0.99, beta1=0.9)
    task.train.learner.optimizer = self.configured(
      opt.ShardedStaticAccumulator, optimizer_tpl=factored, num_sub_batches=2, ema_decay=0.8
    )
    task.train.eval_use_ema_states = True


class Frozen(Learned):
  """Trains only the feed-forward layers; other weights have no optimizer state."""

  def change(self, task, lm):
    super().change(task, lm)
    task.train.learner.bprop_variable_inclusion = ['.*ff_layer.*']


class Skipping(Learned):
  """Skips steps with a gradient norm above 1; some steps have one."""

  def change(self, task, lm):
    task.train.learner.optimizer = self.optimizer(clip_gradient_norm_to_value=0.0)
    task.train.learner.skip_step_gradient_norm_value = 1.2


class TwoOptimizers(Learned):
  """Adafactor for the softmax, Adam for the rest."""

  def change(self, task, lm):
    task.train.learner = pax_fiddle.Config(
      learners.MultiOptimizerLearner,
      loss_name='total_loss',
      optimizer=self.optimizer(),
      auxiliary_optimizers=[self.configured(opt.ShardedAdafactor, decay_method='adam', decay_adam=0.99)],
      auxiliary_regex=['.*/lm/softmax/.*'],
      auxiliary_names=['softmax'],
    )


class Optax(Learned):
  """An optax transformation with Praxis's averages."""

  def change(self, task, lm):
    task.train.learner.optimizer = self.configured(
      opt.OptaxOptimizer,
      grad_tx=optax.chain(optax.scale_by_adam(b2=0.99), optax.scale_by_learning_rate(1e-2)),
      clip_gradient_norm_to_value=1.0,
      ema_decay=0.8,
    )


class Scheduled(Learned):
  """Piecewise: cycles of polynomial ramps, then exponential decay."""

  def optimizer(self):
    ramp = pax_fiddle.Config(schedules.Polynomial, start=(0, 0.1), limit=(3, 1.0), power=2)
    decay = pax_fiddle.Config(schedules.Exponential, start=(0, 1.0), limit=(5, 0.1))
    schedule = pax_fiddle.Config(schedules.PiecewiseSchedule, boundaries=[3], schedules=[ramp, decay])
    return super().optimizer(lr_schedule=schedule)


class Private(Learned):
  """Differentially private gradients: clipped and noised, in microbatches."""

  def change(self, task, lm):
    super().change(task, lm)
    task.train.learner.stochastic_gradient = pax_fiddle.Config(
      sgf.DpSgdStochasticGradient, l2_norm_clip=0.5, noise_multiplier=0.1, inner_batch_size=4
    )
