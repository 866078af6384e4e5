"""RolloutInput: prompts whose completions the training job samples, and the arrays of these completions.

    RolloutInput(source=RewardPrompts(pattern='sums.jsonl'), rewards={'my_lab.rewards:is_correct': 1.0}, ...)

A rollout is G completions of each of P prompts (rollout_sampler.py) with their rewards (rollout_rewards.py). It is used
for one or several updates, in minibatches of its rows, once or several times (rollouts.py). The input's position
consists of the position in the prompts, the rollout if it has updates left, and with staleness the completions of the
next rollout, whose rewards are computed again. Samples depend only on the seed, the epoch and the record, so a resumed
job samples the same completions, bit for bit.

Shapes: R = P * G rows of a rollout, B rows of an update, T tokens of a row (a prompt and its completion), n choices of
experts of a token in all layers.
"""

import base64
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import io
from typing import Any, ClassVar

from absl import logging
import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import Batch, ChatTemplate, State, Tokenizer
from spmd_tasks.inputs.base import BATCH_DTYPES, check_state, empty_batch, language_model_spec, shard_rows
from spmd_tasks.inputs.row_order import order_of_epoch
from spmd_tasks.inputs.tokenizers import encode_prompt
from spmd_tasks.runtime import SamplingParams
from spmd_tasks.tuning._assistant_turns import check_roles
from spmd_tasks.tuning.advantages import BASELINES, SCALES
from spmd_tasks.tuning.conversations import messages_of, tools_of
from spmd_tasks.tuning.environments import Episode
from spmd_tasks.tuning.record_files import OpenRecordFiles
from spmd_tasks.tuning.rollout_packing import pack

