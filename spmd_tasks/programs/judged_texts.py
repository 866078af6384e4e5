"""JudgedTexts: texts that a model writes in an eval, for eval sets that judge them, as SeqIO tasks by metric_fns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from spmd_tasks.decoding import DecodeSteps
from spmd_tasks.decoding.generation import Completion, complete_all
from spmd_tasks.decoding.prompts import PromptTokenizer
from spmd_tasks.experiment import Job
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.task import Variables


class Judge(Protocol):
  """Judges a model by what it makes of the examples of an eval set; an input may have one as its attribute `judge`.

  Attributes:
    wants_texts, wants_scores: what it reads.
  """

  wants_texts: bool
  wants_scores: bool

  def prompts(self) -> Sequence[Any]:
    """Returns a decoding Prompt for each example, in the order of the set's rows."""
    ...

  def metrics(self, step: int, texts: Sequence[Any] | None, scores: np.ndarray | None) -> dict[str, float]:
    """Returns metrics by name.

    Args:
      step: the train step of the weights.
      texts: the Completion of each prompt; None if it `wants_texts` not.
      scores: float [rows], the log-probability of the loss tokens of each row, those of padding last; or None.
    """
    ...


class JudgedTexts:
  """Generates, as `task.decode` says, the texts of the sets whose judges want them."""

  def __init__(self, job: Job, model: PartitionedModel, judges: Mapping[str, Judge]):
    """Reads the prompts; compiles nothing. Raises a UserError for one that does not fit the model."""
    self._steps = DecodeSteps(model)
    self._tokenizer = PromptTokenizer.for_steps(self._steps, job.tokenizer, job.experiment.seed)
    self._requests = {
      name: [
        self._tokenizer.request(prompt, f'eval set {name}, example {number}')[0]
        for number, prompt in enumerate(judge.prompts(), 1)
      ]
      for name, judge in judges.items()
    }

  def compile(self) -> None:
    """Compiles what generates texts."""
    self._steps.compile()

  def generate(self, name: str, variables: Variables, on_step: Callable[[], None]) -> list[Completion]:
    """Returns the texts of a set's examples; `variables` are padded, and left as they are."""
    stored = self._steps.storage.store(variables, free=False)
    return complete_all(self._steps, stored, self._requests[name], decode=self._tokenizer.decode, on_step=on_step)
