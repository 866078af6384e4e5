"""Images, histograms and tables that a job logs beside its numbers.

    def after_step(self, run, outcome):            # of a hook
      if outcome.step % 100 == 0:
        run.log('filters', Image(kernel))          # [H, W] or [H, W, 3]
        run.log('lengths', Histogram(lengths))
        run.log('answers', Table([{'prompt': 'a', 'answer': 'b'}]))

Each becomes a file, `<job_log_dir>/media/filters/step_00000100.png`, which the next line of metrics.jsonl names.

They are pytrees, so that a loss inside a compiled step can return them as summaries, with traced arrays and numbers:

    LossOutput(..., summaries={'reconstruction': Image(predictions[0]), 'norms': Histogram(norms)})
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import re
import struct
from typing import Any
import zlib

import jax
import numpy as np

from spmd_tasks.errors import UserError

_PNG_COLORS = {1: 0, 2: 4, 3: 2, 4: 6}  # PNG's color type by the number of channels
_NUM_BINS = 30


@dataclasses.dataclass(frozen=True)
class Image:
  """An image: [H, W], or [H, W, channels] with 1 (gray), 2 (and alpha), 3 (RGB) or 4 channels.

  Pixels are uint8, or floats in [0, 1]; others are clipped.

  Raises a UserError: the shape is another.
  """

  pixels: Any
  suffix = 'png'

  def __post_init__(self):
    shape = np.shape(self.pixels)
    if len(shape) not in (2, 3) or shape[2:] not in ((), *((n,) for n in _PNG_COLORS)) or 0 in shape:
      raise UserError(f'Image has pixels of shape {shape}: give [H, W], or [H, W, 1 to 4 channels].')
    if _is_traced(self.pixels):
      return
    pixels = np.asarray(self.pixels)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.dtype != np.uint8:
      pixels = np.round(255 * np.clip(np.nan_to_num(np.asarray(pixels, np.float32)), 0, 1)).astype(np.uint8)
    object.__setattr__(self, 'pixels', pixels)

  def encode(self) -> bytes:
    """Returns the image as PNG."""
    height, width, channels = self.pixels.shape
    header = struct.pack('>IIBBBBB', width, height, 8, _PNG_COLORS[channels], 0, 0, 0)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), self.pixels.reshape(height, -1)], axis=1)  # 0: no filter
    chunks = ((b'IHDR', header), (b'IDAT', zlib.compress(rows.tobytes())), (b'IEND', b''))
    return b'\x89PNG\r\n\x1a\n' + b''.join(
      struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data)) for kind, data in chunks
    )


@dataclasses.dataclass(frozen=True)
class Histogram:
  """A histogram of the finite values of an array."""

  values: Any
  suffix = 'json'

  def __post_init__(self):
    if _is_traced(self.values):
      return
    values = np.asarray(self.values, np.float64).ravel()
    object.__setattr__(self, 'values', values[np.isfinite(values)])

  def encode(self) -> bytes:
    """Returns the bins as JSON: `edges`, and the `counts` between them."""
    counts, edges = np.histogram(self.values, _NUM_BINS)
    return json.dumps({'edges': edges.tolist(), 'counts': counts.tolist()}).encode() + b'\n'


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows by column; the first row has all columns. Cells are numbers, texts, True, False or None."""

  rows: Sequence[Mapping[str, Any]]
  suffix = 'json'

  def __post_init__(self):
    if _is_traced(self.rows):
      return
    rows = [{str(name): _cell(value) for name, value in row.items()} for row in self.rows]
    object.__setattr__(self, 'rows', rows)

  @property
  def columns(self) -> list[str]:
    """The names of the columns."""
    return list(self.rows[0]) if self.rows else []

  def encode(self) -> bytes:
    """Returns the rows as JSON."""
    return json.dumps(self.rows).encode() + b'\n'

  def markdown(self) -> str:
    """Returns the table in Markdown."""
    cells = [self.columns, ['---'] * len(self.columns)]
    cells += [[str(row.get(name, '')) for name in self.columns] for row in self.rows]
    escaped = [[cell.replace('|', '\\|').replace('\n', '<br>') for cell in row] for row in cells]
    return '\n'.join(f'| {" | ".join(row)} |' for row in escaped)


Media = Image | Histogram | Table


def _is_traced(tree: Any) -> bool:
  return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _register(cls: Any) -> None:
  """Makes a class a pytree; texts are part of the structure. Nothing is checked or converted in between."""
  [field] = dataclasses.fields(cls)

  def flatten(media: Any) -> tuple[list[Any], Any]:
    value = getattr(media, field.name)
    # A dict would lose the order of the columns.
    leaves, structure = jax.tree.flatten([tuple(row.items()) for row in value] if cls is Table else value)
    texts = [x if isinstance(x, str) else None for x in leaves]
    return [x for x in leaves if not isinstance(x, str)], (structure, *texts)

  def unflatten(aux: Any, children: Any) -> Any:
    structure, *texts = aux
    rest, media = iter(children), object.__new__(cls)
    value = structure.unflatten(next(rest) if text is None else text for text in texts)
    object.__setattr__(media, field.name, [dict(row) for row in value] if cls is Table else value)
    return media

  jax.tree_util.register_pytree_node(cls, flatten, unflatten)


for _cls in (Image, Histogram, Table):
  _register(_cls)


def check_media_name(name: str) -> None:
  """Raises a UserError if a name, which is also a directory's, has other characters than letters, digits, `_-/`."""
  if not re.fullmatch(r'[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*', name):
    raise UserError(
      f'an image, a histogram or a table has the name {name!r}, which is also a directory: use letters, digits, _, - '
      'and /.'
    )


def _cell(value: Any) -> Any:
  value = value.item() if hasattr(value, 'item') and np.ndim(value) == 0 else value
  is_plain = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and np.isfinite(value))
  return value if is_plain else str(value)
