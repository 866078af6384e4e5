"""Prompts from the examples of a SeqIO task, and the task's own metrics of what a model answers.

    SeqIoPrompts(examples=SeqIoInput(task='my_task', split='validation', num_epochs=1, packing=False, ...)).read()

The tokens are those that SeqIO's feature converters make for the architecture.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from spmd_tasks.decoding.generation import Completion
from spmd_tasks.decoding.prompts import Prompt, PromptSource
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import Tokenizer


def prompt_of(features: Mapping[str, Any], number: int, max_tokens: int) -> Prompt:
  """Makes the prompt of an example of which SeqIO's converters have made the features [T] of a row.

  An encoder reads the inputs, and at most `max_tokens` follow; a prefix language model reads the token 0 and the
  inputs, and writes on until the row is full. Raises a UserError if the row has no inputs.
  """
  if 'encoder_input_tokens' in features:
    ids = np.trim_zeros(features['encoder_input_tokens'], 'b')
  elif 'decoder_causal_attention' in features:
    row = features['decoder_input_tokens']
    ids = row[: int(features['decoder_causal_attention'].sum())]
    max_tokens = len(row) - len(ids) + 1
  else:
    raise UserError("a decoder-only model reads inputs as a prefix: set architecture = 'prefix_lm', with their length.")
  if not len(ids):
    raise UserError(f'example {number} of the SeqIO task has no inputs to decode from: leave it out of the task.')
  return Prompt(prompt_ids=tuple(ids.tolist()), max_tokens=max_tokens, id=number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqIoPrompts:
  """The inputs of the examples of a SeqIO task, each in a row of its own.

  `examples`, a SeqIoInput, say of which split, and in which order; they have no packing, and an end (`num_epochs=1`).
  `n` continuations of each are wanted.
  """

  examples: Any
  n: int = 1

  def __post_init__(self):
    if self.examples.packing or self.examples.num_epochs is None:
      raise UserError('examples of SeqIoPrompts need packing = False and num_epochs = 1.')

  def read(self) -> list[Prompt]:
    """Returns the prompts, with their text; `id` is the number of the example, from 0 on."""
    given, prompts = self.examples, []
    for number, features in enumerate(given.features().as_numpy_iterator()):
      prompt = prompt_of(features, number, given.feature_lengths['targets'])
      text = given.inputs_vocabulary.decode([token for token in prompt.prompt_ids or () if token])
      prompts.append(dataclasses.replace(prompt, prompt=text if isinstance(text, str) else None, n=self.n))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskJudge:
  """Judges what a model writes by the metric_fns of a SeqIO task, computed by SeqIO's own Evaluator.

  As T5X's InferenceEvaluator: predict metrics get the tokens that the model generates from the inputs, score metrics
  the log-probability of each example's targets. SeqIO reads these, decodes, postprocesses and calls the functions.

  Attributes:
    make_evaluator: makes SeqIO's Evaluator of the task alone.
    task: the SeqIO task.
    max_tokens: how many tokens the text of an encoder-decoder has at most.
  """

  make_evaluator: Callable[[], Any]
  task: Any
  max_tokens: int

  def __post_init__(self):
    if self._kinds() - {1, 2, 3}:
      raise UserError(
        f'SeqIO task {self.task.name} has a metric of the intermediate values of a model, which are not kept: leave it '
        'out of the task, or set task_metrics = False.'
      )

  def _kinds(self) -> set[int]:  # of seqio.metrics.ModelOutputType
    return {int(each.model_output_type) for each in self.task.metric_objs}

  @property
  def wants_texts(self) -> bool:
    return bool(self._kinds() & {1, 3})

  @property
  def wants_scores(self) -> bool:
    return 2 in self._kinds()

  @functools.cached_property
  def _evaluator(self) -> Any:
    return self.make_evaluator()

  def prompts(self) -> list[Prompt]:
    """Returns the prompt of each example."""
    numbered = self._evaluator.cached_model_datasets[self.task.name].as_numpy_iterator()
    return [prompt_of(features, int(index), self.max_tokens) for index, features in numbered]

  def metrics(self, step: int, texts: Sequence[Completion] | None, scores: np.ndarray | None) -> dict[str, float]:
    """Returns the task's metrics that are numbers. Raises a JobError where a metric fails."""

    def predict(_: Any) -> tuple[list[tuple[int, list[int]]], dict[str, list[float]]]:
      assert texts is not None
      width = max(len(each.ids) for each in texts)
      rows = [(index, each.ids + [0] * (width - len(each.ids))) for index, each in enumerate(texts)]
      return rows, {'scores': [sum(each.logprobs) if each.score is None else each.score for each in texts]}

    def score(dataset: Any) -> list[tuple[int, float]]:
      assert scores is not None
      return [(index, float(scores[index])) for index in range(int(dataset.cardinality()))]

    try:
      found, _ = self._evaluator.evaluate(
        compute_metrics=True,
        step=step,
        predict_fn=lambda dataset: predict(dataset)[0],
        predict_with_aux_fn=predict,
        score_fn=score,
      )
      values = found.result()[self.task.name]
    except Exception as error:  # of a metric_fn or a postprocessor of the user's
      raise JobError(f'the metrics of SeqIO task {self.task.name} failed: {type(error).__name__}: {error}') from error
    numbers = {name: getattr(value, 'value', value) for name, value in values.items()}
    return {name: float(value) for name, value in numbers.items() if isinstance(value, float | int | np.number)}
