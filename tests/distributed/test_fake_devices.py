"""Fake devices do not starve each other of threads."""

import ctypes
import os
import subprocess
import sys

import jax
import pytest

from spmd_tasks.distributed import use_fake_devices

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
  environment = {name: value for name, value in os.environ.items() if name != 'NPROC'}
  environment['XLA_FLAGS'] = '--xla_cpu_collective_call_terminate_timeout_seconds=60'
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM], env=environment, timeout=120, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr[-2000:]
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


class Mallinfo2(ctypes.Structure):
  """What glibc's mallinfo2 returns; `hblks` counts the buffers that are mapped on their own."""

  _fields_ = [(name, ctypes.c_size_t) for name in ('arena', 'ordblks', 'smblks', 'hblks', *'abcdef')]


@pytest.mark.parametrize('num_bytes, num_mapped', [(2**23, 0), (2**25, 1)])
def test_all_but_the_largest_buffers_come_from_memory_that_is_kept(num_bytes, num_mapped):
  """A buffer that is mapped on its own goes back to the kernel when it is freed, after every step."""
  libc = ctypes.CDLL(None)
  if not hasattr(libc, 'mallinfo2') or any(name.startswith('MALLOC_') for name in os.environ):
    pytest.skip('no glibc from 2.33 on, or an allocator that the environment sets')
  libc.mallinfo2.restype = Mallinfo2
  libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
  before = libc.mallinfo2().hblks
  buffer = libc.malloc(num_bytes)
  assert libc.mallinfo2().hblks == before + num_mapped
  libc.free(buffer)
