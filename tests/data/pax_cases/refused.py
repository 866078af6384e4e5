"""Experiments that Paxml 1.4.0 cannot run on today's JAX, beside pipelines.Circular."""

from praxis import layers, optimizers, pax_fiddle

from pax_cases import pipelines, transformers


class RepeatedInStages(pipelines.Pipelined):
  """Each stage of a pipeline repeats a layer by a scan."""

  def change(self, task):
    pipeline = task.model.lm_tpl.stacked_transformer_tpl
    block = pipeline.pipeline_stage
    pipeline.pipeline_stage = pax_fiddle.Config(layers.StackedTransformerRepeated, block=block, x_times=2)


class Shampoo(transformers.SmallLm):
  """Distributed Shampoo."""

  def change(self, task, lm):
    task.train.learner.optimizer = pax_fiddle.Config(
      optimizers.ShardedDistributedShampoo, learning_rate=1e-2, lr_schedule=task.train.learner.optimizer.lr_schedule
    )
