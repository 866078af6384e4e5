"""Fake devices: one CPU process with any number of JAX devices, to test meshes without accelerators."""

import ctypes
import os

import jax

from spmd_tasks.distributed._open_shardings import leave_out_open_shardings
from spmd_tasks.distributed._random_bits import draw_bits_without_loops

_THREADS_PER_DEVICE = 3
_SCHEDULER = '--xla_cpu_enable_concurrency_optimized_scheduler=false'
_EMITTERS = '--xla_cpu_use_fusion_emitters=false'
_LLVM_LEVEL = '--xla_backend_optimization_level=1'
_LARGEST_KEPT_BYTES, _LARGEST_KEPT_FOR_STEPS = 16 * 2**20, 48 * 2**20
_HEAPS_PER_CORE = 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_added_flags: set[str] = set()  # to XLA_FLAGS
_QUICK_COMPILATION = (
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  _EMITTERS,
  '--xla_cpu_parallel_codegen_split_count=1',
  '--xla_cpu_collective_call_terminate_timeout_seconds=300',
)


def use_fake_devices(num_devices: int, *, num_threads: int | None = None) -> None:
  """Replaces all devices by `num_devices` CPU devices of this process; call it before JAX is asked for its devices.

  All fake devices share one pool of threads; XLA's default is one thread per device. A device can take part in several
  collectives at once, all but one of them in loops that do not wait for one another, and holds a thread in each. If
  every thread waits in a collective whose other members have no thread left, the program hangs until XLA's timeout
  aborts the process. With n devices in c collectives at once that takes at most c (n - 1) threads, for each collective
  lacks a member. Therefore the pool gets three threads per device: of the compiled train steps that were looked at
  (docs/benchmarks.md) none has more than three collectives at once. More threads cost CPU time, because XLA wakes idle
  ones in vain. `num_threads` is for programs that are compiled but not run. XLA reads the number from `NPROC`; a value
  that is set already stays.

  XLA's scheduler for concurrency, the CPU's default, is turned off unless XLA_FLAGS name it: with it, one forward, one
  backward on stage 2 x mdl 3 never ends (jax 0.10), and without it does. Presumably devices then start collectives in
  different orders.

  The C library keeps freed buffers of less than 16 MiB, unless the environment sets its allocator: by default it
  returns all from 128 KiB on to the kernel, which clears the pages that the next step asks for (11% of the CPU time of
  a small model). Larger ones it still returns: few find a hole of their size, and the heap would grow to twice what is
  used, for 4% of a step's time, and more beside other work.

  XLA's older emitters of kernels compile a train step in 0.6 of the CPU time of the newer ones, the default
  (docs/benchmarks.md); flags of the user stay. `favor_steps` takes both back, where steps matter more than starts.

  Random numbers are the same, but compiled in half the time (`_random_bits.py`). The programs of pipelines have fewer
  operations to compile (`_open_shardings.py`).
  """
  draw_bits_without_loops()
  leave_out_open_shardings()
  _keep_freed_memory(_LARGEST_KEPT_BYTES)
  os.environ.setdefault('NPROC', str(num_threads or _THREADS_PER_DEVICE * num_devices))
  _add_xla_flags(_SCHEDULER, _EMITTERS)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', num_devices)


def favor_steps() -> None:
  """Makes steps of fake devices faster, for slower compilation and more memory; call it before JAX has its devices.

  Kernels come from XLA's newer emitters, and freed buffers up to 48 MiB are kept: together 0.84 of the CPU time of a
  step of a dense Pax model. LLVM's level 1 makes these kernels in 0.85 of the time, and they run as fast. Without
  effect on other devices than CPUs, and on what the environment sets.
  """
  if jax.config.jax_platforms == 'cpu':  # type: ignore[attr-defined]
    _keep_freed_memory(_LARGEST_KEPT_FOR_STEPS)
  if _EMITTERS in _added_flags:
    os.environ['XLA_FLAGS'] = os.environ['XLA_FLAGS'].replace(_EMITTERS, '').strip()
    _add_xla_flags(_LLVM_LEVEL)


def compile_quickly() -> None:
  """Makes XLA compile CPU programs five to ten times faster, for slower programs; call it before JAX's first use.

  Only LLVM does less: how a program is partitioned over devices stays. Flags of the user stay too.
  """
  _add_xla_flags(*_QUICK_COMPILATION)


def return_freed_memory() -> None:
  """Gives back to the kernel what the C library keeps unused, such as the compiler's memory; where it is glibc.

  Once, before a loop of steps: their buffers are other ones, and lie beside what the compiler leaves (150 to 300 MB).
  """
  trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
  if trim is not None:
    trim(0)


def _keep_freed_memory(up_to: int) -> None:
  """Sets glibc's thresholds for mmap and for trimming the heap to large values; other C libraries have none.

  Two heaps (arenas) per core: with glibc's eight, half as much memory again stays unused; with one for all threads,
  those that compile wait for its lock, and a program of many kernels takes 1.2 of the CPU time.
  """
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  is_set = any(name.startswith('MALLOC_') or name == 'GLIBC_TUNABLES' for name in os.environ)
  if mallopt is not None and not is_set:
    mallopt(_M_MMAP_THRESHOLD, up_to)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_ARENA_MAX, _HEAPS_PER_CORE * (os.cpu_count() or 1))


def _add_xla_flags(*flags: str) -> None:
  """Adds flags to XLA_FLAGS, but for those that are set there already."""
  given = os.environ.get('XLA_FLAGS', '')
  new = [flag for flag in flags if flag.partition('=')[0] not in given]
  _added_flags.update(new)
  os.environ['XLA_FLAGS'] = ' '.join([given, *new]).strip()
