"""MakeRollouts: makes the batches of a training job from completions that it samples, when they are needed.

Read rollout_input.py (settings, arrays, positions), rollout_sampler.py and rollout_rewards.py first.

Shapes: P prompts, G completions of each, K rewards, R = P * G rows of a rollout.
"""

import base64
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import json
import math
import time
from typing import Any
import zlib

import numpy as np

from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.files import storage_errors
from spmd_tasks.inputs import State
from spmd_tasks.programs.hooks import TrainHook, TrainRun, is_multiple
from spmd_tasks.programs.restore import initial_state
from spmd_tasks.programs.training_loop import Outcome
from spmd_tasks.runtime.metrics import METRICS_FILE, make_writer, read_jsonl
from spmd_tasks.tuning.environments import Episode
from spmd_tasks.tuning.rollout_input import PromptIterator, RewardPrompt, Rollout, RolloutInput, record_of
from spmd_tasks.tuning.rollout_rewards import RolloutRewards, mean, with_advantages
from spmd_tasks.tuning.rollout_sampler import RolloutSampler, RolloutScorer, episodes_of, place

_MAX_DRAWS = 8  # how often prompts are drawn for a rollout if `drops_equal` drops some
_SAVED_FIELDS = ('prompt_ids', 'ids', 'logprobs', 'is_sampled', 'text', 'is_cut', 'reward', 'turns', 'expert_ids')


@dataclasses.dataclass
class _Drawn:
  """The completions of a rollout, whose rewards may not be computed yet.

  Fields:
    prompts, groups: P prompts, and G episodes of each.
    num_drawn, seconds, mismatch: how many prompts were completed, how long it took, and the largest difference from the
      trainer's log-probabilities, if it was computed.
    values, pending: the rewards [G, K] of each prompt, or the argument of `RolloutRewards.values`.
  """

  prompts: list[RewardPrompt] = dataclasses.field(default_factory=list)
  groups: list[list[Episode]] = dataclasses.field(default_factory=list)
  num_drawn: int = 0
  seconds: float = 0.0
  mismatch: float | None = None
  values: list[np.ndarray] = dataclasses.field(default_factory=list)
  pending: Any = None

  def to_text(self) -> str:
    """Returns the completions as text, for checkpoints."""
    groups = [[{name: getattr(episode, name) for name in _SAVED_FIELDS} for episode in group] for group in self.groups]
    places, others = [place for *place, _ in self.prompts], {'num_drawn': self.num_drawn, 'mismatch': self.mismatch}
    content = {'places': places, 'groups': groups, 'others': others}
    return base64.b85encode(zlib.compress(json.dumps(content).encode())).decode()

  @classmethod
  def from_text(cls, text: str, iterator: PromptIterator) -> '_Drawn':
    content = json.loads(zlib.decompress(base64.b85decode(text)))
    groups = [[Episode(**fields) for fields in group] for group in content['groups']]
    return cls(prompts=iterator.prompts_at(content['places']), groups=groups, **content['others'])


