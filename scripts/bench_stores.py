"""Measures checkpoints in an emulated store against plain TensorStore, and how long a logged step waits.

    PYTHONPATH=. .venv/bin/python scripts/bench_stores.py --store gs --arrays 32 --mib 4 --rounds 7
    PYTHONPATH=. .venv/bin/python scripts/bench_stores.py --quick      # two small arrays, to see that it works

Plain TensorStore writes and reads the same arrays with the same driver and format (Zarr 3, each array one object with a
CRC-32C), without a manifest or listing. Our time ends when the checkpoint is published, or the state is on the device.
The two alternate. The last line is JSON with medians: MB/s, and ours relative to TensorStore's.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

_SERVERS = {
  'gs': 'from tests.gcs_emulator import GcsEmulator; print(GcsEmulator().__enter__().url, flush=True)',
  's3': (
    'from moto.server import ThreadedMotoServer; import logging; logging.disable(); s = ThreadedMotoServer(port=0); '
    's.start(); print("http://%s:%s" % s.get_host_and_port(), flush=True)'
  ),
}


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--store', choices=('gs', 's3'), default='gs')
  parser.add_argument('--arrays', type=int, default=32)
  parser.add_argument('--mib', type=int, default=4, help='of each array')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--quick', action='store_true', help='two small arrays, one round')
  args = parser.parse_args()
  sizes = (2, 1, 1) if args.quick else (args.arrays, args.mib, args.rounds)
  command = [sys.executable, '-c', f'{_SERVERS[args.store]}; input()']
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
    try:
      assert server.stdout is not None
      url = next(line.strip() for line in server.stdout if line.startswith('http'))
      use_emulator(args.store, url.replace('0.0.0.0', '127.0.0.1'))
      print(json.dumps(measure(args.store, *sizes)))
    finally:
      server.kill()


def use_emulator(store: str, url: str) -> None:
  from tests.gcs_emulator import environment

  if store == 'gs':
    os.environ.update(environment(url))
    return
  import urllib.request

  os.environ.update(AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID='a', AWS_SECRET_ACCESS_KEY='b', AWS_REGION='us-east-1')
  urllib.request.urlopen(urllib.request.Request(f'{url}/bucket', method='PUT')).close()


def measure(scheme: str, num_arrays: int, num_mib: int, num_rounds: int) -> dict[str, object]:
  from alternation import alternate, median
  import jax
  import numpy as np
  import tensorstore as ts

  from spmd_tasks.checkpoints import Checkpointer, Retention
  from spmd_tasks.files import absolute_path
  from spmd_tasks.runtime.metrics import JsonlWriter
  from spmd_tasks.stores import kvstore_spec

  directory = absolute_path(f'{scheme}://bucket/bench')
  device = jax.devices()[0]
  rng = np.random.default_rng(0)
  state = {f'w{i}': jax.device_put(rng.random((num_mib, 1 << 18), np.float32), device) for i in range(num_arrays)}
  abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()}
  checkpointer, step = Checkpointer(directory / 'ours', retention=Retention(max_to_keep=2)), 0

  def open_alone(name: str, **how: Any) -> Any:
    spec = {'driver': 'zarr3', 'kvstore': kvstore_spec(directory / 'alone' / name)}
    return ts.open(spec, **how)

  def save() -> None:
    nonlocal step
    step += 1
    checkpointer.save(step, state)
    checkpointer.wait()

  def write_alone() -> None:
    shape = (num_mib, 1 << 18)
    how = {'dtype': ts.float32, 'shape': shape, 'chunk_layout': ts.ChunkLayout(chunk_shape=shape)}
    how['codec'] = ts.CodecSpec({'driver': 'zarr3', 'codecs': [{'name': 'bytes'}, {'name': 'crc32c'}]})
    opened = [open_alone(name, create=True, delete_existing=True, **how) for name in state]
    host = [np.array(x) for x in state.values()]  # copied first, so that training could continue
    for commit in [store.result().write(x).commit for store, x in zip(opened, host, strict=True)]:
      commit.result()

  def restore() -> object:
    restored = checkpointer.restore(abstract)
    assert restored is not None
    return restored.state

  def read_alone() -> object:
    reads = [opening.result().read() for opening in [open_alone(name, open=True) for name in state]]
    return [jax.device_put(read.result(), device) for read in reads]

  num_mb = num_arrays * num_mib * (1 << 20) / 1e6
  rates: dict[str, object] = {'store': scheme, 'MB': round(num_mb), 'arrays': num_arrays, 'cores': os.cpu_count()}
  for name, ours, alone in (('save', save, write_alone), ('restore', restore, read_alone)):
    times = alternate({'ours': ours, 'alone': alone}, num_rounds)
    rates |= {f'{name}_MB_per_s': {side: round(num_mb / median(times[side].wall)) for side in times}}
    for clock in ('wall', 'cpu'):
      mine, its = (getattr(times[side], clock) for side in ('ours', 'alone'))
      rates |= {f'{name}_of_tensorstore_{clock}': round(median(y / x for x, y in zip(mine, its, strict=True)), 2)}
  checkpointer.close()

  writer, seconds = JsonlWriter(directory), []
  for number in range(300):
    begun = time.perf_counter()
    writer.write(number, {f'metric_{i}': 1.0 / (i + 1) for i in range(30)})
    seconds.append(time.perf_counter() - begun)
    time.sleep(0.01)
  writer.close()
  return rates | {'logged_step_ms': {'median': round(1e3 * median(seconds), 3), 'most': round(1e3 * max(seconds), 2)}}


if __name__ == '__main__':
  main()
