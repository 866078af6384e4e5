"""Targets: how they are written, what a wrong one is answered with, and the compile-only devices that they name."""

import math
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.planning import parse_target, targets
from spmd_tasks.planning.chips import CHIPS
from spmd_tasks.planning.targets import has_compiler, target_of
from spmd_tasks.runtime.compilation import compiler_options
from spmd_tasks.runtime.flops import peak_flops_per_device

UNROLLING = 'xla_sc_disable_mlo_loop_unroll'
needs_libtpu = pytest.mark.skipif(not has_compiler('tpu'), reason="libtpu is not installed: pip install '.[plan-tpu]'")


@pytest.mark.parametrize(
  'text, name, num_devices, num_slices, slice_shape',
  [
    ('v5p:4x4x2', 'v5p:4x4x2', 32, 1, (4, 4, 2)),
    ('2x v5p:8x8x4', '2x v5p:8x8x4', 512, 2, (8, 8, 4)),
    ('h100:8x4', 'h100:8x4', 32, 4, (8,)),
    ('cpu:2048', 'cpu:2048', 2048, 1, (2048,)),
    ('cpu', 'cpu:12', 12, 1, (12,)),
  ],
)
def test_a_target_is_read(text, name, num_devices, num_slices, slice_shape):
  target = parse_target(text, num_cpu_devices=12)
  assert (target.name, target.num_devices, target.num_slices, target.slice_shape) == (
    name,
    num_devices,
    num_slices,
    slice_shape,
  )
  assert parse_target(target.name) == target


@pytest.mark.parametrize(
  'text, parts',
  [
    ('v5p:32', ['a torus of 3 dims', 'v5p:4x4x2']),
    ('v9:4x4', ["the chip 'v9'", 'v5p, v6e, tpu7x, h100, h200, b200, gb200, cpu']),
    ('v5p:4x4x2x', ['CHIP:SHAPE', '2x v5p:8x8x4']),
    ('v5p:3x5x7', ['whole hosts of 2x2x1 chips', 'v5p:4x4x2']),
    ('v6e:999999x999999', ['999,998,000,001 devices', 'at most 1,000,000']),
    ('h100:32', ['NVLink connects 8', 'h100:8x4']),
  ],
)
def test_a_wrong_target_is_one_sentence_with_a_remedy(text, parts):
  with pytest.raises(UserError) as raised:
    parse_target(text)
  for part in parts:
    assert part in str(raised.value)
  assert '\n' not in str(raised.value)


@pytest.mark.parametrize(
  'chip, num_devices, num_slices, name',
  [
    ('v5p', 32, 1, 'v5p:4x4x2'),
    ('v5p', 1024, 4, '4x v5p:8x8x4'),
    ('v6e', 512, 2, '2x v6e:16x16'),
    ('v5p', 6, 1, None),
    ('h100', 32, 1, 'h100:8x4'),
  ],
)
def test_the_target_with_so_many_chips(chip, num_devices, num_slices, name):
  assert target_of(CHIPS[chip], num_devices, num_slices) == name


def test_without_its_compiler_a_target_says_what_installs_it(monkeypatch):
  monkeypatch.setattr('spmd_tasks.planning.targets.has_compiler', lambda platform: platform == 'cpu')
  with pytest.raises(UserError, match=r"not installed: pip install 'spmd-tasks\[plan-tpu\]', or .* cpu:8,"):
    parse_target('v5p:2x2x2').devices()


def test_more_fake_devices_than_jax_has_started_with():
  assert len(parse_target('cpu:8').devices()) == 8
  with pytest.raises(UserError, match='needs 9 fake devices but JAX has started with 8: plan in a new process'):
    parse_target('cpu:9').devices()


def test_the_figures_of_the_chips_agree_with_those_of_training_and_are_published():
  kinds = {
    'v4': 'TPU v4',
    'v5e': 'TPU v5 lite',
    'v5p': 'TPU v5',
    'v6e': 'TPU v6 lite',
    'tpu7x': 'TPU7x',
    'h100': 'H100',
    'h200': 'H200',
    'b200': 'B200',
    'gb200': 'GB200',
  }
  assert kinds.keys() == CHIPS.keys()
  for name, chip in CHIPS.items():
    assert chip.peak_flops == peak_flops_per_device(kinds[name])
    assert chip.sources
    assert chip.ici_links == (18 if chip.platform == 'gpu' else 2 * chip.torus_dims)


@needs_libtpu
@pytest.mark.parametrize(
  'text', ['v5p:2x2x1', 'v5e:1x1', 'v5e:8x4', 'v6e:4x4', 'v4:2x2x2', 'tpu7x:2x2x1', '2x v5p:2x2x2']
)
def test_libtpu_makes_the_devices(text):
  target = parse_target(text)
  devices = target.devices()
  assert len(devices) == target.num_devices
  assert {device.platform for device in devices} == {'tpu'}
  assert {peak_flops_per_device(device.device_kind) for device in devices} == {target.chip.peak_flops}
  if target.num_slices > 1:
    assert len({device.slice_index for device in devices}) == target.num_slices
  coordinates = [device.coords[: target.chip.torus_dims] for device in devices]
  extent = [1 + max(sizes) for sizes in zip(*coordinates)]
  assert math.prod(extent) * target.num_slices * target.chip.cores == target.num_devices


@pytest.mark.parametrize('given', ['', '--xla_tpu_scoped_vmem_limit_kib=65536', f'--{UNROLLING}=false'])
def test_sparse_cores_loops_are_not_unrolled_unless_the_environment_says_so(given, monkeypatch):
  monkeypatch.setenv('LIBTPU_INIT_ARGS', given)
  monkeypatch.setattr(targets.topologies, 'get_topology_desc', lambda *_, **__: SimpleNamespace(devices=[]))
  for _ in range(2):
    targets._tpu_devices(CHIPS['tpu7x'], (2, 2, 1), 1)
  ours = [] if UNROLLING in given else [f'--{UNROLLING}=true']
  assert os.environ['LIBTPU_INIT_ARGS'].split() == given.split() + ours


@needs_libtpu
@pytest.mark.parametrize('text', ['v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1'])
def test_the_compiler_takes_the_options_of_each_chip(text):
  devices = parse_target(text).devices()
  rows = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ('data',)), jax.sharding.PartitionSpec('data'))
  weight = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=rows)
  step = jax.jit(lambda x, w: x @ w, out_shardings=rows)
  assert 'all-gather' in step.lower(weight, weight).compile(compiler_options(devices)).as_text()
