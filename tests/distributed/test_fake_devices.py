"""Fake devices have enough threads, and XLA gets only flags that it knows."""

import os
import tomllib

import jax
import pytest

from spmd_tasks import xla_flags
from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.xla_flags import UNKNOWN_FROM
from tests import binary

# Two independent collectives, one of them in a loop: with one thread per device this hangs within a few steps.
PROGRAM = """
import jax, jax.numpy as jnp
from spmd_tasks.distributed.initialization import use_fake_devices

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
for _ in range(50):
  y = step(x)
print(len(jax.devices()), float(y.mean()) * 64)
"""


def test_a_device_may_be_in_two_collectives_at_once():
  environment = {name: value for name, value in os.environ.items() if name != 'NPROC'}
  environment['XLA_FLAGS'] = '--xla_cpu_collective_call_terminate_timeout_seconds=60'
  done = binary.run_python(PROGRAM, env=environment, limit_s=120)
  assert (done.returncode, done.stdout.split()) == (0, ['8', '2.0']), done.stderr


@pytest.mark.parametrize('flags', ['', '--xla_cpu_enable_concurrency_optimized_scheduler=true --xla_abc=1'])
def test_the_concurrency_optimized_scheduler_is_off_unless_flags_name_it(flags, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', flags)
  use_fake_devices(jax.device_count())
  assert os.environ['XLA_FLAGS'] == (flags or '--xla_cpu_enable_concurrency_optimized_scheduler=false')


@pytest.mark.parametrize('jaxlib, known', [((0, 10, 2), (1, 1, 0)), ((0, 11, 0), (0, 1, 1)), (UNKNOWN_FROM, (0, 0, 0))])
def test_a_flag_is_set_only_if_this_jaxlib_has_it(jaxlib, known, monkeypatch):
  flags = (
    '--xla_cpu_use_fusion_emitters=false', '--xla_backend_optimization_level=0', '--xla_cpu_opt_preset=FAST_COMPILE'
  )  # fmt: skip
  monkeypatch.setenv('XLA_FLAGS', '')
  monkeypatch.setattr(xla_flags, 'JAXLIB', jaxlib)
  xla_flags.add_xla_flags(*flags)
  xla_flags.add_xla_flags(*flags)
  assert os.environ['XLA_FLAGS'].split() == [flag for flag, is_known in zip(flags, known, strict=True) if is_known]


def test_flags_are_known_for_the_jax_versions_of_pyproject():
  project = tomllib.loads((binary.REPOSITORY / 'pyproject.toml').read_text())['project']
  assert f'jax>=0.10.2,<{UNKNOWN_FROM[0]}.{UNKNOWN_FROM[1]}' in project['dependencies']
