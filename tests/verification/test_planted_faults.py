"""--mode verify finds faults of the framework itself, which all layouts have in common, by its own references.

Each fault replaces a real function. The references by formulas are computed once, without faults.
"""

from collections.abc import Callable, Iterator
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
from spmd_tasks.learning import AdamW, Learner, schedules
from spmd_tasks.learning import learner as learner_module
from spmd_tasks.programs import evaluator, restore
from spmd_tasks.runtime import task as task_module
from spmd_tasks.runtime.task import Task
from spmd_tasks.verification import Bench, Setting
from spmd_tasks.verification.mode import CLAIMS
from tests.runtime.loss_curves import source_of
from tests.shared_models import shared_models
from tests.verification.whole_step import StagedStep, WholeStep, WholeStepOfExperts, WholeStepWithAttention

Original = Callable[..., Any]


def with_other_fields(**fields: Callable[[Any], Any]):
  """A loss that computes as if it had other fields."""

  def fault(original: Original) -> Original:
    def call(self, predictions, batch):
      others = {name: change(getattr(self, name)) for name, change in fields.items()}
      return original(dataclasses.replace(self, **others), predictions, batch)

    return call

  return fault


def does_not_clip(original: Original) -> Original:
  """Replaces Learner.update."""
  return lambda self, *args, **named: original(dataclasses.replace(self, clip_global_norm=None), *args, **named)


def decays_everything(original: Original) -> Original:
  """Replaces AdamW.transformation."""
  return lambda self, specs: original(dataclasses.replace(self, decay_exempt_tags=()), specs)


def averages_every_second_step(original: Original) -> Original:
  """Replaces Learner.update."""

  def update(self, grads, loss, step, state, *args, **named):
    weights, new, metrics = original(self, grads, loss, step, state, *args, **named)
    average = jax.tree.map(lambda a, b: jnp.where(step % 2 == 1, a, b), state.ema_weights, new.ema_weights)
    return weights, new.replace(ema_weights=average), metrics

  return update


def averages_before_the_update(original: Original) -> Original:
  """Replaces Learner.update."""

  def update(self, grads, loss, step, state, weights, *args, **named):
    new_weights, new, metrics = original(self, grads, loss, step, state, weights, *args, **named)
    average = jax.tree.map(lambda e, w: 0.9 * e + 0.1 * w, state.ema_weights, weights)
    return new_weights, new.replace(ema_weights=average), metrics

  return update


def has_equal_masks_in_all_steps(original: Original) -> Original:
  """Replaces Task.compute_loss."""
  return lambda self, variables, batch, *, train, rng=None: original(
    self, variables, batch, train=train, rng=jax.random.key(0, impl='threefry2x32') if train else None
  )


def changes_the_loss_of_microbatches(change: Callable[..., Any]):
  """Replaces accumulate_gradients: the loss of a microbatch is `change(loss_fn, weights, batch, rng, step's rng)`."""

  def fault(original: Original) -> Original:
    def accumulate(loss_fn, weights, batch, step_rng, *args, **named):
      changed = lambda w, b, rng: change(loss_fn, w, b, rng, step_rng)
      return original(changed, weights, batch, step_rng, *args, **named)

    return accumulate

  return fault


def unweighted(loss_fn, weights, batch, rng, step_rng):
  loss, output = loss_fn(weights, batch, rng)
  return loss, output.replace(weight=jnp.float32(1))


def same_masks(loss_fn, weights, batch, rng, step_rng):
  return loss_fn(weights, batch, step_rng)


def with_aux_twice(loss_fn, weights, batch, rng, step_rng):
  loss, output = loss_fn(weights, batch, rng)
  return loss + 0.2 * output.metrics['load_balance_loss'][0], output


def one_mask_for_all_layers(original: Original) -> Original:
  """Replaces fold_in: does not fold in loop counters."""
  return lambda key, data: key if isinstance(data, jax.core.Tracer) else original(key, data)


def same_mask_for_all_rows(original: Original) -> Original:
  """Replaces bernoulli."""

  def bernoulli(key, p=0.5, shape=None, **named):
    return jnp.broadcast_to(original(key, p, (1, *shape[1:]), **named), shape) if shape else original(key, p, shape)

  return bernoulli


def counts_all_rows(original: Original) -> Original:
  """Replaces Task.eval_step."""

  def eval_step(self, variables, batch, step, **named):
    return original(self, variables, batch | {'weights': jnp.ones_like(batch['weights'])}, step, **named)

  return eval_step


def means_of_means(original: Original) -> Original:
  """Replaces the mean over the batches of an eval set."""
  return lambda batches: jax.tree.map(
    lambda *values: np.mean(values, axis=0), *[original([batch]) for batch in batches]
  )


def repeats_a_batch(original: Original) -> Original:
  """Replaces an iterator's set_state."""
  return lambda self, state: original(self, state | {'next_batch': state['next_batch'] - 1})


def changes_the_rng(original: Original) -> Original:
  """Replaces restore_or_init."""

  def restore_or_init(*args):
    state, step, origin = original(*args)
    return (state.replace(rng=state.rng + 1) if step else state), step, origin

  return restore_or_init


class Fault(NamedTuple):
  """A fault that replaces `owner.name`, and the claim that finds it; prefixes of the case's subject and of the leaf."""

  owner: Any
  name: str
  replace: Callable[[Original], Original]
  claim: str
  subject: str = ''
  leaf: str = ''
  experiment: type = WholeStep


