"""With exact=True the sampler's log-probabilities have the bits of the trainer's forward pass, and cost no accuracy."""

import jax
import numpy as np
import pytest

from spmd_tasks.decoding import DecodeSettings, DecodeSteps, Request, generate
from spmd_tasks.decoding.generation import complete_groups
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.tuning import RolloutTask
from spmd_tasks.tuning.preference_loss import answer_log_probs
from tests.drawn_weights import draw_variables
from tests.runtime.loss_curves import make_model, table
from tests.tuning.reward_experiments import ExpertsPolicy, LowRankPolicy, Policy

TEMPERATURE, NUM_SLOTS, LENGTH = 0.7, 16, 24


def requests(number, rng, vocab_size=40):
  lengths = rng.integers(1, 15, number)
  return [
    Request(ids=tuple(rng.integers(1, vocab_size, n)), max_tokens=int(rng.integers(1, LENGTH - n)), seed=seed)
    for seed, n in enumerate(lengths.tolist())
  ]


def in_batches(steps, variables, asked, rng):
  """Completes them in batches of 1 to 16, so that slots are taken and left at any time."""
  made, begin, sizes = [], 0, [1, 16, *rng.integers(2, 17, len(asked))]
  for size in sizes:
    part = [asked[i] for i in rng.permutation(np.arange(begin, min(begin + size, len(asked))))]
    made += [completion for _, completion in generate(steps, variables, part, decode=lambda ids: '')] if part else []
    begin += size
  return made


def batches(completions):
  """The trainer's batches of 16 rows, and beside each the sampler's log-probabilities."""
  for begin in range(0, len(completions), NUM_SLOTS):
    arrays = {name: np.zeros((NUM_SLOTS, LENGTH), np.int32) for name in ('ids', 'labels', 'segment_ids', 'segment_pos')}
    arrays['weights'], sampled = (np.zeros((NUM_SLOTS, LENGTH), np.float32) for _ in range(2))
    for row, each in enumerate(completions[begin : begin + NUM_SLOTS]):
      text, start = [*each.request.ids, *each.ids], len(each.request.ids) - 1
      end = len(text) - 1
      arrays['ids'][row, :end], arrays['labels'][row, :end] = text[:-1], text[1:]
      arrays['segment_ids'][row, :end], arrays['segment_pos'][row, :end] = 1, np.arange(end)
      arrays['weights'][row, start:end], sampled[row, start:end] = 1, each.logprobs
    yield arrays, sampled


def trained_log_probs(task, is_exact):
  """(weights, batch) -> log-probabilities as in a training step, beside the gradient of their mean square."""

  def compute(weights, batch):
    with layer_scope(batch_invariant=is_exact):
      log_probs = answer_log_probs(task.predict({'params': weights}, batch), batch, TEMPERATURE)
    return (log_probs**2).mean(), log_probs

  return jax.jit(jax.grad(compute, has_aux=True))


@pytest.mark.parametrize(
  'name, experiment', table([('experts', ExpertsPolicy)], [('dense', Policy), ('adapters', LowRankPolicy)], fast=())
)
def test_no_bit_of_200_rollouts_differs_in_batches_of_1_to_16(name, experiment):
  model, _ = make_model(experiment, (1,), overrides=('exact=True',))
  assert isinstance(model.task, RolloutTask)
  weights, rng = draw_variables(model, 0)['params'], np.random.default_rng(0)
  settings = DecodeSettings(max_len=LENGTH, num_slots=NUM_SLOTS, min_bucket=LENGTH, prefill_rows=4)
  steps = DecodeSteps(model, settings, temperature=TEMPERATURE)
  steps.step_rows = steps.step_rows[-2:]  # of the programs for fewer busy slots one
  asked = requests(200, rng)
  together = complete_groups(steps, {'params': weights}, asked[:8], 4, decode=lambda ids: '')
  is_late = np.array([len(each.ids) for group in together for each in group])
  assert 0 < np.sum(is_late > np.sort(is_late)[-9]) <= 8  # a loop over a quarter of the rows has drawn some tokens
  completions = [*in_batches(steps, {'params': weights}, asked, rng), *(each for group in together for each in group)]
  assert len(completions) == 232

  compute, plain = trained_log_probs(model.task, True), None
  for batch, sampled in batches(completions):
    gradient, log_probs = compute(weights, batch)
    np.testing.assert_array_equal(np.asarray(log_probs), sampled)
    if plain is None and name != 'experts':  # the gradient is the usual one
      plain_model, _ = make_model(experiment, (1,))
      plain, expected = trained_log_probs(plain_model.task, False)(weights, batch)
      np.testing.assert_allclose(log_probs, expected, atol=1e-5)
      largest = max(float(abs(x).max()) for x in jax.tree.leaves(plain))
      for found, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * largest)
