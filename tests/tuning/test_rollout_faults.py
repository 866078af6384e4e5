"""The mismatch of log-probabilities reveals faults that are planted between the sampler and the trainer.

It cannot reveal group means over the wrong axis; tests/tuning/test_advantages.py does.
"""

import dataclasses
import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.decoding import DecodeSteps, decode_state, group_sampling, prefill, step
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
  """A RolloutSampler, with the arguments `kwargs`, and a RolloutScorer, outside of a job, with random weights."""

  def __init__(self, *overrides, experiment=Policy, **kwargs):
    overrides = (f'temperature={TEMPERATURE}', 'max_tokens=12', *overrides)
    self.model, self.settings = make_model(experiment, (1,), overrides=overrides)
    self.sampler = RolloutSampler(self.settings, self.model, seed=0, report=pytest.fail, **kwargs)
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
  """Samples at the temperature of a request, which log-probabilities do not include."""
  faulty = sampler()
  monkeypatch.setattr(faulty.sampler, 'steps', DecodeSteps(faulty.model, faulty.sampler.steps.settings))
  return faulty.rollout(temperature=TEMPERATURE)


def after_top_k(monkeypatch):
  """Computes log-probabilities among the five most probable tokens, which are sampled."""
  sample_next_tokens = decode_state.sample_next_tokens

  def sample_of_few(logits, *others):
    least = jax.lax.top_k(logits, 5)[0][..., -1:]
    return sample_next_tokens(jnp.where(logits >= least, logits, -1e30), *others)

  for module in (prefill, step, group_sampling):
    monkeypatch.setattr(module, 'sample_next_tokens', sample_of_few)
  return Sampler('top_k=5').rollout()


def stale_weights(monkeypatch):
  return sampler().rollout(draw_variables(sampler().model, 1))


def in_batches(change):
  """Changes a batch's arrays: change(batch, columns, lengths of prompts, lengths of rows) -> new arrays."""

  def plant(monkeypatch):
    correct = RolloutInput.rollout_of

    def rollout_of(*args):
      batch = correct(*args)
      columns, lengths = np.arange(batch['ids'].shape[1])[None, :], batch['segment_ids'].sum(axis=1, keepdims=True) + 1
      changed = change(batch, columns, 1 + np.argmax(batch['weights'], axis=1)[:, None], lengths)
      return batch | {name: x.astype(batch[name].dtype) for name, x in changed.items()}

    monkeypatch.setattr(RolloutInput, 'rollout_of', rollout_of)
    return sampler().rollout()

  return plant


FAULTS = {
  'log-probabilities before the temperature': before_the_temperature,
  'log-probabilities after top_k': after_top_k,
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


def test_packed_texts_have_the_same_log_probabilities_and_values_as_unpacked_texts():
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
  packed = RolloutScorer(settings, model).score(variables, rollout)
  unpacked = RolloutScorer(dataclasses.replace(settings, packing=False), model).score(variables, rollout)
  for scores, expected in zip(packed, unpacked, strict=True):
    assert np.ptp(scores[rollout['segment_ids'] > 0]) > 0.1
    np.testing.assert_allclose(scores, expected, atol=2e-6)


_WITH_STEPS_OF_THEIR_OWN = (before_the_temperature, after_top_k)  # which take seconds to compile


@pytest.mark.parametrize(
  'fault',
  [
    pytest.param(name, marks=pytest.mark.exhaustive if fault in _WITH_STEPS_OF_THEIR_OWN else ())
    for name, fault in FAULTS.items()
  ],
)
def test_the_mismatch_shows_a_planted_fault(fault, monkeypatch):
  assert sampler().mismatch(FAULTS[fault](monkeypatch)) > 0.01


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_mismatch_shows_routing_that_is_not_replayed(monkeypatch):
  """The sampler's router has slightly different weights, as if it rounded differently."""
  experts = Sampler('replays_routing=True', experiment=ExpertsPolicy)
  rng, flat = np.random.default_rng(0), traverse_util.flatten_dict(experts.variables['params'])
  noisy = {path: x * (1 + 0.02 * rng.standard_normal(x.shape)) if 'router' in path else x for path, x in flat.items()}
  rollout = experts.rollout({'params': traverse_util.unflatten_dict(noisy)})
  assert rollout['expert_ids'].shape[-1] == 2 * 2  # layers, and choices of a token
  replayed = experts.mismatch(rollout)
  monkeypatch.setattr(RolloutTask, 'constants', lambda *_: {})
  experts.scorer = RolloutScorer(experts.settings, experts.model)
  assert experts.mismatch(rollout) > 0.1 > 3 * replayed > 0


@pytest.mark.slow
def test_verify_claims_that_sampler_and_trainer_agree_and_finds_a_planted_fault(monkeypatch):
  bench = Bench(source_of(Policy), num_devices=1, num_steps=1)
  case = next(sampler_cases(bench))
  verdict = case.decide(bench)
  assert verdict.status == 'held', verdict
  FAULTS['a prompt begins at the wrong position'](monkeypatch)
  verdict = case.decide(bench)
  assert verdict.status == 'BROKEN'
  assert 'log-probability of token' in verdict.detail
  bench.close()
