#!/usr/bin/env python
"""Learning from rewards against TRL's GRPOTrainer with transformers' generation, on one small Llama of random weights.

    uv venv /tmp/env-trl --python 3.11 && uv pip install --python /tmp/env-trl trl==1.16.0 torch transformers
    .venv/bin/python scripts/bench_rl.py [--trl /tmp/env-trl/bin/python] [--quick]

Both sides sample 8 completions of each of 8 prompts a step, reward them by a Python function and make one update, in
float32 on all of this machine's CPUs, in processes that run in turn. Both have the same weights, prompts, temperature 1
and 64 tokens at most, and texts end where the model says so; TRL pads them to the longest, and our `seq_len` is the
longest prompt and 64 tokens. TRL's settings are its fastest here: no checkpointing of activations, no reference model,
nothing logged, and no microbatches, which cost it 4%. Ours log every sixth step, with the mismatch, and differentiate
4 rows at a time. A round ends, and no other begins, when its time is up, so that all takes less than 8 minutes. The
last line is one JSON object:

  samples_over_trl: completions per second, ours / TRL's, of steps that compile nothing; the median of the rounds; null
    without --trl.
  rollout_over_decode: tokens per second of rollouts / of --mode decode_once on the same prompts with the same weights.
  mismatch_max: the largest difference of a token's log-probability in sampling and in the forward pass of training.
  samples_per_second: of each round, by side.

On 2026-11-26, on 2 cores with nothing else to do, --quick gave samples_over_trl 1.35 in the morning and 1.16 in the
evening (goal 3), rollout_over_decode 1.44 and 1.36 (goal 0.9) and mismatch_max 9.5e-7, in 64 s; one round each. A step
took 0.67 s of CPU, TRL's 1.1: the update 0.43 s, whose products with weights alone take 0.21 by XLA (a bare torch
update of the batch takes 0.36); the rollout 0.23 s, of which 0.04 draw random numbers and about 0.08 copy blocks of the
cache; all else 0.01 s. A mesh of two devices on these cores made 122 completions a second, one device 130.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
import subprocess
import sys
import tempfile
import time

from alternation import print_result
from tokenizers import Tokenizer

from spmd_tasks.inputs import train_bpe

ROOT = Path(__file__).parents[1]
SIZES = {'hidden_size': 256, 'intermediate_size': 768, 'num_hidden_layers': 4}
QUICK_SIZES = {'hidden_size': 128, 'intermediate_size': 384, 'num_hidden_layers': 2}
VOCAB, NUM_PROMPTS, GROUP = 1000, 8, 8
LIMIT_S, TRL_LIMIT_S = 420, 75  # of everything, and of TRL's steps in a round
_THEIRS = """
import json, sys, time
folder, prompts, num_steps, num_tokens, limit_s = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
import datasets, transformers, trl
times, begun = [], time.time()
class Note(transformers.TrainerCallback):
  def on_step_end(self, args, state, control, **_):
    times.append(time.time())
    control.should_training_stop = len(times) > 1 and times[-1] - begun > limit_s
def reward(completions, **_):
  return [each.count('e') / max(len(each), 1) for each in completions]
args = trl.GRPOConfig(
  output_dir=folder + '/trl', per_device_train_batch_size=64, num_generations=8, max_completion_length=num_tokens,
  max_steps=num_steps, bf16=False, use_cpu=True, gradient_checkpointing=False, beta=0.0, report_to='none',
  save_strategy='no', logging_steps=1000, disable_tqdm=True, learning_rate=1e-6)
data = datasets.Dataset.from_list([json.loads(line) for line in open(prompts)])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='float32')
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
trl.GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer,
                callbacks=[Note()]).train()
print(json.dumps(64 * (len(times) - 1) / (times[-1] - times[0])))
"""
_MODEL = """
import json, sys, torch, transformers
folder, sizes = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, bos_token_id=1, eos_token_id=2,
                                  pad_token_id=0)
