"""--mode verify finds faults of the framework itself, which every layout has alike: its own references find them.

Each fault takes the place of a real function. The references by hand are computed once, without any fault.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.inputs.synthetic import SyntheticIterator
from spmd_tasks.layers import LanguageModelLoss
from spmd_tasks.layers.attention import attention
from spmd_tasks.learning import AdamW, Learner, accumulation, schedules
from spmd_tasks.learning import learner as learner_module
from spmd_tasks.programs import evaluator, restore
from spmd_tasks.runtime.task import Task
from spmd_tasks.verification import Bench, Setting
from spmd_tasks.verification.mode import CLAIMS
from tests.runtime.loss_curves import source_of
from tests.verification.whole_step import StagedStep, WholeStep

Original = Callable[..., Any]


def of_another_loss(**fields: Callable[[Any], Any]):
  """A loss that computes what one with other fields does."""

  def fault(original: Original) -> Original:
    def call(self, predictions, batch):
      others = {name: change(getattr(self, name)) for name, change in fields.items()}
      return original(dataclasses.replace(self, **others), predictions, batch)

    return call

  return fault


def clips_after_the_update(original: Original) -> Original:
  """Of Learner.update."""
  return lambda self, *args, **named: original(dataclasses.replace(self, clip_global_norm=None), *args, **named)


def decays_everything(original: Original) -> Original:
  """Of AdamW.transformation."""
  return lambda self, specs: original(dataclasses.replace(self, decay_exempt_tags=()), specs)


def averages_every_second_step(original: Original) -> Original:
  """Of Learner.update."""

  def update(self, grads, loss, step, state, *args, **named):
    weights, new, metrics = original(self, grads, loss, step, state, *args, **named)
    average = jax.tree.map(lambda a, b: jnp.where(step % 2 == 1, a, b), state.ema_weights, new.ema_weights)
    return weights, new.replace(ema_weights=average), metrics

  return update


def averages_before_the_update(original: Original) -> Original:
  """Of Learner.update."""

  def update(self, grads, loss, step, state, weights, *args, **named):
    new_weights, new, metrics = original(self, grads, loss, step, state, weights, *args, **named)
    average = jax.tree.map(lambda e, w: 0.9 * e + 0.1 * w, state.ema_weights, weights)
    return new_weights, new.replace(ema_weights=average), metrics

  return update


def drops_alike_in_all_steps(original: Original) -> Original:
  """Of Task.compute_loss."""
  return lambda self, variables, batch, *, train, rng=None: original(
    self, variables, batch, train=train, rng=jax.random.key(0, impl='threefry2x32') if train else None
  )


def changes_the_loss_of_microbatches(change: Callable[..., Any]):
  """Of accumulate_gradients: `change(loss_fn, weights, batch, rng, whole rng)` is the loss of a microbatch."""

  def fault(original: Original) -> Original:
    def accumulate(loss_fn, weights, batch, rng, *args, **named):
      changed = lambda w, b, r: change(loss_fn, w, b, r, rng)
      return original(changed, weights, batch, rng, *args, **named)

    return accumulate

  return fault


def unweighted(loss_fn, weights, batch, rng, whole_rng):
  loss, output = loss_fn(weights, batch, rng)
  return loss, output.replace(weight=jnp.float32(1))


def same_masks(loss_fn, weights, batch, rng, whole_rng):
  return loss_fn(weights, batch, whole_rng)


def with_aux_twice(loss_fn, weights, batch, rng, whole_rng):
  loss, output = loss_fn(weights, batch, rng)
  return loss + 0.2 * output.metrics['load_balance_loss'][0], output


def one_mask_for_all_layers(original: Original) -> Original:
  """Of fold_in: what a loop counts is not folded in."""
  return lambda key, data: key if isinstance(data, jax.core.Tracer) else original(key, data)


def same_mask_for_all_rows(original: Original) -> Original:
  """Of bernoulli."""

  def bernoulli(key, p=0.5, shape=None, **named):
    return jnp.broadcast_to(original(key, p, (1, *shape[1:]), **named), shape) if shape else original(key, p, shape)

  return bernoulli


def counts_all_rows(original: Original) -> Original:
  """Of Task.eval_step."""

  def eval_step(self, variables, batch, step, **named):
    return original(self, variables, batch | {'weights': jnp.ones_like(batch['weights'])}, step, **named)

  return eval_step


def means_of_means(original: Original) -> Original:
  """Of the mean over the batches of an eval set."""
  return lambda batches: jax.tree.map(lambda *values: np.mean(values, axis=0), *[original([each]) for each in batches])


def repeats_a_batch(original: Original) -> Original:
  """Of an iterator's set_state."""
  return lambda self, state: original(self, state | {'next_batch': state['next_batch'] - 1})


def draws_another_rng(original: Original) -> Original:
  """Of what a job starts from."""

  def restore_or_init(*args):
    state, step, origin = original(*args)
    return (state.replace(rng=state.rng + 1) if step else state), step, origin

  return restore_or_init


class Fault(NamedTuple):
  """A fault in place of `where.name`, and the claim that finds it, by a case whose subject begins so, in this leaf."""

  where: Any
  name: str
  make: Callable[[Original], Original]
  claim: str
  subject: str = ''
  leaf: str = ''


