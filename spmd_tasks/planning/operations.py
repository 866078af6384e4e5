"""The operations of one device in a step, the bytes that they move in its memory, and what it holds at the peak.

    memory_passes(block), live_at_peak(block)

traced_step.py makes them of a jaxpr. Elementwise operations are fused with what reads them, as compilers do: only what
a product, a kernel, a loop, a collective or the block's result needs is in memory.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

Axes = tuple[tuple[str, ...], ...]  # per dim, the mesh axes that split it


@dataclasses.dataclass(eq=False)
class Array:
  """A value of the step.

  Attributes:
    shape: of the whole array; in a `shard_map` without the manual axes.
    dtype: as of numpy.
    axes: per dim, the mesh axes that split it.
    parts: into how many parts each dim is split.
    partial: mesh axes over which the true value is the sum of the devices' values.
    summed_as: the dtype in which such sums were computed; None: `dtype`.
    on_host: whether it lies in the host's memory.
    value: of a constant; None if it is not known.
    is_uniform: whether it is a broadcast scalar or an iota, which is computed where it is read.
  """

  shape: tuple[int, ...]
  dtype: Any
  axes: Axes
  parts: tuple[int, ...]
  partial: frozenset[str] = frozenset()
  summed_as: Any = None
  on_host: bool = False
  value: np.ndarray | None = None
  is_uniform: bool = False

  @property
  def local_shape(self) -> tuple[int, ...]:
    return tuple(-(-size // parts) for size, parts in zip(self.shape, self.parts))

  @property
  def local_bytes(self) -> float:
    """Bytes of a device's memory."""
    if self.is_uniform or self.on_host:
      return 0
    return self.size_bytes

  @property
  def size_bytes(self) -> float:
    """Bytes of one device's part."""
    return math.prod(self.local_shape) * itemsize(self.dtype)


@dataclasses.dataclass(eq=False, kw_only=True)
class Operation:
  """One operation of one device.

  Attributes:
    kind: 'product'; 'attention' or 'grouped' for these kernels; 'gather' for rows in any order; 'elementwise', 'view',
      'reduction'; 'collective'; 'host' for a copy to the host's memory or back; 'loop'.
    name: JAX's name stack.
    inputs, outputs: the arrays.
    flops: of products and kernels.
    sizes: of a product, its rows, columns and contracted size; of attention, the head dim alone.
    dtype: of the product's operands.
    collective, group: kind and mesh axes of a collective.
    bytes: that one device sends in a collective, copies to or from the host's memory, or reads and writes in a
      'grouped' product.
    to_host: the direction of such a copy.
    body, count: of a loop.
  """

  kind: str
  name: str
  inputs: tuple[Array, ...] = ()
  outputs: tuple[Array, ...] = ()
  flops: float = 0.0
  sizes: tuple[float, ...] = ()
  dtype: str = ''
  collective: str = ''
  group: tuple[str, ...] = ()
  bytes: float = 0.0
  to_host: bool = False
  body: 'Block | None' = None
  count: int = 1


@dataclasses.dataclass(eq=False)
class Block:
  """Operations in their order: of the whole step, or of the body of a loop with the results of one iteration."""

  operations: list[Operation] = dataclasses.field(default_factory=list)
  inputs: tuple[Array, ...] = ()
  outputs: tuple[Array, ...] = ()

  @functools.cached_property
  def peak(self) -> 'tuple[Live, ...]':
    """What one run holds when it needs the most memory, see `live_at_peak`."""
    return tuple(live_at_peak(self))

  def walk(self, count: int = 1) -> Iterator[tuple[Operation, int]]:
    """Yields each operation that is no loop, and how often it runs."""
    for operation in self.operations:
      if operation.body is None:
        yield operation, count
      else:
        yield from operation.body.walk(count * operation.count)


def itemsize(dtype: Any) -> float:
  try:
    return jax.dtypes.itemsize_bits(dtype) / 8
  except (TypeError, ValueError, AttributeError):
    return 8  # a key


_FUSED = frozenset({'elementwise', 'view', 'reduction'})


