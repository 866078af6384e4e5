"""TaskJudge: the metric_fns of a SeqIO task on what a model of ours writes, computed by SeqIO's own Evaluator.

As T5X's InferenceEvaluator: predict metrics get the tokens that the model generates from the inputs, score metrics the
log-probability of each example's targets. SeqIO reads the targets, decodes, postprocesses and calls the functions.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from spmd_tasks.decoding.generation import Completion
from spmd_tasks.decoding.prompts import Prompt
from spmd_tasks.errors import JobError, UserError


def prompt_of(features: Mapping[str, Any], number: int, max_tokens: int) -> Prompt:
  """Makes the prompt of an example of which SeqIO's converters have made the features [T] of a row.

  An encoder reads the inputs, and at most `max_tokens` follow; a prefix language model reads the token 0 and the
  inputs, and writes on until the row is full.

  Raises:
    UserError: the row has no inputs.
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
class TaskJudge:
  """Judges by the metric_fns and metric_objs of a SeqIO task.

  Attributes:
    make_evaluator: makes SeqIO's Evaluator of the task alone.
    task: the SeqIO task.
    max_tokens: how many tokens the text of an encoder-decoder has at most.
  """

  make_evaluator: Any
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
