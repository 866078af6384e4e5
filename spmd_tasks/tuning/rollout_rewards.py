"""RolloutRewards: the rewards of completions by functions, models and an environment; and what follows from them.

    rewards = RolloutRewards(settings, run)
    asked = rewards.ask(prompts, groups)             # functions run in other processes meanwhile
    values = rewards.values(asked)                   # float64 [P, G, K]

Shapes: P prompts, G completions of each, K rewards, R rows of a rollout, T tokens of a row.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import JobError
from spmd_tasks.programs.hooks import TrainRun
from spmd_tasks.tuning.advantages import advantages_of, generalized_advantages, overlong_penalties
from spmd_tasks.tuning.environments import Episode
from spmd_tasks.tuning.reward_functions import RewardWorkers, load_environment
from spmd_tasks.tuning.reward_models import RewardModel, is_reward_model
from spmd_tasks.tuning.rollout_input import RewardPrompt, Rollout, RolloutInput


class RolloutRewards:
  """All rewards of a job. Process 0 has the workers, and calls them in a thread; all processes run the models.

  Attributes:
    environment: its class; None: there is none.
    weights: of the rewards, float64 [K].
  """

  def __init__(self, settings: RolloutInput, run: TrainRun):
    """Partitions the models. Raises a UserError if a reward or the environment cannot be used."""
    directories = run.job.code_directories
    self.environment = load_environment(settings.environment, directories) if settings.environment else None
    sizes = {'batch_size': settings.batch_size, 'seq_len': settings.seq_len}
    self._models = {name: RewardModel(name, run, **sizes) for name in settings.rewards if is_reward_model(name)}
    self._functions = [name for name in settings.rewards if name not in self._models]
    self._settings, self._run = settings, run
    self.weights = np.array(list(settings.all_rewards.values()))
    self._workers: RewardWorkers | None = None
    self._num_decided = self._num_failed = 0

  def open(self) -> None:
    """Starts the workers, which the job's end stops."""
    settings, stack = self._settings, self._run.stack
    if is_primary() and (self._functions or self.environment):
      number, limit_s = settings.num_workers, settings.reward_timeout_s
      workers = RewardWorkers(
        self._functions,
        environment=settings.environment,
        num_workers=number,
        timeout_s=limit_s,
        code_directories=self._run.job.code_directories,
      )
      self._workers = stack.enter_context(workers)
      self._thread = futures.ThreadPoolExecutor(1)
      stack.callback(self._thread.shutdown)
      stack.callback(workers.stop)  # first, so that the thread ends

  def answer(self, calls: Sequence[tuple[Mapping[str, Any], Sequence[str], Any]]) -> list[Any]:
    """What the environment answers, (messages, reward, done, state); None where it fails. Process 0 has the states."""
    states: list[Any] = [None] * len(calls)

    def step(workers: RewardWorkers) -> list[Any]:
      found = workers.steps(calls)
      states[:] = [each and each[3] for each in found]
      return [each and each[:3] for each in found]

    answers = self._decide(len(calls), self._submit(step))
    return [each and (*each, state) for each, state in zip(answers, states, strict=True)]

  def ask(self, prompts: Sequence[RewardPrompt], groups: Sequence[Sequence[Episode]]) -> Any:
    """Has process 0 call the functions; `values` takes what this returns."""
    episodes = [(record, each) for (*_, record), group in zip(prompts, groups, strict=True) for each in group]
    calls = [(record['prompt'], each.text, record) for record, each in episodes]
    asked = self._submit(lambda workers: workers.rewards(calls).tolist()) if self._functions else None
    return len(prompts), calls, [each.reward for _, each in episodes], asked

  def values(self, given: Any) -> np.ndarray:
    """The rewards, float64 [P, G, K], in the order of `all_rewards`; NaN where there is none."""
    num_prompts, calls, of_environment, asked = given
    columns = {name: model.rewards(calls) for name, model in self._models.items()}
    if self._settings.environment:
      columns[self._settings.environment] = np.array(of_environment)
    if self._functions:
      found = self._decide(len(calls), asked)
      columns |= dict(zip(self._functions, np.array(found, np.float64).T, strict=True))
    values = np.array([columns[name] for name in self._settings.all_rewards], np.float64)
    return values.reshape(len(columns), num_prompts, len(calls) // num_prompts).transpose(1, 2, 0)

  def total(self, groups: Sequence[Sequence[Episode]], values: np.ndarray) -> np.ndarray:
    """The sum of rewards by their weights, with what long completions cost, [P, G]."""
    total = values @ self.weights
    if self._settings.overlong_margin:
      lengths = np.array([[len(each.ids) for each in group] for group in groups])
      total = total + overlong_penalties(lengths, self._settings.max_tokens, self._settings.overlong_margin)
    return total

  def metrics(self, values: np.ndarray, total: np.ndarray) -> dict[str, float]:
    """Means over all completions with a reward, the share of the others, and the mean of each reward of several.

    Without any reward there is no mean.
    """
    metrics = {'reward': mean(total), 'reward_failures': float(np.isnan(values).any(axis=-1).mean())}
    if len(self.weights) > 1:
      metrics |= {f'reward/{name}': mean(values[..., k]) for k, name in enumerate(self._settings.all_rewards)}
    return {name: value for name, value in metrics.items() if not np.isnan(value)}

  def _submit(self, call: Any) -> Any:
    """A Future of what `call` makes of the workers of process 0, one call after another; None on other processes."""
    return self._workers and self._thread.submit(call, self._workers)

  def _decide(self, number: int, future: Any) -> Any:
    """The result of a Future of process 0; `number` is of the calls, for the time that they may take."""
    run, workers = self._run, self._workers

    def decide() -> Any:
      assert workers is not None
      found = future.result()
      if workers.num_failed > self._num_failed:
        run.message(f'{workers.num_failed - self._num_failed} rewards failed, the last one: {workers.last_problem}')
        self._num_failed = workers.num_failed
      return found, workers.broken

    self._num_decided += 1
    limit_s = run.limit_s + round(self._settings.reward_timeout_s * number)
    with run.watchdog.allow('rewards', limit_s):
      found, broken = primary_decides(decide, f'rewards_{self._num_decided}', limit_s=limit_s)
    if broken is not None:
      raise JobError(
        f'a reward or an environment gave no result in any call so far; the last problem: {broken}. '
        'Correct that code, and have it return a number where it cannot read a text; then start again.'
      )
    return found


def with_advantages(settings: RolloutInput, rollout: Rollout, grid: np.ndarray) -> Rollout:
  """Adds the advantages of rewards [P, G], the last R - P G rows having none, and the returns of tokens."""
  is_token, num_rows = rollout['weights'] > 0, len(rollout['weights'])
  kl = np.zeros(is_token.shape)
  if settings.reward_kl_weight:
    kl += settings.reward_kl_weight * (rollout['old_log_probs'].astype(np.float64) - rollout['reference_log_probs'])
  if settings.baseline != 'gae':
    grid = grid - kl.sum(axis=1)[: grid.size].reshape(grid.shape)
    advantages = np.zeros(num_rows, np.float32)
    advantages[: grid.size] = advantages_of(grid, baseline=settings.baseline, scale=settings.scale).reshape(-1)
    return rollout | {'advantages': advantages}
  rewards, rows = -kl, np.flatnonzero(is_token.any(axis=1))
  last = is_token.shape[1] - 1 - np.argmax(is_token[rows, ::-1], axis=1)
  rewards[rows, last] += grid.reshape(-1)[rows]
  discounts: dict[str, Any] = {'gamma': settings.gamma, 'lam': settings.lam, 'whitens': settings.scale == 'batch'}
  made = generalized_advantages(rewards, rollout['old_values'], is_token, **discounts)
  return rollout | {name: each.astype(np.float32) for name, each in zip(('advantages', 'returns'), made, strict=True)}


def mean(values: np.ndarray) -> float:
  """The mean of the values that are known; NaN without any."""
  return float(np.nanmean(values)) if not np.isnan(values).all() else float('nan')
