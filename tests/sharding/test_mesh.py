"""Meshes have ICI x DCN sizes and place devices by granule; shapes that do not fit are refused with a remedy."""

from types import SimpleNamespace

import jax
from jax.sharding import AxisType
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.sharding.granules import device_array

AXES = ('replica', 'data', 'mdl')


def spec(ici, dcn=None, names=AXES):
  return MeshSpec(axis_names=names, ici_mesh_shape=ici, dcn_mesh_shape=dcn)


def expected_id(position, ici, dcn):
  """The device at a mesh position when slice s holds ids [s * n, (s + 1) * n): slow part outer, row-major in both."""
  slow, fast = np.divmod(position, ici)
  return np.ravel_multi_index(slow, dcn) * np.prod(ici) + np.ravel_multi_index(fast, ici)


LAYOUTS = [
  ((1, 4, 2), None),
  ((1, 2, 2), (2, 1, 1)),
  ((1, 2, 2), (1, 2, 1)),
  ((2, 1, 1), (1, 2, 2)),
  ((1, 1, 1), (2, 2, 2)),
]


@pytest.mark.parametrize('ici, dcn', LAYOUTS)
def test_devices_are_placed_by_slice(ici, dcn):
  mesh = spec(ici, dcn).build()
  dcn = dcn or (1, 1, 1)
  assert dict(mesh.shape) == {name: i * d for name, i, d in zip(AXES, ici, dcn)} == spec(ici, dcn).sizes(8)
  assert mesh.axis_names == AXES
  assert mesh.axis_types == (AxisType.Auto,) * 3
  for position in np.ndindex(mesh.devices.shape):
    assert mesh.devices[position].id == expected_id(position, ici, dcn), position


def fake_devices(granule_of_id, attribute, platform='fake'):
  """Devices of an unknown platform, in reverse order, so that only their attributes tell where they belong."""
  other = {'slice_index': 'process_index', 'process_index': 'slice_index'}[attribute]
  neutral = None if other == 'slice_index' else 0
  return [
    SimpleNamespace(id=i, platform=platform, device_kind='fake', **{attribute: granule, other: neutral})
    for i, granule in sorted(granule_of_id.items(), reverse=True)
  ]


@pytest.mark.parametrize('attribute', ['slice_index', 'process_index'])
@pytest.mark.parametrize('ici, dcn', [((1, 2, 2), (2, 1, 1)), ((1, 2, 2), (1, 1, 2)), ((2, 1, 1), (1, 2, 2))])
def test_dcn_axes_run_over_slices_or_else_processes(attribute, ici, dcn):
  num_granules = int(np.prod(dcn))
  granule_of_id = {i: i % num_granules for i in range(8)}  # interleaved, not consecutive
  array = device_array(ici, dcn, fake_devices(granule_of_id, attribute))
  assert array.shape == tuple(i * d for i, d in zip(ici, dcn))
  assert sorted(device.id for device in array.flat) == list(range(8))
  for position in np.ndindex(array.shape):
    slow = [index // size for index, size in zip(position, ici)]
    assert getattr(array[position], attribute) == np.ravel_multi_index(slow, dcn), position


@pytest.mark.parametrize(
  'attribute, counts', [('slice_index', '4 slice.* and 1 process'), ('process_index', 'belong to 4 process')]
)
def test_a_wrong_number_of_slices_is_refused(attribute, counts):
  devices = fake_devices({i: i % 4 for i in range(8)}, attribute)
  with pytest.raises(UserError, match=rf'dcn_mesh_shape \(2, 1, 1\) is for 2 slices.*{counts}.*: set'):
    device_array((1, 2, 2), (2, 1, 1), devices)


@pytest.mark.parametrize('granules, platform', [(4, 'cpu'), (1, 'fake')])
def test_consecutive_devices_stand_for_slices_on_cpus_and_on_one_machine(granules, platform):
  devices = fake_devices({i: i % granules for i in range(8)}, 'process_index', platform)
  array = device_array((1, 2, 2), (2, 1, 1), devices)
  assert [device.id for device in array[0].flat] == [7, 6, 5, 4]


@pytest.mark.parametrize(
  'ici, dcn, num_devices, sizes',
  [((1, -1, 2), None, 8, (1, 4, 2)), ((1, -1, 2), (2, 1, 1), 8, (2, 2, 2)), ((1, 1, -1), None, 1, (1, 1, 1))],
)
def test_a_size_of_minus_one_takes_the_remaining_devices(ici, dcn, num_devices, sizes):
  assert spec(ici, dcn).sizes(num_devices) == dict(zip(AXES, sizes))


@pytest.mark.parametrize(
  'ici, dcn, num_devices, words',
  [
    ((1, 1, 1), None, 8, ['needs 1 device but there are 8', 'or 1,-1,1 (-1 takes all remaining devices), or on a CPU']),
    ((1, 2, 2), None, 8, ['(1, 2, 2)', 'needs 4', 'there are 8', '--ici_mesh_shape', '3 sizes', 'product is 8',
                          '--num_fake_devices 4']),
    ((1, 4, 1), (1, 4, 1), 8, ['dcn_mesh_shape (1, 4, 1)', 'needs 16', 'product is 2']),
    ((1, 4, 1), (1, 3, 1), 8, ['dcn_mesh_shape (1, 3, 1)', 'needs 12', '3 slices do not divide', '--dcn_mesh_shape']),
    ((1, -1, 3), None, 8, ['(1, -1, 3)', 'there are 8', 'product is 8']),
  ],
)  # fmt: skip
def test_a_mesh_that_does_not_match_the_devices_is_refused(ici, dcn, num_devices, words):
  with pytest.raises(UserError) as error:
    spec(ici, dcn).sizes(num_devices)
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
  'names, ici, dcn, message',
  [
    (('data', 'data'), (1, 1), None, r"\('data', 'data'\) .*its own name"),
    (AXES, (1, 8), None, r'ici_mesh_shape \(1, 8\) .*one size per axis'),
    (AXES, (1, 0, 8), None, r'ici_mesh_shape \(1, 0, 8\) .*positive'),
    (AXES, (-1, -1, 8), None, r'ici_mesh_shape \(-1, -1, 8\) .*one ICI size may be -1'),
    (AXES, (1, 8, 1), (0, 1, 1), r'dcn_mesh_shape \(0, 1, 1\) .*positive'),
  ],
)
def test_bad_shapes_are_refused_on_construction(names, ici, dcn, message):
  with pytest.raises(UserError, match=message):
    spec(ici, dcn, names)


@pytest.mark.parametrize('num_fake, hint', [(-1, True), (8, False)])
def test_too_few_devices_hint_at_a_gpu_that_jax_does_not_see(monkeypatch, num_fake, hint):
  monkeypatch.setattr('spmd_tasks.sharding.mesh.glob.glob', lambda pattern: ['/dev/nvidia0'])
  monkeypatch.setattr(type(jax.config), 'jax_num_cpu_devices', num_fake)
  with pytest.raises(UserError, match='--num_fake_devices 16') as raised:
    MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=(4, 4)).build(jax.devices()[:8])
  assert ("pip install 'jax[cuda13]'" in str(raised.value)) == hint
