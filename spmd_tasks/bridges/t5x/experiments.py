"""T5xExperiment: an experiment with the fields to which a gin setup of T5X is translated (`_gin_translation.py`).

    spmd-tasks --gin_file my_setup.gin --gin.MIXTURE_OR_TASK_MODULE="'my_tasks'" --mode train --job_log_dir runs/one

The same can be written in Python as a subclass; `--translate FILE` writes one.
"""

from collections.abc import Mapping
import dataclasses
import functools
import re
from typing import Any

from absl import logging
import fiddle as fdl
from flax.core import FrozenDict, unfreeze

from spmd_tasks.bridges.t5x._seqio import PrefixPrompts, SeqIoInput, SeqIoPrompts, TfExampleInput, find_task
from spmd_tasks.bridges.t5x.origin import T5xOrigin
from spmd_tasks.decoding.prompts import PromptSource
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import Tokenizer
from spmd_tasks.layers.moe import ExpertChoiceRouter
from spmd_tasks.learning import Adafactor, ProductOfFactors
from spmd_tasks.recipes import EncoderDecoderLanguageModel, MoeEncoderDecoderLanguageModel
from spmd_tasks.runtime import DecodeSettings
from spmd_tasks.sharding import AxisRules
from spmd_tasks.sharding.specs import SplitDim


class T5xExperiment(EncoderDecoderLanguageModel):
  """A model of the T5 families with T5X's Adafactor and a SeqIO task.

  Mappings of data have fields of SeqIoInput, or with `paths` in place of a `task`, of TfExampleInput. A mixture is
  evaluated as a whole and by task.
  """

  task_modules: tuple[str, ...] = ()  # modules that register the SeqIO tasks
  train_data: Mapping[str, Any] = FrozenDict()
  eval_data: Mapping[str, Any] | None = None
  infer_data: Mapping[str, Any] | None = None  # evaluated with the tasks' metric_fns, as `infer_NAME`
  decode_data: Mapping[str, Any] | None = None  # decoded by decode jobs
  rate: Mapping[str, Any] = FrozenDict()  # fields of ProductOfFactors
  adafactor: Mapping[str, Any] = FrozenDict()  # fields of Adafactor that differ from T5X's defaults
  decoding: Mapping[str, Any] = FrozenDict()  # fields of DecodeSettings
  num_samples: int = 1  # per prompt of `decode_data`
  scanned: bool = False  # T5X's layers are scanned, as in scalable_t5; decides which dims Adafactor factors
  heads_apart: bool = False  # heads have a dim of their own, as in scalable_t5 without a scan
  clip_global_norm: float | None = None
  num_microbatches: int = 1
  # Whether to continue the data after the step `init_from_step` of T5X's checkpoint; T5X itself starts them anew.
  skips_trained_batches: bool = False
  # See T5xOrigin. If one of them is set, weights and step are restored from `init_from`, and moments start anew.
  assignment_map: tuple[tuple[str, str | None], ...] = ()
  from_scratch: bool = False

  normalization = 'sum'
  has_bias_per_layer = False

  def optimizer(self) -> fdl.Config[Adafactor]:
    layout = {'scanned': self.scanned, 'heads_apart': self.heads_apart}
    return self.t5x_adafactor(fdl.Config(ProductOfFactors, **self.rate), **layout, **self.adafactor)

  def task(self) -> fdl.Config:
    task = super().task()
    task.learner.num_microbatches, task.learner.accumulation = self.num_microbatches, 'sum'
    task.learner.clip_global_norm = self.clip_global_norm
    return task

  def decode_settings(self) -> fdl.Config[DecodeSettings]:
    return fdl.copy_with(super().decode_settings(), **self.decoding)

  def origin(self) -> Any:
    origin = super().origin()
    if not (self.assignment_map or self.from_scratch) or not isinstance(origin, T5xOrigin):
      return origin
    return dataclasses.replace(
      origin,
      assignment_map=self.assignment_map,
      from_scratch=self.from_scratch,
      with_optimizer=False,
      with_step=True,
    )

  def train_input(self) -> fdl.Config:
    if 'paths' in self.train_data:
      return fdl.Config(TfExampleInput, **unfreeze(dict(self.train_data)))
    if 'task' not in self.train_data:
      raise UserError(
        "train_data has no 'task': set it to a SeqIO task, such as {'task': NAME, 'lengths': {...}, 'batch_size': 128}."
      )
    skip_batches = (self.init_from_step or 0) if self.skips_trained_batches else 0
    fields = unfreeze(dict(self.train_data))
    return fdl.Config(SeqIoInput, modules=self.task_modules, skip_batches=skip_batches, **fields)

  def eval_inputs(self) -> dict[str, fdl.Config[SeqIoInput]]:
    inputs = self._inputs_by_task(self.eval_data)
    with_metrics = self._inputs_by_task(self.infer_data, with_metrics=True)
    return inputs | {f'infer_{name}': config for name, config in with_metrics.items()}

  def decode_inputs(self) -> dict[str, fdl.Config[SeqIoPrompts]]:
    inputs = self._inputs_by_task(self.decode_data)
    return {name: fdl.Config(SeqIoPrompts, examples=config, n=self.num_samples) for name, config in inputs.items()}

  def prompts_of_file(self, path: str, tokenizer: Tokenizer | None) -> PromptSource:
    source = super().prompts_of_file(path, tokenizer)
    if self.num_encoder_layers or tokenizer is None:
      return source
    return PrefixPrompts(source=source, tokenizer=tokenizer, start_id=self.start_id)

  def _inputs_by_task(
    self, data: Mapping[str, Any] | None, *, with_metrics: bool = False
  ) -> dict[str, fdl.Config[SeqIoInput]]:
    """Returns the inputs of a mixture and its tasks that have the split, or only of its tasks with metrics."""
    if data is None:
      return {}
    fields = unfreeze(dict(data))
    if 'paths' in fields:
      return {'infer': fdl.Config(TfExampleInput, **fields)}
    task_or_mixture = find_task(fields['task'], self.task_modules)
    tasks = [task for task in getattr(task_or_mixture, 'tasks', [task_or_mixture]) if fields['split'] in task.splits]
    if not tasks:
      splits = ', '.join(sorted(task_or_mixture.splits))
      problem = f'SeqIO task {fields["task"]} has no split {fields["split"]!r}, only {splits}'
      if not with_metrics and fields.get('max_batches') is None:  # not an eval of a training
        raise UserError(f'{problem}: choose one of these.')
      _warn_once(f'{problem}: training continues without evals of this split, as in T5X.')
      return {}
    names = [task.name for task in tasks if task.metric_objs or not with_metrics]
    fields['modules'] = self.task_modules
    return {
      re.sub('[^A-Za-z0-9_-]', '_', name): fdl.Config(SeqIoInput, **fields | {'task': name})
      for name in dict.fromkeys(names if with_metrics else [*names, task_or_mixture.name])
    }


