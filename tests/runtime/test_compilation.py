"""Every program that XLA compiles is counted once, and a call that finds its program is not."""

import threading

import jax
import numpy as np

from spmd_tasks.runtime.compilation import CompilationCounter


def test_a_new_shape_counts_one_and_a_cached_call_none():
  @jax.jit
  def triple(x):
    return x * 3

  rows, more_rows = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)
  with CompilationCounter() as compilations:
    counts = []
    for x in (rows, rows, more_rows, more_rows, rows):
      triple(x).block_until_ready()
      counts.append(compilations.num_programs)
  assert counts == [1, 1, 2, 2, 2]


def test_compilations_of_other_threads_count():
  with CompilationCounter() as compilations:
    threads = [
      threading.Thread(
        target=lambda size=size: jax.jit(lambda x: x + 7)(np.ones((size,), np.float32)).block_until_ready()
      )
      for size in (2, 3, 5)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert compilations.num_programs == 3
