"""Formats the parameter table (every weight's shape, sharding and padding), and checks that states fit in memory.

The table depends only on the model, the axis rules and the mesh. A training job writes it to parameters.txt, and each
registered experiment has it as a golden file.
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
from spmd_tasks.sharding.weights import PINNED_HOST, leaf_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterRow:
  """One weight.

  Attributes:
    name: path of the weight, such as `stack/attention/query/kernel`.
    shape, dtype: as the model sees them.
    split_dims: as the layer declared them; None for an unsharded weight.
    spec: the PartitionSpec to which the axis rules resolve the split dims.
    padded_shape: shape as stored on the mesh.
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
  """Returns one row per weight, sorted by name."""

  def row(path, weight, spec, padded) -> ParameterRow:
    num_stored = math.prod(padded.shape)
    return ParameterRow(
      name=leaf_name(path),
      shape=tuple(weight.shape),
      dtype=np.dtype(weight.dtype).name,
      split_dims=weight.split_dims,
      spec=spec,
      padded_shape=tuple(padded.shape),
      waste=1 - math.prod(weight.shape) / num_stored if num_stored else 0.0,
    )

  rows = jax.tree_util.tree_map_with_path(
    row, model.weight_specs, model.state_specs.weights, model.padded_state.weights
  )
  return sorted(jax.tree.leaves(rows), key=lambda row: row.name)


def bytes_per_device(padded_tree: Any, *, on_host: bool = False) -> int:
  """Returns the bytes of a tree of padded shapes with shardings in the memory of each device, or in its host's."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(padded_tree)
    if (leaf.sharding.memory_kind == PINNED_HOST) == on_host
  )


def check_batch_fits(spec: Mapping[str, Any]) -> None:
  """Raises a UserError if a process's rows of a batch of these shapes and dtypes do not fit in its memory."""
  num_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in spec.values()) // jax.process_count()
  _check_fits('a batch', num_bytes, _host_memory(), 'batch_size or seq_len')


def check_state_fits(model: PartitionedModel) -> None:
  """Raises a UserError if the training state alone does not fit in the memory of this process's devices."""
  devices = jax.local_devices()
  limits = [(device.memory_stats() or {}).get('bytes_limit', 0) for device in devices]
  needed, available = bytes_per_device(model.padded_state), sum(limits)
  if not all(limits):  # CPUs
    needed, available = needed + bytes_per_device(model.padded_state, on_host=True), _host_memory()
  _check_fits('the training state', len(devices) * needed, available, 'the number of layers, the dims or vocab_size')


def _check_fits(what: str, num_bytes: int, available: int, setting: str) -> None:
  if num_bytes > available:
    raise UserError(
      f'{what} needs {num_bytes / 1e9:,.0f} GB, but this process has {available / 1e9:,.0f} GB of memory for it: lower '
      f'{setting}, or use more devices or processes.'
    )


def _host_memory() -> int:
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def format_parameter_table(model: PartitionedModel) -> str:
  """Formats an aligned table with one line per weight, and totals (parameters, padding, bytes per device)."""
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
  """Formats split dims as `(replica+data, -)`: one entry per dim, `-` for an unsharded dim."""

  def entry(dim: SplitDim) -> str:
    if isinstance(dim, str):
      return dim
    return '-' if dim is None or isinstance(dim, int) or not dim else '+'.join(map(str, dim))

  return f'({", ".join(map(entry, dims))})'
