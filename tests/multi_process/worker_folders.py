"""One process that reads its shards of a model's folder and takes part in its export: for test_folder_processes.py."""

import argparse
import json
import math
from pathlib import Path

import jax

from spmd_tasks.bridges._lazy_arrays import LazyArray
from spmd_tasks.bridges.huggingface import export_folder, open_folder
from spmd_tasks.bridges.huggingface._folder import weights_on_mesh
from spmd_tasks.config import resolve
from spmd_tasks.distributed import DistributedSettings, initialize, is_primary
from spmd_tasks.experiment import partition_job


def counted(tensors: dict[str, LazyArray]) -> tuple[dict[str, LazyArray], list[int]]:
  """Returns tensors that note the bytes of each part that is read of them."""
  sizes: list[int] = []

  def note(tensor: LazyArray) -> LazyArray:
    def read(index):
      part = tensor.read(index)
      sizes.append(part.nbytes)
      return part

    return LazyArray(tensor.shape, tensor.dtype, read)

  return {name: note(tensor) for name, tensor in tensors.items()}, sizes


def own_bytes(weights, true) -> int:
  """The bytes of this process's different shards, without their padding."""
  total = 0
  for leaf, abstract in zip(jax.tree.leaves(weights), jax.tree.leaves(true), strict=True):
    shards = set()
    for shard in leaf.addressable_shards:
      bounds = [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape)]
      shards.add(tuple((start, min(stop, size)) for (start, stop), size in zip(bounds, abstract.shape)))
    total += sum(math.prod(max(0, stop - start) for start, stop in bounds) for bounds in shards) * leaf.dtype.itemsize
  return total


def run(args: argparse.Namespace) -> None:
  initialize(
    DistributedSettings(
      coordinator_address=args.coordinator_address, num_processes=args.num_processes, process_id=args.process_id
    )
  )
  job = resolve('hf.Model', [f'model={args.folder}', 'ici_mesh_shape=1,2,2']).build()
  model = partition_job(job)
  folder = open_folder(args.folder)
  total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in folder.tensors.values())
  folder.__dict__['tensors'], sizes = counted(folder.tensors)
  weights = folder.read_weights(model)
  report = {'read': sum(sizes), 'own': own_bytes(weights, model.abstract_state.weights), 'total': total}
  on_mesh = weights_on_mesh(model, weights)
  origin = open_folder(args.folder)
  export_folder(Path(args.out), job.task.model, on_mesh, origin=origin, is_writer=is_primary(), max_shard_bytes=40_000)
  Path(f'{args.out}.{jax.process_index()}.json').write_text(json.dumps(report))


if __name__ == '__main__':
  parser = argparse.ArgumentParser()
  parser.add_argument('folder')
  parser.add_argument('out')
  parser.add_argument('--coordinator_address')
  parser.add_argument('--num_processes', type=int)
  parser.add_argument('--process_id', type=int)
  run(parser.parse_args())
