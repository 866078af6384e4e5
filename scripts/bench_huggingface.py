"""Measures loading and exporting a Hugging Face model folder against transformers: time and peak host memory.

    python scripts/bench_huggingface.py                    # writes a Llama of 2 GB to a temporary directory
    python scripts/bench_huggingface.py --quick            # one layer of it

The last line is a JSON object of all figures, by measurement; `ratio` is our CPU time of loading over theirs.

Each measurement is a process; the peak is its VmHWM, next to its value after the imports of libraries.
Both sides keep the weights in float32 after loading, as training does, or in bfloat16, as generation does (not with
--quick), and write bfloat16.
"""

import argparse
import json
from pathlib import Path
import subprocess
import sys
import tempfile

VOCAB, DIM, FFN, HEADS = 32_000, 2048, 5632, 16

_COMMON = """
import json, sys, time
folder, out = sys.argv[1:]

def peak_gb():
  return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM')) / 2**20
"""
_LOAD_OURS = (
  _COMMON
  + """
import jax
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.origin import variables_from_folder
job = resolve('hf.Model', [f'model={folder}']).build()
model = partition_job(job)
jax.device_get(jax.jit(lambda x: x + 1)(1))
imported, began, cpu = peak_gb(), time.perf_counter(), time.process_time()
variables = jax.block_until_ready(variables_from_folder(model, open_folder(folder)))
"""
)
_LOAD_THEIRS = (
  _COMMON
  + """
import torch, transformers
transformers.utils.logging.disable_progress_bar()
imported, began, cpu = peak_gb(), time.perf_counter(), time.process_time()
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
total = sum(float(value.sum()) for value in model.parameters())  # reads what is only mapped
"""
)
_HOLD_OURS = _LOAD_OURS.replace(
  'variables_from_folder(model, open_folder(folder))',
  "variables_from_folder(model, open_folder(folder), WeightStorage(model, 'bfloat16'))",
).replace('import jax\n', 'import jax\nfrom spmd_tasks.decoding.weight_storage import WeightStorage\n', 1)
_HOLD_THEIRS = _LOAD_THEIRS.replace('dtype=torch.float32', 'dtype=torch.bfloat16')
_EXPORT_OURS = (
  _COMMON
  + """
from pathlib import Path
from spmd_tasks.bridges.huggingface import export_folder, open_folder
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
job = resolve('hf.Model', [f'model={folder}']).build()
model, origin = partition_job(job), open_folder(folder)
weights = origin.lazy_weights(job.task.model, model.canonical_state.weights)
imported, began, cpu = peak_gb(), time.perf_counter(), time.process_time()
export_folder(Path(out), job.task.model, weights, origin=origin)
"""
)
_EXPORT_THEIRS = (
  _COMMON
  + """
import torch, transformers
transformers.utils.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
imported, began, cpu = peak_gb(), time.perf_counter(), time.process_time()
model.save_pretrained(out)
"""
)
_END = """
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
print(json.dumps({'seconds': seconds, 'cpu': cpu, 'imports_gb': imported, 'peak_gb': peak_gb()}))
"""
PROGRAMS = {
  'load, ours': _LOAD_OURS,
  'load, transformers': _LOAD_THEIRS,
  'load in 16 bits, ours': _HOLD_OURS,
  'load in 16 bits, transformers': _HOLD_THEIRS,
  'export, ours': _EXPORT_OURS,
  'export, transformers': _EXPORT_THEIRS,
}


def make_folder(path: Path, num_layers: int) -> None:
  """Writes a Llama with random weights in bfloat16, in several shards."""
  import ml_dtypes
  import numpy as np

  from spmd_tasks.bridges._lazy_arrays import LazyArray
  from spmd_tasks.bridges.huggingface._safetensors import write_tensors

  kernels = {
    'self_attn.q_proj': (DIM, DIM),
    'self_attn.k_proj': (DIM, DIM),
    'self_attn.v_proj': (DIM, DIM),
    'self_attn.o_proj': (DIM, DIM),
    'mlp.gate_proj': (FFN, DIM),
    'mlp.up_proj': (FFN, DIM),
    'mlp.down_proj': (DIM, FFN),
    'input_layernorm': (DIM,),
    'post_attention_layernorm': (DIM,),
  }
  shapes = {'model.embed_tokens.weight': (VOCAB, DIM), 'lm_head.weight': (VOCAB, DIM), 'model.norm.weight': (DIM,)}
  shapes |= {f'model.layers.{i}.{name}.weight': shape for i in range(num_layers) for name, shape in kernels.items()}
  rng = np.random.default_rng(0)

  def draw(index):
    return rng.standard_normal([part.stop - part.start for part in index], np.float32).astype(ml_dtypes.bfloat16) * 0.02

  path.mkdir()
  tensors = {name: LazyArray(shape, ml_dtypes.bfloat16, draw) for name, shape in shapes.items()}
  for _ in write_tensors(path, tensors, max_shard_bytes=500_000_000):
    pass
  config = {
    'model_type': 'llama',
    'architectures': ['LlamaForCausalLM'],
    'vocab_size': VOCAB,
    'hidden_size': DIM,
    'intermediate_size': FFN,
    'num_hidden_layers': num_layers,
    'num_attention_heads': HEADS,
    'dtype': 'bfloat16',
  }
  (path / 'config.json').write_text(json.dumps(config))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--layers', type=int, default=17)
  parser.add_argument('--quick', action='store_true', help='one layer')
  parser.add_argument('--directory', help='for the folders; default: a temporary one')
  args = parser.parse_args()
  results = {}
  with tempfile.TemporaryDirectory(dir=args.directory) as directory:
    folder = Path(directory) / 'made'
    make_folder(folder, 1 if args.quick else args.layers)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**30
    print(f'a folder of {size:.2f} GiB in bfloat16')
    for name, program in PROGRAMS.items():
      if args.quick and '16 bits' in name:
        continue
      out = Path(directory) / name.replace(', ', '_')
      ended = subprocess.run(
        [sys.executable, '-c', program + _END, str(folder), str(out)], capture_output=True, text=True, check=False
      )
      if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        sys.exit(1)
      result = results[name] = json.loads(ended.stdout.splitlines()[-1])
      print(
        f'{name:30} {result["seconds"]:6.1f} s   CPU {result["cpu"]:5.1f} s   peak {result["peak_gb"]:5.2f} GiB'
        f'   (before it {result["imports_gb"]:5.2f})',
        flush=True,
      )
  ratio = results['load, ours']['cpu'] / results['load, transformers']['cpu']
  print(json.dumps(results | {'ratio': ratio}))


if __name__ == '__main__':
  main()
