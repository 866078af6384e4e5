"""InputLayout: how one kind of batch crosses from the hosts to the mesh, and is split by rank inside a step."""

from collections.abc import Mapping
import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

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

  Attributes:
    spec: the true global shapes.
    padded: the shapes on the mesh: rows are added until the batch dim divides over every device.
    split_specs: the PartitionSpec by rank that each input takes inside the step, None to leave it as it entered.
  """

  spec: InputSpec
  padded: Mapping[str, jax.ShapeDtypeStruct]
  split_specs: Mapping[str, PartitionSpec | None]

  def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Global arrays, sharded on batch over the whole mesh, from this process's rows of the batch.

    Raises:
      ValueError: the batch does not have the names, shapes or dtypes of the spec.
    """
    if batch.keys() != self.spec.keys():
      raise ValueError(f'the batch holds {sorted(batch)} but the step was compiled for {sorted(self.spec)}.')
    return {name: self._place_one(name, np.asarray(rows)) for name, rows in batch.items()}

  def _place_one(self, name: str, rows: np.ndarray) -> jax.Array:
    true, padded = self.spec[name], self.padded[name]
    local = (true.shape[0] // jax.process_count(), *true.shape[1:]) if true.shape else ()
    if rows.shape != local or rows.dtype != true.dtype:
      raise ValueError(
        f'input {name!r} is {rows.dtype}{list(rows.shape)} on this process but the step was compiled for '
        f'{true.dtype}{list(local)}: element_spec() and the iterator must agree.'
      )
    if padded.shape != true.shape:
      rows = np.pad(rows, [(0, new - old) for old, new in zip(true.shape, padded.shape)])
    return jax.make_array_from_process_local_data(padded.sharding, rows, padded.shape)


def make_input_layout(
  input_spec: InputSpec, mesh: Mesh, inputs_split_mapping: Mapping[str, SplitDims] | None, axis_rules: AxisRules
) -> InputLayout:
  """The layout of batches of `input_spec` (global shapes, batch dim first).

  A batch that the devices do not divide is padded with zero rows, which the step slices off again.

  Raises:
    ValueError: several processes and a batch that their devices do not divide, or an unusable inputs_split_mapping.
  """

  def padded(name, true):
    spec = shard_on_batch_dim_partition_spec(mesh.axis_names, len(true.shape))
    shape = padding.padded_shape(true.shape, spec, mesh.shape)
    if shape != true.shape and jax.process_count() > 1:
      raise ValueError(
        f'input {name!r} has a global batch of {true.shape[0]}, which the {mesh.size} devices of '
        f'{jax.process_count()} processes do not divide: use a batch_size that is a multiple of {mesh.size}.'
      )
    return jax.ShapeDtypeStruct(shape, true.dtype, sharding=NamedSharding(mesh, spec))

  return InputLayout(
    spec=dict(input_spec),
    padded={name: padded(name, true) for name, true in input_spec.items()},
    split_specs={
      name: infer_partition_spec_based_on_rank(len(true.shape), inputs_split_mapping, mesh.axis_names, axis_rules)
      for name, true in input_spec.items()
    },
  )
