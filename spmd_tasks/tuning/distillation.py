"""Distillation: a model learns a teacher's distributions on conversations, or on completions that it samples.

    DistillationLoss(beta=0.5)            # 0: forward KL divergence, 1: reverse, between: generalized Jensen-Shannon

The teacher is a folder with the same vocabulary. Its weights are on the training mesh, but in no checkpoint. Before
each step, one program adds the teacher's log-probabilities for the batch's tokens: all of them, or the K highest.

Shapes: B batch, T sequence, V vocab, K the teacher's most probable tokens.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.bridges.huggingface import Folder
from spmd_tasks.bridges.huggingface.origin import variables_from_folder
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import Batch, FolderTokenizer, State, Tokenizer
from spmd_tasks.inputs.base import shard_rows
from spmd_tasks.inputs.mixture import sources_of
from spmd_tasks.inputs.text_input import TextIterator
from spmd_tasks.inputs.tokenizer_files import FileTokenizer
from spmd_tasks.layers import LanguageModelLoss, LossOutput
from spmd_tasks.layers.losses import WithAuxLosses
from spmd_tasks.learning.accumulation import compute_in_parts
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.tuning.conversations import ConversationInput
from spmd_tasks.tuning.instruction_tuning import InstructionTuning
from spmd_tasks.tuning.reward_models import frozen_model, open_second_folder
from spmd_tasks.tuning.reward_tuning import Method, RewardTuning
from spmd_tasks.tuning.rollout_input import PromptIterator, Rollout, RolloutInput
from spmd_tasks.tuning.rollout_sampler import place
from spmd_tasks.tuning.rollouts import MakeRollouts, OnDemandBatches

_LOG_PROBS, _IDS = 'teacher_log_probs', 'teacher_ids'


def divergence(student: jax.Array, teacher: jax.Array, beta: float) -> jax.Array:
  """Returns the generalized Jensen-Shannon divergence (Agarwal et al., 2024) of log-probabilities [..., V]: [...].

  It is beta KL(teacher | mixture) + (1 - beta) KL(student | mixture), with mixture = beta teacher + (1 - beta) student;
  KL(teacher | student) if beta is 0, and KL(student | teacher) if beta is 1.
  """

  def kl(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(p == -jnp.inf, 0.0, jnp.exp(p) * (p - q)), axis=-1)

  if beta in (0, 1):
    return kl(student, teacher) if beta else kl(teacher, student)
  mixture = jnp.logaddexp(student + np.log1p(-beta), teacher + np.log(beta))
  return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def _with_rest(log_probs: jax.Array) -> jax.Array:
  """Appends the log-probability of all other tokens together: [..., K] -> [..., K + 1]."""
  total = jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1, keepdims=True), -1e-7)
  return jnp.concatenate([log_probs, jnp.log(-jnp.expm1(total))], axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationLoss(WithAuxLosses):
  """The mean over tokens of the divergence from the teacher; the cross-entropy if a batch has no teacher.

  Fields:
    beta: see `divergence`.
    temperature: divides the logits of both models.
    label_weight: the weight of the cross-entropy with the labels, from 0 to 1; the divergence has the rest.
    aux_loss_weights, num_aux_layers: see WithAuxLosses.
  """

  beta: float = 0.5
  temperature: float = 1.0
  label_weight: float = 0.0

  def __post_init__(self):
    if not 0 <= self.beta <= 1 or not 0 <= self.label_weight <= 1 or not self.temperature > 0:
      raise UserError(
        f'beta={self.beta} and label_weight={self.label_weight} must be from 0 to 1, and '
        f'temperature={self.temperature} positive.'
      )

  def __call__(self, predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> LossOutput:
    """Computes the LossOutput, whose weight is the number of tokens.

    Args:
      predictions: `logits` float [B, T, V]; optionally `aux`.
      batch: `labels` int32 [B, T]; `weights` float [B, T]; `teacher_log_probs` float [B, T, V], at the temperature.
        With `teacher_ids` int32 [B, T, K], `teacher_log_probs` [B, T, K] are for these tokens, and all other tokens
        count as one.
    """
    # With a teacher all logits are needed; computing them also in chunks would be one more product.
    left_out = {'aux', 'softmax_head'} if _LOG_PROBS in batch else {'aux'}
    output = LanguageModelLoss()({name: x for name, x in predictions.items() if name not in left_out}, batch)
    loss = output.loss
    if _LOG_PROBS in batch:
      student, teacher = jax.nn.log_softmax(predictions['logits'] / self.temperature, axis=-1), batch[_LOG_PROBS]
      if _IDS in batch:
        student = _with_rest(jnp.take_along_axis(student, batch[_IDS], axis=-1))
        teacher = _with_rest(teacher)
      weights = batch['weights'].astype(jnp.float32)
      per_token = jnp.where(weights == 0, 0.0, divergence(student, teacher, self.beta)) * weights
      mean = jnp.sum(per_token) / jnp.maximum(output.weight, 1.0)
      output.metrics['divergence'] = (mean, output.weight)
      loss = (1 - self.label_weight) * mean + (self.label_weight * loss if self.label_weight else 0.0)
    loss, metrics = self.add_aux_losses(loss, output.weight, output.metrics, predictions.get('aux', {}))
    return output.replace(loss=loss, metrics=metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WithTeacher:
  """An input whose batches get a teacher's log-probabilities.

  Fields:
    teacher: the teacher's folder.
    vocab_size: V.
    teacher_top_k: K; 0 uses all V tokens.
  """

  teacher: str
  vocab_size: int
  teacher_top_k: int = 0
  batch_size: int
  seq_len: int

  def __post_init__(self):
    super().__post_init__()  # type: ignore[misc]
    if not 0 <= self.teacher_top_k < self.vocab_size:
      raise UserError(f'teacher_top_k = {self.teacher_top_k} must be in [0, {self.vocab_size}), 0 for all tokens.')

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return super().element_spec() | self.teacher_spec()  # type: ignore[misc]

  def teacher_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of the arrays that the teacher adds to a batch."""
    shape = (self.batch_size, self.seq_len, self.teacher_top_k or self.vocab_size)
    ids = {_IDS: jax.ShapeDtypeStruct(shape, np.int32)} if self.teacher_top_k else {}
    return {_LOG_PROBS: jax.ShapeDtypeStruct(shape, np.float32), **ids}


