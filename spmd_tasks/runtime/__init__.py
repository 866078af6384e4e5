"""Turns a task and a mesh into compiled, sharded steps.

    model = partition_spmd_model(task, mesh, input_spec, axis_rules=rules)      # shapes only: nothing is allocated
    print(format_parameter_table(model))                                        # shape, split dims, padding, bytes
    state = model.init(seed=0)                                                  # a sharded, padded TrainState
    state, metrics = model.train_step(state, model.train_step.place(batch))     # compiled by the first call

Read in this order: `task.py` (model, loss and learner, TrainState, and the pure train and eval step),
`partition.py` (the heart: the same steps over a mesh, padded at the boundary), `input_layout.py` (how a batch goes from
the hosts to the mesh), `compilation.py` and `dequantized.py` (what quantized weights stand for). What a job
reports is made by `metrics.py` (files of metrics), `parameter_table.py` (also what memory cannot hold) and `flops.py`.
`decode_settings.py` holds what a task says about generating text, `origin.py` where a new job's weights are from.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.runtime.decode_settings import DecodeSettings, SamplingParams
  from spmd_tasks.runtime.origin import Origin
  from spmd_tasks.runtime.parameter_table import format_parameter_table
  from spmd_tasks.runtime.partition import PartitionedModel, partition_spmd_model
  from spmd_tasks.runtime.task import BaseTask, Task, TrainState
