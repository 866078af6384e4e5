"""Turns a task and a mesh into compiled, sharded steps.

    model = partition_spmd_model(task, mesh, input_spec, axis_rules=rules)      # shapes only: nothing is allocated
    print(format_parameter_table(model))                                        # shape, split dims, padding, bytes
    state = model.init(seed=0)                                                  # a sharded, padded TrainState
    state, metrics = model.train_step(state, model.train_step.place(batch))     # compiled by the first call

Read in this order: `task.py` (model, loss and learner, TrainState, and the pure train and eval step),
`partition.py` (the heart: the same steps over a mesh, padded at the boundary), `input_layout.py` (how a batch goes from
the hosts to the mesh), `compilation.py` and `weight_numbers.py` (what quantized weights stand for). What a job
reports is made by `metrics.py` (files of metrics), `parameter_table.py` and `flops.py`. `memory_checks.py` refuses what
memory cannot hold. `decode_settings.py` holds what a task says about generating text, `optional_methods.py` what a task
may do beside what all do, `origin.py` where a new job's weights are from.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from spmd_tasks.runtime.compilation import CompilationCounter, CompiledStep, StepsByShape
  from spmd_tasks.runtime.decode_settings import DecodeSettings, SamplingParams
  from spmd_tasks.runtime.flops import count_matmul_flops, model_flops_per_train_step, peak_flops_per_device
  from spmd_tasks.runtime.input_layout import InputLayout, InputSpec, make_input_layout
  from spmd_tasks.runtime.memory_checks import check_batch_fits, check_state_fits
  from spmd_tasks.runtime.metrics import (
    METRICS_FILE,
    Metric,
    Metrics,
    MetricsWriter,
    TensorBoardWriter,
    finish_metrics,
    make_writer,
    read_jsonl,
    scalars,
  )
  from spmd_tasks.runtime.optional_methods import DecodesBatches
  from spmd_tasks.runtime.origin import Base, Origin, base_of, origin_named, saved_part
  from spmd_tasks.runtime.parameter_table import ParameterRow, bytes_per_device, format_parameter_table, parameter_rows
  from spmd_tasks.runtime.partition import Part, PartitionedModel, partition_spmd_model, whole_state
  from spmd_tasks.runtime.task import Batch, Task, TrainState, Variables
  from spmd_tasks.runtime.weight_numbers import flat_specs, padded_numbers

__all__ = [
  'METRICS_FILE',
  'Base',
  'Batch',
  'CompilationCounter',
  'CompiledStep',
  'DecodeSettings',
  'DecodesBatches',
  'InputLayout',
  'InputSpec',
  'Metric',
  'Metrics',
  'MetricsWriter',
  'Origin',
  'ParameterRow',
  'Part',
  'PartitionedModel',
  'SamplingParams',
  'StepsByShape',
  'Task',
  'TensorBoardWriter',
  'TrainState',
  'Variables',
  'base_of',
  'bytes_per_device',
  'check_batch_fits',
  'check_state_fits',
  'count_matmul_flops',
  'finish_metrics',
  'flat_specs',
  'format_parameter_table',
  'make_input_layout',
  'make_writer',
  'model_flops_per_train_step',
  'origin_named',
  'padded_numbers',
  'parameter_rows',
  'partition_spmd_model',
  'peak_flops_per_device',
  'read_jsonl',
  'saved_part',
  'scalars',
  'whole_state',
]
