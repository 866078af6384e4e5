"""CompilationCounter counts every XLA compilation once; train steps get the compiler options of their devices."""

from concurrent.futures import ThreadPoolExecutor
import os
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from spmd_tasks.runtime.compilation import CompilationCounter, compiler_options
from spmd_tasks.runtime.tpu_options import invalid_option_error

VECTOR_MEMORY = 'xla_tpu_scoped_vmem_limit_kib'


def test_new_shapes_count_and_cached_calls_do_not():
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
  with CompilationCounter() as compilations, ThreadPoolExecutor(3) as pool:
    list(pool.map(lambda size: jax.jit(lambda x: x + 7)(np.ones((size,), np.float32)).block_until_ready(), (2, 3, 5)))
  assert compilations.num_programs == 3


def devices(platform: str, kind: str, number: int = 1) -> Any:
  return [SimpleNamespace(platform=platform, device_kind=kind, process_index=i // 8) for i in range(number)]


def test_options_depend_on_the_kind_of_chip(monkeypatch):
  monkeypatch.delenv('LIBTPU_INIT_ARGS', raising=False)
  assert compiler_options([]) is None
  v5p = compiler_options(devices('tpu', 'TPU v5'))
  assert v5p is not None
  assert VECTOR_MEMORY not in v5p
  assert set(v5p.values()) <= {'true', 'false'}
  v6e = compiler_options(devices('tpu', 'TPU v6 lite'))
  assert v6e is not None
  assert v6e.items() > v5p.items()
  assert v6e[VECTOR_MEMORY] == '98304'
  assert compiler_options(devices('tpu', 'TPU v6 lite'), {VECTOR_MEMORY: '32768'}) == v6e | {VECTOR_MEMORY: '32768'}
  assert compiler_options(devices('gpu', 'H100'), {VECTOR_MEMORY: '32768'}) is None


def test_an_unknown_option_is_named():
  step = jax.jit(lambda x: x, compiler_options={'xla_tpu_nonsense': 'true'}).lower(1)
  with pytest.raises(jax.errors.JaxRuntimeError) as raised:
    step.compile()
  assert "No such compile option: 'xla_tpu_nonsense'" in str(invalid_option_error(raised.value))
  assert invalid_option_error(jax.errors.JaxRuntimeError('INTERNAL')) is None


def test_options_in_the_environment_are_left_out(monkeypatch):
  monkeypatch.setenv('LIBTPU_INIT_ARGS', f'--{VECTOR_MEMORY}=65536 --xla_enable_async_all_gather=false')
  options = compiler_options(devices('tpu', 'TPU v6 lite'), {VECTOR_MEMORY: '32768'})
  assert options
  assert not {VECTOR_MEMORY, 'xla_enable_async_all_gather'} & set(options)


@pytest.mark.parametrize(
  'num_cores, num_devices, flags, disabled',
  [
    (8, 8, '', 'cpu-parallel-task-assigner'),
    (9, 8, '', None),
    (9, 16, '', None),  # on two processes
    (2, 8, '--xla_disable_hlo_passes=', None),
  ],
)
def test_a_cpu_device_with_one_core_computes_on_one_thread(num_cores, num_devices, flags, disabled, monkeypatch):
  monkeypatch.setattr(os, 'cpu_count', lambda: num_cores)
  monkeypatch.setenv('XLA_FLAGS', flags)
  options = compiler_options(devices('cpu', 'cpu', num_devices))
  assert options == (None if disabled is None else {'xla_disable_hlo_passes': disabled})
