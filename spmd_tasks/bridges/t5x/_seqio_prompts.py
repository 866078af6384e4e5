"""Prompts of T5X's models: from the examples of a SeqIO task, and texts as a prefix language model reads them.

def decode_inputs(self):
  examples = fdl.Config(SeqIoInput, task='my_task', split='validation', num_epochs=1, packing=False, ...)
  return {'my_task': fdl.Config(SeqIoPrompts, examples=examples)}

The tokens are those that SeqIO's feature converters make for the architecture.
"""

import dataclasses
import itertools

from spmd_tasks.bridges.t5x._seqio import SeqIoInput
from spmd_tasks.bridges.t5x._seqio_metrics import prompt_of
from spmd_tasks.decoding.prompts import Prompt, PromptSource
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqIoPrompts:
  """The inputs of the examples of a SeqIO task, each in a row of its own.

  Attributes:
    examples: of which split, and in which order; without packing, and with an end (`num_epochs=1`).
    max_prompts: how many, from the first one on; None: all.
  """

  examples: SeqIoInput
  max_prompts: int | None = None

  def __post_init__(self):
    if self.examples.packing or self.examples.num_epochs is None:
      raise UserError('examples of SeqIoPrompts need packing = False and num_epochs = 1.')

  def read(self) -> list[Prompt]:
    """Returns the prompts, with their text; `id` is the number of the example, from 0 on."""
    given, prompts = self.examples, []
    rows = itertools.islice(given.features().as_numpy_iterator(), self.max_prompts)
    for number, features in enumerate(rows):
      prompt = prompt_of(features, number, given.feature_lengths['targets'])
      text = given.inputs_vocabulary.decode([token for token in prompt.prompt_ids or () if token])
      prompts.append(dataclasses.replace(prompt, prompt=text if isinstance(text, str) else None))
    if not prompts:
      raise UserError(f'split {given.split} of SeqIO task {given.task} has no examples.')
    return prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixPrompts:
  """Texts as T5X's decoder-only models read inputs: the start token, the text, the end of text."""

  source: PromptSource
  tokenizer: Tokenizer
  start_id: int = 0

  def read(self) -> list[Prompt]:
    """Returns the prompts of the source; those that are tokens are left as they are."""
    return [self._as_prefix(prompt) for prompt in self.source.read()]

  def _as_prefix(self, prompt: Prompt) -> Prompt:
    if prompt.prompt is None or prompt.prompt_ids is not None:
      return prompt
    ids = (self.start_id, *self.tokenizer.encode(prompt.prompt), self.tokenizer.eos_id)
    return dataclasses.replace(prompt, prompt_ids=ids)
