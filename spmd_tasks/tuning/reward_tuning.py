"""RewardTuning: the base class of experiments that learn from rewards, and the published methods by name.

class Grpo(RewardTuning, PretrainedLanguageModel): ...       # see experiments/tune.py
"""

from collections.abc import Mapping
import dataclasses
import types

import fiddle as fdl

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LanguageModel
from spmd_tasks.recipes import TextTraining
from spmd_tasks.tuning.conversations import config_of
from spmd_tasks.tuning.policy_loss import PolicyLoss
from spmd_tasks.tuning.preference_loss import reference_from
from spmd_tasks.tuning.rollout_input import RewardPrompts, RolloutInput
from spmd_tasks.tuning.rollout_task import LanguageModelWithValues, RolloutTask, num_choices

Files = str | tuple[str, ...]

# Settings with the same names in RolloutInput.
_SHARED_SETTINGS = (
  *('environment', 'max_turns', 'batch_size', 'seq_len', 'group_size', 'num_minibatches', 'num_iterations'),
  *('staleness', 'max_tokens', 'temperature', 'top_k', 'top_p', 'overlong_margin', 'gamma', 'lam'),
  *('packing', 'reward_timeout_s', 'seed'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """The settings of a published method; see PolicyLoss and RolloutInput for the fields."""

  baseline: str = 'group'
  scale: str = 'group'
  ratio: str = 'token'
  aggregation: str = 'sequences'
  clip_low: float = 0.2
  clip_high: float = 0.2
  drops_equal: bool = False
  kl_in_reward: bool = False


METHODS: Mapping[str, Method] = types.MappingProxyType(
  {
    'grpo': Method(),  # Shao et al., DeepSeekMath, 2024
    'dr_grpo': Method(scale='none', aggregation='max_tokens'),  # Liu et al., Understanding R1-Zero-like training, 2025
    'dapo': Method(aggregation='tokens', clip_high=0.28, drops_equal=True),  # Yu et al., 2025
    'gspo': Method(ratio='sequence', clip_low=3e-4, clip_high=4e-4),  # Zheng et al., 2025
    'rloo': Method(baseline='leave_one_out', scale='none', ratio='sequence_sum'),  # Ahmadian et al., 2024
    'ppo': Method(baseline='gae', scale='batch', aggregation='tokens', kl_in_reward=True),  # Schulman et al., 2017
    'reinforce++': Method(scale='batch', aggregation='tokens'),  # Hu et al., 2025
  }
)


class RewardTuning(TextTraining):
  """Trains on completions that the model samples, by their rewards. A mixin: name it before the model's base class."""

  # Files of prompts for training and optionally for evaluation (JSON lines, Parquet or Arrow), whose records have
  # `prompt`, a text or messages, and further fields for the reward functions.
  data: Files = ''
  eval_data: Files = ''
  # module:function, called as (prompt, completion, record) -> number, or the folder of a reward model; or a mapping
  # from several of them to their weights.
  reward: str | Mapping[str, float] = ''
  # module:Class that answers completions and rewards them, with or without `reward`; see environments.py.
  environment: str | None = None
  max_turns: int = 8  # completions of an episode
  # One of METHODS; fields below that are not None override its settings.
  method: str = 'grpo'
  baseline: str | None = None
  scale: str | None = None
  ratio: str | None = None
  aggregation: str | None = None
  clip_low: float | None = None
  clip_high: float | None = None
  drops_equal: bool | None = None
  kl_in_reward: bool | None = None  # whether the KL divergence is part of the reward instead of the loss
  # For PPO: the discounts of rewards and of advantages, the weight of the values in the loss, and their clip.
  gamma: float = 1.0
  lam: float = 0.95
  value_weight: float = 0.1
  value_clip: float = 0.2

  group_size: int = 8  # completions of each prompt
  batch_size: int = 64  # completions of an update
  num_minibatches: int = 1  # updates among which a rollout's completions are divided
  staleness: int = 0  # 1 samples a rollout before the updates of the previous rollout
  num_iterations: int = 1  # how often each completion is trained on
  max_tokens: int = 256  # per completion; with an environment, per episode after its prompt
  # Sampling settings. Log-probabilities include the temperature, but neither top_k nor top_p, as in TRL.
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  overlong_margin: int = 0  # the last tokens before max_tokens cost up to 1 (overlong_penalties)
  num_rollout_slots: int = 64  # completions that are generated concurrently
  # The weight of the KL divergence from the reference: 'start' is the model that training starts from, 'base' the
  # frozen model without its low-rank adapters.
  kl_weight: float = 0.0
  reference: str = 'start'
  sampler_cap: float | None = None  # None is 2 with staleness, otherwise no cap
  # Whether to pack several short texts into a row; empty microbatches are not computed.
  packing: bool = True
  # Whether training routes tokens to the experts that the sampler chose, with its own gates.
  replays_routing: bool = False
  num_reward_workers: int = 2  # processes that call reward functions
  reward_timeout_s: float = 10.0  # per call

  seq_len: int = 1024
  learning_rate: float = 1e-6

  @property
  def chosen(self) -> Method:
    """The settings of the method, with the overrides."""
    if self.method not in METHODS:
      raise UserError(f'method = {self.method!r} must be one of {", ".join(METHODS)}.')
    overrides = {field.name: getattr(self, field.name) for field in dataclasses.fields(Method)}
    return dataclasses.replace(METHODS[self.method], **{k: v for k, v in overrides.items() if v is not None})

  def task(self) -> fdl.Config:
    """The task, whose model has a head for values if the method needs them."""
    task = super().task()
    if self.replays_routing:
      fdl.update_callable(task, RolloutTask)
      task.records_routing = True
    if self.chosen.baseline == 'gae':
      if fdl.get_callable(task.model) is not LanguageModel:
        raise UserError(f'method = {self.method!r} needs the values of a decoder: use a decoder, or another method.')
      fdl.update_callable(task.model, LanguageModelWithValues)
      task.trained = task.trained and (*task.trained, 'value_head/')
    return task

  def _num_choices(self) -> int:
    number = num_choices(fdl.build(self.task().model)) if self.replays_routing else 0
    if self.replays_routing and not number:
      raise UserError('replays_routing=True needs a mixture of experts whose tokens choose experts: set it to False.')
    return number

  def loss(self) -> fdl.Config:
    """The clipped policy gradient."""
    method = self.chosen
    return fdl.Config(
      PolicyLoss,
      **{name: getattr(method, name) for name in ('ratio', 'aggregation', 'clip_low', 'clip_high')},
      max_tokens=self.max_tokens if method.aggregation == 'max_tokens' else None,
      kl_weight=0.0 if method.kl_in_reward else self.kl_weight,
      value_weight=self.value_weight if method.baseline == 'gae' else 0.0,
      value_clip=self.value_clip,
      reference_from=reference_from(self.reference),
      temperature=self.temperature,
      sampler_cap=2.0 if self.staleness and self.sampler_cap is None else self.sampler_cap,
    )

  def check_data(self) -> None:
    """Raises a UserError unless there are prompts, and a reward or an environment."""
    if not self.data or not (self.reward or self.environment):
      raise UserError(
        f'{type(self).__name__} needs prompts and a reward: --set data=FILE --set reward=MODULE:FUNCTION, a function '
        '(prompt, completion, record) -> number, or --set environment=MODULE:CLASS.'
      )

  def train_input(self) -> fdl.Config:
    self.check_data()
    method = self.chosen
    if method.kl_in_reward and self.kl_weight and self.reference != 'start':
      raise UserError(f"reference = {self.reference!r} needs kl_in_reward=False: set it, or reference='start'.")
    return fdl.Config(
      RolloutInput,
      **{name: getattr(self, name) for name in _SHARED_SETTINGS},
      **{name: getattr(method, name) for name in ('baseline', 'scale', 'drops_equal')},
      source=fdl.Config(RewardPrompts, pattern=self.data),
      eval_source=fdl.Config(RewardPrompts, pattern=self.eval_data) if self.eval_data else None,
      tokenizer=self.tokenizer(),
      template=config_of(self.chat_template()),
      rewards=({self.reward: 1.0} if self.reward else {}) if isinstance(self.reward, str) else dict(self.reward),
      reward_kl_weight=self.kl_weight if method.kl_in_reward else 0.0,
      num_choices=self._num_choices(),
      has_reference=self.kl_weight > 0 and self.reference == 'start',
      num_slots=self.num_rollout_slots,
      num_workers=self.num_reward_workers,
    )

  def eval_inputs(self) -> dict[str, fdl.Config]:
    """Returns {}: rewards are evaluated on completions of `eval_data`."""
    return {}