def memory_passes(block: Block) -> float:
  """Returns the bytes that elementwise operations read and write in one run of a block, without loops inside.

  Elementwise operations are fused with what reads them: only what a product, a kernel, a loop, a collective or the
  block's result needs is written, and a fusion reads each array that was written once.
  """
  written = _materialized(block)
  producers = {id(x): operation for operation in block.operations for x in operation.outputs}
  total = 0.0
  reads: dict[tuple[int, tuple[int, ...]], float] = {}
  for operation in block.operations:
    if operation.kind not in _FUSED:
      continue
    for x in operation.outputs:
      if id(x) not in written:
        continue
      leaves, work = _leaves(x, producers, written)
      if not work:
        continue
      if operation.kind != 'reduction':
        total += x.local_bytes if not operation.bytes else operation.bytes
      for leaf in leaves.values():
        key = id(leaf), x.local_shape if operation.kind != 'reduction' else leaf.local_shape
        is_read_already = (
          operation.kind == 'reduction'
          and id(leaf) in written
          and id(leaf) in producers
          and producers[id(leaf)].kind in _FUSED
        )
        if not is_read_already:
          reads[key] = leaf.local_bytes if not operation.bytes else 0
  return total + sum(reads.values())


def _materialized(block: Block) -> set[int]:
  """Returns the ids of the arrays that are written to memory: results of products and kernels, and what these read."""
  written = {id(x) for x in (*block.inputs, *block.outputs)}
  for operation in block.operations:
    if operation.kind not in _FUSED:
      written.update(id(x) for x in (*operation.inputs, *operation.outputs))
    elif operation.kind == 'reduction':
      written.update(id(x) for x in operation.outputs)
  return written


def _leaves(x: Array, producers: Mapping[int, Operation], written: set[int]) -> tuple[dict[int, Array], bool]:
  """Returns the written arrays from which a fusion computes `x`, and whether it computes anything."""
  leaves: dict[int, Array] = {}
  work, stack, seen = False, [x], {id(x)}
  while stack:
    operation = producers.get(id(stack.pop()))
    if operation is None or operation.kind not in _FUSED:
      continue
    work |= operation.kind != 'view'
    for source in operation.inputs:
      if id(source) in seen:
        continue
      seen.add(id(source))
      producer = producers.get(id(source))
      if id(source) in written or producer is None or producer.kind not in _FUSED:
        leaves[id(source)] = source
      else:
        stack.append(source)
  return leaves, work


class Live(NamedTuple):
  """An array that a device holds when it needs the most memory, and the operation that made it."""

  array: Array
  operation: Operation


def live_at_peak(block: Block) -> list[Live]:
  """Returns what one run of a block holds at its peak beside its inputs, with the peak of the loop that runs then."""
  written = _materialized(block)
  producers = {id(x): operation for operation in block.operations for x in operation.outputs}
  source: dict[int, Array] = {}  # of views
  for operation in block.operations:
    if operation.kind == 'view' and operation.inputs:
      viewed = operation.inputs[0]
      if id(viewed) in written or id(viewed) in source:  # a view of what is fused is written itself
        source.update({id(x): viewed for x in operation.outputs if x.local_bytes == viewed.local_bytes})

  def root(x: Array) -> Array:
    while id(x) in source:
      x = source[id(x)]
    return x

  last_use: dict[int, int] = {}
  for i, operation in enumerate(block.operations):
    for x in operation.inputs:  # what is fused reads its leaves when the fusion runs
      for leaf in [x] if id(x) in written else _leaves(x, producers, written)[0].values():
        last_use[id(root(leaf))] = i
  last_use |= {id(root(x)): len(block.operations) for x in block.outputs}
  # Elementwise results take the place of what they update: a step's of donated arguments, a loop body's of its carry.
  in_place = {id(x) for x in block.outputs if id(x) in producers and producers[id(x)].kind in _FUSED}
  allocated = {id(x) for x in block.inputs} | source.keys() | in_place
  live: dict[int, Live] = {}
  peak, best, best_body = -1.0, [], None
  total = 0.0
  freed: dict[int, list[int]] = {}
  for i, operation in enumerate(block.operations):
    for x in operation.outputs:
      if id(x) in written and id(x) in last_use and id(x) not in allocated and x.local_bytes:
        live[id(x)] = Live(x, operation)
        total += x.local_bytes
        freed.setdefault(last_use[id(x)], []).append(id(x))
    inner = 0.0 if operation.body is None else sum(each.array.local_bytes for each in operation.body.peak)
    if total + inner > peak:
      peak, best, best_body = total + inner, [*live.values()], operation.body
    for key in freed.pop(i, ()):
      total -= live.pop(key).array.local_bytes
  return best + (list(best_body.peak) if best_body is not None else [])
