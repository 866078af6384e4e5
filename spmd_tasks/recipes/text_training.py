"""Defines TextTraining, the base of all recipes: an experiment on packed text that lacks only the model."""

import abc

import fiddle as fdl

from spmd_tasks.experiment import Experiment
from spmd_tasks.inputs import StdlibText, TextInput
from spmd_tasks.layers import LanguageModelLoss
from spmd_tasks.learning import AdamW, Learner, LinearWarmupCosine
from spmd_tasks.runtime import Task


class TextTraining(Experiment):
  """Trains a language model on packed text by AdamW with a cosine schedule; subclasses define model and tokenizer."""

  seq_len: int = 512
  batch_size: int = 16
  eval_batches: int | None = 8

  learning_rate: float = 3e-4
  warmup_fraction: float = 0.05  # of num_train_steps
  weight_decay: float = 0.0

  @abc.abstractmethod
  def language_model(self) -> fdl.Config:
    """The config of the model: a Linen module that returns logits [B, T, V] under the key 'logits'."""

  @abc.abstractmethod
  def tokenizer(self) -> fdl.Config:
    """Returns the tokenizer of all text: inputs, prompts and generated tokens."""

  def loss(self) -> fdl.Config[LanguageModelLoss]:
    """The training loss."""
    return fdl.Config(LanguageModelLoss)

  def optimizer(self) -> fdl.Config:
    """The optimizer, with its learning rate."""
    schedule = fdl.Config(
      LinearWarmupCosine,
      peak=self.learning_rate,
      warmup_steps=round(self.warmup_fraction * self.num_train_steps),
      total_steps=self.num_train_steps,
      final_fraction=0.1,
    )
    return fdl.Config(AdamW, learning_rate=schedule, beta2=0.95, weight_decay=self.weight_decay)

  def task(self) -> fdl.Config[Task]:
    learner = fdl.Config(Learner, optimizer=self.optimizer(), clip_global_norm=1.0)
    return fdl.Config(Task, model=self.language_model(), loss=self.loss(), learner=learner)

  def source(self, split: str) -> fdl.Config:
    """The text of a split, 'train' or 'valid': the config of any TextSource, such as TextFiles or StdlibText."""
    return fdl.Config(StdlibText, split=split)

  def train_input(self) -> fdl.Config[TextInput]:
    return self._packed_text('train', seed=self.seed)

  def eval_inputs(self) -> dict[str, fdl.Config[TextInput]]:
    return {'valid': self._packed_text('valid', num_epochs=1, shuffle=False, max_batches=self.eval_batches)}

  def _packed_text(self, split: str, **settings) -> fdl.Config[TextInput]:
    return fdl.Config(
      TextInput,
      source=self.source(split),
      tokenizer=self.tokenizer(),
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      **settings,
    )
