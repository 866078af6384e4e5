"""Fake devices: one CPU as a mesh of as many devices as one likes."""

import os

import jax

_THREADS_PER_DEVICE = 4


def use_fake_devices(num_devices: int) -> None:
  """Replaces whatever devices there are by CPU devices of this process; before anything asks JAX for its devices.

  All of them share one pool of threads, which has one per device if XLA is left to itself. A device can be in several
  collectives at once, one of them in a loop, and holds a thread in each. If every thread waits in a collective whose
  other members have none left, the program stands still, until XLA ends the process by its timeout.
  So there are more. `NPROC`, which XLA takes their number from, is left alone where it is set.
  """
  os.environ.setdefault('NPROC', str(_THREADS_PER_DEVICE * num_devices))
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', num_devices)