FORMULAS, MICROBATCHES = 'the formulas', '4 against'
LOSS = (LanguageModelLoss, '__call__')
FAULTS = {
  'label smoothing is ignored': Fault(*LOSS, with_other_fields(label_smoothing=lambda _: 0.0), 'step', FORMULAS),
  'z-loss counts twice': Fault(*LOSS, with_other_fields(z_loss_weight=lambda x: 2 * x), 'step', FORMULAS),
  'clipping is left out': Fault(Learner, 'update', does_not_clip, 'step', FORMULAS, 'learner/'),
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
  'one mask for all steps': Fault(Task, 'compute_loss', has_equal_masks_in_all_steps, 'step', FORMULAS),
  'a step that is NaN is taken': Fault(
    learner_module, 'keep_if_finite', lambda f: lambda is_finite, new, old: new, 'step', 'weights that are NaN'
  ),
  'microbatches count alike': Fault(
    task_module, 'accumulate_gradients', changes_the_loss_of_microbatches(unweighted), 'microbatches', MICROBATCHES
  ),
  'one mask for all microbatches': Fault(
    task_module, 'accumulate_gradients', changes_the_loss_of_microbatches(same_masks), 'microbatches', MICROBATCHES
  ),
  'aux losses count twice with microbatches': Fault(
    task_module,
    'accumulate_gradients',
    changes_the_loss_of_microbatches(with_aux_twice),
    'microbatches',
    MICROBATCHES,
    experiment=WholeStepOfExperts,
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
    experiment=WholeStepWithAttention,
  ),
  'rows of weight zero count in evals': Fault(Task, 'eval_step', counts_all_rows, 'job', '', 'eval valid: '),
  'batches of an eval set count alike': Fault(
    evaluator, '_mean_over_batches', means_of_means, 'job', '', 'eval valid: '
  ),
  'evals use raw weights': Fault(
    Task, 'evaluation_variables', lambda f: lambda self, state: state.variables, 'job', '', 'eval valid: '
  ),
  'a resumed job repeats a batch': Fault(SyntheticIterator, 'set_state', repeats_a_batch, 'job', '', 'batch/'),
  'a resumed job has another rng': Fault(restore, 'restore_or_init', changes_the_rng, 'job', ''),
}
# One or two of most claims; the others are found in the same way. Of packing, test_packing_claim.py has leaks, and of
# microbatches test_planted_bugs.py has a bug.
DEFAULT = {
  'label smoothing is ignored',
  'a step that is NaN is taken',
  'a resumed job has another rng',
}


@pytest.fixture(scope='module')
def bench_of():
  """A function of an experiment: its Bench, one for all tests."""
  with contextlib.ExitStack() as benches:
    yield functools.cache(
      lambda experiment: benches.enter_context(
        contextlib.closing(Bench(source_of(experiment), num_devices=1, num_steps=3))
      )
    )


def decide(bench: Bench, claim: str, subject: str):
  (case,) = (case for case in CLAIMS[claim].cases(bench) if case.subject.startswith(subject))
  return case.decide(bench)


@functools.cache
def assert_sound(bench: Bench, claim: str, subject: str) -> None:
  """Checks that the case holds without a fault, and caches its references."""
  verdict = decide(bench, claim, subject)
  assert verdict.status == 'held', verdict.detail


# Faults of these are in no compiled program, so jobs with them share those of jobs without.
OUTSIDE_OF_PROGRAMS = (restore, evaluator, SyntheticIterator)


@contextlib.contextmanager
def without_faulty_programs(bench: Bench, fault: Fault) -> Iterator[None]:
  """The bench compiles again what the fault changes: all but the formulas, or of microbatches but the whole batch."""
  runners, trajectories = dict(bench._runners), dict(bench._trajectories)

  def is_kept(setting: Setting) -> bool:
    is_whole = not any('num_microbatches' in override for override in setting.overrides)
    return setting.by_formulas or (fault.claim == 'microbatches' and is_whole)

  bench._runners = {setting: runner for setting, runner in runners.items() if is_kept(setting)}
  bench._trajectories = {setting: steps for setting, steps in trajectories.items() if is_kept(setting)}
  try:
    yield
  finally:
    bench._runners, bench._trajectories = runners, trajectories


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in DEFAULT)) for name in FAULTS]
)
def test_a_fault_of_all_layouts_is_found(name, bench_of, monkeypatch):
  fault = FAULTS[name]
  bench = bench_of(fault.experiment)
  with contextlib.ExitStack() as stack:
    if fault.owner in OUTSIDE_OF_PROGRAMS:
      stack.enter_context(shared_models())
    assert_sound(bench, fault.claim, fault.subject)
    monkeypatch.setattr(fault.owner, fault.name, fault.replace(getattr(fault.owner, fault.name)))
    if fault.owner is restore:
      monkeypatch.setattr('spmd_tasks.programs.train.restore_or_init', restore.restore_or_init)
    if fault.claim in ('step', 'microbatches'):
      stack.enter_context(without_faulty_programs(bench, fault))
    verdict = decide(bench, fault.claim, fault.subject)
  assert verdict.status == 'BROKEN', verdict
  assert verdict.failure['leaf'].startswith(fault.leaf), verdict.detail


@pytest.mark.exhaustive
def test_a_pipeline_with_one_mask_for_all_layers_is_found(monkeypatch):
  with contextlib.closing(Bench(source_of(StagedStep), num_devices=2, num_steps=1)) as bench:
    bench.trajectory(Setting())
    assert_sound(bench, 'dropout', 'masks, stage 2')
    monkeypatch.setattr(jax.random, 'fold_in', one_mask_for_all_layers(jax.random.fold_in))
    verdict = decide(bench, 'dropout', 'masks, stage 2')
  assert verdict.status == 'BROKEN'
  assert verdict.failure['leaf'].startswith('the mask of')
