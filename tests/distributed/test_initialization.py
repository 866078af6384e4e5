"""When jax.distributed is started, with which arguments, and which settings are refused."""

import os
import subprocess
import sys

import jax
import pytest

from spmd_tasks.distributed import DistributedSettings, initialization, initialize, rendezvous
from spmd_tasks.distributed.environment import backend_errors
from spmd_tasks.distributed.initialization import detect_cluster
from spmd_tasks.errors import JobError, UserError
from tests import binary

SLURM = {
  'SLURM_JOB_ID': '1234',
  'SLURM_STEP_NODELIST': 'node[001-002]',
  'SLURM_NTASKS': '2',
  'SLURM_PROCID': '1',
  'SLURM_LOCALID': '0',
}
OPEN_MPI = {
  'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1:34911',
  'OMPI_COMM_WORLD_SIZE': '2',
  'OMPI_COMM_WORLD_RANK': '1',
  'OMPI_COMM_WORLD_LOCAL_RANK': '0',
}
POD = {'KUBERNETES_SERVICE_HOST': '10.0.0.1'}


@pytest.fixture
def calls(monkeypatch):
  """The arguments of the calls of jax.distributed.initialize, which is replaced."""
  calls = []
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **arguments: calls.append(arguments))
  monkeypatch.setattr(rendezvous, 'meet', lambda *settings: None)
  monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_enable_fast_math=false')
  return calls


@pytest.fixture
def packages(monkeypatch):
  """The names that `find_spec` finds, whatever is installed."""
  names = set()
  monkeypatch.setattr(initialization.importlib.util, 'find_spec', lambda name: name if name in names else None)
  return names


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'coordinator_address': 'a:1'}, 'coordinator_address=a:1 given without num_processes and process_id: give all of'),
    ({'process_id': 0, 'num_processes': 2}, 'given without coordinator_address: give all of'),
    ({'coordinator_address': 'a:1', 'num_processes': 2, 'process_id': 2}, r'process_id=2 must be in \[0, num_proc'),
    ({'coordinator_address': 'a', 'num_processes': 2, 'process_id': 0}, "'a' must be host:port"),
    ({'coordinator_address': '::1:99', 'num_processes': 2, 'process_id': 0}, "'::1:99' must be host:port"),
    ({'cluster': 'pbs'}, "cluster='pbs' is not known: choose 'auto', 'none'"),
  ],
)
def test_bad_settings_are_refused_with_the_remedy(settings, message):
  with pytest.raises(ValueError, match=message):
    DistributedSettings(**settings)


@pytest.mark.parametrize(
  'environ, expected',
  [
    (SLURM, 'slurm'),
    ({name: value for name, value in SLURM.items() if name != 'SLURM_STEP_NODELIST'}, None),  # not under srun
    (OPEN_MPI, 'ompi'),
    (OPEN_MPI | SLURM, 'ompi'),  # mpirun inside an allocation: JAX's own order
    (POD, None),  # a notebook's pod
    (POD | {'JOB_COMPLETION_INDEX': '0'}, 'k8s'),
    ({'TPU_WORKER_HOSTNAMES': 'a,b'}, None),  # libtpu is not installed
  ],
)
def test_a_cluster_is_detected_if_it_started_several_processes(packages, environ, expected):
  assert detect_cluster(environ) == expected


@pytest.mark.parametrize(
  'environ, has_device, expected',
  [
    ({'TPU_WORKER_HOSTNAMES': 'a,b'} | POD | {'JOB_COMPLETION_INDEX': '0'}, True, 'gketpu'),
    ({'TPU_WORKER_HOSTNAMES': 'localhost'}, True, None),
    ({'TPU_WORKER_HOSTNAMES': 'localhost', 'MEGASCALE_NUM_SLICES': '2'}, True, 'gketpu'),
    ({}, True, 'gcetpu'),
    ({}, False, None),  # libtpu on a laptop
    ({'TPU_SKIP_MDS_QUERY': '1'}, True, None),
  ],
)
def test_tpu_hosts_are_detected(monkeypatch, packages, environ, has_device, expected):
  packages.add('libtpu')
  monkeypatch.setattr(initialization.glob, 'glob', lambda pattern: ['/dev/accel0'] if has_device else [])
  assert detect_cluster(environ) == expected


@pytest.mark.parametrize(
  'settings, environ',
  [
    (DistributedSettings(), {}),
    (DistributedSettings(cluster='none'), SLURM),
    (DistributedSettings(coordinator_address='a:1', num_processes=1, process_id=0), SLURM),
  ],
)
def test_a_single_process_starts_nothing(calls, packages, settings, environ):
  assert initialize(settings, environ) is False
  assert calls == []


