"""Fake devices: one CPU process with any number of JAX devices, to test meshes without accelerators."""

import os

import jax

from spmd_tasks.xla_flags import add_xla_flags

_THREADS_PER_DEVICE = 3


def use_fake_devices(num_devices: int, *, num_threads: int | None = None) -> None:
  """Replaces all devices by `num_devices` CPU devices of this process; call it before JAX is asked for its devices.

  All fake devices share one pool of threads; XLA's default is one thread per device. A device can take part in several
  collectives at once, all but one of them in loops that do not wait for one another, and holds a thread in each. If
  every thread waits in a collective whose other members have no thread left, the program hangs until XLA's timeout
  aborts the process. With n devices in c collectives at once that takes at most c (n - 1) threads, for each collective
  lacks a member. Therefore the pool gets three threads per device: of the compiled train steps that were looked at,
  those of `tests/runtime`, none has more than three collectives at once. More threads cost CPU time, because XLA wakes
  idle ones in vain. `num_threads` is for programs that are compiled but not run. XLA reads the number from `NPROC`; a
  value that is set already stays.

  XLA's scheduler for concurrency, the CPU's default, is turned off unless XLA_FLAGS name it: with it, one forward, one
  backward on stage 2 x mdl 3 never ends (jax 0.10), and without it does. Presumably devices then start collectives in
  different orders.
  """
  os.environ.setdefault('NPROC', str(num_threads or _THREADS_PER_DEVICE * num_devices))
  add_xla_flags('--xla_cpu_enable_concurrency_optimized_scheduler=false')
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', num_devices)


def compile_quickly() -> None:
  """Makes XLA compile CPU programs several times faster, for slower programs; call it before JAX's first use.

  Only LLVM does less: how a program is partitioned over devices stays. Flags of the user stay too.
  """
  add_xla_flags(
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
    '--xla_cpu_parallel_codegen_split_count=1',
    '--xla_cpu_collective_call_terminate_timeout_seconds=300',
  )
