"""The claim `rows` finds gradients of padded rows, which XLA computes if activations are split unevenly.

XLA pads the shards of an unevenly split activation. Sums over rows without a mask give the padded rows a gradient, and
the scatter-add of a lookup adds it to row 0 of the table. That the claim holds without the fault:
test_verify_mode.py.
"""

import contextlib
import dataclasses

import fiddle as fdl
import jax.numpy as jnp
import optax
import pytest

from spmd_tasks.layers import LossOutput
from spmd_tasks.recipes import MoeLanguageModel, SyntheticLanguageModel
from spmd_tasks.sharding import split_dims_to_partition_spec
from spmd_tasks.sharding.specs import ShardingScope, even_spec
from spmd_tasks.verification import Bench
from spmd_tasks.verification.mode import CLAIMS
from tests.runtime.loss_curves import source_of
from tests.verification.planted_bugs import Planted


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainMean:
  """A user's own loss: the mean over all tokens, without weights."""

  def __call__(self, predictions, batch) -> LossOutput:
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(predictions['logits'], batch['labels']))
    return LossOutput(loss=loss, weight=jnp.float32(batch['labels'].size), metrics={}, per_example={})


class OwnMean(Planted):
  def block(self, ffn):
    return SyntheticLanguageModel.block(self, ffn)  # with attention

  def loss(self):
    return fdl.Config(PlainMean)


class RouterLosses(Planted, MoeLanguageModel):
  mesh_axis_names = ('replica', 'data', 'expert', 'mdl')
  ici_mesh_shape = (1, 2, 2, 1)
  num_experts, num_selected_experts = 2, 1
  router_z_weight = 0.1


def split_unevenly(scope, split_dims, shape, *, is_even=False):
  spec = split_dims_to_partition_spec(split_dims, scope.mesh.axis_names, scope.axis_rules)
  return even_spec(spec, shape, scope.mesh.shape) if is_even else spec  # a `shard_map` needs even shards


@pytest.mark.slow
@pytest.mark.parametrize(
  'experiment, subject',
  [
    (OwnMean, '3 rows in 3 microbatches, data 2 x mdl 2'),
    pytest.param(RouterLosses, '3 rows, data 2 x expert 2', marks=pytest.mark.exhaustive),
  ],
)
def test_gradients_of_padded_rows_are_found(experiment, subject, monkeypatch):
  with contextlib.closing(Bench(source_of(experiment), num_devices=4, num_steps=1)) as bench:
    (case,) = (case for case in CLAIMS['rows'].cases(bench) if case.subject == subject)
    reference, setting = case.settings
    bench.runner(reference)  # is not compiled again
    monkeypatch.setattr(ShardingScope, 'activation_spec', split_unevenly)
    assert bench.agree(setting, reference, train=False).first.leaf == 'gradients/embedding/table'