_FIELDS = {'num_slots': 'num_rollout_slots', 'num_workers': 'num_reward_workers'}  # as RewardTuning names them
RewardPrompt = tuple[int, int, Mapping[str, Any]]  # epoch, index of the record, the record
# The arrays of all rows of a rollout by name: [R, T], [R] or [R, T, n].
Rollout = Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardPrompts:
  """Prompts in JSON lines, Parquet or Arrow files (a glob pattern or several).

  A record has `prompt`, a text or a list of messages, and further fields for the reward functions.
  """

  pattern: str | tuple[str, ...]

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, ['prompt'], None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutInput:
  """The settings of rollouts, from which MakeRollouts makes batches.

  Fields; see RewardTuning for the others:
    source: RewardPrompts.
    eval_source: further prompts, which are completed greedily at the experiment's `eval_every_steps`, or None.
    tokenizer, template: for the prompts.
    rewards: `module:function` (reward_functions.py) or the folder of a reward model (reward_models.py) -> its weight in
      a completion's reward, to which an environment's rewards are added.
    batch_size, seq_len, group_size, num_minibatches: B, T, G, R / B.
    staleness: 1 samples a rollout before the first update of the previous rollout, so that reward functions run during
      the updates; 0 samples it after the last update.
    baseline, scale: see advantages.py; the baseline 'gae' computes advantages of tokens, and needs a model with values.
    reward_kl_weight: the weight of log q - log r, which is subtracted from the reward; q is the model that sampled, r
      the reference.
    drops_equal: whether to replace prompts whose completions all have the same reward (DAPO's dynamic sampling).
    packing: whether to pack several short texts into a row (rollout_packing.py).
    num_choices: n, if the sampler's experts are recorded and replayed, or 0.
    has_reference: whether batches have log-probabilities under the weights that training starts from.
    num_slots, num_workers: how many completions are generated concurrently, and how many processes compute rewards.
    seed, shuffle: the seed of the samples, and whether to shuffle the prompts by it.
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
  packing: bool = True
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
    counts = ('group_size', 'num_minibatches', 'num_iterations', 'max_tokens', 'max_turns', 'num_slots', 'num_workers')
    for name in counts:
      if getattr(self, name) < 1:
        raise UserError(f'{_FIELDS.get(name, name)} = {getattr(self, name)} must be at least 1.')
    if self.num_rows % self.group_size:
      raise UserError(
        f'batch_size {self.batch_size} x num_minibatches {self.num_minibatches} must be divisible by group_size '
        f'{self.group_size}, the number of completions of a prompt.'
      )
    if self.staleness not in (0, 1):
      raise UserError(f'staleness = {self.staleness} must be 0 or 1.')
    if self.needs_reward and not self.all_rewards:
      raise UserError('rewards are missing: --set reward=MODULE:FUNCTION, a function (prompt, completion, record).')
    for name, choices in (('baseline', BASELINES), ('scale', SCALES)):
      if getattr(self, name) not in choices:
        raise UserError(f'{name} = {getattr(self, name)!r} must be one of {", ".join(map(repr, choices))}.')
    if (self.baseline == 'gae' and self.scale == 'group') or not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
      raise UserError(
        f"scale = {self.scale!r} must be 'batch' or 'none' for baseline = 'gae', and gamma = {self.gamma} and lam = "
        f'{self.lam} from 0 to 1.'
      )
    needs_no_group = self.scale == 'batch' or self.baseline == 'gae' or (self.baseline, self.scale) == ('none', 'none')
    if self.group_size == 1 and not needs_no_group:
      raise UserError("group_size = 1 has no group to compare with: set baseline='none' and scale='batch'.")
    SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)  # checks the values
    if self.needs_reward and self.group_size > 1 and (self.top_k == 1 or self.top_p == 0):
      raise UserError(
        f'top_k = {self.top_k} and top_p = {self.top_p} make all completions of a prompt equal: set top_k to 0 or at '
        'least 2, and top_p above 0.'
      )
    if self.num_choices and (self.environment or self.num_slots < self.num_rows):
      raise UserError(
        f'replays_routing needs num_rollout_slots of at least {self.num_rows}, the completions of a rollout, not '
        f'{self.num_slots}, and no environment.'
      )
    if not 0 < self.max_tokens < self.seq_len or not 0 <= self.overlong_margin <= self.max_tokens:
      raise UserError(
        f'max_tokens = {self.max_tokens} must be less than seq_len {self.seq_len}, which includes the prompt, and at '
        f'least overlong_margin {self.overlong_margin}.'
      )

  @property
  def all_rewards(self) -> dict[str, float]:
    """The weights of all rewards by name, beginning with the environment."""
    return {**({self.environment: 1.0} if self.environment else {}), **self.rewards}

  @property
  def num_rows(self) -> int:
    """R."""
    return self.batch_size * self.num_minibatches

  @property
  def num_updates(self) -> int:
    """How many updates use a rollout."""
    return self.num_minibatches * self.num_iterations

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    spec = self.rollout_spec()
    per_token = dict.fromkeys(('advantages', 'completion_lengths') if self.packing else (), np.float32)
    return spec | {name: jax.ShapeDtypeStruct(spec['ids'].shape, dtype) for name, dtype in per_token.items()}

  def batch_of(self, rollout: Rollout, num_parts: int) -> Batch:
    """Returns the batch of an update in `num_parts` microbatches from B rows of a rollout."""
    return pack(rollout, num_parts, self.tokenizer.pad_id) if self.packing else rollout

  def rollout_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of B rows of a rollout, before packing."""
    has_values = self.baseline == 'gae'
    has_old = has_values or self.num_updates > 1 or self.reward_kl_weight > 0
    names = ['sampler_log_probs', *['old_log_probs'] * has_old, *['reference_log_probs'] * self.has_reference]
    names += ['old_values', 'returns', 'advantages'] * has_values
    of_tokens = dict.fromkeys(names, np.float32)
    return {
      'advantages': jax.ShapeDtypeStruct((self.batch_size,), np.float32),
      **self.text_spec(),
      **language_model_spec(self.batch_size, self.seq_len, of_tokens),
    }

  def text_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of the arrays that the model reads."""
    spec = language_model_spec(self.batch_size, self.seq_len)
    if self.num_choices:
      shape = (self.batch_size, self.seq_len, self.num_choices)
      spec['expert_ids'] = jax.ShapeDtypeStruct(shape, np.int32)
    return spec

  def rollout_of(self, episodes: Sequence[Episode], num_rows: int) -> Rollout:
    """Returns the arrays of episodes, one per row; episodes without a prompt, and further rows, are padding."""
    rollout = empty_batch(
      num_rows, self.seq_len, self.tokenizer.pad_id, {**BATCH_DTYPES, 'sampler_log_probs': np.float32}
    )
    if self.num_choices:
      rollout['expert_ids'] = np.zeros((num_rows, self.seq_len, self.num_choices), np.int32)
    for row, episode in enumerate(episodes):
      if not episode.prompt_ids:
        continue
      text, start = [*episode.prompt_ids, *episode.ids], len(episode.prompt_ids) - 1
      end = len(text) - 1
      rollout['ids'][row, :end], rollout['labels'][row, :end] = text[:-1], text[1:]
      rollout['segment_ids'][row, :end], rollout['segment_pos'][row, :end] = 1, np.arange(end)
      rollout['weights'][row, start:end] = episode.is_sampled
      rollout['sampler_log_probs'][row, start:end] = episode.logprobs
      if self.num_choices:
        if episode.expert_ids is None:
          raise UserError('replays_routing does not support stop strings: set it to False, or remove the stop strings.')
        rollout['expert_ids'][row, :end] = episode.expert_ids[:end]
    return rollout

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'PromptIterator':
    """Returns an iterator over all prompts, on every process."""
    shard_rows(self.batch_size, shard_index, shard_count)
    return PromptIterator(self)

  def reshard_states(self, states: Sequence[State], shard_count: int) -> list[State]:
    return [states[0]] * shard_count

  def prompt_of(self, record: Mapping[str, Any]) -> str:
    """Returns the text of a record's prompt."""
    if isinstance(record['prompt'], str):
      return record['prompt']
    messages = messages_of(record, 'prompt')
    check_roles(self.template, messages)
    return self.template.render(messages, tools=tools_of(record, 'tools'))

  def epochs(self, state: State) -> float:
    return state['num_read'] / state['num_records']


