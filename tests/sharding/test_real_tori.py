"""The stand-in devices of the mesh tests agree with libtpu's compile-only devices, and meshes of these build."""

import importlib.util
import os

import pytest

from spmd_tasks.sharding import MeshSpec
from tests.sharding.stand_in_devices import tpu_devices

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed: pip install libtpu'
)


@pytest.fixture(scope='module')
def compile_only(tmp_path_factory):
  """A function from a topology to libtpu's devices."""
  os.environ.update(TPU_SKIP_MDS_QUERY='1', TPU_WORKER_HOSTNAMES='localhost', ALLOW_MULTIPLE_LIBTPU_LOAD='1')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5p-8')
  from jax.experimental import topologies

  def devices(chip, topology, num_slices=1):
    settings = {'num_slices': num_slices} if num_slices > 1 else {}
    if chip == 'v4':
      settings['chip_config_name'] = 'megacore'  # one device per chip, as v4 pods have
    return topologies.get_topology_desc(platform='tpu', topology_name=f'{chip}:{topology}', **settings).devices

  return devices


@pytest.mark.parametrize(
  'chip, topology, num_slices',
  [
    ('v5e', '4x8', 1),
    ('v5e', '2x4', 1),
    ('v5p', '8x8x4', 1),
    ('v5p', '4x4x2', 2),
    ('v6e', '4x8', 1),
    ('v4', '2x4x4', 1),
  ],
)
def test_stand_ins_have_what_real_devices_have(compile_only, chip, topology, num_slices):
  def seen(device):
    fields = ('id', 'device_kind', 'platform', 'process_index', 'core_on_chip', 'slice_index')
    return tuple(device.coords), {field: getattr(device, field, None) for field in fields}

  real, stand_ins = compile_only(chip, topology, num_slices), tpu_devices(chip, topology, num_slices)
  assert list(map(seen, real)) == list(map(seen, stand_ins))


def test_the_mesh_of_pipeline_dense70b_builds_on_the_slices_that_it_names(compile_only):
  names = ('replica', 'stage', 'data', 'mdl')
  spec = MeshSpec(axis_names=names, ici_mesh_shape=(1, 2, 32, 4), dcn_mesh_shape=(1, 4, 1, 1))
  mesh = spec.build(compile_only('v5p', '8x8x4', 4))
  assert dict(mesh.shape) == dict(zip(names, (1, 8, 32, 4)))
