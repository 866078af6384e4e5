"""The experiment of the tests of whole jobs: the smallest model that does everything, on inputs that can misbehave."""

from collections.abc import Mapping, Sequence
import dataclasses
from pathlib import Path
import time
from typing import Any

import fiddle as fdl
import numpy as np

from spmd_tasks.inputs import ByteTokenizer, JsonLines, SyntheticText, TextInput
from spmd_tasks.recipes import SyntheticLanguageModel

SMALL = 'tests.programs.small_jobs.Small'  # for --exp


class Small(SyntheticLanguageModel):
  """Width 6, 3 heads, 9 hidden, vocabulary 259 on data 2 x mdl 4: padded nearly everywhere, otherwise on every mesh.

  The learning rate is constant, so that a job of fewer steps is the beginning of a longer one.
  """

  ici_mesh_shape = (1, 2, 4)
  vocab_size = 259
  model_dims = 6
  num_layers = 1
  num_heads = 3
  hidden_dims = 9
  seq_len = 8
  batch_size = 8
  eval_batches = 2
  num_train_steps = 20
  log_every_steps = 1
  checkpoint_every = 2
  checkpoint_max_to_keep = 100
  eval_every_steps = 8
  trackers = ()

  def task(self):
    task = super().task()
    task.learner.optimizer.learning_rate = 0.01
    task.learner.ema_decay = 0.9
    task.model.stack.block.dropout_rate = 0.1  # so that the random state matters too
    return task

  def train_input(self):
    return fdl.Config(FaultyText, text=super().train_input())

  def eval_inputs(self):
    ragged = fdl.Config(
      TextInput,
      source=fdl.Config(JsonLines, pattern=str(Path(__file__).parent / 'ragged.jsonl')),
      tokenizer=fdl.Config(ByteTokenizer),
      batch_size=self.batch_size,
      seq_len=self.seq_len,
      num_epochs=1,
      shuffle=False,
    )
    valid = fdl.copy_with(super().train_input(), seed=self.seed + 1, num_batches=self.eval_batches)
    return {'valid': valid, 'ragged': ragged}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultyText:
  """Another input's batches, slowly, and with broken ones put in before some of them.

  Attributes:
    text: the input.
    spikes: position in the resulting sequence -> the loss weight of every token of the broken batch there, as text,
      because JSON has no nan; or `ids=-1`, `labels=-1`: this token stands once in the batch.
    seconds_per_batch: how long each batch takes.
    pauses: position in the resulting sequence -> how many seconds more the batch there takes.
  """

  text: SyntheticText
  spikes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  seconds_per_batch: float = 0.0
  pauses: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @property
  def batch_size(self) -> int:
    return self.text.batch_size

  def element_spec(self):
    return self.text.element_spec()

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'FaultyIterator':
    return FaultyIterator(self, self.text.make_iterator(shard_index, shard_count))

  def reshard_states(self, states: Sequence[dict[str, Any]], shard_count: int) -> list[dict[str, Any]]:
    texts = self.text.reshard_states([state['text'] for state in states], shard_count)
    return [{'position': states[0]['position'], 'text': text} for text in texts]


class FaultyIterator:
  """A position in a FaultyText."""

  def __init__(self, settings: FaultyText, text: Any):
    self._settings = settings
    self._text = text
    self._position = 0

  def __iter__(self):
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    time.sleep(self._settings.seconds_per_batch + self._settings.pauses.get(str(self._position), 0.0))
    position, self._position = str(self._position), self._position + 1
    before = self._text.get_state()
    batch = next(self._text)
    if position in self._settings.spikes:
      self._text.set_state(before)  # the good batch is still to come
      name, _, token = self._settings.spikes[position].rpartition('=')
      if name:
        batch[name][-1, 0] = int(token)
      else:
        batch['weights'][:] = float(token)
    return batch

  def get_state(self) -> dict[str, Any]:
    return {'position': self._position, 'text': self._text.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    self._position = state['position']
    self._text.set_state(state['text'])

  def close(self) -> None:
    self._text.close()
