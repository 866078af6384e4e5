"""Small training steps, compiled once per test process, and programs written by hand as XLA's text."""

import functools
from typing import Any, NamedTuple

import fiddle as fdl

from spmd_tasks.config import resolve
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.experiments.synthetic import Tiny
from spmd_tasks.layers.moe import Dropless
from spmd_tasks.planning.hlo import read_module
from spmd_tasks.planning.program import Program, read_program
from spmd_tasks.recipes import MoeLanguageModel, PipelinedLanguageModel
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.sharding import DataExpertModelMesh


class Dense(Tiny):
  """Fully sharded over data 4, tensor parallel over mdl 2."""

  ici_mesh_shape = (1, 4, 2)


class Mixture(MoeLanguageModel, Tiny):
  """8 experts, top 2, one per device."""

  mesh = DataExpertModelMesh(num_devices=8, num_expert_partitions=8)
  num_experts = 8

  def computation(self):
    return fdl.Config(Dropless, dispatch='padded_all_to_all')


class Pipelined(PipelinedLanguageModel, Tiny):
  """4 stages of a layer each, data 2, 4 microbatches."""

  ici_mesh_shape = (1, 4, 2, 1)
  num_layers = 4
  num_microbatches = 4


class CompiledStep(NamedTuple):
  """A training step, compiled for 8 fake CPU devices."""

  job: Job
  model: PartitionedModel
  compiled: Any
  program: Program


@functools.cache
def compiled_step(experiment: type) -> CompiledStep:
  job = resolve(experiment).build()
  model = partition_job(job)
  compiled = model.train_step.compile()
  return CompiledStep(job, model, compiled, read_program(compiled))


ADD = """\
%add (x.add: f32[], y.add: f32[]) -> f32[] {
  %x.add = f32[] parameter(0)
  %y.add = f32[] parameter(1)
  ROOT %sum.add = f32[] add(%x.add, %y.add)
}

"""


def program_of(text: str) -> Program:
  """Reads a program written by hand as XLA's text; `%add` is there for reductions."""
  head, line, rest = text.partition('\n')
  return Program(read_module(f'{head}{line}\n{ADD}{rest}'))
