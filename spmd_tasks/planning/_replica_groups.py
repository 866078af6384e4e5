"""Reads which devices talk to one another in a collective, and along which mesh axes they lie.

XLA writes the groups in three ways; ids are positions in the mesh's flattened array of devices:

    replica_groups={{0,1},{2,3}}                       every group in full; {} is one group of all devices
    replica_groups=[2,4]<=[4,2]T(1,0)                  arange(8).reshape(4, 2).transpose(1, 0).reshape(2, 4)
    replica_groups=mesh['a'=2,'b'=4] {'b'}             a mesh of XLA's own, and the axes along which a group lies;
                                                       {'b':(2)2} is a part of an axis: 2 of its parts, after 2 others
A collective permute has pairs instead: source_target_pairs={{0,1},{1,2}}.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
import math
import re

import numpy as np

_IOTA = re.compile(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(r'mesh\[([^\]]*)\](?:, ?device_ids=\(([^)]*)\))? ?\{([^}]*)\}')
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^',:()]+)'?(?::\((\d+)\)(\d+))?")
_GROUP = re.compile(r'\{([\d, ]*)\}')

Groups = tuple[np.ndarray, ...]


def replica_groups(attributes: Mapping[str, str], num_devices: int) -> Groups:
  """Returns the groups of devices of a collective, as int arrays of positions in the mesh.

  Args:
    attributes: the instruction's; `replica_groups` says the groups.
    num_devices: of the mesh.
  """
  text = attributes.get('replica_groups', '{}')
  if 'device_ids' in attributes:
    text = text.replace(']', f'], device_ids={attributes["device_ids"]}', 1) if text.endswith(']') else text
    text = text if '{' in text else f'{attributes["replica_groups"]}, device_ids={attributes["device_ids"]}'
  return _parse_groups(text, num_devices)


def source_target_pairs(attributes: Mapping[str, str]) -> np.ndarray:
  """Returns the pairs [N, 2] (source, target) of a collective permute, without those that stay on their device."""
  return _parse_pairs(attributes.get('source_target_pairs', '{}'))


@functools.lru_cache(maxsize=4096)
def _parse_pairs(text: str) -> np.ndarray:
  numbers = np.array([int(number) for number in re.findall(r'\d+', text)], dtype=np.int64).reshape(-1, 2)
  return numbers[numbers[:, 0] != numbers[:, 1]]


@functools.lru_cache(maxsize=4096)
def _parse_groups(text: str, num_devices: int) -> Groups:
  if iota := _IOTA.search(text):
    shape, dims = _numbers(iota[1]), _numbers(iota[2])
    ids = np.arange(math.prod(dims)).reshape(dims)
    ids = ids.transpose(_numbers(iota[3])) if iota[3] else ids
    return tuple(ids.reshape(shape[0], -1))
  if mesh := _MESH.search(text):
    return _mesh_groups(mesh[1], mesh[2], mesh[3])
  groups = [np.array(_numbers(group), dtype=np.int64) for group in _GROUP.findall(text) if group.strip()]
  return tuple(groups) or (np.arange(num_devices),)


def _mesh_groups(axes: str, device_ids: str | None, group_axes: str) -> Groups:
  sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
  ids = np.array(_numbers(device_ids)) if device_ids else np.arange(math.prod(sizes.values()))
  # Split every axis that is named in part into what comes before the part, the part, and what comes after it.
  parts = {(name, int(pre), int(size)) for name, pre, size in _GROUP_AXIS.findall(group_axes) if size}
  whole = {name for name, _, size in _GROUP_AXIS.findall(group_axes) if not size}
  dims: list[int] = []
  grouped: list[int] = []
  for name, size in sizes.items():
    cuts = sorted({1, size, *(n for part, pre, k in parts if part == name for n in (pre, pre * k))})
    for start, end in itertools.pairwise(cuts):
      within = name in whole or any(part == name and pre <= start and end <= pre * k for part, pre, k in parts)
      if within:
        grouped.append(len(dims))
      dims.append(end // start)
  kept = [dim for dim in range(len(dims)) if dim not in grouped]
  size = math.prod(dims[dim] for dim in grouped)
  return tuple(ids.reshape(dims).transpose([*kept, *grouped]).reshape(-1, size))


def varying_axes(groups: Sequence[np.ndarray], axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the devices of a group differ; an axis counts if it does in any group."""
  shape = tuple(axis_sizes.values())
  varies = np.zeros(len(shape), dtype=bool)
  for group in groups:
    coordinates = np.stack(np.unravel_index(group, shape))
    varies |= (coordinates != coordinates[:, :1]).any(axis=1)
  return tuple(name for name, does in zip(axis_sizes, varies) if does)


def _numbers(text: str) -> list[int]:
  return [int(number) for number in re.findall(r'\d+', text)]
