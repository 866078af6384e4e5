"""Explains the layout of each weight: how it is split, what padding costs, and why an axis does not split it.

    for row in weight_rows(model):
      print(row['name'], row['bytes_per_device'], row['why'])

A mesh axis of size 1 splits nothing and is not mentioned.
"""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.parameter_table import ParameterRow, parameter_rows
from spmd_tasks.sharding import AxisRules
from spmd_tasks.sharding.specs import SplitDim, num_parts, spec_axes


def weight_rows(model: PartitionedModel) -> list[dict[str, Any]]:
  """Makes the rows of plan.json, one per weight, the largest per device first.

  `split_dims` and `spec` have a list of names per dim, [] for a dim that is not split; `bytes_per_device` are those of
  the weight alone, without optimizer state; `replicated_over` has the mesh axes of more than 1 along which every device
  holds the same; `why` says in sentences why it is replicated or padded.
  """
  sizes = {axis: size for axis, size in model.mesh.shape.items() if size > 1}
  rows = [_explain(row, sizes, dict(model.mesh.shape), model.axis_rules) for row in parameter_rows(model)]
  return sorted(rows, key=lambda row: (-row['bytes_per_device'], row['name']))


def _explain(row: ParameterRow, sizes: dict[str, int], all_sizes: dict[str, int], rules: AxisRules) -> dict[str, Any]:
  axes = spec_axes(row.spec, len(row.shape))
  used = {axis for dim in axes for axis in dim}
  replicated = tuple(axis for axis in sizes if axis not in used)
  reasons = []
  for dim, (true, padded) in enumerate(zip(row.shape, row.padded_shape)):
    if true != padded:
      parts = num_parts(axes[dim], all_sizes)
      reasons.append(
        f'dim {dim} is padded from {true} to {padded}, the next multiple of {parts} ({" x ".join(axes[dim])})'
      )
  if replicated:
    dims = row.split_dims or (None,) * len(row.shape)
    why = [(dim, *_why_not(entry, replicated, axes[dim], used, rules)) for dim, entry in enumerate(dims)]
    reasons.append(f'replicated over {" and ".join(replicated)}; ' + ('; '.join(_group(why)) or 'it is a scalar'))
  shard = math.prod(math.ceil(size / num_parts(axes[dim], all_sizes)) for dim, size in enumerate(row.padded_shape))
  return {
    'name': row.name,
    'shape': list(row.shape),
    'dtype': row.dtype,
    'split_dims': [list(_names(dim)) for dim in row.split_dims or (None,) * len(row.shape)],
    'spec': [list(each) for each in axes],
    'padded_shape': list(row.padded_shape),
    'waste': row.waste,
    'bytes_per_device': shard * np.dtype(row.dtype).itemsize,
    'replicated_over': list(replicated),
    'why': '. '.join(reasons),
  }


def _group(reasons: Sequence[tuple[int, str, str]]) -> list[str]:
  """Joins the dims that have the same reason: (dim, its name, reason) of each."""
  dims_of: dict[str, list[str]] = {}
  for dim, name, reason in reasons:
    dims_of.setdefault(reason, []).append(f'dim {dim}' + (f' ({name})' if name else ''))
  return [f'{" and ".join(dims)}: {reason}' for reason, dims in dims_of.items()]


def _why_not(
  entry: SplitDim, wanted: Sequence[str], got: Sequence[str], used: set[str], rules: AxisRules
) -> tuple[str, str]:
  """Returns the name of a dim and why none of the axes `wanted` splits it."""
  names = _names(entry)
  targets = [_names(axes) for name in names for rule, axes in rules if rule == name]
  asked = [axes for axes in targets if set(axes) & set(wanted)]
  taken = [axes for axes in targets if set(axes) & used and not set(axes) & set(got)]
  if not names:
    reason = 'no name that a rule could split'
  elif asked or taken:
    axes = (asked or taken)[0]
    held = [axis for axis in axes if axis in used]
    reason = f'a rule asks for {" x ".join(axes)}, but {" and ".join(held)} already splits another dim'
  elif got:
    reason = f'split over {" x ".join(got)} alone by the axis rules'
  else:
    reason = 'left whole by the axis rules'
  return ' '.join(names), reason


def _names(entry: SplitDim) -> tuple[str, ...]:
  if isinstance(entry, str):
    return (entry,)
  return () if entry is None or isinstance(entry, int) else tuple(entry)
