"""Formats the parameter table (every weight's shape, layout and padding), and refuses what memory cannot hold.

The text depends on the model, the axis rules and the mesh only: it names no path, device or version. A training job
writes the table to parameters.txt, and each registered experiment has it as a golden file.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import os
from typing import Any

import jax
from jax.sharding import PartitionSpec
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.runtime.partition import PartitionedModel
from spmd_tasks.sharding.specs import SplitDim, spec_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterRow:
  """One weight.

  Attributes:
    name: its path, as in `stack/attention/query/kernel`.
    shape, dtype: of the weight that the model sees.
    split_dims: as the layer declared them; None for an unsharded weight.
    spec: the PartitionSpec that the axis rules make of the split dims.
    padded_shape: of the weight as stored on the mesh.
    waste: the fraction of the stored elements that is padding.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  split_dims: tuple[SplitDim, ...] | None
  spec: PartitionSpec
  padded_shape: tuple[int, ...]
  waste: float


def parameter_rows(model: PartitionedModel) -> list[ParameterRow]:
  """Makes one row per weight, sorted by name."""

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
  """Counts the bytes that one device stores of a tree of padded shapes with shardings."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(padded_tree)
  )


def check_batch_fits(spec: Mapping[str, Any]) -> None:
  """Raises a UserError if a process's part of a batch of these shapes and dtypes is larger than its memory."""
  num_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in spec.values()) // jax.process_count()
  _check_fits('a batch', num_bytes, _host_memory(), 'batch_size or seq_len')


def check_state_fits(model: PartitionedModel) -> None:
  """Raises a UserError if the training state alone is larger than the memory of this process's devices."""
  local = jax.local_devices()
  limits = [(device.memory_stats() or {}).get('bytes_limit', 0) for device in local]
  available = sum(limits) if all(limits) else _host_memory()
  needed = len(local) * bytes_per_device(model.padded_state)
  _check_fits('the training state', needed, available, 'the number of layers, the dims or vocab_size')


def _check_fits(what: str, num_bytes: int, available: int, setting: str) -> None:
  if num_bytes > available:
    raise UserError(
      f'{what} has {num_bytes / 1e9:,.0f} GB, and this process {available / 1e9:,.0f} GB of memory for it: lower '
      f'{setting}, or take more devices or processes.'
    )


def _host_memory() -> int:
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def format_parameter_table(model: PartitionedModel) -> str:
  """Formats an aligned table: one line per weight, then lines of totals (parameters, padding, bytes per device)."""
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
  trained = f', {model.num_trained_params:,} of them trained' if model.has_frozen_weights else ''
  totals = [
    f'total: {model.total_num_params:,} parameters{trained}, padding waste {model.padding_waste:.2%}',
    f'bytes per device: weights {weights:,}, optimizer state {learner:,}, together {weights + learner:,}',
  ]
  widths = [max(map(len, column)) for column in zip(header, *lines)]
  table = ['  '.join(map(str.ljust, line, widths)).rstrip() for line in (header, *lines)]
  return '\n'.join([*table, *totals]) + '\n'


def _shape_text(shape: Sequence[int]) -> str:
  return f'[{", ".join(map(str, shape))}]'


def _dims_text(dims: Iterable[SplitDim]) -> str:
  """Formats split dims as `(replica+data, -)`: an entry per dim, `-` for a dim that is not split."""

  def entry(dim: SplitDim) -> str:
    if isinstance(dim, str):
      return dim
    return '-' if dim is None or isinstance(dim, int) or not dim else '+'.join(map(str, dim))

  return f'({", ".join(map(entry, dims))})'
