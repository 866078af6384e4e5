"""Fake devices do not starve each other of threads."""

import ctypes
import os
import subprocess
import sys

import jax
import pytest

from spmd_tasks.distributed import suit_fake_devices, use_fake_devices
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
  environment = {name: value for name, value in os.environ.items() if name != 'NPROC'}
  environment['XLA_FLAGS'] = '--xla_cpu_collective_call_terminate_timeout_seconds=60'
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM], env=environment, timeout=120, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.split() == ['8', '2.0']


@pytest.mark.parametrize('given', ['', '--xla_cpu_enable_concurrency_optimized_scheduler=true'])
def test_collectives_are_scheduled_as_data_flows_unless_the_flags_say_otherwise(given, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', given)
  use_fake_devices(jax.device_count())
  assert os.environ['XLA_FLAGS'] == (given or '--xla_cpu_enable_concurrency_optimized_scheduler=false')


def test_an_experiment_says_how_many_threads_its_steps_need(monkeypatch):
  monkeypatch.delenv('NPROC', raising=False)
  use_fake_devices(jax.device_count())
  for number in (2, 3):
    suit_fake_devices(threads_per_device=number)
    assert os.environ['NPROC'] == str(number * jax.device_count())


def test_threads_that_the_environment_sets_stay(monkeypatch):
  monkeypatch.setenv('NPROC', '5')
  use_fake_devices(jax.device_count())
  suit_fake_devices(threads_per_device=2)
  assert os.environ['NPROC'] == '5'


def test_the_binary_asks_the_experiment_before_there_are_devices(tmp_path):
  code = """if True:
    import os, sys
    os.environ.pop('NPROC', None)
    from spmd_tasks import main
    from spmd_tasks.experiment import Experiment
    from spmd_tasks.programs import train
    Experiment.fake_device_settings = lambda experiment: {'threads_per_device': 1}
    train.train = lambda *args, **kwargs: print(os.environ['NPROC']) or 0
    main.main(sys.argv[1:])
  """
  flags = ('--exp', 'lm.StdlibTiny', '--mode', 'train', '--num_fake_devices', 5, '--job_log_dir', tmp_path / 'job')
  assert binary.run_binary(*flags, command=('-c', code)).stdout == '5\n'


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
