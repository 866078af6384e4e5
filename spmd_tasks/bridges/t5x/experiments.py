"""T5xExperiment: a run of T5X as one of ours, whose fields a gin setup fills; see `_gin_translation.py`.

    spmd-tasks --gin_file my_setup.gin --gin.MIXTURE_OR_TASK_MODULE="'my_tasks'" --mode train --job_log_dir runs/one

A subclass says the same in Python: `--translate FILE` writes one.
"""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any

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
  """A model of T5's families, T5X's Adafactor, and a SeqIO task.

  `train_data`, `eval_data`, `infer_data` and `decode_data` are fields of SeqIoInput. A mixture is evaluated as a whole,
  and each of its tasks by itself; the sets of `infer_data` compute the metric_fns of each task, as `infer_NAME`, and
  the examples of `decode_data` are decoded. `rate` has fields of ProductOfFactors, `adafactor` those of Adafactor that
  differ from T5X's defaults. Data with `paths` in place of a `task` are a TfExampleInput.
  """

  task_modules: tuple[str, ...] = ()
  train_data: Mapping[str, Any] = FrozenDict()
  eval_data: Mapping[str, Any] | None = None
  infer_data: Mapping[str, Any] | None = None
  decode_data: Mapping[str, Any] | None = None
  rate: Mapping[str, Any] = FrozenDict()
  adafactor: Mapping[str, Any] = FrozenDict()
  decoding: Mapping[str, Any] = FrozenDict()  # fields of DecodeSettings
  num_samples: int = 1  # of each prompt of `decode_data`
  scanned: bool = False  # T5X's layers are one weight, as in its scalable_t5: which dims Adafactor factors
  heads_apart: bool = False  # as in scalable_t5 without a scan
  clip_global_norm: float | None = None
  num_microbatches: int = 1
  # Whether the data go on where the checkpoint `init_from_step` of T5X ended; T5X itself reads them anew.
  skips_trained_batches: bool = False
  # Of the checkpoint `init_from`: with one of them the weights and the step are taken, and the moments begin anew.
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
    found = super().origin()
    if not (self.assignment_map or self.from_scratch) or not isinstance(found, T5xOrigin):
      return found
    parts: dict[str, Any] = {'assignment_map': self.assignment_map, 'from_scratch': self.from_scratch}
    return dataclasses.replace(found, **parts, with_optimizer=False, with_step=True)

  def train_input(self) -> fdl.Config:
    if 'paths' in self.train_data:
      return fdl.Config(TfExampleInput, **unfreeze(dict(self.train_data)))
    if 'task' not in self.train_data:
      raise UserError("train_data must name a SeqIO task, as {'task': NAME, 'lengths': {...}, 'batch_size': 128}.")
    skipped = (self.init_from_step or 0) if self.skips_trained_batches else 0
    return fdl.Config(SeqIoInput, modules=self.task_modules, skip_batches=skipped, **unfreeze(dict(self.train_data)))

  def eval_inputs(self) -> dict[str, fdl.Config[SeqIoInput]]:
    inputs = self._inputs_by_task(self.eval_data)
    judged = self._inputs_by_task(self.infer_data, with_metrics=True)
    return inputs | {f'infer_{name}': each for name, each in judged.items()}

  def decode_inputs(self) -> dict[str, fdl.Config[SeqIoPrompts]]:
    inputs = self._inputs_by_task(self.decode_data)
    return {name: fdl.Config(SeqIoPrompts, examples=each, n=self.num_samples) for name, each in inputs.items()}

  def prompts_of_file(self, path: str, tokenizer: Tokenizer | None) -> PromptSource:
    source = super().prompts_of_file(path, tokenizer)
    if self.num_encoder_layers or tokenizer is None:
      return source
    return PrefixPrompts(source=source, tokenizer=tokenizer, start_id=self.start_id)

  def _inputs_by_task(
    self, data: Mapping[str, Any] | None, *, with_metrics: bool = False
  ) -> dict[str, fdl.Config[SeqIoInput]]:
    """Returns the inputs of each task of a mixture that has the split; also of the whole, unless metrics are wanted."""
    if data is None:
      return {}
    fields = unfreeze(dict(data))
    if 'paths' in fields:
      return {'infer': fdl.Config(TfExampleInput, **fields)}
    whole = find_task(fields['task'], self.task_modules)
    tasks = [each for each in getattr(whole, 'tasks', [whole]) if fields['split'] in each.splits]
    names = [each.name for each in tasks if each.metric_objs or not with_metrics]
    fields['modules'] = self.task_modules
    return {
      re.sub('[^A-Za-z0-9_-]', '_', name): fdl.Config(SeqIoInput, **fields | {'task': name})
      for name in dict.fromkeys(names if with_metrics else [*names, whole.name])
    }


class T5xMoeExperiment(T5xExperiment, MoeEncoderDecoderLanguageModel):
  """The same with Flaxformer's mixtures of experts in every `mixture_every`-th layer."""

  experts_choose: bool = False  # in the encoder
  expert_grad_scale: float | str = 1.0  # MoeTrainer's

  def router(self, *, encodes: bool) -> fdl.Config:
    if not (self.experts_choose and encodes):
      return super().router(encodes=encodes)
    return fdl.Config(ExpertChoiceRouter, num_experts=self.num_experts, **self.capacity())

  def task(self) -> fdl.Config:
    task = super().task()
    task.learner.expert_grad_scale = self.expert_grad_scale
    return task


# Rules of T5X for names that no layer of ours uses. Its `embed` comes after them and before the rules of experts.
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
  """Returns the base rules with weights and activations split as by T5X's `standard_logical_axis_rules`.

  Two dims of parameters split the features of weights over `data`. Two of activations split the residual stream over
  `mdl`, and of the weights those whose other dims do not take `mdl`, such as the scales of norms. T5X's contrib/moe has
  `activation_partitioning_dims=2` by default; its rules for experts are those of `DataExpertModelMesh` and
  `DataModelMesh` with these rules as `base_rules`.

  The rules have T5X's names, too, so that split dims written for T5X resolve as there.

  Args:
    base_rules: such as DEFAULT_AXIS_RULES: rules for what T5X does not name, and for `batch` and `layers`.
    activation_partitioning_dims, parameter_partitioning_dims: 1 or 2.
    additional_rules: come last, in T5X's form with the mesh axes of this mesh.
  """
  if {activation_partitioning_dims, parameter_partitioning_dims} - {1, 2}:
    raise UserError(f'{activation_partitioning_dims=} and {parameter_partitioning_dims=} must be 1 or 2.')
  residual = 'mdl' if activation_partitioning_dims == 2 else None
  axes_of_features: list[SplitDim] = [residual] if residual else []
  if parameter_partitioning_dims == 2:
    axes_of_features.append('data')
  replaced = ('embed', 'norm', 'act_embed', 'expert_embed')
  base = [(name, axes) for name, axes in base_rules if name not in replaced]
  return (
    *(rule for rule in base if not rule[0].startswith('expert')),
    *_RULES_OF_OTHER_NAMES,
    *((name, axis) for name in ('embed', 'norm') for axis in axes_of_features or [None]),
    ('act_embed', residual),
    *(rule for rule in base if rule[0].startswith('expert')),
    ('expert_embed', None),
    *_RULES_OF_OTHER_EXPERT_NAMES,
    *additional_rules,
  )
