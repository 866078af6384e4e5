"""What a compiled program really multiplies: FLOPs of its matrix products on one device, every turn of a loop counted.

XLA's own cost analysis counts the body of a loop once, which is of no use where the question is how often it turns.
"""

import functools
import math
import re

_COMPUTATION = re.compile(r'^(?:ENTRY )?%(\S+) \(.*\{$')
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%(\S+) = (\S+) ([\w-]+)\((.*)$')
_CALLED = re.compile(r'\b(?:calls|to_apply|body)=%([\w.-]+)')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def executed_matmul_flops(hlo_text: str) -> int:
  """FLOPs, two per multiply-add, of all `dot`s that one run of the program executes on one device.

  Raises:
    ValueError: a loop with products in it does not say how often it turns.
  """
  computations = _parse(hlo_text)
  entry = next(line.split()[1].lstrip('%') for line in hlo_text.splitlines() if line.startswith('ENTRY '))

  @functools.cache
  def flops(computation: str) -> int:
    shapes, total = {}, 0
    for name, shape, opcode, rest in computations[computation]:
      shapes[name] = _dims(shape)
      if opcode == 'dot':
        total += _dot_flops(shapes, name, rest)
      else:
        inner = sum(flops(called) for called in _CALLED.findall(rest))
        if inner and opcode == 'while':
          trips = _TRIP_COUNT.search(rest)
          if trips is None:
            raise ValueError(f'the loop {name} has matrix products, but no known trip count.')
          inner *= int(trips.group(1))
        total += inner
    return total

  return flops(entry)


def _parse(hlo_text: str) -> dict[str, list[tuple[str, ...]]]:
  """Computation -> its instructions (name, shape, opcode, what follows the opening parenthesis)."""
  computations: dict[str, list[tuple[str, ...]]] = {}
  current: list[tuple[str, ...]] = []
  for line in hlo_text.splitlines():
    # A tuple's shape has spaces and comments; no product has one, and only its name matters.
    line = re.sub(r'= \(.*?\) (?=[\w-]+\()', '= tuple ', re.sub(r'/\*.*?\*/', '', line))
    if header := _COMPUTATION.match(line):
      current = computations.setdefault(header.group(1), [])
    elif instruction := _INSTRUCTION.match(line):
      current.append(instruction.groups())
  return computations


def _dims(shape: str) -> tuple[int, ...]:
  found = re.search(r'\[([\d,]*)\]', shape)
  return tuple(int(size) for size in found.group(1).split(',') if size) if found else ()


def _dot_flops(shapes: dict[str, tuple[int, ...]], name: str, rest: str) -> int:
  lhs = re.search(r'%([\w.-]+)', rest)
  contracting = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', rest)
  assert lhs is not None, rest
  sizes = [shapes[lhs.group(1)][int(dim)] for dim in contracting.group(1).split(',')] if contracting else []
  return 2 * math.prod(shapes[name]) * math.prod(sizes)
