"""Judges: eval sets with metrics of the model's texts or scores beside the loss, as SeqIO tasks have metric_fns."""

from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any, Protocol

import numpy as np

from spmd_tasks.activity import doing
from spmd_tasks.decoding import DecodeSteps, Request
from spmd_tasks.decoding.generation import complete_all
from spmd_tasks.decoding.prompts import PromptTokenizer
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.layers.losses import StepOutputs
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.task import Variables


class Judge(Protocol):
  """Judges a model by its texts or scores for the examples of an eval set. An input may have one as `judge`.

  Attributes:
    wants_texts, wants_scores: what `metrics` reads.
  """

  wants_texts: bool
  wants_scores: bool

  def prompts(self) -> Sequence[Any]:
    """Returns a decoding Prompt for each example, in the order of the set's rows."""

  def metrics(self, step: int, texts: Sequence[Any] | None, scores: np.ndarray | None) -> dict[str, float]:
    """Returns metrics by name.

    Args:
      step: the train step of the weights.
      texts: the Completion of each prompt; None without `wants_texts`.
      scores: float [rows], the log-probability of each row's loss tokens, rows of padding last; None without
        `wants_scores`.
    """


class Judges:
  """Asks the judges of eval sets, and generates the texts that they want, as `task.decode` says."""

  def __init__(self, job: Job, model: PartitionedModel, judges: Mapping[str, Judge]):
    """Reads the prompts; compiles nothing. Raises a UserError for one that does not fit the model."""
    self._judges = judges
    self.want_scores = any(judge.wants_scores for judge in judges.values())
    self._requests: dict[str, list[Request]] = {}
    if any(judge.wants_texts for judge in judges.values()):
      self._steps = DecodeSteps(model)
      self._tokenizer = PromptTokenizer(steps=self._steps, tokenizer=job.tokenizer, seed=job.experiment.seed)
    for name, judge in judges.items():
      if judge.wants_texts:
        where = f'eval set {name}, example'
        self._requests[name] = [
          self._tokenizer.request(prompt, f'{where} {i + 1}', i)[0] for i, prompt in enumerate(judge.prompts())
        ]

  def compile(self) -> None:
    """Compiles the steps that generate texts."""
    if self._requests:
      sets = self._requests.values()
      self._steps.compile(
        num_texts=max(map(len, sets)), longest=max((len(each.ids) for each in itertools.chain(*sets)), default=1)
      )

  def metrics(
    self,
    name: str,
    variables: Variables,
    step: int,
    outputs: list[StepOutputs],
    on_step: Callable[[], None],
  ) -> dict[str, float]:
    """Returns the metrics of a set's judge, {} without one; `variables` are padded; they are not donated.

    Calls `on_step`, which may raise, in each step of the generation.
    """
    judge, texts, scores = self._judges.get(name), None, None
    if judge is None:
      return {}
    if judge.wants_texts:
      with doing(f'writing the texts of {name}'):
        stored = self._steps.storage.store(variables, free=False)
        decode = self._tokenizer.decode
        texts = complete_all(self._steps, stored, self._requests[name], decode=decode, on_step=on_step)
    if judge.wants_scores:
      if not outputs or 'cross_entropy' not in outputs[0].per_example:
        raise UserError(
          f"eval set {name!r} judges scores, and the task's loss gives no 'cross_entropy' per example: add it to the "
          'per_example of its LossOutput.'
        )
      scores = -np.concatenate([output.per_example['cross_entropy'] for output in outputs])
    metrics = judge.metrics(step, texts, scores)
    if unnamed := [key for key in metrics if not isinstance(key, str)]:
      raise UserError(f'the judge of eval set {name!r} returned a metric with the name {unnamed[0]!r}: give a string.')
    return metrics
