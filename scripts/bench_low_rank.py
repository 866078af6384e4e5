#!/usr/bin/env python
"""Compares memory and time of a train step with low-rank adapters and with all weights, compiled for TPUs.

    .venv/bin/python scripts/bench_low_rank.py [--quick]

The model is Llama 3.1 8B, from its config.json, on four v5p chips; it is compiled, but not run. The last line is one
JSON object: peak bytes of one device by their use, the expected size of the state (twelve bytes per trained parameter,
two per frozen parameter, fewer with a quantized base), and predicted seconds. `ratio` is the peak with rank 16 over the
peak with all weights. `--quick` compiles a tiny model for one CPU.
"""

import argparse
import json
from pathlib import Path
import tempfile
from typing import Any

from alternation import print_result

from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.planning import make_plan, parse_target

LLAMA_8B = {
  'model_type': 'llama',
  'architectures': ['LlamaForCausalLM'],
  'vocab_size': 128_256,
  'hidden_size': 4096,
  'intermediate_size': 14_336,
  'num_hidden_layers': 32,
  'num_attention_heads': 32,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-5,
  'eos_token_id': 128_001,
  'dtype': 'bfloat16',
}
TINY = {'vocab_size': 256, 'hidden_size': 64, 'intermediate_size': 160, 'num_hidden_layers': 2, 'eos_token_id': 1}
TINY |= {'num_attention_heads': 4, 'num_key_value_heads': 2}
KINDS = {
  'all weights': ('hf.Model', ()),
  'rank 16': ('finetune.LoraText', ('lora_rank=16',)),
  'rank 16, base in int8': ('finetune.LoraText', ('lora_rank=16', 'base_dtype=int8')),
  'rank 16, base in nf4': ('finetune.LoraText', ('lora_rank=16', 'base_dtype=nf4')),
  'rank 16, base in nf4_double': ('finetune.LoraText', ('lora_rank=16', 'base_dtype=nf4_double')),
  'rank 64': ('finetune.LoraText', ('lora_rank=64',)),
  'rank 16, attention': ('finetune.LoraText', ('lora_rank=16', 'lora_targets=("attention/",)')),
  'DPO, rank 16': ('finetune.LoraDpo', ('lora_rank=16', 'data=pairs.jsonl')),
  'DPO, rank 16, from the base': ('finetune.LoraDpo', ('lora_rank=16', 'data=pairs.jsonl', 'reference=base')),
}


BYTES_OF_FROZEN = {'int8': 1, 'nf4': 4.5 / 8, 'nf4_double': 4.13 / 8}


def measure(experiment: str, overrides: tuple[str, ...], folder: Path, target: str, sizes: tuple[str, ...]) -> Any:
  job = resolve(experiment, [f'model={folder}', *sizes, *overrides]).build()
  step = make_plan(job, parse_target(target))
  model = partition_job(job, job.experiment.mesh_spec().build_abstract())
  trained = model.num_trained_params
  frozen = model.total_num_params - trained
  base_dtype = dict(override.split('=', 1) for override in overrides).get('base_dtype', '')
  return {
    'trained_parameters': trained,
    'frozen_parameters': frozen,
    'peak_bytes': step['peak_bytes'],
    'parts': {name: size for name, size in step['memory'].items() if size},
    'state_bytes_by_arithmetic': (12 * trained + BYTES_OF_FROZEN.get(base_dtype, 2) * frozen) / step['num_devices'],
    'model_flops': step['model_flops'],
    'predicted_seconds': step['predicted_step_s'],
    'fits': step['fits'],
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='a tiny model on one CPU, to see that it works')
  quick = parser.parse_args().quick
  sizes: tuple[str, ...] = ('seq_len=2048', 'batch_size=16', 'remat_policy=full', 'ici_mesh_shape=1,4,1')
  if quick:
    sizes = ('seq_len=32', 'batch_size=2', 'ici_mesh_shape=1,1,1')
  results = {}
  with tempfile.TemporaryDirectory() as directory:
    (Path(directory) / 'config.json').write_text(json.dumps(LLAMA_8B | (TINY if quick else {})))
    for name, (experiment, overrides) in list(KINDS.items())[: 2 if quick else None]:
      results[name] = measure(experiment, overrides, Path(directory), 'cpu:1' if quick else 'v5p:2x2x1', sizes)
      print(name, results[name], flush=True)
  ratio = results['rank 16']['peak_bytes'] / results['all weights']['peak_bytes']
  print_result(ratio=ratio, kinds=results)


if __name__ == '__main__':
  main()
