"""Every test process gets 8 fake CPU devices; implicit rank promotion raises.

XLA's optimisation level is low: compilation is most of what the tests wait for, and it halves that. Fake devices wait
long for one another, because a busy machine may not run one of them for XLA's 40 seconds, after which it aborts.
Processes that tests start inherit all that.
"""

import gc
import os
from pathlib import Path

os.environ.setdefault(
  'XLA_FLAGS',
  '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true '
  '--xla_cpu_collective_call_terminate_timeout_seconds=300',
)

import jax
import numpy as np
import pytest

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')


_MAPS = Path('/proc/self/maps')
_MAX_MAPS = 20_000


@pytest.fixture(autouse=True, scope='module')
def compiled_programs_are_given_up():
  """Linux lets a process have 65,530 memory maps, of which a compiled program takes ten; then LLVM dies wordlessly."""
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b'\n') > _MAX_MAPS:
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def rng() -> np.random.Generator:
  return np.random.default_rng(0)