class _TaughtIterator(TextIterator):
  _settings: Any  # _WithTeacher

  def finish(self, batch: Batch) -> Batch:
    return _with_uniform_teacher(batch, self._settings)


class _TaughtPrompts(PromptIterator):
  def __next__(self) -> Batch:
    return _with_uniform_teacher(super().__next__(), self._settings)


def _with_uniform_teacher(batch: Batch, settings: Any) -> Batch:
  """Adds a uniform distribution as the teacher's, for --mode verify; in training, AskTeacher replaces it."""
  shape = (len(batch['ids']), *settings.teacher_spec()[_LOG_PROBS].shape[1:])
  uniform = {_LOG_PROBS: np.broadcast_to(np.float32(-np.log(settings.vocab_size)), shape)}
  if settings.teacher_top_k:
    uniform[_IDS] = np.broadcast_to(np.arange(settings.teacher_top_k, dtype=np.int32), shape)
  return batch | uniform


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtInput(_WithTeacher, ConversationInput):
  """Conversations with a teacher's log-probabilities."""

  kind: ClassVar[str] = 'taught conversations'
  iterator_type: ClassVar[type[TextIterator]] = _TaughtIterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtRollouts(_WithTeacher, RolloutInput):
  """Rollouts with a teacher's log-probabilities, which need no rewards."""

  kind: ClassVar[str] = 'taught rollouts'
  needs_reward: ClassVar[bool] = False

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> PromptIterator:
    shard_rows(self.batch_size, shard_index, shard_count)
    return _TaughtPrompts(self)


def _refuse_other_tokens(own: Tokenizer | None, folder: Folder) -> None:
  """Raises a UserError if a teacher's tokens are not the model's. Added tokens, such as marks of turns, may differ."""
  if not isinstance(own, FileTokenizer) or not (folder.path / 'tokenizer.json').exists():
    return
  vocabulary = own.vocabulary()
  for token, number in FolderTokenizer(path=str(folder.path)).vocabulary(with_added_tokens=False).items():
    if vocabulary.get(token) != number:
      raise UserError(
        f'the teacher {folder.path} has other tokens than the model: its token {number} is {token!r}. Choose a teacher '
        'with the same tokenizer.'
      )


