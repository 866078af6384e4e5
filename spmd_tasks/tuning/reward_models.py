"""RewardModel: scores completions with a reward model from a folder, on the mesh of the training job.

    model = RewardModel('models/reward', run, batch_size=64, seq_len=1024)
    model.rewards([(prompt, completion, record), ...])        # float64 [N]; see reward_functions.py for the arguments

Texts are rendered with the folder's own tokenizer and chat template, as in the reward model's training
(scored_texts.py).

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


def open_second_folder(run: TrainRun, name: str) -> Folder:
  """Opens the folder of a second model, with the experiment's `accept_config_keys`."""
  accept_config_keys = getattr(run.experiment, 'accept_config_keys', ())
  return open_folder(local_folder(name), accept_config_keys=accept_config_keys)


def frozen_model(run: TrainRun, folder: Folder, spec: Mapping[str, Any]) -> PartitionedModel:
  """Partitions the model of a folder over the mesh of a job, without reading its weights."""
  task = run.job.task.as_task('a second model')
  dtype: dict[str, Any] = {}
  if folder.dtype == 'bfloat16':  # keeps kernels in bfloat16; nothing is trained, but `trained` must match a weight
    dtype = {'trained': ('final_norm/',), 'frozen_dtype': 'bfloat16'}
  return partition_spmd_model(
    Task(
      model=folder.with_nextn_heads(0).build_model(),
      loss=LanguageModelLoss(),
      learner=task.learner,
      decode=task.decode,
      quantization=task.quantization,
      **dtype,
    ),
    run.model.mesh,
    spec,
    axis_rules=run.experiment.axis_rules,
    inputs_split_mapping=run.experiment.inputs_split_mapping,
  )


def is_reward_model(name: str) -> bool:
  """Whether a reward's name is a folder; if not, it is a function."""
  return '://' in name or os.path.isdir(name)


class RewardModel:
  """A reward model. Calls are collective: every process makes the same calls."""

  def __init__(self, name: str, run: TrainRun, *, batch_size: int, seq_len: int):
    """Partitions the model. Raises a UserError if the folder has another kind of model."""
    self._folder = folder = open_second_folder(run, name)
    if folder.decoder.num_labels != 1:
      raise UserError(
        f'reward {name} must be a folder of ForSequenceClassification with one label: train one with '
        'finetune.FullReward.'
      )
    template = ChatTemplate.from_folder(str(folder.path)) or ChatTemplate()
    tokenizer = FolderTokenizer(path=str(folder.path))
    self._renderer = Renderer(tokenizer=tokenizer, template=template, variables={}, date='2026-01-01')
    self._spec = language_model_spec(batch_size, seq_len)
    self._model = frozen_model(run, folder, self._spec)
    self._variables: Any = None

    score = functools.partial(pooled, self._model.task)
    self._step = self._model.batch_step('score_completions', self._spec, lambda *args: score(*args)[:, 0])

  def rewards(self, calls: Sequence[Call]) -> np.ndarray:
    """Returns the scores, float64 [N]; NaN for a text that is longer than T, or that cannot be rendered."""
    if self._variables is None:
      self._variables = variables_from_folder(self._model, self._folder)
    scores = np.full(len(calls), np.nan)
    num_rows = self._spec['ids'].shape[0]
    for start in range(0, len(calls), num_rows):
      batch = text_batch(self._spec, [self._ids(*call).tolist() for call in calls[start : start + num_rows]])
      batch_scores = np.asarray(self._step(self._variables, self._step.place(self._step.layout.own_rows(batch))))
      is_text = np.any(batch['weights'] > 0, axis=1)[: len(calls) - start]
      scores[start : start + num_rows] = np.where(is_text, batch_scores[: len(is_text)], np.nan)
    return scores

  def _ids(self, prompt: Any, completion: str, record: Mapping[str, Any]) -> np.ndarray:
    if isinstance(prompt, str):
      return self._renderer.plain(prompt, completion)[0]
    answer = [{'role': 'assistant', 'content': completion}]
    texts = {'prompt': prompt, 'chosen': answer, 'rejected': answer, 'tools': record.get('tools')}
    try:
      return encode_answer(self._renderer, texts, 'chosen')[0]
    except UserError:  # for example, an empty answer
      return np.zeros(0, np.int32)
