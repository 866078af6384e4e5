"""Chip: the published figures of the accelerators that a plan can be made for; chips.toml has them with their sources.

    CHIPS['v5p'].peak_flops       # 459e12 bfloat16 FLOP/s

All rates are per device, which is a chip or one of its `cores`. `hbm_bytes` is what a program may use: less than the
data sheet's capacity, of which the runtime keeps a part.
"""

import dataclasses
from importlib import resources
import tomllib
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One kind of accelerator; None where a figure is not known or has no meaning.

  Attributes:
    name: as targets name it, such as `v5p`.
    platform: 'tpu', 'gpu' or 'cpu'.
    hbm_bytes: memory that a program may use.
    peak_flops: dense bfloat16 FLOP/s.
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
  hbm_bytes: int | None = None
  peak_flops: float | None = None
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


CPU = Chip(name='cpu', platform='cpu')


def _chip(name: str, table: dict[str, Any]) -> Chip:
  figures = table[name] | table.get(table[name].get('like'), {})
  figures.pop('like', None)
  if torus_dims := figures.get('torus_dims', 0):
    figures |= {'ici_links': 2 * torus_dims, 'host_chips': (2, 2, 1) if torus_dims == 3 else (2, 2)}
  else:
    config = figures['gpu_target_config'].replace('NAME', name.upper()).replace('HBM_BYTES', str(figures['hbm_bytes']))
    config = config.replace('HBM_BANDWIDTH', f'{figures["hbm_bandwidth"]:.0f}')
    figures |= {'host_chips': (8,), 'gpu_target_config': config}
  if (cores := figures.get('cores', 1)) > 1:
    figures |= {key: figures[key] / cores for key in figures if key.endswith(('_flops', 'bandwidth'))}
    figures['hbm_bytes'] //= cores
  return Chip(name=name, **{**figures, 'sources': tuple(figures['sources'])})


_TABLE = tomllib.loads(resources.files('spmd_tasks.planning').joinpath('chips.toml').read_text(encoding='utf-8'))
CHIPS: dict[str, Chip] = {name: _chip(name, _TABLE) for name, figures in _TABLE.items() if 'platform' in figures}
