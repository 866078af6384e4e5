"""The parameter table says what is stored where, in an order and a form that golden files can hold."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from spmd_tasks.runtime import format_parameter_table
from spmd_tasks.sharding import WeightSpec

EXPECTED_TABLE = """\
name              shape        dtype     split dims             partition spec       padded shape  waste
embed/table       [257, 30]    bfloat16  (vocab, replica+data)  (mdl, replica+data)  [258, 32]     6.61%
final/bias        [30]         float32   (-)                    (-)                  -             -
stack/ffn/kernel  [4, 30, 90]  float32   (layers, embed, mlp)   (-, data, mdl)       [4, 32, 90]   6.25%
temperature       []           float32   ()                     ()                   -             -
total: 18,541 parameters, padding waste 6.39%
bytes per device: weights 7,948, optimizer state 16,168, together 24,116
"""


@pytest.fixture(scope='module')
def model():
  """Four weights on replica 1 x data 4 x mdl 2, as partition_spmd_model would describe them."""
  mesh = jax.make_mesh((1, 4, 2), ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)

  def stored(shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

  def declared(shape, split_dims, dtype=jnp.float32):
    return WeightSpec(shape=shape, init=None, split_dims=split_dims, dtype=dtype)

  table, kernel = P('mdl', ('replica', 'data')), P(None, 'data', 'mdl')
  return SimpleNamespace(
    weight_specs={
      'temperature': declared((), ()),
      'stack': {'ffn': {'kernel': declared((4, 30, 90), ('layers', 'embed', 'mlp'))}},
      'final': {'bias': declared((30,), None)},
      'embed': {'table': declared((257, 30), ('vocab', ('replica', 'data')), jnp.bfloat16)},
    },
    state_specs=SimpleNamespace(
      weights={
        'temperature': P(),
        'stack': {'ffn': {'kernel': kernel}},
        'final': {'bias': P()},
        'embed': {'table': table},
      }
    ),
    padded_state=SimpleNamespace(
      weights={
        'temperature': stored((), P()),
        'stack': {'ffn': {'kernel': stored((4, 32, 90), kernel)}},
        'final': {'bias': stored((30,), P())},
        'embed': {'table': stored((258, 32), table, jnp.bfloat16)},
      },
      learner=(
        {'mu': stored((4, 32, 90), kernel), 'nu': stored((4, 32, 90), kernel), 'row': stored((258,), P('mdl'))},
        {'mu': stored((258, 32), table), 'count': stored((), P(), jnp.int32)},
      ),
    ),
    has_frozen_weights=False,
    total_num_params=18_541,
    padding_waste=1 - 18_541 / 19_807,
  )


def test_the_table(model):
  assert format_parameter_table(model) == EXPECTED_TABLE
