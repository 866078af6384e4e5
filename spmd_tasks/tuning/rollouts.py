"""Rollouts: completions of prompts that the training job itself samples, with their rewards, as batches of the loop.

    RolloutInput(source=RewardPrompts(pattern='sums.jsonl'), rewards={'my_lab.rewards:is_correct': 1.0}, ...)

A step's batch is made when the step is due: P prompts are completed G times each by the decoding engine, on the
training mesh and with the weights of that moment; each completion gets rewards, and from these an advantage. A rollout
may serve several updates, with minibatches of its rows, several times.

The position of the input is that of its prompts, the rollout of which updates are still due, and with staleness the
completions of the next one, whose rewards are computed again. The draws depend on
the seed, the epoch and the record only: a job that goes on from a checkpoint makes the same bits.

Shapes: R = P * G rows of a rollout, B rows of an update, T tokens of a row (a prompt and its completion), K rewards.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import io
import json
import time
import types
from typing import Any, ClassVar, NamedTuple
import zlib

import jax
import numpy as np

from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate, State, Tokenizer
from spmd_tasks.inputs.base import BATCH_DTYPES, check_state, language_model_spec, shard_rows
from spmd_tasks.inputs.tokenizers import encode_prompt
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.programs.interval_hooks import is_multiple
from spmd_tasks.programs.training_loop import Outcome
from spmd_tasks.runtime import SamplingParams
from spmd_tasks.runtime.metrics import make_writer
from spmd_tasks.tuning.advantages import BASELINES, SCALES, advantages_of, generalized_advantages, overlong_penalties
from spmd_tasks.tuning.conversations import messages_of, tools_of
from spmd_tasks.tuning.environments import Episode, Turns
from spmd_tasks.tuning.preference_loss import answer_log_probs
from spmd_tasks.tuning.record_files import OpenRecordFiles
from spmd_tasks.tuning.reward_functions import RewardWorkers, load_environment
from spmd_tasks.tuning.reward_models import RewardModel, is_reward_model

_Prompt = tuple[int, int, Mapping[str, Any]]  # epoch, number of the record, the record
_OF_TOKENS = ('sampler_log_probs', 'old_log_probs', 'reference_log_probs', 'old_values', 'returns')
_MAX_DRAWS = 8  # of prompts for one rollout, where groups whose rewards are all equal are left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardPrompts:
  """Prompts in JSON lines, Parquet or Arrow files (a glob pattern or several).

  A record has `prompt`, a text or a list of messages, and whatever else the reward functions read.
  """

  pattern: str | tuple[str, ...]

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, ['prompt'], None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutInput:
  """What a rollout is made of; the batches are made by MakeRollouts.

  Fields:
    source: RewardPrompts.
    eval_source: further ones, which are completed greedily at the experiment's `eval_every_steps`; None: none.
    tokenizer, template: of the prompts.
    rewards: `module:function` (reward_functions.py) or the folder of a reward model (reward_models.py) -> its weight in
      a completion's reward.
    environment: `module:Class` that answers completions (environments.py); its rewards are added. None: there is none.
    max_turns: completions of one episode with it.
    batch_size, seq_len: B and T.
    group_size: G.
    num_minibatches: R / B.
    num_iterations: how often each row of a rollout is trained on.
    staleness: 1: a rollout is sampled before the first update of the rollout before it, so that reward functions run
      while the devices make the updates; 0: after the last one.
    max_tokens: of a completion; with an environment, of all that follows the prompt.
    temperature: completions are drawn from logits / temperature, and their log-probabilities are of these.
    top_k, top_p: cut the draws as SamplingParams say, and not the log-probabilities.
    baseline, scale: of advantages (advantages.py); with the baseline 'gae' those of tokens, from the values of a model
      with a value head.
    gamma, lam: of 'gae'.
    reward_kl_weight: how much of log q - log r, of the models that sampled and of reference, is taken off the reward.
    drops_equal: leaves out prompts all of whose completions have one reward, and completes others in their place
      (DAPO's dynamic sampling).
    overlong_margin: the last tokens before max_tokens that cost up to 1 (overlong_penalties); 0: none do.
    exact: whether the task is batch-invariant, so that old log-probabilities are the sampler's.
    num_choices: n, the choices of experts of a token in all layers that are recorded and replayed; 0: none are.
    has_reference: whether batches have the log-probabilities under the weights that training starts from.
    num_slots: how many completions are generated at once.
    num_workers, reward_timeout_s: processes for rewards, and the seconds that one call may take.
    seed, shuffle: of the order of prompts, and of the draws.
  """

  source: RewardPrompts
  eval_source: RewardPrompts | None = None
  tokenizer: Tokenizer
  template: ChatTemplate = dataclasses.field(default_factory=ChatTemplate)
  rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
  environment: str | None = None
  max_turns: int = 8
  batch_size: int
  seq_len: int
  group_size: int = 8
  num_minibatches: int = 1
  num_iterations: int = 1
  staleness: int = 0
  max_tokens: int = 256
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  baseline: str = 'group'
  scale: str = 'group'
  gamma: float = 1.0
  lam: float = 1.0
  reward_kl_weight: float = 0.0
  drops_equal: bool = False
  overlong_margin: int = 0
  exact: bool = False
  num_choices: int = 0
  has_reference: bool = False
  num_slots: int = 64
  num_workers: int = 2
  reward_timeout_s: float = 10.0
  seed: int = 0
  shuffle: bool = True

  kind: ClassVar[str] = 'rollouts'
  needs_reward: ClassVar[bool] = True

  def __post_init__(self):
    for name in (
      'group_size',
      'num_minibatches',
      'num_iterations',
      'max_tokens',
      'max_turns',
      'num_slots',
      'num_workers',
    ):
      if getattr(self, name) < 1:
        raise UserError(f'{name} = {getattr(self, name)} must be at least 1.')
    if self.num_rows % self.group_size:
      raise UserError(
        f'batch_size {self.batch_size} x num_minibatches {self.num_minibatches} must be a multiple of group_size '
        f'{self.group_size}, the completions of one prompt.'
      )
    if self.staleness not in (0, 1):
      raise UserError(f'staleness = {self.staleness} must be 0 or 1.')
    if self.needs_reward and not self.all_rewards:
      raise UserError('rewards are missing: --set reward=MODULE:FUNCTION, a function (prompt, completion, record).')
    for name, known in (('baseline', BASELINES), ('scale', SCALES)):
      if getattr(self, name) not in known:
        raise UserError(f'{name} = {getattr(self, name)!r} must be one of {", ".join(map(repr, known))}.')
    if (self.baseline == 'gae' and self.scale == 'group') or not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
      raise UserError(
        f"scale = {self.scale!r} must be 'batch' or 'none' for baseline = 'gae', and gamma = {self.gamma} and lam = "
        f'{self.lam} from 0 to 1.'
      )
    if self.reward_kl_weight and not self.has_reference:
      raise UserError(f'reward_kl_weight = {self.reward_kl_weight} needs has_reference = True.')
    alone = self.scale == 'batch' or self.baseline == 'gae' or (self.baseline, self.scale) == ('none', 'none')
    if self.group_size == 1 and not alone:
      raise UserError("group_size = 1 has no group to compare with: set baseline='none' and scale='batch'.")
    SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)  # raises
    if self.num_choices and (self.environment or self.num_slots < self.num_rows):
      raise UserError(
        f'replays_routing needs a slot for each of the {self.num_rows} completions of a rollout, not {self.num_slots}, '
        'and no environment: set num_rollout_slots.'
      )
    if not 0 < self.max_tokens < self.seq_len or not 0 <= self.overlong_margin <= self.max_tokens:
      raise UserError(
        f'max_tokens = {self.max_tokens} must be less than seq_len {self.seq_len}, which holds the prompt too, and at '
        f'least overlong_margin {self.overlong_margin}.'
      )

  @property
  def all_rewards(self) -> dict[str, float]:
    """The weights of all rewards by name, the environment's first."""
    return {**({self.environment: 1.0} if self.environment else {}), **self.rewards}

  @property
  def num_rows(self) -> int:
    """R."""
    return self.batch_size * self.num_minibatches

  @property
  def num_updates(self) -> int:
    """How many updates one rollout serves."""
    return self.num_minibatches * self.num_iterations

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    has_values = self.baseline == 'gae'
    has_old = self.exact or has_values or self.num_updates > 1 or self.reward_kl_weight > 0
    names = ['sampler_log_probs', *['old_log_probs'] * has_old, *['reference_log_probs'] * self.has_reference]
    names += ['old_values', 'returns', 'advantages'] * has_values
    spec = language_model_spec(self.batch_size, self.seq_len, {**BATCH_DTYPES, **dict.fromkeys(names, np.float32)})
    if self.num_choices:
      shape = (self.batch_size, self.seq_len, self.num_choices)
      spec |= {'expert_ids': jax.ShapeDtypeStruct(shape, np.int32)}
    return {'advantages': jax.ShapeDtypeStruct((self.batch_size,), np.float32)} | spec

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'PromptIterator':
    """Every process reads all prompts."""
    shard_rows(self.batch_size, shard_index, shard_count)
    return PromptIterator(self)

  def reshard_states(self, states: Sequence[State], shard_count: int) -> list[State]:
    return [states[0]] * shard_count

  def prompt_of(self, record: Mapping[str, Any]) -> str:
    """The text that a record's prompt is."""
    if isinstance(record['prompt'], str):
      return record['prompt']
    return self.template.render(messages_of(record, 'prompt'), tools=tools_of(record, 'tools'))

  def epochs(self, state: State) -> float:
    return state['num_read'] / state['num_records']


class Rollout(NamedTuple):
  """A rollout whose updates are not all made yet: host arrays.

  Fields:
    tokens: int32 [R, T + 1], prompt and completion, padded.
    is_sampled: bool [R, T], which tokens the model wrote, of `tokens[:, 1:]`.
    lengths: int32 [R], all tokens; 0 is of a row to leave out.
    advantages: float32 [R], or [R, T] of tokens.
    sampler_log_probs, old_log_probs, reference_log_probs, old_values, returns: float32 [R, T]; all but the first [0]
      where there are none.
    expert_ids: int32 [R, T, n], which experts computed the tokens; n may be 0.
  """

  tokens: np.ndarray
  is_sampled: np.ndarray
  lengths: np.ndarray
  advantages: np.ndarray
  sampler_log_probs: np.ndarray
  old_log_probs: np.ndarray
  reference_log_probs: np.ndarray
  old_values: np.ndarray
  returns: np.ndarray
  expert_ids: np.ndarray = np.zeros((0, 0, 0), np.int32)

  def batch(self, rows: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
    """The arrays of some rows, as `RolloutInput.element_spec` names them."""
    columns = np.arange(self.tokens.shape[1] - 1)[None, :]
    is_text = columns < self.lengths[rows, None] - 1
    batch = {
      'ids': np.where(is_text, self.tokens[rows, :-1], pad_id).astype(np.int32),
      'labels': np.where(is_text, self.tokens[rows, 1:], pad_id).astype(np.int32),
      'weights': (is_text & self.is_sampled[rows]).astype(np.float32),
      'segment_ids': is_text.astype(np.int32),
      'segment_pos': np.where(is_text, columns, 0).astype(np.int32),
      'advantages': self.advantages[rows],
    }
    for name in _OF_TOKENS:
      if (values := getattr(self, name)).ndim == 2:
        batch[name] = values[rows]
    return batch | ({'expert_ids': self.expert_ids[rows]} if self.expert_ids.size else {})

  def to_text(self) -> str:
    """As JSON takes it."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **self._asdict())
    return base64.b85encode(buffer.getvalue()).decode()

  @classmethod
  def from_text(cls, text: str) -> 'Rollout':
    with np.load(io.BytesIO(base64.b85decode(text))) as arrays:
      return cls(**arrays)


class PromptIterator:
  """The order of prompts, and the rollout of which updates are still due: the position of a RolloutInput.

  Attributes:
    rollout: that rollout; None: the next update needs a new one.
    num_made: how many updates were made of it.
    drawn: with staleness the completions of the next rollout, as text; None: there are none.
  """

  def __init__(self, settings: RolloutInput):
    self._settings = settings
    self._records = settings.source.open()
    self._num_read = 0
    self.rollout: Rollout | None = None
    self.num_made = 0
    self.drawn: str | None = None

  def __iter__(self) -> 'PromptIterator':
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    """A batch with made-up completions and advantages in place of sampled ones, for --mode verify."""
    settings = self._settings
    rng = np.random.default_rng((settings.seed, self._num_read))
    texts = [settings.prompt_of(record) for *_, record in self.take(settings.batch_size)]
    prompts = [list(encode_prompt(settings.tokenizer, text))[: settings.seq_len - 1] for text in texts]
    made_up = rng.geometric(0.1, (settings.batch_size, settings.seq_len + 1)) % settings.tokenizer.vocab_size
    lengths = [min(len(ids) + int(rng.integers(1, settings.max_tokens + 1)), settings.seq_len) for ids in prompts]
    for row, ids in enumerate(prompts):
      made_up[row, : len(ids)] = ids
    nothing, known = np.zeros((settings.batch_size, settings.seq_len), np.float32), settings.element_spec()
    rollout = Rollout(
      made_up.astype(np.int32),
      np.arange(settings.seq_len) >= np.array([[len(ids) - 1] for ids in prompts]),
      np.array(lengths),
      rng.normal(size=known['advantages'].shape).astype(np.float32),
      **{name: nothing if name in known else nothing[0] for name in _OF_TOKENS},
      expert_ids=rng.integers(0, 2, (*nothing.shape, settings.num_choices), np.int32),
    )
    if 'returns' in known:
      rollout = rollout._replace(returns=rng.normal(size=nothing.shape).astype(np.float32))
    return rollout.batch(np.arange(settings.batch_size), settings.tokenizer.pad_id)

  def take(self, number: int) -> list[_Prompt]:
    """The next prompts."""
    taken = []
    for _ in range(number):
      epoch, place = divmod(self._num_read, len(self._records))
      self._num_read += 1
      if self._settings.shuffle:
        place = int(np.random.default_rng((self._settings.seed, epoch)).permutation(len(self._records))[place])
      taken.append((epoch, place))
    return self.prompts_at(taken)

  def prompts_at(self, places: Sequence[tuple[int, int]]) -> list[_Prompt]:
    """The prompts of epochs and numbers of records."""
    return [(epoch, place, record_of(self._records, place)) for epoch, place in places]

  def get_state(self) -> State:
    state = self._identity() | {'num_read': self._num_read, 'num_made': self.num_made, 'drawn': self.drawn}
    return state | {'rollout': None if self.rollout is None else self.rollout.to_text()}

  def set_state(self, state: State) -> None:
    check_state(state, self._identity())
    self._num_read, self.num_made, self.drawn = state['num_read'], state['num_made'], state['drawn']
    self.rollout = None if state['rollout'] is None else Rollout.from_text(state['rollout'])

  def close(self) -> None:
    pass

  def _identity(self) -> State:
    names = ('seed', 'shuffle', 'group_size', 'batch_size', 'seq_len', 'num_minibatches', 'num_iterations', 'staleness')
    return {
      'kind': self._settings.kind,
      'source': self._records.fingerprint(),
      'tokenizer': self._settings.tokenizer.fingerprint(),
      'num_records': len(self._records),
      **{name: getattr(self._settings, name) for name in names},
    }


def record_of(records: OpenRecordFiles, index: int) -> Mapping[str, Any]:
  """The fields of a record; raises a UserError that names it if it has no prompt."""
  ((record, _),) = records[index].documents
  if not record.values.get('prompt'):
    raise UserError(f"{records.block_name(index)}: there is no 'prompt', a text or a list of messages.")
  return record.values


class MakeRollouts(TrainHook):
  """Gives the loop its batches: samples completions, has them rewarded, and notes metrics; also evaluates rewards."""

  def prepare(self, run: TrainRun) -> None:
    from spmd_tasks.decoding import DecodeSteps
    from spmd_tasks.decoding.prompts import PromptTokenizer

    assert isinstance(run.job.train_input, RolloutInput)
    self._input = run.job.train_input
    given = run.job.task.decode
    settings = dataclasses.replace(
      given,
      max_len=self._input.seq_len,
      num_slots=min(self._input.num_slots, self._input.num_rows),
      prefill_rows=given.prefill_rows and min(given.prefill_rows, self._input.num_rows),
      num_top_logprobs=0,
      num_beams=1,
      weights_dtype=None,
    )
    if self._input.exact:
      settings = dataclasses.replace(settings, num_drafts=0, draft_model=None, cache_dtype=None)
    self._steps = DecodeSteps(run.model, settings, temperature=self._input.temperature)
    self._tokenizer = PromptTokenizer.for_steps(self._steps, self._input.tokenizer, run.experiment.seed)
    self._eval_records = self._input.eval_source.open() if self._input.eval_source else None
    self._every_steps = run.experiment.eval_every_steps
    self._score = run.model.batch_step('score_rollouts', self.rollout_spec(), self._log_probs)
    self._task = run.model.task
    self._metrics: list[dict[str, float]] = []  # of the updates that were given to the loop, oldest first
    self._newest: dict[str, float] = {}
    self._last_eval, self._num_decided, self._num_failed = -1, 0, 0
    self._drawn: _Drawn | None = None
    sizes = {'batch_size': self._input.batch_size, 'seq_len': self._input.seq_len}
    self._models = {name: RewardModel(name, run, **sizes) for name in self._input.rewards if is_reward_model(name)}
    self._functions = [name for name in self._input.rewards if name not in self._models]
    self._environment = load_environment(self._input.environment) if self._input.environment else None
    self._stop = tuple(getattr(self._environment, 'stop', ()))

  def _log_probs(self, variables: Any, batch: Any) -> Any:
    """Log-probabilities, and values if there are any, float32 [B, T] each, by the forward pass of training."""
    predictions = self._task.predict(variables, batch)
    with layer_scope(batch_invariant=self._input.exact):
      return answer_log_probs(predictions, batch, self._input.temperature), predictions.get('values')

  def open(self, run: TrainRun) -> None:
    self._workers = None
    environment = self._input.environment
    if is_primary() and (self._functions or environment):
      number, limit_s = self._input.num_workers, self._input.reward_timeout_s
      workers = RewardWorkers(self._functions, environment=environment, num_workers=number, timeout_s=limit_s)
      self._workers = run.stack.enter_context(workers)
      self._thread = futures.ThreadPoolExecutor(1)
      run.stack.callback(self._thread.shutdown)
      run.stack.callback(workers.stop)  # first, so that the thread ends

  def start(self, run: TrainRun) -> None:
    self._reference = None
    if self._input.has_reference:
      from spmd_tasks.programs.restore import initial_state

      self._reference = initial_state(run.model, run.experiment)[0].variables
    if self._eval_records is not None:
      directory = run.job_log_dir / 'eval_rewards'
      self._writer = make_writer(directory, tensorboard=run.experiment.tensorboard, primary=is_primary())
      run.stack.callback(self._writer.close)

  def batches(self, run: TrainRun, iterator: Any) -> Any:
    return _Batches(self, run, iterator)

  def before_loop(self, run: TrainRun) -> None:
    if run.first_step == 0:
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
    """The placed batch of the next update."""
    settings = self._input
    if iterator.rollout is None:
      if self._drawn is None:
        is_new = iterator.drawn is None
        self._drawn = self._draw(run, iterator, run.loop.step + 1) if is_new else self._restore(iterator)
      iterator.rollout, self._newest = self._finish(run, self._drawn)
      self._drawn = iterator.drawn = None
      if settings.staleness:
        self._drawn = self._draw(run, iterator, run.loop.step + 1 + settings.num_updates)
        iterator.drawn = self._drawn.to_text()
    rollout = iterator.rollout
    iteration, minibatch = divmod(iterator.num_made, settings.num_minibatches)
    rows = np.arange(settings.num_rows)
    if settings.num_minibatches > 1:
      rows = np.random.default_rng((settings.seed, int(rollout.lengths.sum()), iteration)).permutation(rows)
    batch = self.train_batch(run, rollout, rows.reshape(settings.num_minibatches, -1)[minibatch])
    iterator.num_made += 1
    if iterator.num_made == settings.num_updates:
      iterator.rollout, iterator.num_made = None, 0
    self._metrics.append(self._newest)
    return batch

  def rollout_spec(self) -> dict[str, Any]:
    """Of the arrays of a rollout in batches."""
    return self._input.element_spec()

  def train_batch(self, run: TrainRun, rollout: Rollout, rows: np.ndarray) -> Any:
    """The placed batch of some rows."""
    return self._place(run, run.model.train_step, rollout, rows)

  def _place(self, run: TrainRun, step: Any, rollout: Rollout, rows: np.ndarray) -> Any:
    own = shard_rows(self._input.batch_size, jax.process_index(), jax.process_count())
    return step.place(rollout.batch(rows[own.start : own.stop], self._input.tokenizer.pad_id))

  def _draw(self, run: TrainRun, iterator: PromptIterator, step: int) -> '_Drawn':
    """Samples the completions of the next prompts with the weights of now, for the update `step` and those after it.

    Rewards are asked for in the end, so that their functions run while the devices make the update before.
    """
    settings, num_prompts = self._input, self._input.num_rows // self._input.group_size
    variables = run.model.task.decoding_variables(run.loop.state)
    drawn, started = _Drawn(), time.perf_counter()
    for _ in range(_MAX_DRAWS):
      prompts = iterator.take(num_prompts - len(drawn.prompts))
      drawn.num_drawn += len(prompts)
      groups = self._complete(run, variables, prompts, settings.group_size)
      if not settings.drops_equal:
        drawn.prompts, drawn.groups = prompts, groups
        drawn.asked = self._ask_rewards(prompts, groups)
        break
      asked_at = time.perf_counter()
      values = self._rewards(run, self._ask_rewards(prompts, groups))
      started += time.perf_counter() - asked_at
      for prompt, group, each in zip(prompts, groups, values, strict=True):
        known = self._total([group], each[None])
        known = known[~np.isnan(known)]
        if known.size and np.ptp(known) > 0:
          drawn.prompts.append(prompt)
          drawn.groups.append(group)
          drawn.values.append(each)
      if len(drawn.prompts) == num_prompts:
        break
    if not drawn.prompts:
      raise UserError(
        f'all completions of {drawn.num_drawn} prompts have one reward each, so that nothing can be learnt: use '
        'prompts that the model sometimes answers, or set drops_equal=False.'
      )
    drawn.seconds = time.perf_counter() - started
    if is_multiple(step, run.experiment.log_every_steps) and settings.staleness:
      drawn.mismatch = self._largest_mismatch(run, variables, self._as_rollout(drawn.episodes))
    return drawn

  def _restore(self, iterator: PromptIterator) -> '_Drawn':
    """The completions that a checkpoint has; their rewards are asked for again."""
    drawn = _Drawn.from_text(iterator.drawn or '', iterator)
    drawn.asked = self._ask_rewards(drawn.prompts, drawn.groups)
    return drawn

  def _total(self, groups: Sequence[Sequence[Episode]], values: np.ndarray) -> np.ndarray:
    """The sum of rewards [P, G, K] by their weights, [P, G]."""
    total = values @ np.array(list(self._input.all_rewards.values()))
    if self._input.overlong_margin:
      lengths = np.array([[len(each.ids) for each in group] for group in groups])
      total = total + overlong_penalties(lengths, self._input.max_tokens, self._input.overlong_margin)
    return total

  def _finish(self, run: TrainRun, drawn: '_Drawn') -> tuple[Rollout, dict[str, float]]:
    """The rollout of completions, once they have rewards, with the weights of now; and its metrics."""
    settings, completions, asked_at = self._input, drawn.episodes, time.perf_counter()
    variables = run.model.task.decoding_variables(run.loop.state)
    known = np.stack(drawn.values) if drawn.values else self._rewards(run, drawn.asked)  # [P, G, K]
    reward_seconds = time.perf_counter() - asked_at
    grid = self._total(drawn.groups, known)  # [P, G]
    rollout = self._as_rollout(completions, np.isnan(grid).reshape(-1))
    scored_at = time.perf_counter()
    rollout = self._with_advantages(self._with_log_probs(run, variables, rollout), grid)
    tokens = [len(each.ids) for each in completions]
    now = time.perf_counter()
    metrics = {
      'reward': _mean(grid),
      'reward_std': _mean(np.nanstd(grid, axis=1) if not np.isnan(grid).all() else grid),
      'reward_failures': float(np.isnan(known).any(axis=-1).mean()),
      'completion_tokens': float(np.mean(tokens)),
      'truncated': float(np.mean([each.is_cut for each in completions])),
      'prompts_drawn': float(drawn.num_drawn),
      'reward_seconds': reward_seconds,
      'score_seconds': now - scored_at,
    }
    if drawn.seconds:  # else a checkpoint had the completions
      metrics |= {'rollout_seconds': drawn.seconds, 'rollout_tokens_per_second': sum(tokens) / drawn.seconds}
    if settings.reward_kl_weight:
      difference = np.where(rollout.is_sampled, rollout.old_log_probs - rollout.reference_log_probs, 0.0)
      metrics['kl'] = float(difference.sum() / max(rollout.is_sampled.sum(), 1))
    if settings.environment:
      metrics['num_turns'] = float(np.mean([len(each.turns) for each in completions]))
    if len(settings.all_rewards) > 1:
      metrics |= {f'reward/{name}': _mean(known[..., k]) for k, name in enumerate(settings.all_rewards)}
    if not settings.all_rewards:
      metrics = {name: each for name, each in metrics.items() if not name.startswith('reward')}
    if is_multiple(run.loop.step + 1, run.experiment.log_every_steps):
      is_stale = settings.staleness > 0
      mismatch = drawn.mismatch if is_stale else self._largest_mismatch(run, variables, rollout)
      metrics |= {} if mismatch is None else {'sampler_mismatch_max': mismatch}
      best = int(np.nanargmax(grid)) if not np.isnan(grid).all() else 0
      shown = ' '.join(completions[best].text.split())[:160]
      earned = f'reward {grid.reshape(-1)[best]:.3g} for ' if settings.all_rewards else ''
      run.message(f'rollout for step {run.loop.step + 1}: {earned}{shown!r}')
    return rollout, metrics

  def _as_rollout(self, episodes: Sequence[Episode], is_failed: np.ndarray | None = None) -> Rollout:
    num_rows, num_tokens = self._input.num_rows, self._input.seq_len
    tokens = np.zeros((num_rows, num_tokens + 1), np.int32)
    is_sampled, lengths = np.zeros((num_rows, num_tokens), bool), np.zeros(num_rows, np.int32)
    sampler = np.zeros((num_rows, num_tokens), np.float32)
    expert_ids = np.zeros((num_rows, num_tokens, self._input.num_choices), np.int32)
    for row, each in enumerate(episodes):
      if not each.prompt_ids or (is_failed is not None and is_failed[row]):
        continue
      text, start = [*each.prompt_ids, *each.ids], len(each.prompt_ids)
      tokens[row, : len(text)], lengths[row] = text, len(text)
      is_sampled[row, start - 1 : len(text) - 1] = each.is_sampled
      sampler[row, start - 1 : len(text) - 1] = each.logprobs
      if self._input.num_choices:
        if each.expert_ids is None:
          raise UserError('replays_routing: prompts that end at strings are not sampled by one program: unset it.')
        expert_ids[row, : len(text) - 1] = each.expert_ids[: len(text) - 1]
    nothing = np.zeros(0, np.float32)
    unknown = {name: nothing for name in _OF_TOKENS[1:]} | {'advantages': np.zeros(num_rows, np.float32)}
    return Rollout(tokens, is_sampled, lengths, sampler_log_probs=sampler, expert_ids=expert_ids, **unknown)

  def _with_advantages(self, rollout: Rollout, grid: np.ndarray) -> Rollout:
    """Adds the advantages of rewards [P, G], and returns of tokens."""
    settings, kl = self._input, np.zeros(rollout.is_sampled.shape)
    if settings.reward_kl_weight:
      kl += settings.reward_kl_weight * (rollout.old_log_probs.astype(np.float64) - rollout.reference_log_probs)
    if settings.baseline != 'gae':
      grid = grid - kl.sum(axis=1)[: grid.size].reshape(grid.shape)
      made = np.zeros(settings.num_rows, np.float32)
      made[: grid.size] = advantages_of(grid, baseline=settings.baseline, scale=settings.scale).reshape(-1)
      return rollout._replace(advantages=made)
    rewards, is_token = -kl, rollout.is_sampled
    rows = np.flatnonzero(is_token.any(axis=1))
    last = is_token.shape[1] - 1 - np.argmax(is_token[rows, ::-1], axis=1)
    rewards[rows, last] += grid.reshape(-1)[rows]
    advantages, returns = generalized_advantages(
      rewards,
      rollout.old_values,
      is_token,
      gamma=settings.gamma,
      lam=settings.lam,
      whitens=settings.scale == 'batch',
    )
    return rollout._replace(advantages=advantages.astype(np.float32), returns=returns.astype(np.float32))

  def _with_log_probs(self, run: TrainRun, variables: Any, rollout: Rollout) -> Rollout:
    """Adds what the batches have of the sampling model and of the reference model, by one program."""
    settings = self._input
    wanted = {}
    if settings.exact and settings.baseline != 'gae' and not settings.staleness:
      rollout = rollout._replace(old_log_probs=rollout.sampler_log_probs)
    elif 'old_log_probs' in settings.element_spec():
      wanted['old_log_probs'] = variables
    if self._reference is not None:
      wanted['reference_log_probs'] = self._reference
    return self._scored(run, wanted, rollout) if wanted else rollout

  def _scored(self, run: TrainRun, models: Mapping[str, Any], rollout: Rollout) -> Rollout:
    """Computes log-probabilities under several variables of the model, by the name that they get in the rollout."""
    settings, spec = self._input, self._input.element_spec()
    made: dict[str, list[np.ndarray]] = {name: [] for name in (*models, *['old_values'] * ('old_values' in spec))}
    empty = np.zeros((settings.num_rows, settings.seq_len), np.float32)
    filled = rollout._replace(**{name: empty for name in _OF_TOKENS[1:] if name in spec})
    if spec['advantages'].ndim == 2:
      filled = filled._replace(advantages=empty)
    for rows in np.arange(settings.num_rows).reshape(settings.num_minibatches, -1):
      batch = self._place(run, self._score, filled, rows)
      for name, variables in models.items():
        log_probs, values = self._score(variables, batch)
        made[name].append(np.asarray(log_probs))
        if name == 'old_log_probs' and values is not None:
          made['old_values'].append(np.asarray(values))
    return rollout._replace(**{name: np.concatenate(parts) for name, parts in made.items()})

  def _largest_mismatch(self, run: TrainRun, variables: Any, rollout: Rollout) -> float:
    """The largest difference between a token's log-probability in sampling and by the forward pass of training."""
    is_known = rollout.old_log_probs.ndim == 2 and not self._input.exact
    scored = rollout if is_known else self._scored(run, {'old_log_probs': variables}, rollout)
    return float(np.abs(scored.old_log_probs - scored.sampler_log_probs).max())

  def _complete(
    self, run: TrainRun, variables: Any, prompts: Sequence[_Prompt], number: int, **draws: Any
  ) -> list[list[Episode]]:
    """The episodes of each prompt, `number` of them: completions, or the turns of an environment."""
    records: Sequence[Any] = [record for *_, record in prompts]
    if self._environment is not None:
      records = self._begin(run, records)
    groups = [[Episode() for _ in range(number)] for _ in records]
    requests, begun = [], []
    for (epoch, index, _), record, group in zip(prompts, records, groups, strict=True):
      try:
        if record is not None:
          seed = int(np.random.SeedSequence((self._input.seed, epoch, index)).generate_state(1)[0])
          requests.append(self._request(record, f'record {index}', seed=seed, **draws))
          begun.append((epoch, index, record, group))
      except UserError as error:
        if self._environment is None:
          raise
        run.message(f'the environment began with {record["prompt"]!r:.200}: {error}')
    completions = [each for group in self._generate(run, variables, requests, number) for each in group]
    flat = [(epoch, index, record, each) for epoch, index, record, group in begun for each in group]
    episodes = [each for *_, each in flat]
    if self._environment is None:
      for episode, completion in zip(episodes, completions, strict=True):
        episode.add(completion)
      return groups
    for _, _, record, episode in flat:
      if not isinstance(record['prompt'], str):
        episode.messages, episode.tools = record['prompt'], tools_of(record, 'tools')

    def complete(turn: int, wanted: Any) -> list[Any]:
      requests = []
      for place, ids, max_tokens in wanted:
        epoch, index, record, _ = flat[place]
        seed = np.random.SeedSequence((self._input.seed, epoch, index, turn, place % number)).generate_state(1)[0]
        given = {'prompt_ids': ids, 'max_tokens': max_tokens, 'seed': int(seed), **draws}
        requests.append(self._request(record, f'record {index}', **given))
      return [completion for (completion,) in self._generate(run, variables, requests, 1)]

    turns = Turns(
      tokenizer=self._input.tokenizer,
      template=self._input.template,
      stop=self._stop,
      max_tokens=self._input.max_tokens,
      max_turns=self._input.max_turns,
      report=run.message,
      answer=lambda calls: self._ask(run, calls),
      complete=complete,
    )
    turns.play([record for _, _, record, _ in flat], episodes, completions)
    return groups

  def _begin(self, run: TrainRun, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
    """The records with the first messages of an environment as their prompts, and its tools; None where it fails."""
    answers = self._ask(run, [(record, (), None) for record in records])
    tools = getattr(self._environment, 'tools', None)
    added = {} if tools is None else {'tools': tools}
    return [
      None if answer is None else {**record, **added, 'prompt': answer[0]}
      for record, answer in zip(records, answers, strict=True)
    ]

  def _ask(self, run: TrainRun, calls: Sequence[tuple[Mapping[str, Any], Sequence[str], Any]]) -> list[Any]:
    """What the environment answers, (messages, reward, done, state); None where it fails. Process 0 has the states."""
    states: list[Any] = [None] * len(calls)

    def step(workers: RewardWorkers) -> list[Any]:
      found = workers.steps(calls)
      states[:] = [each and each[3] for each in found]
      return [each and each[:3] for each in found]

    answers = self._decide(run, len(calls), self._submit(step))
    return [each and (*each, state) for each, state in zip(answers, states, strict=True)]

  def _submit(self, call: Any) -> Any:
    """A Future of what `call` makes of the workers of process 0, one call after another; None on other processes."""
    return self._workers and self._thread.submit(call, self._workers)

  def _decide(self, run: TrainRun, number: int, future: Any) -> Any:
    """The result of a Future of process 0; `number` is of the calls, for the time that they may take."""

    def decide() -> Any:
      if future is None:
        return None
      found, workers = future.result(), self._workers
      assert workers is not None
      if workers.num_failed > self._num_failed:
        run.message(f'{workers.num_failed - self._num_failed} rewards failed, the last one: {workers.last_problem}')
        self._num_failed = workers.num_failed
      return found

    self._num_decided += 1
    limit_s = run.limit_s + round(self._input.reward_timeout_s * number)
    with run.watchdog.allow('rewards', limit_s):
      return primary_decides(decide, f'rewards_{self._num_decided}', limit_s=limit_s)

  def _generate(self, run: TrainRun, variables: Any, requests: Sequence[Any], number: int) -> list[list[Any]]:
    """The Completions of each request, `number` of them."""
    from spmd_tasks.decoding import generate
    from spmd_tasks.decoding.generation import can_sample, complete_groups

    if not requests:
      return []
    texts: Any = {'decode': self._tokenizer.decode}
    if can_sample(self._steps, requests, number):
      if number > 1 or self._environment is not None:
        texts |= {'num_prompts': self._steps.settings.num_slots // number, 'max_tokens': self._input.max_tokens}
      # One program makes all tokens, and no beat comes from within.
      with run.watchdog.allow('rollout', run.limit_s + self._input.max_tokens):
        return complete_groups(self._steps, variables, requests, number, **texts)
    samples = [request.as_sample(sample) for request in requests for sample in range(number)]
    made: list[Any] = [None] * len(samples)
    texts |= {'on_step': lambda: run.watchdog.beat(run.loop.step, 'rollout'), 'keep_cache': False}
    for place, completion in generate(self._steps, variables, samples, **texts):
      made[place] = completion
    return [made[start : start + number] for start in range(0, len(made), number)]

  def _request(self, record: Mapping[str, Any], where: str, *, temperature: float = 1.0, **given: Any) -> Any:
    """The request of a prompt, drawn from the distribution of the steps, which have the temperature, or greedy."""
    from spmd_tasks.decoding.prompts import Prompt

    stop = self._stop if isinstance(record['prompt'], str) else (*self._input.template.stop, *self._stop)
    if 'prompt_ids' not in given:
      text = self._input.prompt_of(record)
      has_bos = not isinstance(record['prompt'], str) and self._input.template.writes_bos
      ids = tuple(self._input.tokenizer.encode(text)) if has_bos else None
      given |= {'prompt_ids': ids} if ids else {'prompt': text}
    prompt = Prompt(
      stop=stop,
      temperature=temperature,
      top_k=self._input.top_k,
      top_p=self._input.top_p,
      min_p=0.0,
      repetition_penalty=1.0,
      frequency_penalty=0.0,
      presence_penalty=0.0,
      **{'max_tokens': self._input.max_tokens} | given,
    )
    return self._tokenizer.request(prompt, where)[0]

  def _ask_rewards(self, prompts: Sequence[_Prompt], groups: Sequence[Sequence[Episode]]) -> Any:
    """Has process 0 call the functions; `_rewards` takes what this returns."""
    episodes = [(record, each) for (*_, record), group in zip(prompts, groups, strict=True) for each in group]
    calls = [(record['prompt'], each.text, record) for record, each in episodes]
    asked = self._submit(lambda workers: workers.rewards(calls).tolist()) if self._functions else None
    return len(prompts), calls, [each.reward for _, each in episodes], asked

  def _rewards(self, run: TrainRun, given: Any) -> np.ndarray:
    """float64 [P, G, K], of what `_ask_rewards` returned; all processes run the models."""
    num_prompts, calls, of_environment, asked = given
    columns = {name: model.rewards(calls) for name, model in self._models.items()}
    if self._input.environment:
      columns[self._input.environment] = np.array(of_environment)
    if self._functions:
      found = self._decide(run, len(calls), asked)
      columns |= dict(zip(self._functions, np.array(found, np.float64).T, strict=True))
    values = np.array([columns[name] for name in self._input.all_rewards], np.float64)
    return values.reshape(len(columns), num_prompts, len(calls) // num_prompts).transpose(1, 2, 0)

  def _evaluate(self, run: TrainRun) -> None:
    """Completes the prompts for evaluation greedily and records their rewards."""
    if self._eval_records is None or self._last_eval == run.step:
      return
    self._last_eval = run.step
    with run.timed('eval', 'evaluation'):
      variables = run.model.task.evaluation_variables(run.state)
      prompts = [(0, index, record_of(self._eval_records, index)) for index in range(len(self._eval_records))]
      made = self._complete(run, variables, prompts, 1, temperature=0.0)
      rewards = self._rewards(run, self._ask_rewards(prompts, made))
    total = rewards @ np.array(list(self._input.all_rewards.values()))
    metrics = {'reward': _mean(total), 'reward_failures': float(np.isnan(rewards).any(axis=-1).mean())}
    metrics |= {f'reward/{name}': _mean(rewards[..., k]) for k, name in enumerate(self._input.all_rewards)}
    metrics['completion_tokens'] = float(np.mean([len(group[0].ids) for group in made]))
    self._writer.write(run.step, metrics)
    run.message(f'step {run.step}  eval rewards: reward {metrics["reward"]:.4f} over {len(prompts)} prompts')


@dataclasses.dataclass
class _Drawn:
  """Completions of a rollout, of which the rewards may not be there yet.

  Fields:
    prompts, groups: P prompts, and the G episodes of each.
    num_drawn, seconds, mismatch: how many prompts were completed, the time that took, and the largest difference from
      the trainer's log-probabilities, where that was wanted.
    values, asked: the rewards [G, K] of each prompt, or what `_rewards` takes for them.
  """

  prompts: list[_Prompt] = dataclasses.field(default_factory=list)
  groups: list[list[Episode]] = dataclasses.field(default_factory=list)
  num_drawn: int = 0
  seconds: float = 0.0
  mismatch: float | None = None
  values: list[np.ndarray] = dataclasses.field(default_factory=list)
  asked: Any = None

  @property
  def episodes(self) -> list[Episode]:
    return [each for group in self.groups for each in group]

  def to_text(self) -> str:
    """What a checkpoint needs to have the same rollout."""
    names = ('prompt_ids', 'ids', 'logprobs', 'is_sampled', 'text', 'is_cut', 'reward', 'turns', 'expert_ids')
    groups = [[{name: getattr(each, name) for name in names} for each in group] for group in self.groups]
    places, others = [place for *place, _ in self.prompts], {'num_drawn': self.num_drawn, 'mismatch': self.mismatch}
    content = {'places': places, 'groups': groups, 'others': others}
    return base64.b85encode(zlib.compress(json.dumps(content).encode())).decode()

  @classmethod
  def from_text(cls, text: str, iterator: PromptIterator) -> '_Drawn':
    content = json.loads(zlib.decompress(base64.b85decode(text)))
    groups = [[Episode(**each) for each in group] for group in content['groups']]
    return cls(prompts=iterator.prompts_at(content['places']), groups=groups, **content['others'])


class SampledOutside:
  """Samples rollouts outside of a job, without their rewards, and scores them as the job does."""

  def __init__(self, job: Any, model: Any):
    self._input = dataclasses.replace(job.train_input, environment=None, rewards={'no:rewards': 1.0})
    run: Any = types.SimpleNamespace(
      job=dataclasses.replace(job, train_input=self._input),
      model=model,
      experiment=job.experiment,
      watchdog=types.SimpleNamespace(allow=lambda *_: contextlib.nullcontext(), beat=lambda *_: None),
      limit_s=60,
      loop=types.SimpleNamespace(step=0),
      message=print,
    )
    self._run, self._hook = run, MakeRollouts()
    self._hook.prepare(run)

  def sample(self, variables: Any) -> Rollout:
    """A rollout of the first prompts."""
    settings = self._input
    prompts = settings.make_iterator().take(settings.num_rows // settings.group_size)
    made = self._hook._complete(self._run, variables, prompts, settings.group_size)
    return self._hook._as_rollout([each for group in made for each in group])

  def log_probs(self, variables: Any, rollout: Rollout) -> np.ndarray:
    """The trainer's, float32 [R, T]."""
    return self._hook._scored(self._run, {'old_log_probs': variables}, rollout).old_log_probs


class _Batches:
  """The loop's batches, each made when it is asked for."""

  seconds_waited = 0.0  # sampling is work of the devices

  def __init__(self, hook: MakeRollouts, run: TrainRun, iterator: PromptIterator):
    self._hook, self._run, self._iterator = hook, run, iterator

  def __iter__(self) -> Iterator[tuple[Any, State]]:
    return self

  def __next__(self) -> tuple[Any, State]:
    return self._hook.next_batch(self._run, self._iterator), self._iterator.get_state()


def _mean(values: np.ndarray) -> float:
  """The mean of the values that are known; NaN without any."""
  return float(np.nanmean(values)) if not np.isnan(values).all() else float('nan')
