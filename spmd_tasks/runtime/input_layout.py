"""Places batches on the mesh: rows of hosts become global arrays, which a step then shards by rank."""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import (
  AxisRules,
  SplitDims,
  infer_partition_spec_based_on_rank,
  padding,
  shard_on_batch_dim_partition_spec,
)
from spmd_tasks.sharding.specs import even_spec

InputSpec = Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputLayout:
  """The layout on the mesh of batches with one element spec.

  Process i of n stores rows [i R, (i+1) R) of the global batch on its own devices, with R = B/n rounded up. Zero rows
  follow, so that the batch dim is divisible by the number of devices; a step selects the true rows again, in order.

  Attributes:
    spec: true global shapes, with B rows.
    padded: padded shapes on the mesh, with zero rows, and their NamedShardings.
    split_specs: the PartitionSpec of each input inside a step, by its rank, over axes that divide its true shape; None
      keeps the sharding of `padded`.
    row_positions: batch size -> the position of each true row in the padded array, int [B].
  """

  spec: InputSpec
  padded: Mapping[str, jax.ShapeDtypeStruct]
  split_specs: Mapping[str, PartitionSpec | None]
  row_positions: Mapping[int, np.ndarray]

  def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes global arrays, sharded on batch over the whole mesh, from this process's rows of the batch.

    Raises a UserError if the batch does not have the names, shapes or dtypes of the spec.
    """
    if not isinstance(batch, Mapping):
      raise UserError(f'the batch is a {type(batch).__name__}: it must be a dict of arrays by name.')
    if batch.keys() != self.spec.keys():
      raise UserError(
        f'the batch has {sorted(batch)} but the step was compiled for {sorted(self.spec)}: element_spec() and the '
        'iterator must agree.'
      )
    return {name: self._place_array(name, np.asarray(rows)) for name, rows in batch.items()}

  def own_rows(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns this process's rows of a whole batch."""
    own = lambda rows: rows[_rows_of(jax.process_index(), len(rows))] if rows.ndim else rows
    return {name: own(rows) for name, rows in batch.items()}

  def _place_array(self, name: str, rows: np.ndarray) -> jax.Array:
    true, padded = self.spec[name], self.padded[name]
    num_rows = len(range(true.shape[0])[_rows_of(jax.process_index(), true.shape[0])]) if true.shape else 0
    local_shape = (num_rows, *true.shape[1:]) if true.shape else ()
    if rows.dtype != true.dtype and np.can_cast(rows.dtype, true.dtype, 'same_kind'):  # numpy's default 64-bit dtypes
      cast = rows.astype(true.dtype)
      if np.issubdtype(rows.dtype, np.integer) and not np.array_equal(cast, rows):
        raise UserError(
          f'input {name!r} has integers from {rows.min()} to {rows.max()}, which do not fit in {true.dtype}: choose a '
          'wider dtype in element_spec().'
        )
      rows = cast
    if rows.shape != local_shape or rows.dtype != true.dtype:
      raise UserError(
        f'input {name!r} is {rows.dtype}{list(rows.shape)} on this process but the step was compiled for '
        f'{true.dtype}{list(local_shape)}: element_spec() and the iterator must agree.'
      )
    if padded.shape != true.shape:
      num_zero_rows = padded.shape[0] // jax.process_count() - num_rows
      rows = np.concatenate([rows, np.zeros((num_zero_rows, *rows.shape[1:]), rows.dtype)])
    return jax.make_array_from_process_local_data(padded.sharding, rows, padded.shape)

  def true_rows(self, placed: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Removes the zero rows of a global batch and restores the order of rows. Call it inside a step."""

    def select(name, x):
      num_rows = self.spec[name].shape[0] if x.ndim else 0
      positions = self.row_positions.get(num_rows)
      if positions is None or np.array_equal(positions, np.arange(x.shape[0])):
        return x
      if np.array_equal(positions, np.arange(num_rows)):
        return x[:num_rows]
      return jnp.take(x, positions, axis=0)

    return {name: select(name, x) for name, x in placed.items()}

  def with_zero_rows(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Inverts `true_rows`: adds the zero rows of the padded layout. Call it inside a step."""
    zeros = {name: jnp.zeros(padded.shape, padded.dtype) for name, padded in self.padded.items()}
    return {name: zeros[name].at[self.row_positions[len(rows)]].set(rows) for name, rows in batch.items()}


def make_input_layout(
  input_spec: InputSpec,
  mesh: Mesh | AbstractMesh,
  inputs_split_mapping: Mapping[str, SplitDims] | None,
  axis_rules: AxisRules,
) -> InputLayout:
  """Returns the layout of batches of `input_spec` (global shapes, batch dim first).

  Raises a UserError if an input has a dtype that JAX does not support, or if `inputs_split_mapping` has no entry for
  its rank or does not fit the mesh.
  """
  for name, dtype in ((name, np.dtype(spec.dtype)) for name, spec in input_spec.items()):
    if dtype.kind not in 'biufcV' or not dtype.isnative:
      raise UserError(
        f'input {name!r} has the dtype {dtype.str}, which JAX does not support: choose a numeric dtype with the native '
        'byte order in element_spec().'
      )

  def padded(true):
    spec = shard_on_batch_dim_partition_spec(mesh.axis_names, len(true.shape))
    shape = padding.padded_shape(true.shape, spec, mesh.shape)
    return jax.ShapeDtypeStruct(shape, true.dtype, sharding=NamedSharding(mesh, spec))

  def split(true, padded):
    spec = infer_partition_spec_based_on_rank(len(true.shape), inputs_split_mapping, mesh.axis_names, axis_rules)
    if spec is None and padded.shape != true.shape:  # without zero rows, keep the axes of `padded` that divide rows
      spec = padded.sharding.spec
    return None if spec is None else even_spec(spec, true.shape, mesh.shape)

  padded_spec = {name: padded(true) for name, true in input_spec.items()}
  return InputLayout(
    spec=dict(input_spec),
    padded=padded_spec,
    split_specs={name: split(true, padded_spec[name]) for name, true in input_spec.items()},
    row_positions={
      true.shape[0]: _row_positions(true.shape[0], padded_spec[name]) for name, true in input_spec.items() if true.shape
    },
  )


def _row_positions(num_rows: int, padded: jax.ShapeDtypeStruct) -> np.ndarray:
  """Returns the positions of the true rows in the padded global array, which are the first rows of each process."""
  if jax.process_count() == 1:
    return np.arange(num_rows)
  positions: dict[int, set[int]] = {}
  for device, (rows, *_) in padded.sharding.devices_indices_map(padded.shape).items():
    positions.setdefault(device.process_index, set()).update(range(*rows.indices(padded.shape[0])))
  counts = [len(range(num_rows)[_rows_of(process, num_rows)]) for process in range(jax.process_count())]
  return np.concatenate([np.array(sorted(positions[process])[:count], int) for process, count in enumerate(counts)])


def _rows_of(process: int, num_rows: int) -> slice:
  """Returns the rows of a batch that a process reads; if the split is uneven, the last processes read fewer."""
  rows_per_process = -(-num_rows // jax.process_count())
  return slice(min(process * rows_per_process, num_rows), min((process + 1) * rows_per_process, num_rows))
