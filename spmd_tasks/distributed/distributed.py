"""Starts jax.distributed, where there is more than one process to connect.

Usage, before anything touches a device:

    settings = DistributedSettings(coordinator_address='10.0.0.1:1234', num_processes=2, process_id=0)
    is_multi_process = initialize(settings)

Without the three flags the launcher's environment decides (Slurm, Open MPI, Cloud TPU, an indexed Kubernetes Job),
through JAX's own cluster detection. Where none of them is seen, as on a laptop or in a notebook's pod, nothing is
started and nothing is waited for.
"""

from collections.abc import Mapping
import dataclasses
import glob
import importlib.util
import os
from typing import Any

from absl import logging
import jax
from jax._src import distributed
from jax.experimental import multihost_utils

from spmd_tasks.errors import UserError

CLUSTERS = ('slurm', 'ompi', 'gketpu', 'gcetpu', 'k8s')  # JAX's names, in JAX's order of preference.

_CPU_COLLECTIVE_TIMEOUT = '--xla_cpu_collective_timeout_seconds'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedSettings:
  """How the processes of one job find each other, and how long they wait for each other.

  Attributes:
    coordinator_address: `host:port` of process 0. Goes with `num_processes` and `process_id`: all three or none.
    num_processes: number of processes of the job; 1 is a single process, without jax.distributed.
    process_id: this process, in [0, num_processes).
    coordinator_bind_address: what process 0 listens on; by default the coordinator address, not every interface (in a
      detected cluster it is JAX's choice, which is every interface). To be given where that name means something else
      to process 0 itself: a 127.0.1.1 entry in /etc/hosts, address translation.
    cluster: 'auto', 'none', or one of CLUSTERS to insist on it.
    local_device_ids: GPUs of this process; None is all of them, or the cluster's rule where there is one.
    heartbeat_timeout_s: a process silent for so long is dead, and JAX ends all others. Seconds.
    shutdown_timeout_s: how long a process that ends waits for the others to end too, before it ends them: see `finish`.
    initialization_timeout_s: how long to wait for all processes to appear. Seconds.
    collective_timeout_s: a CPU collective that waits longer for another process raises. It must exceed every honest
      wait, as for a process that compiles or saves. Accelerators have their own limits; a StepWatchdog's is for both.
  """

  coordinator_address: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  coordinator_bind_address: str | None = None
  cluster: str = 'auto'
  local_device_ids: tuple[int, ...] | None = None
  heartbeat_timeout_s: int = 30
  shutdown_timeout_s: int = 10
  initialization_timeout_s: int = 300
  collective_timeout_s: int = 600

  def __post_init__(self):
    for name in ('heartbeat_timeout_s', 'shutdown_timeout_s', 'initialization_timeout_s', 'collective_timeout_s'):
      if getattr(self, name) < 1:
        raise UserError(f'{name}={getattr(self, name)} must be at least 1 second.')
    if self.cluster not in ('auto', 'none', *CLUSTERS):
      raise UserError(f"cluster={self.cluster!r} is not known: choose 'auto', 'none' or one of {', '.join(CLUSTERS)}.")
    _check_explicit(self)

  @property
  def is_explicit(self) -> bool:
    """Whether the three flags are given, so that no environment is looked at."""
    return self.coordinator_address is not None


def initialize(settings: DistributedSettings, environ: Mapping[str, str] | None = None) -> bool:
  """Connects this process to the job's others; returns whether there are any (or may be: a one-host TPU slice).

  Must come before the first use of a device. `environ` is the process's own unless a test says otherwise.

  Raises:
    UserError: the environment asks for what this installation cannot do.
    RuntimeError: JAX is already in use, or the processes did not find each other in time.
  """
  environ = os.environ if environ is None else environ
  if settings.is_explicit:
    if settings.num_processes == 1:
      return False
    connection: dict[str, Any] = {
      'coordinator_address': settings.coordinator_address,
      'num_processes': settings.num_processes,
      'process_id': settings.process_id,
      'coordinator_bind_address': settings.coordinator_bind_address or settings.coordinator_address,
      'cluster_detection_method': 'deactivate',
      'local_device_ids': settings.local_device_ids,
    }
  else:
    cluster = detect_cluster(environ) if settings.cluster == 'auto' else settings.cluster
    if cluster is None or cluster == 'none':
      return False
    if cluster == 'k8s' and importlib.util.find_spec('kubernetes') is None:
      raise UserError(
        'an indexed Kubernetes Job was detected, but not the `kubernetes` package, by which JAX finds the other pods: '
        'install `jax[k8s]`, give all of coordinator_address, num_processes and process_id, or pass '
        '--cluster none if these pods are independent jobs.'
      )
    connection = {
      'cluster_detection_method': cluster,
      'coordinator_bind_address': settings.coordinator_bind_address,
      'local_device_ids': settings.local_device_ids or _all_gpus_of_a_lone_task(environ),
    }
  _configure_cpu_collectives(settings.collective_timeout_s)
  logging.info('waiting for the other processes for at most %d s: %s', settings.initialization_timeout_s, connection)
  jax.distributed.initialize(
    heartbeat_timeout_seconds=settings.heartbeat_timeout_s,
    shutdown_timeout_seconds=settings.shutdown_timeout_s,
    initialization_timeout=settings.initialization_timeout_s,
    **connection,
  )
  return True


