"""Splits XLA's HLO text into its parts: shapes, operands and attributes, whatever quotes and brackets they hold.

One instruction is one line:

    ROOT %dot.3 = bf16[8,128]{1,0:T(8,128)(2,1)} dot(%x, %y), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot"}
         name     shape        layout            opcode operands, attributes

A layout names the dims from minor to major; on TPU also the tiles to which memory is padded, `T(8,128)`, and a memory
space, `S(1)`: 0 or absent is the device's main memory (HBM), 1 the vector memory on the chip, 5 the host.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import re

_BITS = {
  'pred': 8, 's2': 2, 'u2': 2, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16, 'bf16': 16, 'f16': 16,
  's32': 32, 'u32': 32, 'f32': 32, 's64': 64, 'u64': 64, 'f64': 64, 'c64': 64, 'c128': 128, 'token': 0, 'opaque': 0,
  'f4e2m1fn': 4, 'tuple': 0,
}  # fmt: skip
_ARRAY = re.compile(r'([a-z][a-z0-9]*)\[([^\]]*)\](\{[^}]*\})?')
_TILE = re.compile(r'T\(([^)]*)\)')
_MEMORY_SPACE = re.compile(r'S\((\d+)\)')
_COMMENT = re.compile(r'/\*.*?\*/')
_BRACKETS = re.compile(r'["()\[\]{}]')
_SPLIT = re.compile(r'["({\[,]')
_OPEN, _CLOSE = '([{', ')]}'


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape of a value: an array, or a tuple of shapes.

  Attributes:
    dtype: XLA's name, such as 'f32'; 'tuple' for a tuple, 'token' or 'opaque' for what has no bytes.
    dims: the sizes of an array's dims.
    layout: the text in braces after them, such as '1,0:T(8,128)'.
    elements: the shapes in a tuple.
  """

  dtype: str
  dims: tuple[int, ...] = ()
  layout: str = ''
  elements: tuple['Shape', ...] = ()

  def leaves(self) -> Iterator['Shape']:
    """Yields the arrays in the shape, from left to right."""
    if self.dtype != 'tuple':
      yield self
    for element in self.elements:
      yield from element.leaves()

  @property
  def size(self) -> int:
    """The number of elements of an array."""
    return math.prod(self.dims)

  @property
  def bits(self) -> int:
    """The bits of one element. Dtypes unknown here (new 8-bit floats, mostly) count by the digits of their name."""
    known = _BITS.get(self.dtype)
    if known is None:
      digits = re.match(r'[a-z]+(\d+)', self.dtype)
      known = int(digits[1]) if digits else 0
    return known

  @property
  def num_bytes(self) -> int:
    """The bytes of the values, without the padding of tiles; of a tuple, those of all its arrays."""
    return sum((leaf.size * leaf.bits + 7) // 8 for leaf in self.leaves())

  @functools.cached_property
  def stored_bytes(self) -> int:
    """The bytes in memory, with every array padded to its tiles."""
    return sum((math.prod(leaf.tiled_dims) * leaf.bits + 7) // 8 for leaf in self.leaves())

  @property
  def tiled_dims(self) -> tuple[int, ...]:
    """An array's dims, rounded up to the tile of its layout."""
    tile = _TILE.search(self.layout)
    minor_to_major = [int(dim) for dim in self.layout.split(':')[0].split(',') if dim.strip().isdigit()]
    if not tile or len(minor_to_major) != len(self.dims):
      return self.dims
    dims = list(self.dims)
    sizes = [int(size) if size.strip().isdigit() else 1 for size in tile[1].split(',')]
    for dim, size in zip(minor_to_major, reversed(sizes)):
      dims[dim] = -(-dims[dim] // size) * size
    return tuple(dims)

  @property
  def memory_space(self) -> int:
    """XLA's number of the memory that holds the array; 0 is the device's main memory."""
    space = _MEMORY_SPACE.search(self.layout)
    return int(space[1]) if space else 0

  def __str__(self) -> str:
    if self.dtype == 'tuple':
      return f'({", ".join(map(str, self.elements))})'
    return f'{self.dtype}[{",".join(map(str, self.dims))}]'


NO_SHAPE = Shape('opaque')
HOST_MEMORY = 5  # a layout's memory space, `S(5)`


@functools.lru_cache(maxsize=50_000)
def parse_shape(text: str) -> Shape:
  """Parses a shape, such as `(f32[2,3]{1,0}, s32[])`; what is no shape gives an opaque one."""
  text = _COMMENT.sub('', text).strip()
  if text.startswith('('):
    return Shape('tuple', elements=tuple(parse_shape(part) for part in split_top(text[1:-1])))
  found = _ARRAY.match(text)
  if not found:
    return NO_SHAPE
  sizes = [size.strip().lstrip('<=') for size in found[2].split(',') if size.strip()]  # <=5 is a dynamic size
  dims = tuple(int(size) if size.isdigit() else 1 for size in sizes)
  return Shape(found[1], dims, (found[3] or '{}')[1:-1])


def end_of_brackets(text: str, start: int) -> int:
  """Returns the index after the bracket that closes the one at `start`; the text's length if none does."""
  depth, position = 0, start
  while True:
    found = _BRACKETS.search(text, position)
    if not found:
      return len(text)
    position = found.end()
    if found[0] == '"':
      position = _end_of_string(text, found.start())
    elif found[0] in _OPEN:
      depth += 1
    else:
      depth -= 1
      if depth == 0:
        return position


def split_top(text: str) -> list[str]:
  """Splits at the commas that are outside of every bracket and string; parts are stripped, empty ones left out."""
  parts, start, position = [], 0, 0
  while found := _SPLIT.search(text, position):
    if found[0] == ',':
      parts.append(text[start : found.start()])
      start = position = found.end()
    elif found[0] == '"':
      position = _end_of_string(text, found.start())
    else:
      position = end_of_brackets(text, found.start())
  parts.append(text[start:])
  return [part.strip() for part in parts if part.strip()]


def parse_attributes(text: str) -> dict[str, str]:
  """Parses `a=1, b={x, y}, metadata={op_name="f(x)"}` to names and texts; what has no `=` is left out."""
  attributes = {}
  for part in split_top(text):
    name, equals, value = part.partition('=')
    if equals:
      attributes[name.strip()] = value.strip()
  return attributes


def quoted(text: str, name: str) -> str:
  """Returns the string after `name=` in an attribute's text, unescaped; '' if there is none."""
  start = text.find(f'{name}="')
  if start < 0:
    return ''
  start += len(name) + 1
  return text[start + 1 : _end_of_string(text, start) - 1].replace('\\"', '"').replace("\\'", "'").replace('\\\\', '\\')


def _end_of_string(text: str, start: int) -> int:
  position = start + 1
  while position < len(text):
    if text[position] == '\\':
      position += 2
    elif text[position] == '"':
      return position + 1
    else:
      position += 1
  return len(text)
