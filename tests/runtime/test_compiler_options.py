"""The options that training steps for TPUs are compiled with."""

from types import SimpleNamespace
from typing import Any

from spmd_tasks.runtime.compilation import compiler_options

VECTOR_MEMORY = 'xla_tpu_scoped_vmem_limit_kib'


def device(platform: str, kind: str) -> Any:
  return SimpleNamespace(platform=platform, device_kind=kind)


def test_options_are_of_the_kind_of_chip(monkeypatch):
  monkeypatch.delenv('LIBTPU_INIT_ARGS', raising=False)
  assert compiler_options(None) is None
  assert compiler_options(device('cpu', 'cpu')) is None
  of_v5p = compiler_options(device('tpu', 'TPU v5'))
  assert of_v5p is not None
  assert VECTOR_MEMORY not in of_v5p
  assert set(of_v5p.values()) == {'true'}
  assert compiler_options(device('tpu', 'TPU v6 lite')) == of_v5p | {VECTOR_MEMORY: '98304'}


def test_an_option_that_the_environment_names_is_left_to_it(monkeypatch):
  monkeypatch.setenv('LIBTPU_INIT_ARGS', f'--{VECTOR_MEMORY}=65536 --xla_enable_async_all_gather=false')
  options = compiler_options(device('tpu', 'TPU v6 lite'))
  assert options
  assert not {VECTOR_MEMORY, 'xla_enable_async_all_gather'} & set(options)
