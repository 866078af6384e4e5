"""Training with int8 and fp8 products has one loss curve on any mesh; decoding uses the products too."""

import jax
import numpy as np
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.decoding import DecodeSteps
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from tests.runtime.loss_curves import make_model, reference, runner, table
from tests.runtime.pipeline_experiments import PipelinedAdamW
from tests.runtime.uneven_experiments import AdamW

SIX = ('num_layers=6', 'batch_size=16')
BOTH = ('task.quantization={"^stack/layers/ffn/": "int8", "attention/out": None, "attention/": "fp8_full"}',)
# By default tests/layers/test_quantized_products.py compares single products on meshes with numpy, bit for bit.
ONE_BY_ONE = [
  ('data 2 x mdl 4', AdamW, (1, 2, 4), SIX),
  ('gradients scattered, replica 2 x data 2 x mdl 2', AdamW, (2, 2, 2), ('scatters_gradients=True', *SIX)),
  ('stage 4 x data 2', PipelinedAdamW, (1, 4, 2, 1), ('schedule=one_forward_one_backward',)),
]


@pytest.mark.parametrize('name, experiment, shape, overrides', table((), ONE_BY_ONE))
def test_one_loss_curve(name, experiment, shape, overrides):
  """The first loss agrees to the last bits; later, rounding errors may round a number to another int8 value."""
  alone = reference(AdamW, (*SIX, *BOTH))
  text = alone.runner.model.train_step.compile().as_text()
  assert 's8[' in text
  assert 'f8e4m3fn[' in text
  losses = runner(experiment, shape, overrides=(*overrides, *BOTH)).losses(alone.state(0), alone.batches)
  assert abs(losses[0] - alone.losses[0]) < 1e-5
  np.testing.assert_allclose(losses, alone.losses, atol=0.02)


def test_the_products_of_training_and_their_gradients_are_quantized():
  model, _ = make_model(AdamW, (1, 2, 4), overrides=BOTH)
  products = [line for line in model.train_step.lower().as_text().splitlines() if 'stablehlo.dot_general' in line]
  # In the loops over layers: up, gate and down; query, key and value. Each has a result and two gradients.
  assert sum(line.count('xi8>') == 2 for line in products) == 3 * 3
  assert sum(line.count('xf8E4M3FN>') + line.count('xf8E5M2>') == 2 for line in products) == 3 * 3


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