FORMULAS, BY_HAND = 'the formulas', '4 against'
LOSS = (LanguageModelLoss, '__call__')
FAULTS = {
  'label smoothing is ignored': Fault(*LOSS, of_another_loss(label_smoothing=lambda _: 0.0), 'step', FORMULAS),
  'z-loss counts twice': Fault(*LOSS, of_another_loss(z_loss_weight=lambda x: 2 * x), 'step', FORMULAS),
  'clipping is left out': Fault(Learner, 'update', clips_after_the_update, 'step', FORMULAS, 'learner/'),
  'the schedule is a step ahead': Fault(
    schedules, 'learning_rate_at', lambda f: lambda rate, step: f(rate, step + 1), 'step', FORMULAS, 'learning_rate'
  ),
  'exempt weights decay': Fault(AdamW, 'transformation', decays_everything, 'step', FORMULAS, 'weights/'),
  'the average skips odd steps': Fault(
    Learner, 'update', averages_every_second_step, 'step', FORMULAS, 'learner/ema_weights'
  ),
  'the average is of old weights': Fault(
    Learner, 'update', averages_before_the_update, 'step', FORMULAS, 'learner/ema_weights'
  ),
  'one mask for all steps': Fault(Task, 'compute_loss', drops_alike_in_all_steps, 'step', FORMULAS),
  'a step that is NaN is taken': Fault(
    learner_module, 'keep_if_finite', lambda f: lambda is_finite, new, old: new, 'step', 'weights that are NaN'
  ),
  'microbatches count alike': Fault(
    accumulation, 'accumulate_gradients', changes_the_loss_of_microbatches(unweighted), 'microbatches', BY_HAND
  ),
  'one mask for all microbatches': Fault(
    accumulation, 'accumulate_gradients', changes_the_loss_of_microbatches(same_masks), 'microbatches', BY_HAND
  ),
  'aux losses count twice with microbatches': Fault(
    accumulation, 'accumulate_gradients', changes_the_loss_of_microbatches(with_aux_twice), 'microbatches', BY_HAND
  ),
  'one mask for all rows': Fault(jax.random, 'bernoulli', same_mask_for_all_rows, 'dropout', 'masks, one', 'rows of'),
  'documents see one another': Fault(
    attention.Attention,
    '__call__',
    lambda f: (
      lambda self, x, segment_ids=None, *args, **named: f(
        self, x, None if segment_ids is None else jnp.minimum(segment_ids, 1), *args, **named
      )
    ),
    'packing',
    'three documents',
  ),
  'rows of weight zero count in evals': Fault(Task, 'eval_step', counts_all_rows, 'job', '', 'eval valid: '),
  'batches of an eval set count alike': Fault(
    evaluator, '_mean_over_batches', means_of_means, 'job', '', 'eval valid: '
  ),
  'evals take the raw weights': Fault(
    Task, 'evaluation_variables', lambda f: lambda self, state: state.variables, 'job', '', 'eval valid: '
  ),
  'a resumed job repeats a batch': Fault(SyntheticIterator, 'set_state', repeats_a_batch, 'job', '', 'batch/'),
  'a resumed job has another rng': Fault(restore, 'restore_or_init', draws_another_rng, 'job', ''),
}
# Those that are found as others are.
SLOW = {'z-loss counts twice', 'the average is of old weights', 'batches of an eval set count alike'}


@pytest.fixture(scope='module')
def bench():
  with contextlib.closing(Bench(source_of(WholeStep), num_devices=1, num_steps=3)) as bench:
    yield bench


def decide(bench: Bench, claim: str, subject: str):
  (case,) = (case for case in CLAIMS[claim].cases(bench) if case.subject.startswith(subject))
  return case.decide(bench)


@functools.cache
def assert_sound(bench: Bench, claim: str, subject: str) -> None:
  """The case holds without a fault; its references by hand are then known."""
  verdict = decide(bench, claim, subject)
  assert verdict.status == 'held', verdict.detail


@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS])
def test_a_fault_that_all_layouts_have_is_found(name, bench, monkeypatch):
  fault = FAULTS[name]
  assert_sound(bench, fault.claim, fault.subject)
  by_hand = {setting for setting in bench._runners if setting.by_hand}
  kept = dict(bench._runners), dict(bench._trajectories)
  where = fault.where
  monkeypatch.setattr(where, fault.name, fault.make(getattr(where, fault.name)))
  if where is restore:
    monkeypatch.setattr('spmd_tasks.programs.train.restore_or_init', restore.restore_or_init)
  if fault.claim in ('step', 'microbatches'):  # whose steps are compiled again
    bench._runners = {setting: kept[0][setting] for setting in by_hand}
    bench._trajectories = {setting: kept[1][setting] for setting in by_hand if setting in kept[1]}
  try:
    verdict = decide(bench, fault.claim, fault.subject)
  finally:
    bench._runners, bench._trajectories = kept
  assert verdict.status == 'BROKEN', verdict
  assert verdict.failure['leaf'].startswith(fault.leaf), verdict.detail


def test_a_pipeline_with_one_mask_for_all_layers_is_found(monkeypatch):
  with contextlib.closing(Bench(source_of(StagedStep), num_devices=2, num_steps=1)) as bench:
    bench.trajectory(Setting())
    assert_sound(bench, 'dropout', 'masks, stage 2')
    monkeypatch.setattr(jax.random, 'fold_in', one_mask_for_all_layers(jax.random.fold_in))
    verdict = decide(bench, 'dropout', 'masks, stage 2')
  assert verdict.status == 'BROKEN'
  assert verdict.failure['leaf'].startswith('the mask of')
