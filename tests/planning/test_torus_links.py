"""Bandwidths of collectives on tori, by hand: whole rings, lines, parts of rings, groups that stride over a dim."""

import itertools

import numpy as np
import pytest

from spmd_tasks.planning import parse_target
from spmd_tasks.planning.chips import CHIPS
from spmd_tasks.planning.networks import Networks, links_of_group
from spmd_tasks.sharding import MeshSpec


def links(chip: str, shape: tuple[int, ...], places: tuple, is_exchange: bool = False) -> float:
  """Links of one direction that a device of the group at these places of every dim uses at once."""
  return links_of_group(CHIPS[chip], shape, list(itertools.product(*places)), is_exchange)


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
  assert links(chip, shape, tuple(split[0] for split in splits), is_exchange=True) == pytest.approx(
    sent / traffic.max()
  )


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


def mesh_spec(ici: tuple[int, ...], dcn: tuple[int, ...] | None = None) -> MeshSpec:
  return MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=ici, dcn_mesh_shape=dcn)


def test_networks_of_mesh_axes():
  """Rates of links (0.89 of the published ones are reached on v5p), of the network between slices and of a GPU node."""
  one = CHIPS['v5p'].ici_bandwidth * 0.89
  slices = Networks(parse_target('2x v5p:4x4x4'), mesh_spec((1, 16, 4), (2, 1, 1)))
  assert slices.crosses_slices(('replica',))
  assert slices.seconds('all_reduce', ('replica',), 4.11e9) == pytest.approx((0, 1))
  assert not slices.crosses_slices(('data', 'mdl'))
  assert slices.seconds('all_gather', ('mdl',), one) == pytest.approx((1 / 2, 0))  # a whole dim, a ring
  assert slices.seconds('all_gather', ('data', 'mdl'), one) == pytest.approx((1 / 6, 0))
  assert slices.seconds('collective_permute', ('mdl',), one) == pytest.approx((1, 0))
  node = Networks(parse_target('h100:8'), mesh_spec((1, 8, 1)))
  assert node.seconds('all_to_all', ('data',), 0.8 * 450e9) == pytest.approx((1, 0))  # 18 links to the switch
  cores = Networks(parse_target('tpu7x:2x2x1'), mesh_spec((1, 4, 2)))
  assert cores.seconds('all_gather', ('mdl',), 1e9) < cores.seconds('all_gather', ('data',), 1e9)  # of one chip


def test_a_gather_over_slices_sends_each_piece_to_the_other_slices_once():
  """Two slices of 64: of 127 pieces that a device receives, 1 crosses; of 127 that it exchanges, 64 do."""
  slices = Networks(parse_target('2x v5p:4x4x4'), mesh_spec((1, 16, 4), (1, 2, 1)))
  one = Networks(parse_target('v5p:4x4x4'), mesh_spec((1, 16, 4)))
  for kind, crossing in (('all_gather', 1), ('all_reduce', 1), ('all_to_all', 64)):
    (within, _) = one.seconds(kind, ('data', 'mdl'), 127 - crossing)
    assert slices.seconds(kind, ('data', 'mdl'), 127) == pytest.approx((within, crossing / 4.11e9))