def test_explicit_flags_win_over_the_environment_and_bind_one_address_only(calls):
  settings = DistributedSettings(coordinator_address='127.0.0.1:1234', num_processes=2, process_id=1)
  assert initialize(settings, SLURM) is True
  assert calls == [
    dict.fromkeys(('coordinator_address', 'coordinator_bind_address'), '127.0.0.1:1234')
    | {'num_processes': 2, 'process_id': 1, 'cluster_detection_method': 'deactivate', 'local_device_ids': None}
    | {'heartbeat_timeout_seconds': 30, 'shutdown_timeout_seconds': 10, 'initialization_timeout': 300}
  ]
  assert os.environ['XLA_FLAGS'].split() == [
    '--xla_cpu_enable_fast_math=false',
    '--xla_cpu_collective_timeout_seconds=600',
  ]


@pytest.mark.parametrize(
  'environ, expected',
  [
    ({}, None),  # JAX's rule: the GPU of the task's local rank
    ({'SLURM_STEP_TASKS_PER_NODE': '1(x2)', 'CUDA_VISIBLE_DEVICES': '0,1,2,3'}, (0, 1, 2, 3)),
    ({'SLURM_STEP_TASKS_PER_NODE': '4(x2)', 'CUDA_VISIBLE_DEVICES': '0,1,2,3'}, None),
    ({'SLURM_STEP_TASKS_PER_NODE': '1(x2)'}, (0, 1, 2)),  # nothing hides a GPU
    ({'SLURM_STEP_TASKS_PER_NODE': '4(x2)'}, None),
  ],
)
def test_the_only_task_of_a_node_uses_all_its_gpus(calls, environ, expected, monkeypatch):
  monkeypatch.setattr('glob.glob', lambda pattern: [f'/dev/nvidia{i}' for i in range(3)] if 'nvidia' in pattern else [])
  initialize(DistributedSettings(), SLURM | environ)
  assert calls[0]['cluster_detection_method'] == 'slurm'
  assert calls[0]['local_device_ids'] == expected


def test_an_indexed_job_without_the_kubernetes_package_is_refused(calls, packages):
  with pytest.raises(ValueError, match=r'install `jax\[k8s\]`.*or pass --cluster none'):
    initialize(DistributedSettings(), POD | {'JOB_COMPLETION_INDEX': '0'})
  assert calls == []


@pytest.mark.parametrize('environ', [SLURM, OPEN_MPI])
def test_jax_detects_the_cluster_that_we_detect(environ, monkeypatch):
  for name, value in environ.items():
    monkeypatch.setenv(name, value)
  from jax._src import clusters

  address, num_processes, process_id, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
    None, None, None, None, detect_cluster(environ), 1
  )
  assert (num_processes, process_id) == (2, 1)
  assert address.rpartition(':')[0] in ('node001', '10.96.0.1')


def test_libtpu_is_not_started_on_a_machine_without_a_tpu():
  program = 'from spmd_tasks.distributed import *; initialize(DistributedSettings()); import jax; print(jax.devices())'
  environment = {name: value for name, value in os.environ.items() if name not in ('JAX_PLATFORMS', 'XLA_FLAGS')}
  done = subprocess.run(
    [sys.executable, '-c', program], cwd=binary.REPOSITORY, env=environment, capture_output=True, text=True, check=True
  )
  assert done.stdout == '[CpuDevice(id=0)]\n'
  assert done.stderr == ''


def test_out_of_memory_is_a_job_error():
  with (
    pytest.raises(JobError, match=r'\(RESOURCE_EXHAUSTED: Out of memory\): lower batch_size'),
    backend_errors(),
  ):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out\nof memory')


@pytest.mark.parametrize('variable', ['JAX_PLATFORMS', 'JAX_PLATFORM_NAME'])
def test_a_platform_without_devices_is_refused_by_its_variable(monkeypatch, variable):
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  monkeypatch.setenv(variable, 'gpu')
  monkeypatch.setattr(jax, 'devices', lambda: jax.local_devices(backend='gpu'))
  with pytest.raises(UserError, match=f'no devices with {variable}=gpu .*: unset it'), backend_errors():
    jax.devices()


@pytest.mark.parametrize('error', [ValueError("'junk' is no int"), KeyError('OMPI_COMM_WORLD_RANK')])
def test_unreadable_variables_of_a_launcher_are_refused(monkeypatch, error):
  def fails(**_):
    raise error

  monkeypatch.setattr(jax.distributed, 'initialize', fails)
  with pytest.raises(UserError, match=r'launcher ompi .* --cluster none'):
    rendezvous.connect(DistributedSettings(), 'ompi', {})
