"""Fake devices: one CPU process with any number of JAX devices, to test meshes without accelerators."""

import os

import jax

_THREADS_PER_DEVICE = 4


def use_fake_devices(num_devices: int) -> None:
  """Replaces all devices by `num_devices` CPU devices of this process; call it before JAX is asked for its devices.

  All fake devices share one pool of threads; XLA's default is one thread per device. A device can take part in several
  collectives at once, one of them in a loop, and holds a thread in each. If every thread waits in a collective whose
  other members have no thread left, the program hangs until XLA's timeout aborts the process. Therefore the pool gets
  four threads per device. XLA reads their number from `NPROC`; a value that is set already stays.
  """
  os.environ.setdefault('NPROC', str(_THREADS_PER_DEVICE * num_devices))
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', num_devices)
