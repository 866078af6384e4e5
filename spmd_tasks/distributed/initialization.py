"""Starts jax.distributed if the job has more than one process.

Usage, before anything touches a device:

    settings = DistributedSettings(coordinator_address='10.0.0.1:1234', num_processes=2, process_id=0)
    is_multi_process = initialize(settings)

Without the three fields, the launcher's environment decides (Slurm, Open MPI, Cloud TPU, an indexed Kubernetes Job),
through JAX's own cluster detection. Without a launcher, as in a notebook's pod, `initialize` starts nothing.
"""

from collections.abc import Mapping
import dataclasses
import glob
import importlib.metadata
import importlib.util
import os
import pkgutil
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils

from spmd_tasks.distributed.rendezvous import check_explicit, connect
from spmd_tasks.errors import UserError
from spmd_tasks.xla_flags import add_xla_flags

CLUSTERS = ('slurm', 'ompi', 'gketpu', 'gcetpu', 'k8s')  # JAX's names, in JAX's order of preference

_TPU_FILES = ('/dev/accel*', '/dev/vfio/[0-9]*')
_GPU_FILES = ('/dev/nvidia0', '/dev/nvidiactl', '/dev/dxg')
_MAX_FAKE_DEVICES = 10_000  # more take hours to create, and all memory
_THREADS_PER_DEVICE = 3  # of fake devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedSettings:
  """How the processes of a job find each other, and how long they wait for each other."""

  coordinator_address: str | None = None  # `host:port` of process 0; set this and the next two fields, or none
  num_processes: int | None = None  # of the job; 1 means a single process without jax.distributed
  process_id: int | None = None  # this process, in [0, num_processes)
  # The address that process 0 listens on. Default: the coordinator address; in a detected cluster JAX listens on every
  # interface. Set it if process 0 itself resolves the coordinator's name to another address, such as by a 127.0.1.1
  # entry in /etc/hosts or address translation.
  coordinator_bind_address: str | None = None
  cluster: str = 'auto'  # or 'none', or one of CLUSTERS to require that launcher
  local_device_ids: tuple[int, ...] | None = None  # GPUs of this process; None: all, or the cluster's rule
  heartbeat_timeout_s: int = 30  # a process that sends no heartbeat for so long counts as dead; JAX ends the others
  shutdown_timeout_s: int = 10  # how long a process that ends waits for the others before it ends them: see `finish`
  initialization_timeout_s: int = 300  # for all processes to appear
  # A CPU collective that waits longer for another process raises. Must exceed every normal wait, such as for a process
  # that compiles or saves. Accelerators have their own limits.
  collective_timeout_s: int = 600

  def __post_init__(self):
    for name in ('heartbeat_timeout_s', 'shutdown_timeout_s', 'initialization_timeout_s', 'collective_timeout_s'):
      if getattr(self, name) < 1:
        raise UserError(f'{name}={getattr(self, name)} must be at least 1 second.')
    if self.cluster not in ('auto', 'none', *CLUSTERS):
      raise UserError(f"cluster={self.cluster!r} is not known: choose 'auto', 'none' or one of {', '.join(CLUSTERS)}.")
    if (self.coordinator_address, self.num_processes, self.process_id) != (None, None, None):
      check_explicit(self)

  @property
  def is_explicit(self) -> bool:
    """Whether the three fields are set, so that the launcher's environment is ignored."""
    return self.coordinator_address is not None


def initialize(settings: DistributedSettings, environ: Mapping[str, str] | None = None) -> bool:
  """Connects this process to the other processes of the job; returns whether there may be others.

  Call this before the first use of a device; a second call does nothing. `environ` replaces the process's environment
  in tests. Raises the errors of rendezvous.py's `connect`.
  """
  if jax.distributed.is_initialized():
    return True
  environ = os.environ if environ is None else environ
  skip_absent_tpu()
  if settings.is_explicit:
    cluster, is_alone = 'deactivate', settings.num_processes == 1
  else:
    cluster = (detect_cluster(environ) if settings.cluster == 'auto' else settings.cluster) or 'none'
    is_alone = cluster == 'none'
  if is_alone and (settings.local_device_ids or (settings.coordinator_bind_address and not settings.is_explicit)):
    raise UserError('local_device_ids and coordinator_bind_address are for jobs of several processes: leave them out.')
  if is_alone:
    return False

  connect(settings, cluster, environ)
  return True


def coordination() -> Any:
  """Returns JAX's state of the coordination service: client, process_id, num_processes; None in a single process.

  Unlike `jax.process_index`, this starts no backend.
  """
  # No public name of JAX (0.10 to 0.12) reaches the client, whose key-value store and barriers need no backend:
  # jax.distributed only starts and ends it, and jax.experimental.multihost_utils runs its collectives on devices.
  from jax._src import distributed

  return distributed.global_state if distributed.global_state.client is not None else None


