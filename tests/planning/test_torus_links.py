"""Bandwidths of collectives on tori, by hand: whole rings, lines, parts of rings, groups that stride over a dim."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spmd_tasks.planning.chips import CHIPS
from spmd_tasks.planning.networks import Links


def torus(shape: tuple[int, ...]) -> Any:
  """A mesh whose position p has the coordinates of p in row-major order."""
  coordinates = [tuple(map(int, place)) for place in np.ndindex(*shape)]
  return SimpleNamespace(devices=np.array([SimpleNamespace(coords=place) for place in coordinates]))


def links(chip: str, shape: tuple[int, ...], places: tuple, kind: str = 'all_gather') -> float:
  """Links of one direction that a device of the group at these places of every dim uses at once."""
  group = tuple(np.arange(np.prod(shape)).reshape(shape)[np.ix_(*places)].flat)
  collective: Any = SimpleNamespace(kind=kind, network='ici', group=group, bytes_per_device=1e9)
  found = Links(torus(shape), CHIPS[chip])
  one = CHIPS[chip].ici_bandwidth or 0
  assert found.seconds(collective) == pytest.approx(1e9 / (found.bandwidth(collective) or 0))
  return (found.bandwidth(collective) or 0) / one


ALL4, ALL8, ALL16 = range(4), range(8), range(16)


@pytest.mark.parametrize(
  'chip, shape, places, wanted',
  [
    ('v5p', (8, 8, 4), (ALL8, ALL8, ALL4), 6),  # the whole slice: three rings
    ('v5p', (8, 8, 4), (ALL8, ALL8, (0, 1)), 5),  # moe.Mixtral8x7B's data: half a ring has no wrap link
    ('v5p', (8, 8, 4), (ALL8, ALL8, (0, 2)), 5),  # pipeline.Dense70B's: a ring of 2, shared by two groups
    ('v5p', (8, 8, 4), ((0,), (0,), (0, 2)), 1),
    ('v5p', (8, 8, 4), (range(4), (0,), (0,)), 1),
    ('v5p', (8, 8, 4), ((0, 2, 4, 6), (0,), (0,)), 1),  # a ring of 4 with longer links, shared by two groups
    ('v5p', (8, 8, 4), ((0, 4), (0,), (0,)), 0.5),  # 4 groups on one ring
    ('v5p', (8, 8, 4), ((0, 1, 4, 5), (0,), (0,)), 1),  # by the whole ring, shared by two
    ('v5p', (4, 4, 2), (ALL4, ALL4, (0, 1)), 5),  # a dim of 2 has one link
    ('v5e', (8, 4), (ALL8, ALL4), 2),  # less than a pod: lines
    ('v6e', (16, 16), (ALL16, ALL16), 4),
  ],
)
def test_links_of_a_gather(chip, shape, places, wanted):
  assert links(chip, shape, places) == pytest.approx(wanted)
  assert links(chip, shape, places, 'all_reduce') == pytest.approx(wanted)


# How a dim's places are split into groups; the first is the group that is looked at.
WHOLE4, WHOLE8, WHOLE16 = (ALL4,), (ALL8,), (ALL16,)
HALVES, ODD_AND_EVEN = (range(4), range(4, 8)), ((0, 2, 4, 6), (1, 3, 5, 7))
OPPOSITE = ((0, 4), (1, 5), (2, 6), (3, 7))
TWO_APART = ((0, 2), (1, 3), (4, 6), (5, 7))
SINGLE4 = ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
  'chip, splits',
  [
    ('v5p', (WHOLE4, WHOLE4, WHOLE4)),
    ('v5p', (WHOLE8, SINGLE4)),
    ('v5p', (ODD_AND_EVEN, WHOLE4)),
    ('v5p', (OPPOSITE, SINGLE4)),
    ('v5p', (TWO_APART, SINGLE4)),
    ('v5e', (WHOLE8, WHOLE4)),
    ('v6e', (WHOLE16,)),
  ],
)
def test_an_exchange_takes_as_long_as_its_busiest_link(chip, splits):
  """Every piece of every group is sent, dim after dim, the short way round, and links count what passes."""
  shape = tuple(sum(map(len, split)) for split in splits)
  traffic = np.zeros((len(shape), *shape, 2))  # through the link after each device, up and down the dim
  for places in itertools.product(*splits):
    group = list(itertools.product(*places))
    for source, target in itertools.permutations(group, 2):
      send(traffic, source, target, shape, chip, 1 / len(group))
  sent = 1 - 1 / len(group)
  assert links(chip, shape, tuple(split[0] for split in splits), 'all_to_all') == pytest.approx(sent / traffic.max())


def send(traffic: np.ndarray, source: tuple, target: tuple, shape: tuple[int, ...], chip: str, amount: float) -> None:
  here = list(source)
  for dim, size in enumerate(shape):
    up, down = (target[dim] - here[dim]) % size, (here[dim] - target[dim]) % size
    if not (size % 4 == 0 if chip == 'v5p' else size == 16):  # a line
      up, down = (up, size) if target[dim] > here[dim] else (size, down)
    for hops, step in ((up, 0), (down, 1)):
      if hops <= min(up, down):
        for hop in range(hops):
          at = [*here[:dim], (here[dim] + hop if step == 0 else here[dim] - hop - 1) % size, *here[dim + 1 :]]
          traffic[(dim, *at, step)] += amount / (2 if up == down else 1)
    here[dim] = target[dim]


def test_other_networks():
  far: Any = SimpleNamespace(kind='all_to_all', network='dcn', group=(0, 1), bytes_per_device=1e9)
  assert Links(torus((4, 4, 4)), CHIPS['v5p']).bandwidth(far) == CHIPS['v5p'].dcn_bandwidth
  near: Any = SimpleNamespace(kind='all_to_all', network='ici', group=(0, 1), bytes_per_device=1e9)
  assert Links(torus((8,)), CHIPS['h100']).bandwidth(near) == 450e9  # 18 links to the switch
  fake: Any = SimpleNamespace(devices=np.array([SimpleNamespace()] * 4))
  assert Links(fake, CHIPS['v5p']).bandwidth(near) == CHIPS['v5p'].ici_bandwidth
