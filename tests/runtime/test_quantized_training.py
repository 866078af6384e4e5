"""Training with int8 and fp8 products has one loss curve on any mesh; decoding uses the products too."""

import jax
import numpy as np
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.decoding import DecodeSteps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from tests.runtime.loss_curves import reference, runner, table
from tests.runtime.pipeline_experiments import PipelinedAdamW
from tests.runtime.uneven_experiments import AdamW

SIX = ('num_layers=6', 'batch_size=16')
# One product of a layer for each: the others are quantized by the same code, and take as long to compile.
BOTH = ('task.quantization={"^stack/layers/ffn/up": "int8", "attention/value": "fp8_full"}',)
CASES = [('data 2 x mdl 4', AdamW, (1, 2, 4), SIX)]
# tests/layers/test_quantized_products.py tests single products on these meshes by default.
ONE_BY_ONE = [
  ('gradients scattered, replica 2 x data 2 x mdl 2', AdamW, (2, 2, 2), ('scatters_gradients=True', *SIX)),
  ('stage 4 x data 2', PipelinedAdamW, (1, 4, 2, 1), ('schedule=one_forward_one_backward',)),
]


@pytest.mark.parametrize('name, experiment, shape, overrides', table(CASES, ONE_BY_ONE))
def test_one_loss_curve(name, experiment, shape, overrides):
  """The first loss agrees to the last bits; later, rounding errors may round a number to another int8 value."""
  alone = reference(AdamW, (*SIX, *BOTH))
  text = alone.runner.model.train_step.compile().as_text()
  assert 's8[' in text
  assert 'f8e4m3fn[' in text
  losses = runner(experiment, shape, overrides=(*overrides, *BOTH)).losses(alone.state(0), alone.batches)
  assert abs(losses[0] - alone.losses[0]) < 1e-5
  np.testing.assert_allclose(losses, alone.losses, atol=0.02)


def partitioned(name, setting):
  job = resolve(name, [f'task.quantization={setting}']).build()
  return partition_job(job, job.experiment.mesh_spec().build_abstract())


@pytest.mark.parametrize(
  'name, setting, message',
  [
    ('synthetic.Tiny', 'int7', "'int7'.*must be one of int8, int8_forward, fp8"),
    ('synthetic.Tiny', {'fnn/': 'int8'}, 'similar .*stack/layers/ffn/down/kernel'),
    ('synthetic.Tiny', {'embedding/': 'int8'}, 'matches no weight'),
    ('moe.StdlibTiny', {'ffn/': 'int8'}, 'experts/down: grouped products of experts are not quantized'),
  ],
)
def test_a_pattern_that_matches_no_linear_is_refused(name, setting, message):
  with pytest.raises(UserError, match=message):
    partitioned(name, setting)


def test_an_earlier_pattern_may_exclude_experts():
  partitioned('moe.StdlibTiny', {'experts/': None, '/(ffn|attention)/': 'int8'})


def test_decoding_uses_quantized_products_too():
  job = resolve('synthetic.Tiny', ['task.quantization={"ffn/": "int8"}']).build()
  steps = DecodeSteps(partition_job(job, job.experiment.mesh_spec().build(jax.devices()[:1])))
  products = [line for line in steps.step.lower().as_text().splitlines() if 'stablehlo.dot_general' in line]
  assert sum('xi8>' in line for line in products) == 3 < len(products)  # up, gate and down, in the loop over layers