transformers.LlamaForCausalLM(config).save_pretrained(folder)
"""


def share_of_e(prompt, completion, record):
  """How much of the text is the letter e."""
  return completion.count('e') / max(len(completion), 1)


def run(*command: str) -> str:
  env = {name: value for name, value in os.environ.items() if name != 'OMP_NUM_THREADS'}  # it would bind torch only
  env |= {'PYTHONPATH': f'{ROOT}:{ROOT / "scripts"}'}
  done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
  if done.returncode:
    sys.exit(f'{" ".join(command)[:300]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}')
  return done.stdout


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--trl', help='the Python of an environment with TRL; without it ours is measured alone')
  parser.add_argument('--quick', action='store_true', help='a smaller model, one round')
  given = parser.parse_args()
  sizes = {**(QUICK_SIZES if given.quick else SIZES), 'vocab_size': VOCAB, 'max_position_embeddings': 256}
  num_tokens, num_first, num_steps, started = 64, 6, 12, time.monotonic()
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name) / 'model'
    run(sys.executable, '-c', _MODEL, str(folder), json.dumps(sizes))
    texts = [
      line for path in sorted(ROOT.glob('docs/*.md')) for line in path.read_text().splitlines() if len(line) > 60
    ]
    train_bpe(texts, str(folder / 'tokenizer.json'), VOCAB)
    named = {'bos_token': '<bos>', 'eos_token': '<eos>', 'pad_token': '<pad>'}
    (folder / 'tokenizer_config.json').write_text(json.dumps({'tokenizer_class': 'PreTrainedTokenizerFast'} | named))
    tokenizer = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    longest = max(len(tokenizer.encode(text[:50]).ids) for text in texts[:NUM_PROMPTS])
    prompts = Path(name) / 'prompts.jsonl'
    prompts.write_text(''.join(json.dumps({'prompt': text[:50]}) + '\n' for text in texts[:NUM_PROMPTS]))

    samples: dict[str, list[float]] = {'ours': [], 'theirs': []}
    rollouts, mismatches = [], []
    for i in range(1 if given.quick else 3):  # the first step of each process compiles, and is not counted
      round_started = time.monotonic()
      job = Path(name) / f'job{i}'
      settings = {'model': folder, 'data': prompts, 'reward': 'bench_rl:share_of_e'}
      settings |= {'seq_len': longest + num_tokens}
      settings |= {'max_tokens': num_tokens, 'batch_size': NUM_PROMPTS * GROUP, 'group_size': GROUP}
      settings |= {'task.learner.num_microbatches': NUM_PROMPTS * GROUP // 4}
      settings |= {'log_every_steps': num_first, 'tensorboard': False}
      flags = [part for name, value in settings.items() for part in ('--set', f'{name}={value}')]
      run(
        *(sys.executable, '-m', 'spmd_tasks.main', '--exp', 'tune.Grpo', '--mode', 'train', '--job_log_dir', str(job)),
        *('--num_train_steps', str(num_steps), *flags),
      )
      lines = [json.loads(line) for line in (job / 'metrics.jsonl').read_text().splitlines()]
      by_step = {line['step']: line for line in lines}
      seconds = by_step[num_steps]['time'] - by_step[num_first]['time']
      samples['ours'].append(NUM_PROMPTS * GROUP * (num_steps - num_first) / seconds)
      rollouts += [line['rollout_tokens_per_second'] for line in lines if line['step'] >= num_first]
      mismatches += [line['sampler_mismatch_max'] for line in lines if 'sampler_mismatch_max' in line]
      if given.trl:
        counts = (num_steps, num_tokens, TRL_LIMIT_S)
        theirs = run(given.trl, '-c', _THEIRS, str(folder), str(prompts), *map(str, counts))
        samples['theirs'].append(json.loads(theirs.splitlines()[-1]))
      print(f'round {i + 1}: { ({side: round(each[-1], 2) for side, each in samples.items() if each}) }', flush=True)
      now = time.monotonic()
      if now - started + 1.5 * (now - round_started) > LIMIT_S:  # decoding takes half a round at most
        break

    wanted = Path(name) / 'wanted.jsonl'
    draws = {'n': GROUP, 'max_tokens': num_tokens, 'temperature': 1.0, 'top_k': 0, 'top_p': 1.0}
    lines = [json.dumps({'prompt': text[:50], **draws}) + '\n' for text in texts[:NUM_PROMPTS]]
    wanted.write_text(''.join(lines * (num_steps - num_first)))  # as many as the measured steps have
    decoded = ('--mode', 'decode_once', '--job_log_dir', str(job), '--decode_input', str(wanted))
    sizes = {'num_slots': NUM_PROMPTS * GROUP, 'max_len': longest + num_tokens}
    slots = [part for size, value in sizes.items() for part in ('--set', f'task.decode.{size}={value}')]
    run(sys.executable, '-m', 'spmd_tasks.main', *decoded, *slots)
    (metrics,) = (job / 'decode').rglob('metrics.jsonl')
    decode = json.loads(metrics.read_text().splitlines()[-1])['tokens_per_second']
  print_result(
    samples_over_trl=median(a / b for a, b in zip(*samples.values(), strict=True)) if given.trl else None,
    rollout_over_decode=median(rollouts) / decode,
    mismatch_max=max(mismatches),
    samples_per_second=samples,
    rollout_tokens_per_second=median(rollouts),
    decode_tokens_per_second=decode,
  )


if __name__ == '__main__':
  main()