class MakeRollouts(TrainHook):
  """Samples completions, computes their rewards, and gives the training loop batches and metrics; evaluates rewards."""

  def prepare(self, run: TrainRun) -> None:
    assert isinstance(run.job.train_input, RolloutInput)
    self._input = run.job.train_input
    self._rewards = RolloutRewards(self._input, run)
    self._sampler = RolloutSampler(
      self._input,
      run.model,
      seed=run.experiment.seed,
      answer=self._rewards.answer if self._rewards.environment else None,
      environment=self._rewards.environment,
      allow=lambda activity, seconds: run.watchdog.allow(activity, run.limit_s + seconds),
      beat=lambda: run.watchdog.beat(run.loop.step, 'rollout'),
      report=run.message,
    )
    self._scorer = RolloutScorer(self._input, run.model)
    self._eval_records = self._input.eval_source.open() if self._input.eval_source else None
    self._every_steps = run.experiment.eval_every_steps
    self._metrics: list[dict[str, float]] = []  # of the batches that the loop has, oldest first
    self._last_eval = -1
    self._num_failed = 0  # consecutive rollouts whose rewards all failed
    self._drawn: _Drawn | None = None

  def open(self, run: TrainRun) -> None:
    self._rewards.open()

  def start(self, run: TrainRun) -> None:
    self._reference = None
    if self._input.has_reference:
      self._reference = initial_state(run.model, run.experiment)[0].variables
    if self._eval_records is not None:
      directory = run.job_log_dir / 'eval_rewards'
      self._writer = make_writer(directory, trackers=run.experiment.trackers, primary=is_primary())
      run.stack.callback(self._writer.close)

  def batches(self, run: TrainRun) -> Any:
    iterator: Any = run.iterator
    return OnDemandBatches(lambda: (self.next_batch(run, iterator), iterator.get_state()))

  def before_loop(self, run: TrainRun) -> None:
    if self._eval_records is None:
      return
    directory, step = run.job_log_dir / 'eval_rewards', run.first_step

    def is_recorded() -> bool:
      with storage_errors(directory / METRICS_FILE), contextlib.suppress(FileNotFoundError):
        return step in read_jsonl(directory)
      return False

    if primary_decides(is_recorded, 'eval_rewards', limit_s=run.limit_s):
      self._last_eval = step
    elif step == 0 or is_multiple(step, self._every_steps):  # an earlier process may have ended during the evaluation
      self._evaluate(run)

  def needs_state(self, step: int) -> bool:
    return self._eval_records is not None and is_multiple(step, self._every_steps)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    run.metrics |= self._metrics.pop(0)
    if is_multiple(outcome.step, self._every_steps):
      self._evaluate(run)

  def after_skipped_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._metrics.pop(0)

  def finish(self, run: TrainRun) -> None:
    self._evaluate(run)

  def next_batch(self, run: TrainRun, iterator: PromptIterator) -> Any:
    """Returns the placed batch of the next update."""
    settings = self._input
    if iterator.rollout is None:
      if self._drawn is None and iterator.drawn is not None:  # restored from a checkpoint, without rewards
        self._drawn = _Drawn.from_text(iterator.drawn, iterator)
        self._drawn.pending = self._rewards.start(self._drawn.prompts, self._drawn.groups)
      drawn = self._drawn or self._draw(run, iterator, run.loop.step + 1)
      iterator.begin(*self._finish(run, drawn))
      self._drawn = iterator.drawn = None
      if settings.staleness:
        self._drawn = self._draw(run, iterator, run.loop.step + 1 + settings.num_updates)
        iterator.drawn = self._drawn.to_text()
    rollout = iterator.rollout
    assert rollout is not None
    iteration, minibatch = divmod(iterator.num_made, settings.num_minibatches)
    rows = np.arange(settings.num_rows)
    if settings.num_minibatches > 1:
      rows = np.random.default_rng((settings.seed, int(rollout['segment_ids'].sum()), iteration)).permutation(rows)
    batch = self.train_batch(run, rollout, rows.reshape(settings.num_minibatches, -1)[minibatch])
    iterator.num_made += 1
    if iterator.num_made == settings.num_updates:
      iterator.rollout, iterator.num_made = None, 0
    self._metrics.append(iterator.metrics)
    return batch

  def train_batch(self, run: TrainRun, rollout: Rollout, rows: np.ndarray) -> Any:
    """Returns the placed batch of some rows of a rollout."""
    num_parts = run.model.task.num_microbatches
    batch = self._input.batch_of({name: array[rows] for name, array in rollout.items()}, num_parts)
    return place(run.model.train_step, batch, np.arange(len(rows)))

  def _draw(self, run: TrainRun, iterator: PromptIterator, step: int) -> _Drawn:
    """Samples completions of the next prompts with the current weights, for the updates from `step` on.

    Also starts the reward functions, so that they run while the devices compute the previous updates.
    """
    settings, num_prompts = self._input, self._input.num_rows // self._input.group_size
    variables = run.model.task.decoding_variables(run.loop.state)
    drawn, started = _Drawn(), time.perf_counter()
    for _ in range(_MAX_DRAWS):
      prompts = iterator.take(num_prompts - len(drawn.prompts))
      drawn.num_drawn += len(prompts)
      groups = self._sampler.complete(variables, prompts, settings.group_size)
      pending = self._rewards.start(prompts, groups)
      if not settings.drops_equal:
        drawn.prompts, drawn.groups, drawn.pending = prompts, groups, pending
        break
      waited_from = time.perf_counter()
      values = self._rewards.values(pending)
      started += time.perf_counter() - waited_from
      for prompt, group, group_values in zip(prompts, groups, values, strict=True):
        total = self._rewards.total([group], group_values[None])
        total = total[~np.isnan(total)]
        if total.size and np.ptp(total) > 0:
          drawn.prompts.append(prompt)
          drawn.groups.append(group)
          drawn.values.append(group_values)
      if len(drawn.prompts) == num_prompts:
        break
    if not drawn.prompts:
      raise UserError(
        f'for each of {drawn.num_drawn} prompts, all completions have the same reward, or none: use prompts that the '
        'model sometimes answers correctly, or set drops_equal=False.'
      )
    drawn.seconds = time.perf_counter() - started
    if is_multiple(step, run.experiment.log_every_steps) and settings.staleness:
      rollout = settings.rollout_of(episodes_of(drawn.groups), settings.num_rows)
      drawn.mismatch = self._largest_mismatch(variables, rollout)
    return drawn

  def _finish(self, run: TrainRun, drawn: _Drawn) -> tuple[Rollout, dict[str, float]]:
    """Waits for the rewards of completions; returns their rollout, with the current weights, and its metrics."""
    settings, completions, started = self._input, episodes_of(drawn.groups), time.perf_counter()
    variables = run.model.task.decoding_variables(run.loop.state)
    rollout = self._with_log_probs(variables, settings.rollout_of(completions, settings.num_rows))
    scored_at = time.perf_counter()  # until here reward functions cost no time
    values = np.stack(drawn.values) if drawn.values else self._rewards.values(drawn.pending)  # [P, G, K]
    rewarded_at = time.perf_counter()
    grid = self._rewards.total(drawn.groups, values)  # [P, G]
    is_failed = np.isnan(grid).reshape(-1)
    self._num_failed = self._num_failed + 1 if is_failed.all() else 0
    if self._num_failed >= run.job.task.max_consecutive_skips:
      raise JobError(
        f'all rewards of {self._num_failed} consecutive rollouts failed: correct the problems above, and run the '
        'command again.'
      )
    if is_failed.any():
      blank, rows = settings.rollout_of([], len(is_failed)), np.flatnonzero(is_failed)
      for name, array in rollout.items():
        array[rows] = blank[name][rows] if name in blank else 0
    rollout = with_advantages(settings, rollout, grid)
    tokens = [len(episode.ids) for episode in completions]
    metrics = {
      'completion_tokens': float(np.mean(tokens)),
      'truncated': float(np.mean([episode.is_cut for episode in completions])),
      'prompts_drawn': float(drawn.num_drawn),
      'score_seconds': scored_at - started,
    }
    if settings.all_rewards:
      metrics |= self._rewards.metrics(values, grid) | {'reward_seconds': rewarded_at - scored_at}
      if not is_failed.all():
        # Without rows of NaN only, for which nanstd warns.
        metrics['reward_std'] = mean(np.nanstd(grid[~np.isnan(grid).all(axis=1)], axis=1))
    if drawn.seconds:  # 0 if the completions were restored from a checkpoint
      metrics |= {'rollout_seconds': drawn.seconds, 'rollout_tokens_per_second': sum(tokens) / drawn.seconds}
    if settings.reward_kl_weight:
      difference = rollout['weights'] * (rollout['old_log_probs'] - rollout['reference_log_probs'])
      metrics['kl'] = float(difference.sum() / max(rollout['weights'].sum(), 1))
    if settings.environment:
      metrics['num_turns'] = float(np.mean([len(episode.turns) for episode in completions]))
    if is_multiple(run.loop.step + 1, run.experiment.log_every_steps):
      mismatch = drawn.mismatch if settings.staleness else self._largest_mismatch(variables, rollout)
      metrics |= {} if mismatch is None else {'sampler_mismatch_max': mismatch}
      best = int(np.nanargmax(grid)) if not is_failed.all() else 0
      shown = ' '.join(completions[best].text.split())[:160]
      earned = ''
      if settings.all_rewards:
        earned = f'reward {grid.reshape(-1)[best]:.3g} for '
      if is_failed.all():
        earned = 'all rewards failed for '
      run.message(f'rollout for step {run.loop.step + 1}: {earned}{shown!r}')
    return rollout, metrics

  def _with_log_probs(self, variables: Any, rollout: Rollout) -> Rollout:
    """Adds the log-probabilities and values under the sampling model and the reference model that batches need."""
    if 'old_log_probs' in self._input.rollout_spec():
      log_probs, values = self._scorer.score(variables, rollout)
      rollout = rollout | {'old_log_probs': log_probs} | ({} if values is None else {'old_values': values})
    if self._reference is not None:
      rollout = rollout | {'reference_log_probs': self._scorer.score(self._reference, rollout)[0]}
    return rollout

  def _largest_mismatch(self, variables: Any, rollout: Rollout) -> float:
    """Returns the largest difference of a token's log-probability between the sampler and the training forward pass."""
    log_probs = rollout.get('old_log_probs')
    log_probs = self._scorer.score(variables, rollout)[0] if log_probs is None else log_probs
    return float(np.abs(log_probs - rollout['sampler_log_probs']).max())

  def _evaluate(self, run: TrainRun) -> None:
    """Completes the evaluation prompts greedily, and writes their rewards."""
    if self._eval_records is None or self._last_eval == run.step:
      return
    self._last_eval = run.step
    with run.timed('eval', 'evaluation'):
      variables = run.model.task.evaluation_variables(run.state)
      prompts = [(0, index, record_of(self._eval_records, index)) for index in range(len(self._eval_records))]
      groups = self._sampler.complete(variables, prompts, 1, temperature=0.0)
      values = self._rewards.values(self._rewards.start(prompts, groups))
    metrics = self._rewards.metrics(values, values @ self._rewards.weights)
    metrics['completion_tokens'] = float(np.mean([len(episode.ids) for episode in episodes_of(groups)]))
    self._writer.write(run.step, metrics)
    reward = metrics.get('reward', math.nan)
    run.message(f'step {run.step}  eval rewards: reward {reward:.4f} over {len(prompts)} prompts')


class OnDemandBatches:
  """Iterates over (batch, position after the batch) pairs, each computed by `make` when it is needed.

  Attributes:
    seconds_waited: how long the devices waited for the input; sampling is not waiting.
  """

  def __init__(self, make: Callable[[], tuple[Any, State]], seconds_waited: Callable[[], float] = lambda: 0.0):
    self._make, self._seconds_waited = make, seconds_waited

  @property
  def seconds_waited(self) -> float:
    return self._seconds_waited()

  def __iter__(self) -> Iterator[tuple[Any, State]]:
    return self

  def __next__(self) -> tuple[Any, State]:
    return self._make()
