"""The claim that the sampler of rollouts gives the log-probabilities of the forward pass of training.

A rollout is sampled as in a job, at its temperature and with its cuts, and its batches are scored by the trainer.

Shapes: R rows, T tokens.
"""

from collections.abc import Iterator
import functools
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.verification._agreement import FURTHER, ROUNDINGS, SPREADS, Difference, distance, largest, moved
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken, held, not_applicable
from spmd_tasks.verification._settings import Setting


def sampler_cases(bench: Bench) -> Iterator[Case]:
  """Yields a case on one device and one on the experiment's mesh, of an experiment that samples rollouts."""
  if getattr(bench.source.base.train_input, 'kind', '') != 'rollouts':
    yield not_applicable('sampler', 'rollouts', 'the experiment samples none')
    return
  for setting in dict.fromkeys((Setting(), Setting(mesh=bench.own_mesh))):
    decide = functools.partial(_compare_log_probs, setting=setting)
    yield Case(claim='sampler', subject=str(setting), settings=(Setting(), setting), decide=decide)


@functools.lru_cache(maxsize=2)
def _sampler(runner: Any) -> Any:
  from spmd_tasks.tuning.rollouts import SampledOutside

  return SampledOutside(runner.job, runner.model)


def _compare_log_probs(bench: Bench, setting: Setting) -> Verdict:
  runner, state = bench.runner(setting), bench.trajectory(Setting()).state(bench.num_steps - 1)
  sampler, variables = _sampler(runner), runner.place(state).variables
  rollout = sampler.sample(variables)
  trained, sampled = sampler.log_probs(variables, rollout), rollout.sampler_log_probs
  rng, epsilon = np.random.default_rng((bench.seed, 42)), runner.epsilon

  def spread(units: float) -> float:
    samples = [runner.place(moved(state, units * epsilon, rng)).variables for _ in range(3)]
    return max(distance(trained, sampler.log_probs(sample, rollout)) for sample in samples)

  settings: Any = runner.job.train_input
  allowed = 0.0 if settings.exact else SPREADS * spread(1.0) + ROUNDINGS * epsilon * largest(trained)
  sizes = np.nan_to_num(np.abs(trained - sampled), nan=np.inf)
  row, column = np.unravel_index(np.argmax(sizes), sizes.shape)
  place = column - int(np.argmax(rollout.is_sampled[row])) + 1
  mean = float(sizes[rollout.is_sampled].mean())
  leaf = f'log-probability of token {place} of completion {row + 1} (the mean of all differs by {mean:.2g})'
  found = Difference(step=bench.num_steps - 1, leaf=leaf, difference=float(sizes.max()), allowed=allowed)
  if found.difference <= allowed:
    return held(found, 1)
  if not settings.exact and spread(FURTHER) > found.difference / 4:
    raise UserError('rounding alone makes the forward pass jump, as at a tie between experts.')
  return broken(bench, 'sampler', setting, found)
