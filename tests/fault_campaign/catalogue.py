"""Registers the kinds of faults, and assigns a kind to each number.

    @kind('kill/at a random instant', share=4)
    def kill_at_a_random_instant(scene: Scene) -> str:
      ...                                        # raises BrokenPromiseError, or says why the promise was held

A fault is a function of the campaign's seed and the fault's number alone, so any one of them can be run again.
"""

from collections.abc import Callable
import dataclasses
import importlib
import random

from tests.fault_campaign.scene import Scene

FAMILIES = ('kills', 'damage', 'disks', 'directories', 'inputs', 'clients', 'decoding', 'processes', 'tuning', 'stores')

_KINDS: dict[str, 'Kind'] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """One kind of fault.

  Attributes:
    name: 'family/what happens'.
    inject: makes the fault in a scene; returns why the promise was held.
    share: how often it is drawn, compared with others.
  """

  name: str
  inject: Callable[[Scene], str]
  share: int


def kind(name: str, *, share: int = 2) -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
  """Registers a function as a kind of fault."""

  def register(inject: Callable[[Scene], str]) -> Callable[[Scene], str]:
    assert name not in _KINDS, name
    _KINDS[name] = Kind(name=name, inject=inject, share=share)
    return inject

  return register


def kinds() -> list[Kind]:
  """Returns all kinds, sorted by name."""
  for family in FAMILIES:
    importlib.import_module(f'tests.fault_campaign.{family}')
  return [_KINDS[name] for name in sorted(_KINDS)]


def kind_of(seed: int, number: int) -> Kind:
  """Returns the kind of fault `number`: each round has every kind `share` times, in a random order."""
  one_round = [member for member in kinds() for _ in range(member.share)]
  place = number % len(one_round)
  random.Random(f'{seed} round {number // len(one_round)}').shuffle(one_round)
  return one_round[place]


def rng_of(seed: int, number: int) -> random.Random:
  return random.Random(f'{seed} fault {number}')