@functools.cache
def _warn_once(message: str) -> None:
  logging.warning('%s', message)


class T5xMoeExperiment(T5xExperiment, MoeEncoderDecoderLanguageModel):
  """T5xExperiment with Flaxformer's mixtures of experts in every `mixture_every`-th layer."""

  experts_choose: bool = False  # whether experts choose tokens in the encoder
  expert_grad_scale: float | str = 1.0  # as in T5X's MoeTrainer

  def router(self, *, encodes: bool) -> fdl.Config:
    if not (self.experts_choose and encodes):
      return super().router(encodes=encodes)
    return fdl.Config(ExpertChoiceRouter, num_experts=self.num_experts, **self.capacity())

  def task(self) -> fdl.Config:
    task = super().task()
    task.learner.expert_grad_scale = self.expert_grad_scale
    return task


# T5X's rules for names that our layers do not use. T5X's `embed` comes after them, and before the rules of experts.
_RULES_OF_OTHER_NAMES = (
  ('kv', None),
  ('joined_kv', 'mdl'),
  ('relpos_buckets', None),
  ('abspos_buckets', None),
  ('length', None),
  ('stack', None),
  ('mlp_activations', None),
)
_RULES_OF_OTHER_EXPERT_NAMES = (('expert_group', None), ('expert_replicas', None), ('unmodeled', None))


def t5x_axis_rules(
  base_rules: AxisRules,
  *,
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: AxisRules = (),
) -> AxisRules:
  """Returns axis rules that shard weights and activations as T5X's `standard_logical_axis_rules` do.

  T5X's contrib/moe has `activation_partitioning_dims=2` by default; for its rules for experts, pass these rules as
  `base_rules` of `DataExpertModelMesh` or `DataModelMesh`. T5X's own names are included, so that split dims written for
  T5X resolve as in T5X.

  Args:
    base_rules: rules for names that T5X does not have, and for `batch` and `layers`, such as DEFAULT_AXIS_RULES.
    activation_partitioning_dims: 1 or 2; with 2, the residual stream is sharded over `mdl`, and so are weights whose
      other dims are not, such as the scales of norms.
    parameter_partitioning_dims: 1 or 2; with 2, the features of weights are sharded over `data`.
    additional_rules: rules in T5X's form with the axes of our mesh; they come last.
  """
  if {activation_partitioning_dims, parameter_partitioning_dims} - {1, 2}:
    raise UserError(f'{activation_partitioning_dims=} and {parameter_partitioning_dims=} must be 1 or 2.')
  residual = 'mdl' if activation_partitioning_dims == 2 else None
  feature_axes: list[SplitDim] = [residual] if residual else []
  if parameter_partitioning_dims == 2:
    feature_axes.append('data')
  replaced_names = ('embed', 'norm', 'act_embed', 'expert_embed')
  base = [(name, axes) for name, axes in base_rules if name not in replaced_names]
  return (
    *(rule for rule in base if not rule[0].startswith('expert')),
    *_RULES_OF_OTHER_NAMES,
    *((name, axis) for name in ('embed', 'norm') for axis in feature_axes or [None]),
    ('act_embed', residual),
    *(rule for rule in base if rule[0].startswith('expert')),
    ('expert_embed', None),
    *_RULES_OF_OTHER_EXPERT_NAMES,
    *additional_rules,
  )