def skip_absent_tpu() -> None:
  """Keeps JAX from starting libtpu, which is installed for planning, on a machine without a TPU.

  libtpu would print errors there. Call this before the first use of a device. Does nothing if JAX_PLATFORMS is set, or
  if a plugin for another accelerator is installed.
  """
  config: Any = jax.config
  if config.jax_platforms or importlib.util.find_spec('libtpu') is None or 'JAX_FORCE_TPU_INIT' in os.environ:
    return
  if any(map(glob.glob, _TPU_FILES)):
    return
  installed = importlib.util.find_spec('jax_plugins')
  folders = [] if installed is None else list(installed.submodule_search_locations or ())
  plugins = {module.name for module in pkgutil.iter_modules(folders)}
  plugins |= {point.name for point in importlib.metadata.entry_points(group='jax_plugins')}
  if any('cuda' not in plugin for plugin in plugins):
    return
  has_gpu = any(map(os.path.exists, _GPU_FILES))
  if has_gpu and not plugins:
    logging.warning("JAX cannot use this machine's NVIDIA GPU: pip install 'jax[cuda13]'.")
  jax.config.update('jax_platforms', 'cuda,cpu' if has_gpu and plugins else 'cpu')


def use_fake_devices(num_devices: int, *, num_threads: int | None = None) -> None:
  """Replaces all devices by `num_devices` CPU devices of this process; call it before JAX initializes its devices.

  All fake devices share one pool of threads. A device may take part in several collectives at once, and holds a thread
  in each. If every thread waits in a collective whose other devices have no thread left, the program hangs until XLA
  aborts it; n devices in c collectives at once need c (n - 1) + 1 threads. The pool has three threads per device, as
  no train step of `tests/runtime` has more than three collectives at once; more threads cost CPU time. `num_threads`
  is for programs that are compiled but not run. XLA reads the number from `NPROC`, which is kept if it is set.

  XLA's concurrency-optimized scheduler, the CPU's default, is turned off unless XLA_FLAGS names it. With it, the
  one-forward-one-backward schedule on stage 2 x mdl 3 hangs (jax 0.10), presumably because devices start collectives
  in different orders.
  """
  if not 1 <= num_devices <= _MAX_FAKE_DEVICES:
    raise UserError(f'num_fake_devices={num_devices} must be in [1, {_MAX_FAKE_DEVICES:,}].')
  os.environ.setdefault('NPROC', str(num_threads or _THREADS_PER_DEVICE * num_devices))
  add_xla_flags('--xla_cpu_enable_concurrency_optimized_scheduler=false')
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', num_devices)


def finish():
  """Waits until every process has called this, then shuts jax.distributed down. The last call of a successful job.

  Otherwise the first process to end would end the others after `shutdown_timeout_s`, even if they still write a
  checkpoint or close files. A StepWatchdog bounds the wait: `with watchdog.allow('finish', limit_s=...)`.
  """
  if jax.distributed.is_initialized():
    multihost_utils.sync_global_devices('finish')
    jax.distributed.shutdown()


def detect_cluster(environ: Mapping[str, str]) -> str | None:
  """Returns JAX's name of the launcher that started several processes, or None.

  Stricter than JAX's own detection: a cluster's variables do not count for a single process (an interactive shell in an
  allocation, a single pod or task). Reads only variables and device files, not the network.
  """
  if 'OMPI_MCA_orte_hnp_uri' in environ and _count(environ, 'OMPI_COMM_WORLD_SIZE') > 1:
    return 'ompi'
  if _count(environ, 'OMPI_COMM_WORLD_SIZE') > 1:
    logging.warning(
      'Open MPI started %s processes, but JAX cannot read the coordinator from this version: running as a single '
      'process. Pass --coordinator_address, --num_processes and --process_id.',
      environ['OMPI_COMM_WORLD_SIZE'],
    )
  slurm_names = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID')
  if _count(environ, 'SLURM_NTASKS') > 1:
    if all(name in environ for name in slurm_names):
      return 'slurm'
    logging.warning(
      'Slurm allocated %s tasks, but srun did not start this process: running as a single process. Start it as '
      '`srun <command>` to run one job on all tasks.',
      environ['SLURM_NTASKS'],
    )
  if importlib.util.find_spec('libtpu') is not None:
    hosts = environ.get('TPU_PROCESS_ADDRESSES', environ.get('TPU_WORKER_HOSTNAMES'))
    if hosts is not None:
      return 'gketpu' if ',' in hosts or _count(environ, 'MEGASCALE_NUM_SLICES') > 1 else None
    # JAX asks a metadata server for the slice of a Cloud TPU VM. Other machines have no such device file.
    if 'TPU_SKIP_MDS_QUERY' not in environ and any(map(glob.glob, _TPU_FILES)):
      return 'gcetpu'
  if 'KUBERNETES_SERVICE_HOST' in environ and 'JOB_COMPLETION_INDEX' in environ:
    return 'k8s'
  if 'JAX_COORDINATOR_ADDRESS' in environ:
    logging.warning(
      'JAX_COORDINATOR_ADDRESS is set, but no launcher gives the number of processes: running as a single process. '
      'Pass --coordinator_address, --num_processes and --process_id.'
    )
  return None


def _count(environ: Mapping[str, str], name: str) -> int:
  value = environ.get(name, '')
  return int(value) if value.isdecimal() else 0
