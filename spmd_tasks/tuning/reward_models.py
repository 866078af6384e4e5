"""RewardModel: a folder with a head of one score, on the mesh of a training job, as a reward of completions.

    model = RewardModel('models/reward', run, batch_size=64, seq_len=1024)
    model.rewards([(prompt, completion, record), ...])        # float64 [N], as reward_functions.py

A text is written as its training wrote it (scored_texts.py): by the folder's own tokenizer and chat template.

Shapes: N calls, B rows of a batch, T tokens of a row.
"""

from collections.abc import Mapping, Sequence
import functools
import os
from typing import Any

import numpy as np

from spmd_tasks.bridges.huggingface import Folder, open_folder
from spmd_tasks.bridges.huggingface.origin import variables_from_folder
from spmd_tasks.decoding.text_scorer import pooled, text_batch
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate, FolderTokenizer
from spmd_tasks.inputs.base import language_model_spec
from spmd_tasks.layers import LanguageModelLoss
from spmd_tasks.programs.hooks import TrainRun
from spmd_tasks.runtime import PartitionedModel, Task, partition_spmd_model
from spmd_tasks.store_files import local_folder
from spmd_tasks.tuning.conversations import Renderer
from spmd_tasks.tuning.preferences import encode_answer
from spmd_tasks.tuning.reward_functions import Call


def open_beside(run: TrainRun, name: str) -> Folder:
  """Opens the folder of a model beside the job's own."""
  accepted = getattr(run.experiment, 'accept_config_keys', ())
  return open_folder(local_folder(name), accept_config_keys=accepted)


def frozen_model(run: TrainRun, folder: Folder, spec: Mapping[str, Any]) -> PartitionedModel:
  """Returns the model of a folder on the mesh of a job, beside the job's own; its weights are not read yet."""
  own = run.job.task.as_task('a model beside the one that is trained')
  parts: dict[str, Any] = {}
  if folder.dtype == 'bfloat16':  # then kernels are held in it; nothing is trained, but a pattern must name something
    parts = {'trained': ('final_norm/',), 'frozen_dtype': 'bfloat16'}
  return partition_spmd_model(
    Task(
      model=folder.with_nextn_heads(0).build_model(),
      loss=LanguageModelLoss(),
      learner=own.learner,
      decode=own.decode,
      quantization=own.quantization,
      **parts,
    ),
    run.model.mesh,
    spec,
    axis_rules=run.experiment.axis_rules,
    inputs_split_mapping=run.experiment.inputs_split_mapping,
  )


def is_reward_model(name: str) -> bool:
  """Whether the name of a reward is that of a folder, not of a function."""
  return '://' in name or os.path.isdir(name)


class RewardModel:
  """A reward model; every process calls it alike."""

  def __init__(self, name: str, run: TrainRun, *, batch_size: int, seq_len: int):
    """Partitions the model. Raises a UserError if the folder is of another one."""
    self._folder = folder = open_beside(run, name)
    if folder.decoder.num_labels != 1:
      raise UserError(f'reward {name} must be a folder of ForSequenceClassification with one label: see FullReward.')
    template = ChatTemplate.from_folder(str(folder.path)) or ChatTemplate()
    tokenizer = FolderTokenizer(path=str(folder.path))
    self._renderer = Renderer(tokenizer=tokenizer, template=template, variables={}, date='2026-01-01')
    self._spec = language_model_spec(batch_size, seq_len)
    self._model = frozen_model(run, folder, self._spec)
    self._variables: Any = None

    score = functools.partial(pooled, self._model.task)
    self._step = self._model.batch_step('score_completions', self._spec, lambda *given: score(*given)[:, 0])

  def rewards(self, calls: Sequence[Call]) -> np.ndarray:
    """Returns the scores, float64 [N]; NaN for a text that is longer than T, or that cannot be written."""
    if self._variables is None:
      self._variables = variables_from_folder(self._model, self._folder)
    scores = np.full(len(calls), np.nan)
    num_rows = self._spec['ids'].shape[0]
    for start in range(0, len(calls), num_rows):
      batch = text_batch(self._spec, [self._ids(*call).tolist() for call in calls[start : start + num_rows]])
      found = np.asarray(self._step(self._variables, self._step.place(self._step.layout.own_rows(batch))))
      is_known = np.any(batch['weights'] > 0, axis=1)[: len(calls) - start]
      scores[start : start + num_rows] = np.where(is_known, found[: len(is_known)], np.nan)
    return scores

  def _ids(self, prompt: Any, completion: str, record: Mapping[str, Any]) -> np.ndarray:
    if isinstance(prompt, str):
      return self._renderer.plain(prompt, completion)[0]
    answer = [{'role': 'assistant', 'content': completion}]
    texts = {'prompt': prompt, 'chosen': answer, 'rejected': answer, 'tools': record.get('tools')}
    try:
      return encode_answer(self._renderer, texts, 'chosen')[0]
    except UserError:  # such as of an empty answer
      return np.zeros(0, np.int32)
