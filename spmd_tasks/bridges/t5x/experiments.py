"""T5xExperiment: a run of T5X as one of ours, whose fields a gin setup fills; see `_gin_translation.py`.

    spmd-tasks --gin_file my_setup.gin --gin.MIXTURE_OR_TASK_MODULE="'my_tasks'" --mode train --job_log_dir runs/one

A subclass says the same in Python: `--translate FILE` writes one.
"""

from collections.abc import Mapping
import re
from typing import Any

import fiddle as fdl
from flax.core import FrozenDict

from spmd_tasks.bridges.t5x._seqio import SeqIoInput, find_task, import_seqio
from spmd_tasks.errors import UserError
from spmd_tasks.learning import Adafactor, ProductOfFactors
from spmd_tasks.recipes import EncoderDecoderLanguageModel


class T5xExperiment(EncoderDecoderLanguageModel):
  """A model of T5's families, T5X's Adafactor, and a SeqIO task.

  `train_data` and `eval_data` are fields of SeqIoInput. A mixture is evaluated as a whole, and each of its tasks by
  itself. `rate` has fields of ProductOfFactors, `adafactor` those of Adafactor that differ from T5X's defaults.
  """

  task_modules: tuple[str, ...] = ()
  train_data: Mapping[str, Any] = FrozenDict()
  eval_data: Mapping[str, Any] | None = None
  rate: Mapping[str, Any] = FrozenDict()
  adafactor: Mapping[str, Any] = FrozenDict()
  scanned: bool = False  # T5X's layers are one weight, as in its scalable_t5: which dims Adafactor factors
  clip_global_norm: float | None = None
  num_microbatches: int = 1
  # Whether the data go on where the checkpoint `init_from_step` of T5X ended; T5X itself reads them anew.
  skips_trained_batches: bool = False

  normalization = 'sum'
  has_bias_per_layer = False

  def optimizer(self) -> fdl.Config[Adafactor]:
    return self.t5x_adafactor(fdl.Config(ProductOfFactors, **self.rate), scanned=self.scanned, **self.adafactor)

  def task(self) -> fdl.Config:
    task = super().task()
    task.learner.num_microbatches, task.learner.accumulation = self.num_microbatches, 'sum'
    task.learner.clip_global_norm = self.clip_global_norm
    return task

  def train_input(self) -> fdl.Config[SeqIoInput]:
    if 'task' not in self.train_data:
      raise UserError("train_data must name a SeqIO task, as {'task': NAME, 'lengths': {...}, 'batch_size': 128}.")
    skipped = (self.init_from_step or 0) if self.skips_trained_batches else 0
    return fdl.Config(SeqIoInput, modules=self.task_modules, skip_batches=skipped, **_thawed(self.train_data))

  def eval_inputs(self) -> dict[str, fdl.Config[SeqIoInput]]:
    if self.eval_data is None:
      return {}
    data = _thawed(self.eval_data)
    whole = find_task(data['task'], self.task_modules)
    tasks = [each for each in import_seqio().get_subtasks(whole) if data['split'] in each.splits]
    names = dict.fromkeys([*(each.name for each in tasks), whole.name])
    return {
      re.sub('[^A-Za-z0-9_-]', '_', name): fdl.Config(SeqIoInput, **data | {'task': name, 'modules': self.task_modules})
      for name in names
    }


def _thawed(value: Any) -> Any:
  """Returns a plain dict, with those in it."""
  return {name: _thawed(each) for name, each in value.items()} if isinstance(value, Mapping) else value