def finish():
  """Waits for every process to come here; to be called in all of them, last thing before a good end.

  Without it the first to end ends the others after `shutdown_timeout_s`, also one that still writes its checkpoint. A
  StepWatchdog bounds the wait: `with watchdog.allow('finish', limit_s=...): finish()`.
  """
  if jax.distributed.is_initialized():
    multihost_utils.sync_global_devices('finish')


def coordinator_host() -> str:
  """The host of process 0 as all others reach it, in a job of several processes."""
  address = distributed.global_state.coordinator_address  # where a launcher gave it, nothing public has it
  assert address is not None
  return address.rpartition(':')[0].strip('[]')


def detect_cluster(environ: Mapping[str, str]) -> str | None:
  """JAX's name of the launcher that started several processes, or None.

  Stricter than JAX's own test: a cluster's variables around a single process (an interactive shell in an allocation, a
  lone pod or task) do not count. Looks at variables and device files only; no network.
  """
  if 'OMPI_MCA_orte_hnp_uri' in environ and _count(environ, 'OMPI_COMM_WORLD_SIZE') > 1:
    return 'ompi'
  if _count(environ, 'OMPI_COMM_WORLD_SIZE') > 1:
    logging.warning(
      'Open MPI started %s processes, but in a version that JAX cannot read the coordinator from: running as a single '
      'process. Pass --coordinator_address, --num_processes and --process_id.',
      environ['OMPI_COMM_WORLD_SIZE'],
    )
  slurm_names = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID')
  if _count(environ, 'SLURM_NTASKS') > 1:
    if all(name in environ for name in slurm_names):
      return 'slurm'
    logging.warning(
      'Slurm allots %s tasks, but this process was not started by srun: running as a single process. Start it as '
      '`srun <command>` for one job over all tasks.',
      environ['SLURM_NTASKS'],
    )
  if importlib.util.find_spec('libtpu') is not None:
    hosts = environ.get('TPU_PROCESS_ADDRESSES', environ.get('TPU_WORKER_HOSTNAMES'))
    if hosts is not None:
      return 'gketpu' if ',' in hosts or _count(environ, 'MEGASCALE_NUM_SLICES') > 1 else None
    # A Cloud TPU VM learns of its slice from a metadata server, which is left to JAX; elsewhere there is no such file.
    if 'TPU_SKIP_MDS_QUERY' not in environ and (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*')):
      return 'gcetpu'
  if 'KUBERNETES_SERVICE_HOST' in environ and 'JOB_COMPLETION_INDEX' in environ:
    return 'k8s'
  return None


def _check_explicit(settings: DistributedSettings):
  """All three flags or none, and each in range."""
  given = {name: getattr(settings, name) for name in ('coordinator_address', 'num_processes', 'process_id')}
  missing = [name for name, value in given.items() if value is None]
  if len(missing) == 3:
    return
  if missing:
    present = ', '.join(f'{name}={value}' for name, value in given.items() if value is not None)
    raise UserError(
      f'{present} given without {" and ".join(missing)}: give all of coordinator_address, num_processes and '
      'process_id, or none of them to let the launcher (Slurm, Open MPI, Kubernetes, TPU) decide.'
    )
  assert settings.coordinator_address is not None
  assert settings.num_processes is not None
  assert settings.process_id is not None
  host, _, port = settings.coordinator_address.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise UserError(
      f'coordinator_address={settings.coordinator_address!r} must be host:port of process 0, such as 10.0.0.1:1234.'
    )
  if settings.num_processes < 1:
    raise UserError(f'num_processes={settings.num_processes} must be at least 1: the number of processes started.')
  if not 0 <= settings.process_id < settings.num_processes:
    raise UserError(
      f'process_id={settings.process_id} must lie in [0, {settings.num_processes}) for num_processes='
      f'{settings.num_processes}: number the processes from 0.'
    )


def _configure_cpu_collectives(timeout_s: int):
  """A limit to the waits of gloo (JAX's default); XLA reads its flags once, when the first backend starts."""
  flags = os.environ.get('XLA_FLAGS', '')
  if _CPU_COLLECTIVE_TIMEOUT not in flags:  # What the user has set by hand stays.
    os.environ['XLA_FLAGS'] = f'{flags} {_CPU_COLLECTIVE_TIMEOUT}={timeout_s}'.strip()


def _all_gpus_of_a_lone_task(environ: Mapping[str, str]) -> tuple[int, ...] | None:
  """Every visible GPU where this is its node's only task; JAX would take GPU number 0 alone and leave the others idle.

  None where it is not known; JAX then gives each task the GPU of its local number.
  """
  # Slurm writes `1(x4)` for one task on each of four nodes, `2,1` for two and one.
  tasks_per_node = environ.get('SLURM_STEP_TASKS_PER_NODE', environ.get('OMPI_COMM_WORLD_LOCAL_SIZE', ''))
  is_alone = bool(tasks_per_node) and all(part.partition('(')[0] == '1' for part in tasks_per_node.split(','))
  gpus = [gpu for gpu in environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if gpu]
  return tuple(range(len(gpus))) if is_alone and gpus else None


def _count(environ: Mapping[str, str], name: str) -> int:
  value = environ.get(name, '')
  return int(value) if value.isdecimal() else 0
