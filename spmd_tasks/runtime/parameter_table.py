"""The parameter table: every weight's shape, split dims, layout and padding. Logged at the start, and a golden file.

Usage:

    print(format_parameter_table(model))

The text depends on the model, the axis rules and the mesh only: no paths, no device names, no versions.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec
import numpy as np

from spmd_tasks.runtime.partition import PartitionedModel
from spmd_tasks.sharding.specs import SplitDim, spec_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterRow:
  """One weight.

  Attributes:
    name: its path, as in `stack/attention/query/kernel`.
    shape, dtype: as the model sees it.
    split_dims: as the layer declared them; None for wholly unsharded.
    spec: what they resolve to on the mesh.
    padded_shape: as it is stored.
    waste: the fraction of what is stored that is padding.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  split_dims: tuple[SplitDim, ...] | None
  spec: PartitionSpec
  padded_shape: tuple[int, ...]
  waste: float


def parameter_rows(model: PartitionedModel) -> list[ParameterRow]:
  """One row per weight, sorted by name."""

  def row(path, declared, spec, padded) -> ParameterRow:
    stored = math.prod(padded.shape)
    return ParameterRow(
      name=jax.tree_util.keystr(path, simple=True, separator='/'),
      shape=tuple(declared.shape),
      dtype=np.dtype(declared.dtype).name,
      split_dims=declared.split_dims,
      spec=spec,
      padded_shape=tuple(padded.shape),
      waste=1 - math.prod(declared.shape) / stored if stored else 0.0,
    )

  rows = jax.tree_util.tree_map_with_path(
    row, model.weight_specs, model.state_specs.weights, model.padded_state.weights
  )
  return sorted(jax.tree.leaves(rows), key=lambda row: row.name)


def bytes_per_device(padded_tree: Any) -> int:
  """What one device stores of a tree of padded shapes with their shardings, in bytes."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(padded_tree)
  )


def format_parameter_table(model: PartitionedModel) -> str:
  """An aligned table, one line per weight, and lines of totals: parameters, padding, bytes on every device."""
  header = ('name', 'shape', 'dtype', 'split dims', 'partition spec', 'padded shape', 'waste')
  lines = [
    (
      row.name,
      _shape_text(row.shape),
      row.dtype,
      _dims_text(row.split_dims or (None,) * len(row.shape)),
      _dims_text(spec_axes(row.spec, len(row.shape))),
      _shape_text(row.padded_shape) if row.padded_shape != row.shape else '-',
      f'{row.waste:.2%}' if row.waste else '-',
    )
    for row in parameter_rows(model)
  ]
  weights, learner = bytes_per_device(model.padded_state.weights), bytes_per_device(model.padded_state.learner)
  totals = [
    f'total: {model.total_num_params:,} parameters, padding waste {model.padding_waste:.2%}',
    f'bytes per device: weights {weights:,}, optimizer state {learner:,}, together {weights + learner:,}',
  ]
  return '\n'.join([*_align([header, *lines]), *totals]) + '\n'


def _shape_text(shape: Sequence[int]) -> str:
  return f'[{", ".join(map(str, shape))}]'


def _dims_text(dims: Iterable[SplitDim]) -> str:
  """`(replica+data, -)`: an entry per dim, `-` where it is not split."""

  def entry(dim: SplitDim) -> str:
    if isinstance(dim, str):
      return dim
    return '-' if dim is None or isinstance(dim, int) or not dim else '+'.join(map(str, dim))

  return f'({", ".join(map(entry, dims))})'


def _align(lines: Sequence[Sequence[str]]) -> list[str]:
  """Columns as wide as their widest cell, left-aligned, without trailing spaces."""
  widths = [max(map(len, column)) for column in zip(*lines)]
  return ['  '.join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
