"""InputLayout: how one kind of batch crosses from the hosts to the mesh, and is split by rank inside a step."""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import padding
from spmd_tasks.sharding.specs import (
  AxisRules,
  SplitDims,
  infer_partition_spec_based_on_rank,
  shard_on_batch_dim_partition_spec,
)

InputSpec = Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputLayout:
  """How one kind of batch crosses from the hosts to the mesh.

  Process i of n reads rows [i B/n, (i+1) B/n) of the global batch. On the mesh they lie wherever its devices are, and
  behind them as many zero rows as make the batch dim divide over all devices; a step puts the true rows in order again.

  Attributes:
    spec: the true global shapes.
    padded: the shapes on the mesh.
    split_specs: the PartitionSpec by rank that each input takes inside the step, None to leave it as it entered.
    row_positions: by batch size, where each true row lies on the mesh: int [B].
  """

  spec: InputSpec
  padded: Mapping[str, jax.ShapeDtypeStruct]
  split_specs: Mapping[str, PartitionSpec | None]
  row_positions: Mapping[int, np.ndarray]

  def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Global arrays, sharded on batch over the whole mesh, from this process's rows of the batch.

    Raises:
      UserError: the batch does not have the names, shapes or dtypes of the spec.
    """
    if batch.keys() != self.spec.keys():
      raise UserError(f'the batch holds {sorted(batch)} but the step was compiled for {sorted(self.spec)}.')
    return {name: self._place_one(name, np.asarray(rows)) for name, rows in batch.items()}

  def _place_one(self, name: str, rows: np.ndarray) -> jax.Array:
    true, padded = self.spec[name], self.padded[name]
    num_processes = jax.process_count()
    local = (true.shape[0] // num_processes, *true.shape[1:]) if true.shape else ()
    if rows.shape != local or rows.dtype != true.dtype:
      raise UserError(
        f'input {name!r} is {rows.dtype}{list(rows.shape)} on this process but the step was compiled for '
        f'{true.dtype}{list(local)}: element_spec() and the iterator must agree.'
      )
    if padded.shape != true.shape:
      num_zero_rows = (padded.shape[0] - true.shape[0]) // num_processes
      rows = np.concatenate([rows, np.zeros((num_zero_rows, *rows.shape[1:]), rows.dtype)])
    return jax.make_array_from_process_local_data(padded.sharding, rows, padded.shape)

  def true_rows(self, placed: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Inside a step: the global batch in its own order, without the zero rows."""

    def select(name, x):
      num_rows = self.spec[name].shape[0] if x.ndim else 0
      positions = self.row_positions.get(num_rows)
      if positions is None or np.array_equal(positions, np.arange(x.shape[0])):
        return x
      if np.array_equal(positions, np.arange(num_rows)):
        return x[:num_rows]
      return jnp.take(x, positions, axis=0)

    return {name: select(name, x) for name, x in placed.items()}


def make_input_layout(
  input_spec: InputSpec, mesh: Mesh, inputs_split_mapping: Mapping[str, SplitDims] | None, axis_rules: AxisRules
) -> InputLayout:
  """The layout of batches of `input_spec` (global shapes, batch dim first).

  Raises:
    UserError: an unusable inputs_split_mapping.
  """

  def padded(true):
    spec = shard_on_batch_dim_partition_spec(mesh.axis_names, len(true.shape))
    shape = padding.padded_shape(true.shape, spec, mesh.shape)
    return jax.ShapeDtypeStruct(shape, true.dtype, sharding=NamedSharding(mesh, spec))

  padded_spec = {name: padded(true) for name, true in input_spec.items()}
  return InputLayout(
    spec=dict(input_spec),
    padded=padded_spec,
    split_specs={
      name: infer_partition_spec_based_on_rank(len(true.shape), inputs_split_mapping, mesh.axis_names, axis_rules)
      for name, true in input_spec.items()
    },
    row_positions={
      true.shape[0]: _row_positions(true.shape[0], padded_spec[name]) for name, true in input_spec.items() if true.shape
    },
  )


def _row_positions(num_rows: int, padded: jax.ShapeDtypeStruct) -> np.ndarray:
  """Where the true rows lie in the padded global array: of the rows that each process holds, the first ones."""
  if jax.process_count() == 1:
    return np.arange(num_rows)
  num_local = num_rows // jax.process_count()
  held: dict[int, set[int]] = {}
  for device, (rows, *_) in padded.sharding.devices_indices_map(padded.shape).items():
    held.setdefault(device.process_index, set()).update(range(*rows.indices(padded.shape[0])))
  return np.concatenate([sorted(held[process])[:num_local] for process in range(jax.process_count())])
