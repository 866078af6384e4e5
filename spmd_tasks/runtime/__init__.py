"""Turns a task and a mesh into compiled, sharded steps.

    model = partition_spmd_model(task, mesh, input_spec, axis_rules=rules)      # shapes only: nothing is allocated
    print(format_parameter_table(model))                                        # shape, split dims, padding, bytes
    state = model.init(seed=0)                                                  # a sharded, padded TrainState
    state, metrics = model.train_step(state, model.train_step.place(batch))     # compiled by the first call

Start with `task.py` (model, loss, learner, TrainState, and the pure train and eval step), `partition.py` (the same
steps over a mesh, padded at the step boundary), `input_layout.py` (batches from hosts to the mesh) and
`compilation.py`. Then read `decode_settings.py` (settings of text generation), `origin.py` (the source of a new job's
weights), and the modules for reports: `metrics.py` (metric files), `parameter_table.py` and `flops.py`.
"""

from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.runtime.decode_settings import DecodeSettings, SamplingParams
  from spmd_tasks.runtime.origin import Origin
  from spmd_tasks.runtime.parameter_table import format_parameter_table
  from spmd_tasks.runtime.partition import PartitionedModel, partition_spmd_model
  from spmd_tasks.runtime.task import BaseTask, Task, TrainState
