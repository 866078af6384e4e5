"""Faults that are planted between sampler and trainer show in the mismatch of their log-probabilities.

Group means over the wrong axis are no such fault: tests/tuning/test_advantages.py finds them.
"""

import dataclasses
import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.decoding import DecodeSteps, group_sampling, step_functions
from spmd_tasks.tuning.environments import Episode
from spmd_tasks.tuning.rollout_input import RolloutInput
from spmd_tasks.tuning.rollout_sampler import RolloutSampler, RolloutScorer, episodes_of
from spmd_tasks.tuning.rollout_task import RolloutTask
from spmd_tasks.verification._cases import Bench
from spmd_tasks.verification._text_claims import sampler_cases
from tests.drawn_weights import draw_variables
from tests.runtime.loss_curves import make_model, source_of
from tests.tuning.reward_experiments import ExpertsPolicy, Policy, ValuePolicy

NUM_PROMPTS, GROUP, TEMPERATURE = 4, 4, 0.7


class Sampler:
  """What samples and what scores, outside of a job, with the weights of a seed; `own` goes to RolloutSampler."""

  def __init__(self, *overrides, experiment=Policy, **own):
    given = (f'temperature={TEMPERATURE}', 'max_tokens=12', *overrides)
    self.model, self.settings = make_model(experiment, (1,), overrides=given)
    self.sampler = RolloutSampler(self.settings, self.model, seed=0, report=pytest.fail, **own)
    step = self.sampler.steps.step
    step.row_counts = step.row_counts[-1:]  # no programs for fewer busy slots
    self.scorer = RolloutScorer(self.settings, self.model)
    self.variables = draw_variables(self.model, 0)
    self.prompts = self.settings.make_iterator().take(NUM_PROMPTS)

  def complete(self, variables=None, **draws):
    return episodes_of(self.sampler.complete(variables or self.variables, self.prompts, GROUP, **draws))

  def rollout(self, variables=None, **draws):
    return self.settings.rollout_of(self.complete(variables, **draws), NUM_PROMPTS * GROUP)

  def mismatch(self, rollout) -> float:
    return float(np.abs(self.scorer.score(self.variables, rollout)[0] - rollout['sampler_log_probs']).max())


sampler = functools.cache(Sampler)


def before_the_temperature(monkeypatch):
  """The same draws, at the temperature of a request, which log-probabilities do not have."""
  given = sampler()
  monkeypatch.setattr(given.sampler, 'steps', DecodeSteps(given.model, given.sampler.steps.settings))
  return given.rollout(temperature=TEMPERATURE)


def after_the_cut(monkeypatch):
  """Of the five likeliest tokens, among which the draws are."""
  emit = step_functions.emit

  def emit_of_few(logits, *others):
    least = jax.lax.top_k(logits, 5)[0][..., -1:]
    return emit(jnp.where(logits >= least, logits, -1e30), *others)

  for module in (step_functions, group_sampling):
    monkeypatch.setattr(module, 'emit', emit_of_few)
  return Sampler('top_k=5').rollout()


def stale_weights(monkeypatch):
  given = sampler()
  return given.rollout(draw_variables(given.model, 1))


def in_batches(change):
  """A fault of the batch's arrays: new ones, of the batch, its columns, and the lengths of prompts and whole rows."""

  def plant(monkeypatch):
    made = RolloutInput.rollout_of

    def rollout_of(*given):
      whole = made(*given)
      columns, lengths = np.arange(whole['ids'].shape[1])[None, :], whole['segment_ids'].sum(axis=1, keepdims=True) + 1
      changed = change(whole, columns, 1 + np.argmax(whole['weights'], axis=1)[:, None], lengths)
      return whole | {name: each.astype(whole[name].dtype) for name, each in changed.items()}

    monkeypatch.setattr(RolloutInput, 'rollout_of', rollout_of)
    return sampler().rollout()

  return plant


