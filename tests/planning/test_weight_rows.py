"""Why a weight is replicated or padded, by the axis rules and the mesh."""

import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.planning.weights import weight_rows
from spmd_tasks.runtime.parameter_table import bytes_per_device


def rows_of(name: str, *overrides: str):
  job = resolve(name, overrides).build()
  model = partition_job(job, job.experiment.mesh_spec().build_abstract())
  return model, {row['name']: row for row in weight_rows(model)}


@pytest.fixture(scope='module')
def uneven():
  return rows_of('lm.UnevenTiny')


def test_bytes_per_device_add_up(uneven):
  model, rows = uneven
  assert sum(row['bytes_per_device'] for row in rows.values()) == bytes_per_device(model.padded_state.weights)
  sizes = [row['bytes_per_device'] for row in rows.values()]
  assert sizes == sorted(sizes, reverse=True)


def test_padding_is_explained(uneven):
  _, rows = uneven
  kernel = rows['stack/layers/ffn/up/kernel']
  assert kernel['shape'] == [3, 30, 90]
  assert 'dim 2 is padded from 90 to 92, the next multiple of 4 (mdl)' in kernel['why']
  assert kernel['replicated_over'] == []


def test_a_norm_is_replicated_because_the_rules_leave_it_whole(uneven):
  _, rows = uneven
  norm = rows['final_norm/scale']
  assert norm['replicated_over'] == ['data', 'mdl']
  assert norm['why'] == 'replicated over data and mdl; dim 0 (norm): left whole by the axis rules'


def test_an_axis_that_another_dim_has_taken():
  """Grouped-query attention with all of embed, heads and head dim over one axis: the first dim takes it."""
  rules = resolve('synthetic.Uneven', ()).experiment.axis_rules
  changed = tuple((name, 'mdl' if name == 'embed' else axes) for name, axes in rules)
  _, rows = rows_of('synthetic.Uneven', f'axis_rules={changed!r}')
  kernel = rows['stack/layers/ffn/up/kernel']
  assert kernel['replicated_over'] == ['data']
  assert 'dim 2 (mlp): a rule asks for mdl, but mdl already splits another dim' in kernel['why']
