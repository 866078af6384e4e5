"""Learning: from gradients to new weights, with optax underneath.

    learner = Learner(
      optimizer=AdamW(learning_rate=LinearWarmupCosine(peak=3e-4, warmup_steps=100, total_steps=10_000)),
      clip_global_norm=1.0,
    )
    state = learner.init(weights, weight_specs)
    weights, state, metrics = learner.update(grads, loss, step, state, weights, weight_specs)

A learning rate is a number, one of the schedules here, or any callable of the step, such as an optax schedule.
Optimizer state is sharded like the weights. A step with a non-finite loss or gradient does not change the weights.
Start with learner.py, optimizers.py and schedules.py; each other file adds one feature.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.learning.adafactor import Adafactor
  from spmd_tasks.learning.from_optax import FromOptax
  from spmd_tasks.learning.learner import BaseLearner, Learner, LearnerState
  from spmd_tasks.learning.multi_optimizer import MultiOptimizer
  from spmd_tasks.learning.muon import Muon, MuonClip
  from spmd_tasks.learning.optimizers import AdamW, Optimizer
  from spmd_tasks.learning.schedules import (
    Constant,
    LinearWarmupCosine,
    LinearWarmupRsqrt,
    ProductOfFactors,
    Schedule,
  )