FAULTS = {
  'log-probabilities before the temperature': before_the_temperature,
  'log-probabilities after the cut of top_k and top_p': after_the_cut,
  'stale weights in the sampler': stale_weights,
  'one token shifted': in_batches(lambda b, c, p, n: {'labels': np.roll(b['labels'], 1, axis=1)}),
  'what follows the end counts': in_batches(lambda b, c, p, n: {'weights': (c >= p - 1) & (c < n)}),
  'padding counts': in_batches(lambda b, c, p, n: {'weights': c >= p - 1}),
  "the prompt's tokens count": in_batches(lambda b, c, p, n: {'weights': c < n - 1}),
  'a prompt begins at the wrong position': in_batches(lambda b, c, p, n: {'segment_pos': b['segment_pos'] + c // 2}),
}


def test_without_a_fault_sampler_and_trainer_agree_at_a_temperature_other_than_1():
  rollout = sampler().rollout()
  assert sampler().mismatch(rollout) < 1e-5
  assert len({*map(tuple, rollout['ids'])}) > NUM_PROMPTS  # draws differ


def test_texts_that_share_rows_are_scored_and_valued_as_those_of_their_own():
  model, settings = make_model(ValuePolicy, (1,), overrides=('task.learner.num_microbatches=4',))
  rng, episodes = np.random.default_rng(0), []
  for prompt, length in rng.integers(1, 20, (settings.num_rows, 2)).tolist():
    ids = rng.integers(0, 30, prompt + length).tolist()
    episodes.append(Episode(prompt_ids=ids[:prompt], ids=ids[prompt:], logprobs=[0] * length, is_sampled=[1] * length))
  episodes[3] = Episode()
  rollout, variables = settings.rollout_of(episodes, settings.num_rows), draw_variables(model, 0)
  batch = settings.batch_of(rollout, 4)
  is_used = (batch['segment_ids'].reshape(-1, 4, settings.seq_len) > 0).any(axis=(0, 2))
  assert is_used.tolist() == [True, True, True, False]
  found = RolloutScorer(settings, model).score(variables, rollout)
  alone = RolloutScorer(dataclasses.replace(settings, packing=False), model).score(variables, rollout)
  for each, expected in zip(found, alone, strict=True):
    assert np.ptp(each[rollout['segment_ids'] > 0]) > 0.1
    np.testing.assert_allclose(each, expected, atol=2e-6)


@pytest.mark.parametrize(
  'fault', [pytest.param(name, marks=pytest.mark.slow if FAULTS[name] is after_the_cut else ()) for name in FAULTS]
)
def test_the_mismatch_shows_a_planted_fault(fault, monkeypatch):
  assert sampler().mismatch(FAULTS[fault](monkeypatch)) > 0.01


@pytest.mark.slow
def test_routing_that_is_not_replayed_is_found(monkeypatch):
  """The sampler's router rounds otherwise, as that of another program or dtype does."""
  given = Sampler('replays_routing=True', experiment=ExpertsPolicy)
  rng, flat = np.random.default_rng(0), traverse_util.flatten_dict(given.variables['params'])
  moved = {path: x * (1 + 0.02 * rng.standard_normal(x.shape)) if 'router' in path else x for path, x in flat.items()}
  rollout = given.rollout({'params': traverse_util.unflatten_dict(moved)})
  assert rollout['expert_ids'].shape[-1] == 2 * 2  # layers, and choices of a token
  replayed = given.mismatch(rollout)
  monkeypatch.setattr(RolloutTask, 'constants', lambda *_: {})
  given.scorer = RolloutScorer(given.settings, given.model)
  assert given.mismatch(rollout) > 0.1 > 3 * replayed > 0


@pytest.mark.slow
def test_verify_claims_that_sampler_and_trainer_agree_and_finds_a_planted_fault(monkeypatch):
  bench = Bench(source_of(Policy), num_devices=1, num_steps=1)
  case = next(sampler_cases(bench))
  held = case.decide(bench)
  assert held.status == 'held', held
  FAULTS['a prompt begins at the wrong position'](monkeypatch)
  found = case.decide(bench)
  assert found.status == 'BROKEN'
  assert 'log-probability of token' in found.detail
  bench.close()
