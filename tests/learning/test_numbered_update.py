"""The numbers of an update as its arguments: one program computes the updates of learners that differ in numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.learning import AdamW, FromOptax, Learner, LinearWarmupCosine, Muon, ProductOfFactors
from spmd_tasks.learning.numbered_update import NumberedUpdate
from spmd_tasks.sharding import WeightSpec

NORMAL = jax.nn.initializers.normal(1.0)
SPECS = {
  'kernel': WeightSpec(shape=(3, 6, 4), init=NORMAL, stacked=1, num_input_dims=1),
  'bias': WeightSpec(shape=(4,), init=NORMAL),
}
WEIGHTS = {name: spec.init(jax.random.key(0), spec.shape) for name, spec in SPECS.items()}


def cosine(peak, warmup_steps, total_steps, **settings):
  return LinearWarmupCosine(peak=peak, warmup_steps=warmup_steps, total_steps=total_steps, **settings)


def adam(learning_rate, decay):
  """0.001 and 0.1 are also 1 - beta2 and 1 - beta1."""
  return Learner(optimizer=AdamW(learning_rate=learning_rate, weight_decay=decay), clip_global_norm=0.5, ema_decay=0.9)


LEARNERS = {
  'rate': (adam(0.003, 0.01), adam(0.001, 0.1)),
  'cosine': (adam(cosine(0.1, 5, 30), 0.01), adam(cosine(0.03, 9, 50), 0.02)),
  'betas': tuple(
    Learner(optimizer=AdamW(learning_rate=0.1, beta1=beta1, beta2=beta2)) for beta1, beta2 in ((0.8, 0.9), (0.9, 0.9))
  ),
  'factors': tuple(
    Learner(optimizer=AdamW(learning_rate=ProductOfFactors(base=base, warmup_steps=steps)))
    for base, steps in ((0.5, 100), (0.1, 7))
  ),
  'muon': tuple(Learner(optimizer=Muon(learning_rate=rate, momentum=m)) for rate, m in ((0.02, 0.95), (0.05, 0.9))),
  'optax': (optax.adamw(0.003), optax.adamw(0.001, weight_decay=0.02)),
  'schedule of optax': tuple(
    optax.sgd(optax.warmup_cosine_decay_schedule(0.0, peak, 3, steps), momentum=0.9)
    for peak, steps in ((0.1, 20), (0.2, 40))
  ),
  'own schedule': tuple(
    FromOptax(factory=optax.lion, learning_rate=lambda step, scale=scale: scale / (5 + step)) for scale in (0.1, 0.3)
  ),
}


def update_of(learner):
  learner = learner if isinstance(learner, Learner) else Learner(optimizer=learner)
  return lambda g, loss, step, state: learner.update(g, loss, step, state, WEIGHTS, SPECS), learner.init(WEIGHTS, SPECS)


@pytest.mark.parametrize('case', LEARNERS)
def test_one_program_with_the_numbers_of_another_learner_computes_its_update(case):
  gradients = jax.tree.map(lambda w: jnp.sin(3 * w), WEIGHTS)
  (first, _), (second, state) = map(update_of, LEARNERS[case])
  arguments = gradients, jnp.float32(1), jnp.int32(6), state
  one, other = (NumberedUpdate.trace(update, *arguments) for update in (first, second))
  assert len({x.item() for x in one.numbers} ^ {x.item() for x in other.numbers}) > 0
  by_first = jax.jit(one)(other.numbers, *arguments)
  expected = jax.jit(second)(*arguments)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), by_first, expected)
  assert (
    jax.jit(one).lower(one.numbers, *arguments).as_text() == jax.jit(other).lower(other.numbers, *arguments).as_text()
  )


def test_a_loss_of_another_dtype_is_computed_with_the_functions_own_numbers():
  update, state = update_of(optax.sgd(0.1))
  numbered = NumberedUpdate.trace(update, WEIGHTS, jnp.float32(1), jnp.int32(6), state)
  weights, *_ = numbered([np.float32(9)] * len(numbered.numbers), WEIGHTS, jnp.bfloat16(1), jnp.int32(6), state)
  np.testing.assert_allclose(weights['bias'], 0.9 * WEIGHTS['bias'], rtol=1e-6)
