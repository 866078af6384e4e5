"""Which rows of a batch lie on which host, on meshes over stand-ins for the devices of several hosts."""

import dataclasses
import math

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from spmd_tasks.runtime import make_input_layout
from spmd_tasks.sharding import host_data_layout

TWO_DATA_AXES = ('data', 'mdl')
THREE_AXES = ('expert', 'data')


@dataclasses.dataclass(frozen=True)
class FakeDevice:
  """What a Mesh and its placement read of a device."""

  id: int
  process_index: int
  platform: str = 'fake'
  device_kind: str = 'fake'


def blocks(axes: dict[str, int], hosts: dict[str, int]) -> Mesh:
  """A mesh in which every host has a block: `hosts` says how many of them lie along each axis, slowest first."""
  hosts = {name: hosts.get(name, 1) for name in axes}
  array = np.empty(tuple(axes.values()), dtype=object)
  for i, place in enumerate(np.ndindex(array.shape)):
    chunk = [index * hosts[name] // axes[name] for name, index in zip(axes, place)]
    array[place] = FakeDevice(i, int(np.ravel_multi_index(chunk, tuple(hosts.values()))))
  return Mesh(array, tuple(axes))


# (mesh axes, hosts along them, axes of the batch) -> the shard of hosts 0, 1, ...
CASES = [
  # T5X's own example: 32 devices on 4 hosts.
  ({'data': 4, 'expert': 8, 'mdl': 1}, {'data': 2, 'expert': 2}, THREE_AXES, [0, 2, 1, 3]),
  ({'data': 4, 'expert': 8, 'mdl': 1}, {'data': 4}, THREE_AXES, [0, 1, 2, 3]),
  ({'data': 4, 'expert': 8, 'mdl': 1}, {'expert': 4}, THREE_AXES, [0, 1, 2, 3]),
  ({'data': 1, 'expert': 8, 'mdl': 1}, {'expert': 2}, THREE_AXES, [0, 1]),
  ({'data': 8, 'mdl': 1}, {'data': 4}, ('data',), [0, 1, 2, 3]),
  # Model parallelism over hosts: the same rows twice, on purpose.
  ({'data': 4, 'mdl': 4}, {'data': 2, 'mdl': 2}, ('data',), [0, 0, 1, 1]),
  # Two data axes: T5X leaves the second out and would give the same rows twice here too.
  ({'data': 4, 'mdl': 4}, {'data': 2, 'mdl': 2}, TWO_DATA_AXES, [0, 1, 2, 3]),
  ({'data': 4, 'mdl': 4}, {'mdl': 4}, TWO_DATA_AXES, [0, 1, 2, 3]),
]


@pytest.mark.parametrize('axes, hosts, batch_axes, expected', CASES)
def test_shards_of_all_hosts(axes, hosts, batch_axes, expected):
  mesh = blocks(axes, hosts)
  layouts = [host_data_layout(mesh, batch_axes, host_index=host) for host in range(len(expected))]
  assert [layout.shard_id for layout in layouts] == expected
  assert {layout.num_shards for layout in layouts} == {len(set(expected))}
  # The formula, with the chunk of each host along every axis of the batch.
  for host, layout in enumerate(layouts):
    chunk = dict(zip(axes, np.unravel_index(host, [hosts.get(name, 1) for name in axes])))
    formula = 0
    for name in batch_axes:
      formula = formula * hosts.get(name, 1) + chunk[name]
    assert layout.shard_id == formula


@pytest.mark.parametrize('axes, hosts, batch_axes, expected', CASES)
def test_rows_of_different_shards_are_disjoint_and_cover_the_batch(axes, hosts, batch_axes, expected):
  mesh = blocks(axes, hosts)
  batch_size = 3 * math.prod(axes[name] for name in batch_axes)
  rows, firsts = {}, []
  for host, shard in enumerate(expected):
    layout = host_data_layout(mesh, batch_axes, batch_size=batch_size, host_index=host)
    assert len(layout.rows) == batch_size // layout.num_shards
    assert rows.setdefault(shard, layout.rows) == layout.rows
    firsts.append(layout.is_first_host_in_replica_set)
  assert sorted(row for shard in rows.values() for row in shard) == list(range(batch_size))
  assert firsts == [expected.index(shard) == host for host, shard in enumerate(expected)]


@pytest.mark.parametrize('axes, hosts, batch_axes, expected', CASES)
def test_our_own_input_reads_every_row_once_whatever_the_layout(axes, hosts, batch_axes, expected, monkeypatch):
  mesh = blocks(axes, hosts)
  monkeypatch.setattr(jax, 'process_count', lambda: len(expected))
  spec = {'ids': jax.ShapeDtypeStruct((2 * mesh.size, 8), np.int32)}
  layout = make_input_layout(spec, mesh, {'map_2d': (batch_axes, None)}, ())
  positions = layout.row_positions[2 * mesh.size]
  assert sorted(positions) == list(range(2 * mesh.size))
  # Process i reads the i-th run of the batch; its rows lie where the whole mesh has this process's devices.
  whole_mesh = [
    host_data_layout(mesh, tuple(axes), host_index=host, batch_size=2 * mesh.size) for host in range(len(expected))
  ]
  for host, own in enumerate(np.split(positions, len(expected))):
    assert tuple(own) == whole_mesh[host].rows


def test_defaults_are_one_row_for_each_part_and_this_host():
  layout = host_data_layout(Mesh(np.asarray(jax.devices()).reshape(4, 2), ('data', 'mdl')), ('data',))
  assert (layout.batch_size, layout.shard_id, layout.num_shards) == (4, 0, 1)
  assert layout.is_first_host_in_replica_set
  assert layout.rows == (0, 1, 2, 3)


def test_errors():
  mesh = blocks({'data': 4, 'mdl': 4}, {'data': 2})
  with pytest.raises(ValueError, match='batch size 24 must be a multiple of 16'):
    host_data_layout(mesh, TWO_DATA_AXES, batch_size=24, host_index=0)
  with pytest.raises(ValueError, match=r'host_index 2 has no device in the mesh: choose one of \[0, 1\]'):
    host_data_layout(mesh, TWO_DATA_AXES, host_index=2)
  three_of_eight = np.asarray([FakeDevice(i, i // 3) for i in range(8)], dtype=object)
  with pytest.raises(ValueError, match='overlap or differ in size'):
    host_data_layout(Mesh(three_of_eight, ('data',)), ('data',), host_index=0)
