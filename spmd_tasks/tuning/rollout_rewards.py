"""RolloutRewards: computes the rewards of completions by functions, reward models and an environment.

    rewards = RolloutRewards(settings, run)
    pending = rewards.start(prompts, groups)         # starts the functions in other processes
    values = rewards.values(pending)                 # waits for them: float64 [P, G, K]

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
  """All rewards of a job. Process 0 calls the workers in a thread; all processes run the reward models.

  Attributes:
    environment: the environment's class, or None.
    weights: the weights of the rewards, float64 [K].
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
    """Starts the workers, which stop with the job."""
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
      stack.callback(workers.stop)  # called before the thread's shutdown, so that the thread can end

  def answer(self, calls: Sequence[tuple[Mapping[str, Any], Sequence[str], Any]]) -> list[Any]:
    """Returns the environment's answers, (messages, reward, done, state), or None if it fails.

    Only process 0 has the states.
    """
    states: list[Any] = [None] * len(calls)

    def step(workers: RewardWorkers) -> list[Any]:
      answers = workers.steps(calls)
      states[:] = [answer and answer[3] for answer in answers]
      return [answer and answer[:3] for answer in answers]

    answers = self._decide(len(calls), self._submit(step))
    return [answer and (*answer, state) for answer, state in zip(answers, states, strict=True)]

  def start(self, prompts: Sequence[RewardPrompt], groups: Sequence[Sequence[Episode]]) -> Any:
    """Starts the reward functions on process 0; returns the argument of `values`."""
    episodes = [(record, episode) for (*_, record), group in zip(prompts, groups, strict=True) for episode in group]
    calls = [(record['prompt'], episode.text, record) for record, episode in episodes]
    future = self._submit(lambda workers: workers.rewards(calls).tolist()) if self._functions else None
    return len(prompts), calls, [episode.reward for _, episode in episodes], future

  def values(self, pending: Any) -> np.ndarray:
    """Returns the rewards, float64 [P, G, K], in the order of `all_rewards`; NaN if a reward failed."""
    num_prompts, calls, environment_rewards, future = pending
    columns = {name: model.rewards(calls) for name, model in self._models.items()}
    if self._settings.environment:
      columns[self._settings.environment] = np.array(environment_rewards)
    if self._functions:
      rewards = self._decide(len(calls), future)
      columns |= dict(zip(self._functions, np.array(rewards, np.float64).T, strict=True))
    values = np.array([columns[name] for name in self._settings.all_rewards], np.float64)
    return values.reshape(len(columns), num_prompts, len(calls) // num_prompts).transpose(1, 2, 0)

  def total(self, groups: Sequence[Sequence[Episode]], values: np.ndarray) -> np.ndarray:
    """Returns the weighted sums of rewards, with the penalties of long completions, [P, G]."""
    total = values @ self.weights
    if self._settings.overlong_margin:
      lengths = np.array([[len(episode.ids) for episode in group] for group in groups])
      total = total + overlong_penalties(lengths, self._settings.max_tokens, self._settings.overlong_margin)
    return total

  def metrics(self, values: np.ndarray, total: np.ndarray) -> dict[str, float]:
    """Returns the mean reward, the fraction of completions whose reward failed, and, of several rewards, each mean.

    Means are over the completions whose reward did not fail, and omitted if there are none.
    """
    metrics = {'reward': mean(total), 'reward_failures': float(np.isnan(values).any(axis=-1).mean())}
    if len(self.weights) > 1:
      metrics |= {f'reward/{name}': mean(values[..., k]) for k, name in enumerate(self._settings.all_rewards)}
    return {name: value for name, value in metrics.items() if not np.isnan(value)}

  def _submit(self, call: Any) -> Any:
    """Returns a Future of `call(workers)`, in the thread of process 0; None on other processes."""
    return self._workers and self._thread.submit(call, self._workers)

  def _decide(self, num_calls: int, future: Any) -> Any:
    """Returns the result of a Future of process 0 on all processes; `num_calls` determines the timeout."""
    run, workers = self._run, self._workers

    def decide() -> Any:
      assert workers is not None
      result = future.result()
      if workers.num_failed > self._num_failed:
        run.message(f'{workers.num_failed - self._num_failed} rewards failed, the last one: {workers.last_problem}')
        self._num_failed = workers.num_failed
      return result, workers.broken

    self._num_decided += 1
    limit_s = run.limit_s + round(self._settings.reward_timeout_s * num_calls)
    with run.watchdog.allow('rewards', limit_s):
      result, broken = primary_decides(decide, f'rewards_{self._num_decided}', limit_s=limit_s)
    if broken is not None:
      raise JobError(
        f'all calls of a reward or an environment have failed; the last problem: {broken}. Correct its code, return a '
        'number also for texts that it cannot parse, and run the command again.'
      )
    return result


def with_advantages(settings: RolloutInput, rollout: Rollout, grid: np.ndarray) -> Rollout:
  """Adds the advantages of rewards [P, G], and with values the returns; the last R - P G rows have no reward."""
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
  advantages, returns = generalized_advantages(rewards, rollout['old_values'], is_token, **discounts)
  return rollout | {'advantages': advantages.astype(np.float32), 'returns': returns.astype(np.float32)}


def mean(values: np.ndarray) -> float:
  """Returns the mean of the values that are not NaN; NaN if all are."""
  return float(np.nanmean(values)) if not np.isnan(values).all() else float('nan')
