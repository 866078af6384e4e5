"""Fake devices do not starve each other of threads."""

import ctypes
import os
import subprocess
import sys

import jax
import pytest

from spmd_tasks.distributed import use_fake_devices
from tests import binary

# Two collectives that do not wait for one another, one of them in a loop: with a thread per device this stands still
# within some steps.
PROGRAM = """
import jax, jax.numpy as jnp
from spmd_tasks.distributed.fake_devices import use_fake_devices

use_fake_devices(8)
mesh = jax.make_mesh((4, 2), ('stage', 'data'))
spec = jax.P(('stage', 'data'))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
def step(x):
  square = lambda x: jax.lax.all_gather(x[0] @ x[0], 'data').mean(0)[None]
  there = jax.lax.ppermute(square(x), 'stage', [(i, (i + 1) % 4) for i in range(4)])
  return there + jax.lax.fori_loop(0, 12, lambda i, x: square(x), x)

x = jax.device_put(jnp.ones((8, 64, 64)) / 64, jax.NamedSharding(mesh, spec))
for _ in range(200):
  y = step(x)
print(len(jax.devices()), float(y.mean()) * 64)
"""


def test_a_device_may_be_in_two_collectives_at_once():
  done = _run(PROGRAM, XLA_FLAGS='--xla_cpu_collective_call_terminate_timeout_seconds=60')
  assert done.stdout.split() == ['8', '2.0']


@pytest.mark.parametrize(
  'given', ['', '--xla_cpu_enable_concurrency_optimized_scheduler=true --xla_cpu_use_fusion_emitters=true']
)
def test_collectives_are_scheduled_as_data_flows_and_kernels_come_from_older_emitters_unless_flags_say_otherwise(
  given, monkeypatch
):
  monkeypatch.setenv('XLA_FLAGS', given)
  use_fake_devices(jax.device_count())
  chosen = '--xla_cpu_enable_concurrency_optimized_scheduler=false --xla_cpu_use_fusion_emitters=false'
  assert os.environ['XLA_FLAGS'] == (given or chosen)


def test_the_binary_asks_the_experiment_before_there_are_devices(tmp_path):
  code = """if True:
    import os, sys
    from spmd_tasks import main
    from spmd_tasks.experiment import Experiment
    from spmd_tasks.programs import train
    Experiment.favors_steps = lambda experiment: True
    train.train = lambda *args, **kwargs: print(os.environ['XLA_FLAGS']) or 0
    main.main(sys.argv[1:])
  """
  flags = ('--exp', 'lm.StdlibTiny', '--mode', 'train', '--num_fake_devices', 5, '--job_log_dir', tmp_path / 'job')
  done = binary.run_binary(*flags, command=('-c', code), env={'XLA_FLAGS': ''})
  chosen = '--xla_cpu_enable_concurrency_optimized_scheduler=false --xla_backend_optimization_level=1'
  assert done.stdout == f'{chosen}\n'


# Prints how many buffers are mapped on their own: for one of 8 MiB, for one of 32 MiB, and when steps are favored.
ALLOCATIONS = """
import ctypes
from spmd_tasks.distributed.fake_devices import favor_steps, use_fake_devices

class Mallinfo2(ctypes.Structure):
  _fields_ = [(name, ctypes.c_size_t) for name in ('arena', 'ordblks', 'smblks', 'hblks', *'abcdef')]

use_fake_devices(8)
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
for num_bytes in (2**23, 2**25, -(2**25)):
  if num_bytes < 0:
    favor_steps()
  before = libc.mallinfo2().hblks
  libc.malloc(abs(num_bytes))
  print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'mallinfo2'), reason='no glibc from 2.33 on')
def test_all_but_the_largest_buffers_come_from_memory_that_is_kept():
  """A buffer that is mapped on its own goes back to the kernel when it is freed, after every step."""
  done = _run(ALLOCATIONS, 'MALLOC_', 'GLIBC_TUNABLES')  # here, memory that other tests freed would do for both
  assert done.stdout.split() == ['0', '1', '0']


def _run(program: str, *without: str, **environment: str) -> subprocess.CompletedProcess:
  """Runs a program in a process of its own, in the environment without variables that begin so."""
  kept = {name: value for name, value in os.environ.items() if not name.startswith(('NPROC', *without))}
  command = [sys.executable, '-c', program]
  done = subprocess.run(command, env=kept | environment, timeout=120, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  return done