class AskTeacher(TrainHook):
  """Gives the training loop batches with the teacher's log-probabilities."""

  def prepare(self, run: TrainRun) -> None:
    settings = next(source for source in sources_of(run.job.train_input) if isinstance(source, _WithTeacher))
    task = run.job.task.as_task('distillation')
    self._folder = folder = open_second_folder(run, settings.teacher)
    is_decoder = not folder.decoder.num_encoder_layers and folder.decoder.num_labels is None
    if folder.decoder.vocab_size != settings.vocab_size or not is_decoder:
      raise UserError(
        f'the teacher {settings.teacher} has a vocabulary of {folder.decoder.vocab_size} tokens: it must be a decoder '
        f"with logits and the model's vocabulary of {settings.vocab_size} tokens."
      )
    _refuse_other_tokens(run.job.tokenizer, folder)
    temperature = task.loss.temperature if isinstance(task.loss, DistillationLoss) else 1.0
    teacher_spec, num_parts, top_k = settings.teacher_spec(), task.num_microbatches, settings.teacher_top_k
    batch_spec = run.job.train_input.element_spec()
    spec = {name: entry for name, entry in batch_spec.items() if name not in teacher_spec}
    self._model = frozen_model(run, folder, spec)
    teacher = self._model.task

    def log_probs_of(variables: Any, part: Any) -> dict[str, jax.Array]:
      log_probs = jax.nn.log_softmax(teacher.predict(variables, part)['logits'] / temperature, axis=-1)
      return dict(zip((_LOG_PROBS, _IDS), jax.lax.top_k(log_probs, top_k))) if top_k else {_LOG_PROBS: log_probs}

    def ask(variables: Any, batch: Any) -> dict[str, jax.Array]:
      return compute_in_parts(lambda part: log_probs_of(variables, part), batch, num_parts)

    self.step = self._model.batch_step('ask_teacher', spec, ask, output_spec=teacher_spec)

  def load(self) -> None:
    """Reads the teacher's weights."""
    self._variables = variables_from_folder(self._model, self._folder)

  def place(self, batch: Batch) -> dict[str, jax.Array]:
    """Places a batch on the mesh, without the teacher's arrays."""
    return self.step.place({name: batch[name] for name in self.step.layout.spec})

  def batches(self, run: TrainRun) -> Any:
    self.load()
    read = run.read_ahead(self.place)

    def make() -> tuple[dict[str, jax.Array], State]:
      batch, state = next(read)
      return self.answer(batch), state

    return OnDemandBatches(make, lambda: read.seconds_waited)

  def answer(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Adds the teacher's log-probabilities to a placed batch."""
    return {**batch, **self.step(self._variables, batch)}


class MakeTaughtRollouts(MakeRollouts):
  """Gives the training loop rollouts with the teacher's log-probabilities."""

  def prepare(self, run: TrainRun) -> None:
    self._teacher = AskTeacher()
    self._teacher.prepare(run)
    super().prepare(run)

  def batches(self, run: TrainRun) -> Any:
    self._teacher.load()
    return super().batches(run)

  def train_batch(self, run: TrainRun, rollout: Rollout, rows: np.ndarray) -> Any:
    return self._teacher.answer(place(self._teacher.step, rollout, rows))


class DistillationTuning(InstructionTuning):
  """Tunes a folder's model on a teacher's distributions of the assistant's tokens in conversations."""

  # The folder of the teacher, which has the same vocabulary, and how many of its most probable tokens to use (0: all).
  teacher: str = ''
  teacher_top_k: int = 0
  # 0: forward KL divergence, 1: reverse, between: generalized Jensen-Shannon; see DistillationLoss.
  beta: float = 0.5
  temperature: float = 1.0
  label_weight: float = 0.0

  def loss(self) -> fdl.Config:
    """Returns the config of the DistillationLoss."""
    settings = {name: getattr(self, name) for name in ('beta', 'temperature', 'label_weight')}
    return fdl.Config(DistillationLoss, **settings)

  def train_input(self) -> fdl.Config:
    if not self.teacher:
      raise UserError(f'{type(self).__name__} needs a teacher with the vocabulary of the model: --set teacher=FOLDER.')
    train_input = super().train_input()
    for source in train_input.sources.values() if hasattr(train_input, 'sources') else (train_input,):
      fdl.update_callable(source, TaughtInput)
      source.teacher, source.teacher_top_k = self.teacher, self.teacher_top_k
      source.vocab_size = self.folder.decoder.vocab_size
    return train_input


class SampledDistillation(RewardTuning):
  """Tunes a model on a teacher's distributions of completions that the model samples.

  A mixin: name it before the model's base class.
  """

  # See DistillationTuning. Rewards are optional, and only logged.
  teacher: str = ''
  teacher_top_k: int = 0
  beta: float = 0.5

  group_size = 1
  baseline = scale = 'none'
  packing = False

  def loss(self) -> fdl.Config:
    """Returns the config of the DistillationLoss, at the sampling temperature."""
    return fdl.Config(DistillationLoss, beta=self.beta, temperature=self.temperature)

  def check_data(self) -> None:
    """Raises a UserError unless there are prompts and a teacher, and no settings of losses from rewards."""
    if not self.data or not self.teacher:
      raise UserError(f'{type(self).__name__} needs prompts and a teacher: --set data=FILE --set teacher=FOLDER.')
    names = ('method', *Method.__dataclass_fields__, 'gamma', 'lam', 'value_weight', 'value_clip', 'kl_weight')
    names += ('reference', 'sampler_cap')
    unused = [name for name in names if getattr(self, name) != getattr(SampledDistillation, name)]
    if unused:
      raise UserError(f'{type(self).__name__} learns only from a teacher and ignores {", ".join(unused)}: remove them.')

  def train_input(self) -> fdl.Config:
    rollouts = super().train_input()
    fdl.update_callable(rollouts, TaughtRollouts)
    rollouts.teacher, rollouts.teacher_top_k = self.teacher, self.teacher_top_k
    rollouts.vocab_size = self.task().model.embedding.vocab_size
    return rollouts
