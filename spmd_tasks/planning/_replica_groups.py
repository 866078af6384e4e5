"""Reads which devices talk to one another in a collective, and along which mesh axes they lie.

XLA writes the groups in three ways; ids are positions in the mesh's flattened array of devices:

    replica_groups={{0,1},{2,3}}                       every group in full; {} is one group of all devices
    replica_groups=[2,4]<=[4,2]T(1,0)                  arange(8).reshape(4, 2).transpose(1, 0).reshape(2, 4)
    replica_groups=mesh['a'=2,'b'=4] {'b'}             a mesh of XLA's own, and the axes along which a group lies;
                                                       {'b':(2)2} is a part of an axis: 2 of its parts, after 2 others

The mesh's devices are 0, 1, 2, ... unless they follow it, in full or as an iota array:

    mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}
    mesh['a'=1,'b'=32,'c'=2], device_ids=([2,32]T(1,0)) {'b'}     arange(64).reshape(2, 32).transpose(1, 0)

A collective permute has pairs instead: source_target_pairs={{0,1},{1,2}}. The notation is that of XLA's
`CollectiveDeviceListBase::ToString` and `Mesh::ToString` (xla/hlo/ir); anything else raises a UserError.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
import math
import re

import numpy as np

from spmd_tasks.errors import UserError

_LISTS = re.compile(r'\{(?: ?\{[\d, ]*\},?)*\}')
_LIST = re.compile(r'\{([\d, ]*)\}')
_TRANSPOSE = r'(?:T\((?P<order>[\d,]+)\))?'
_IOTA = re.compile(r'\[(?P<groups>\d+),(?P<size>\d+)\]<=\[(?P<dims>[\d,]+)\]' + _TRANSPOSE)
_MESH = re.compile(r'mesh\[(?P<axes>.*?)\](?:, ?device_ids=\((?P<ids>.*?)\))? ?\{(?P<grouped>.*)\}')
_MESH_IOTA = re.compile(r'\[(?P<dims>[\d,]+)\]' + _TRANSPOSE)
_MESH_LIST = re.compile(r'\d+(?:, ?\d+)*')
_NAME = r"(?P<name>'(?:[^'\\]|\\.)*'|[^\s',:=]+)"
_MESH_AXIS = re.compile(_NAME + r'=(?P<size>\d+)')
_GROUP_AXIS = re.compile(_NAME + r'(?::\((?P<before>\d+)\)(?P<size>\d+))?')

Groups = tuple[np.ndarray, ...]


def replica_groups(attributes: Mapping[str, str], num_devices: int) -> Groups:
  """Returns the groups of devices of a collective, as int arrays of positions in the mesh.

  Args:
    attributes: the instruction's; `replica_groups` says the groups, and `device_ids` the devices of XLA's mesh.
    num_devices: of the mesh.

  Raises:
    UserError: the groups are written in another way than those above.
  """
  text = attributes.get('replica_groups', '{}')
  if 'device_ids' in attributes:
    text = f'{text}, device_ids={attributes["device_ids"]}'
  return _parse_groups(text, num_devices)


def source_target_pairs(attributes: Mapping[str, str]) -> np.ndarray:
  """Returns the pairs [N, 2] (source, target) of a collective permute, without those that stay on their device."""
  return _parse_pairs(attributes.get('source_target_pairs', '{}'))


@functools.lru_cache(maxsize=4096)
def _parse_pairs(text: str) -> np.ndarray:
  numbers = np.array(_numbers(text), dtype=np.int64).reshape(-1, 2)
  return numbers[numbers[:, 0] != numbers[:, 1]]


@functools.lru_cache(maxsize=4096)
def _parse_groups(text: str, num_devices: int) -> Groups:
  try:
    if _LISTS.fullmatch(text):
      groups = [np.array(_numbers(group), dtype=np.int64) for group in _LIST.findall(text) if group.strip()]
      return tuple(groups) or (np.arange(num_devices),)
    if iota := _IOTA.fullmatch(text):
      return tuple(_iota_array(iota).reshape(int(iota['groups']), int(iota['size'])))
    if mesh := _MESH.fullmatch(text):
      return _mesh_groups(mesh['axes'], mesh['ids'], mesh['grouped'])
    problem = 'none of the ways that are known'
  except (ValueError, KeyError) as error:
    problem = str(error)
  raise UserError(
    f'the compiled program has a collective with replica_groups={_shortened(text)}, which cannot be read ({problem}): '
    'plan with the versions of jax, jaxlib and libtpu in uv.lock, or add this notation to planning/_replica_groups.py.'
  )


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups:
  """Returns the groups along some axes, or parts of axes, of a mesh; those in a group are in the order of the axes."""
  sizes = {axis['name']: int(axis['size']) for axis in _split(axes, _MESH_AXIS)}
  along = [(axis['name'], int(axis['before'] or 1), axis['size']) for axis in _split(grouped, _GROUP_AXIS)]
  parts = [(name, before, before * int(size) if size else sizes[name]) for name, before, size in along]
  # Each axis is split wherever a part of it starts or ends; a dimension is then in a group as a whole or not at all.
  dims: dict[tuple[str, int], int] = {}
  for name, size in sizes.items():
    cuts = sorted({1, size, *(cut for part, *bounds in parts if part == name for cut in bounds)})
    if any(end % start for start, end in itertools.pairwise(cuts)):
      raise ValueError(f'parts of the axis {name} do not divide its size {size}')
    dims.update({(name, start): end // start for start, end in itertools.pairwise(cuts)})
  members = [key for part, start, end in parts for key in dims if key[0] == part and start <= key[1] < end]
  order = [list(dims).index(key) for key in [*(key for key in dims if key not in members), *members]]
  devices = _mesh_devices(device_ids, math.prod(sizes.values())).reshape(list(dims.values()))
  return tuple(devices.transpose(order).reshape(-1, math.prod(dims[key] for key in members)))


def _mesh_devices(text: str | None, num_devices: int) -> np.ndarray:
  if text is None:
    return np.arange(num_devices)
  if iota := _MESH_IOTA.fullmatch(text):
    return _iota_array(iota)
  if _MESH_LIST.fullmatch(text):
    return np.array(_numbers(text), dtype=np.int64)
  raise ValueError(f'the device_ids ({text})')


def _iota_array(found: re.Match[str]) -> np.ndarray:
  dims = _numbers(found['dims'])
  ids = np.arange(math.prod(dims)).reshape(dims)
  return ids.transpose(_numbers(found['order'])) if found['order'] else ids


def _split(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
  """Returns the matches of a pattern that make up a text, with commas between them."""
  found = list(pattern.finditer(text))
  if ','.join(each[0] for each in found) != text.replace(', ', ','):
    raise ValueError(f'the axes {text!r}')
  return found


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


def _shortened(text: str) -> str:
  return text if len(text) <= 200 else f'{text[:200]}...'