class PromptIterator:
  """The position of a RolloutInput: the position in the prompts, and the current rollout.

  Attributes:
    rollout: the rollout that has updates left; None if the next update needs a new rollout.
    metrics: the metrics of the newest rollout.
    num_made: how many updates have used it.
    drawn: with staleness, the completions of the next rollout, as text, or None.
  """

  def __init__(self, settings: RolloutInput):
    self._settings = settings
    self._records = settings.source.open()
    num_prompts = settings.num_rows // settings.group_size
    if num_prompts > len(self._records):
      logging.warning(
        'A rollout takes %d prompts, but the data have only %d, so that rollouts repeat prompts: add prompts, or '
        'reduce batch_size or num_minibatches.',
        *(num_prompts, len(self._records)),
      )
    self._num_read = 0
    self.rollout: Rollout | None = None
    self.num_made, self.metrics = 0, dict[str, float]()
    self.drawn: str | None = None
    self._text: str | None = None  # the rollout as text, once a state was saved

  def __iter__(self) -> 'PromptIterator':
    return self

  def __next__(self) -> Batch:
    """Returns a batch with random completions and advantages, for --mode verify."""
    settings = self._settings
    rng = np.random.default_rng((settings.seed, self._num_read))
    episodes = []
    for *_, record in self.take(settings.batch_size):
      prompt = encode_prompt(settings.tokenizer, settings.prompt_of(record))[: settings.seq_len - 1]
      size = min(int(rng.integers(1, settings.max_tokens + 1)), settings.seq_len - len(prompt))
      episode = Episode(prompt_ids=prompt, logprobs=[0.0] * size, is_sampled=[True] * size)
      episode.ids = (rng.geometric(0.1, size) % settings.tokenizer.vocab_size).tolist()
      episode.expert_ids = rng.integers(0, 2, (settings.seq_len, settings.num_choices))
      episodes.append(episode)
    batch = settings.rollout_of(episodes, settings.batch_size)
    missing = {name: spec.shape for name, spec in settings.rollout_spec().items() if name not in batch}
    batch |= {name: np.zeros(shape, np.float32) for name, shape in missing.items()}
    for name in [name for name in ('advantages', 'returns') if name in missing]:
      batch[name] = rng.normal(size=missing[name]).astype(np.float32)
    return settings.batch_of(batch, 1)

  def take(self, number: int) -> list[RewardPrompt]:
    """Returns the next prompts."""
    positions = []
    for _ in range(number):
      epoch, index = divmod(self._num_read, len(self._records))
      self._num_read += 1
      if self._settings.shuffle:
        index = int(self._order(epoch)[index])
      positions.append((epoch, index))
    return self.prompts_at(positions)

  def _order(self, epoch: int) -> np.ndarray:
    """Returns the order of an epoch's prompts; the prompts of a rollout differ, even if it spans two epochs."""
    settings, num_records = self._settings, len(self._records)
    num_prompts = settings.num_rows // settings.group_size
    # Larger than a rollout, because `drops_equal` replaces prompts.
    window = max(num_prompts, min(8 * num_prompts, num_records // 4))
    return order_of_epoch(num_records, window, settings.seed, epoch)

  def prompts_at(self, positions: Sequence[tuple[int, int]]) -> list[RewardPrompt]:
    """Returns the prompts of (epoch, index of the record) pairs."""
    return [(epoch, index, record_of(self._records, index)) for epoch, index in positions]

  def get_state(self) -> State:
    state = self._identity | {'num_read': self._num_read, 'num_made': self.num_made, 'drawn': self.drawn}
    if self.rollout is None:
      return state | {'rollout': None, 'metrics': {}}
    metrics = {name: value for name, value in self.metrics.items() if 'second' not in name}
    return state | {'rollout': self._rollout_text(), 'metrics': metrics}

  def set_state(self, state: State) -> None:
    check_state(state, self._identity, self._settings.source)
    self._num_read, self.num_made, self.drawn = state['num_read'], state['num_made'], state['drawn']
    self.rollout, self._text, self.metrics = None, state['rollout'], state['metrics']
    if self._text is not None:
      with np.load(io.BytesIO(base64.b85decode(self._text))) as arrays:
        self.rollout = dict(arrays)

  def begin(self, rollout: Rollout, metrics: dict[str, float]) -> None:
    """Starts the updates of a new rollout."""
    self.rollout, self.metrics, self.num_made, self._text = rollout, metrics, 0, None

  def _rollout_text(self) -> str:
    if self._text is None:
      buffer = io.BytesIO()
      np.savez_compressed(buffer, **self.rollout)  # type: ignore[arg-type]
      self._text = base64.b85encode(buffer.getvalue()).decode()
    return self._text

  def close(self) -> None:
    pass

  @functools.cached_property  # because each step saves the state
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
  """Returns the fields of a record. Raises a UserError that names the record if it has no prompt."""
  try:
    ((record, _),) = records[index].documents
    if not (prompt := record.values.get('prompt')):
      raise UserError("the record has no 'prompt': add a text or a list of messages, or remove the record.")
    if not isinstance(prompt, str):
      messages_of(record.values, 'prompt')
    return record.values
  except UserError as error:
    raise UserError(f'{records.block_name(index)}: {error}') from error
