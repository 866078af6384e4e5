"""What the two processes of test_checkpointer_processes.py run."""

import sys

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.checkpoints import Checkpointer

SHAPE = (64, 128)


def host_state(step: int) -> dict[str, np.ndarray]:
  values = np.random.default_rng(step).integers(2**32, size=SHAPE, dtype=np.uint32)
  return {'values': values, 'step': np.asarray(step, np.int32)}


def abstract_state() -> dict[str, jax.ShapeDtypeStruct]:
  mesh = jax.make_mesh((2, jax.device_count() // 2), ('data', 'mdl'), axis_types=(AxisType.Auto,) * 2)
  split, replicated = NamedSharding(mesh, PartitionSpec('data', 'mdl')), NamedSharding(mesh, PartitionSpec())
  return {
    'values': jax.ShapeDtypeStruct(SHAPE, np.uint32, sharding=split),
    'step': jax.ShapeDtypeStruct((), np.int32, sharding=replicated),
  }


def device_state(step: int) -> dict[str, jax.Array]:
  return {
    name: jax.make_array_from_callback(value.shape, abstract_state()[name].sharding, value.__getitem__)
    for name, value in host_state(step).items()
  }


def share(directory: str, address: str, rank: int) -> None:
  """Two processes save, one damages, both restore; every line printed must be the same on both."""
  jax.distributed.initialize(address, 2, rank)
  checkpointer = Checkpointer(directory, max_to_keep=3, timeout_secs=60)
  assert checkpointer.restore(abstract_state()) is None
  for step in (1, 2, 3):
    checkpointer.save(step, device_state(step), {'rank': rank, 'step': step})
  checkpointer.wait()
  print('steps', checkpointer.all_steps())
  for last in (3, 2):
    restored = checkpointer.restore(abstract_state())
    assert restored is not None
    exact = all(
      np.array_equal(np.asarray(shard.data), value[shard.index])
      for name, value in host_state(last).items()
      for shard in restored.state[name].addressable_shards
    )
    assert restored.input_state == {'rank': rank, 'step': last}
    print('restored', restored.step, 'exact', exact, restored.input_states)
    if last == 3 and rank == 0:
      # Rank 1 may be one restore ahead, but process 0 alone verifies, and that it does after this.
      with open(f'{directory}/checkpoint_00000003/input/process_0_of_2.json', 'w') as file:
        file.write('{}')
  try:
    checkpointer.restore(abstract_state(), step=9)
  except ValueError as error:
    print('refused', error)
  checkpointer.close()


if __name__ == '__main__':
  share(sys.argv[1], sys.argv[2], int(sys.argv[3]))
