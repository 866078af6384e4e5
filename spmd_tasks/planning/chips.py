"""Chip: the published figures of the accelerators that a plan can be made for; chips.toml has them with their sources.

    CHIPS['v5p'].peak_flops           # 459e12 bfloat16 FLOP/s
    rate_of(CHIPS['v6e'], 'hbm')      # what is reached of the published rate, and who says so: rates.toml

All rates are per device, which is a chip or one of its `cores`. `hbm_bytes` is what a program may use: less than the
data sheet's capacity, of which the runtime keeps a part.
"""

import dataclasses
import functools
from importlib import resources
import tomllib
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One kind of accelerator; None where a figure is not known or has no meaning.

  Attributes:
    name: as targets name it, such as `v5p`.
    platform: 'tpu', 'gpu' or 'cpu'.
    device_kind: as JAX calls its devices.
    hbm_bytes: memory that a program may use.
    peak_flops: dense bfloat16 FLOP/s.
    int8_flops, fp8_flops: of products of these types, where they are faster.
    hbm_bandwidth: bytes/s between the chip and its memory.
    clock_hz: cycles/s of the cycles that the TPU compiler estimates.
    mxu_size: rows and columns of a TPU's matrix units; None on GPUs, whose units are small.
    ici_bandwidth: bytes/s of one link in one direction. On a GPU, of one NVLink.
    ici_links: number of links. On a TPU two for each dim of the torus; on a GPU all lead to the node's switch, so that
      any two GPUs of a node can use all of them.
    dcn_bandwidth: bytes/s that one chip sends over the network between slices (GPU: between nodes).
    host_bandwidth: bytes/s between one chip and the memory of its host, in one direction.
    cores: of a chip, each a device of JAX with its part of the chip's figures.
    torus_dims: dims of a slice's torus: 3 or 2; 0 where a switch connects the chips.
    host_chips: chips of one host, as a shape in the torus; (8,) for a GPU node.
    sources: where the figures are published, and what is assumed.
    gpu_target_config: what XLA's compiler for CUDA must know of a GPU.
  """

  name: str
  platform: str
  device_kind: str = ''
  hbm_bytes: int | None = None
  peak_flops: float | None = None
  int8_flops: float | None = None
  fp8_flops: float | None = None
  hbm_bandwidth: float | None = None
  clock_hz: float | None = None
  mxu_size: int | None = None
  ici_bandwidth: float | None = None
  ici_links: int = 0
  dcn_bandwidth: float | None = None
  host_bandwidth: float | None = None
  cores: int = 1
  torus_dims: int = 0
  host_chips: tuple[int, ...] = ()
  sources: tuple[str, ...] = ()
  gpu_target_config: str = ''

  def peak_of(self, dtype: str) -> float | None:
    """Returns the FLOP/s of products of XLA's type of this name, such as 'bf16', 's8' or 'f8e4m3fn'."""
    own = self.fp8_flops if dtype.startswith('f8') else self.int8_flops if dtype in ('s8', 'u8') else None
    return own or self.peak_flops


CPU = Chip(name='cpu', platform='cpu')


class Rate(NamedTuple):
  """What a chip reaches of a published rate.

  Attributes:
    value: the share that is reached, or the rate itself; rates.toml says which.
    basis: 'measured', 'fitted' or 'assumed'.
    source: where that is published, or after what it is assumed.
  """

  value: float
  basis: str
  source: str


_ASSUMED = Rate(0.6, 'assumed', 'published kernels of attention and grouped products reach 0.5 to 0.75')


@functools.cache
def read_table(name: str) -> dict[str, Any]:
  """Reads a table beside this file."""
  return tomllib.loads(resources.files('spmd_tasks.planning').joinpath(name).read_text(encoding='utf-8'))


def rate_of(chip: Chip, name: str) -> Rate:
  """Returns a rate of rates.toml; for chips that it does not have, of kernels, 60% of peak."""
  entry = read_table('rates.toml').get(chip.name, {}).get(name)
  return Rate(*entry) if entry else _ASSUMED


def _chip(name: str, table: dict[str, Any]) -> Chip:
  figures = dict(table[name])
  while like := figures.pop('like', None):
    figures = table[like] | figures
  if torus_dims := figures.get('torus_dims', 0):
    figures |= {'ici_links': 2 * torus_dims, 'host_chips': (2, 2, 1) if torus_dims == 3 else (2, 2)}
  else:
    config = figures['gpu_target_config'].replace('NAME', name.upper()).replace('HBM_BYTES', str(figures['hbm_bytes']))
    config = config.replace('HBM_BANDWIDTH', f'{figures["hbm_bandwidth"]:.0f}')
    for key in ('multiprocessors', 'clock_ghz', 'l2_bytes', 'major'):
      config = config.replace(key.upper(), str(figures.pop(key)))
    figures['device_kind'] = f'NVIDIA {name.upper()}'
    figures |= {'host_chips': (figures.pop('node'),), 'gpu_target_config': config}
  if (cores := figures.get('cores', 1)) > 1:
    figures |= {key: figures[key] / cores for key in figures if key.endswith(('_flops', 'bandwidth'))}
    figures['hbm_bytes'] //= cores
  return Chip(name=name, **{**figures, 'sources': tuple(figures['sources'])})


_TABLE = read_table('chips.toml')
_FAMILIES = ('hopper', 'blackwell')
CHIPS: dict[str, Chip] = {name: _chip(name, _TABLE) for name in _TABLE if name not in _FAMILIES}
