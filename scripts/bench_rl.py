#!/usr/bin/env python
"""Compares training on rewards with TRL's GRPOTrainer and transformers' generation, with a small random Llama.

    uv venv /tmp/env-trl --python 3.11 && uv pip install --python /tmp/env-trl trl==1.16.0 torch transformers
    .venv/bin/python scripts/bench_rl.py [--trl /tmp/env-trl/bin/python] [--quick]

Both sides sample 8 completions of each of 8 prompts per step, score them with a Python function and make one update, in
float32 on all CPUs, in processes that run in turn. Weights, prompts, temperature (1) and the maximum length (64 tokens)
are equal. There are two workloads. In the first, lengths vary as with trained models: the end token has a constant
probability, so texts have 12 tokens on average, and TRL pads them to the longest. In the second, `_equal`, nearly all
texts have 64 tokens, as with untrained weights.

TRL has its fastest settings here: no activation checkpointing, no reference model, no logging and no microbatches,
which cost it 4%. Our side logs every sixth step, with the mismatch, and differentiates 4 rows at a time; its `seq_len`
is the longest prompt plus 64 tokens. No new round begins once the time is up, so everything takes less than 8 minutes.
The last line is one JSON object; each name also exists with `_equal`:

  samples_over_trl: completions per second, ours / TRL's, without steps that compile; median over rounds; null without
    --trl.
  cpu_of_trl_over_ours: CPU seconds per completion, TRL's / ours. Hardly depends on other load if everything runs on one
    core (`taskset -c 0`); on several cores, waiting threads of torch count as well.
  rollout_over_decode: tokens per second of rollouts / of --mode decode_once with the same prompts and weights.
  mismatch_max: the largest difference between a token's log-probability in sampling and in training's forward pass.
  rounds: the figures of each round and side: completions per second, CPU seconds and tokens per completion.

The goals are samples_over_trl 3 and rollout_over_decode 0.9. On 2026-11-27, on 2 slow, idle cores, --quick gave
samples_over_trl 3.2, cpu_of_trl_over_ours 4.0, rollout_over_decode 1.36 and mismatch_max 3.1e-6, and with equal lengths
1.40, 1.71, 1.59 and 9.5e-7, in one round each (287 s in all). A completion took 0.0107 s of CPU on our side and 0.043 s
on TRL's; with equal lengths 0.0264 s and 0.0452 s. With unrolled layers (`scan=False`) XLA copies the cache in each
step of a rollout, which then takes 0.14 s of CPU instead of 0.11 s.
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
VOCAB, NUM_PROMPTS, GROUP, NUM_TOKENS = 1000, 8, 8, 64
NUM_ROWS = NUM_PROMPTS * GROUP
MEAN_TOKENS = {'': 12, '_equal': 0}  # of texts, by workload; 0: a text ends by chance of one in VOCAB
FIRST, LAST = 6, 18  # steps between which ours is measured
LIMIT_S, TRL_LIMIT_S = 400, 40  # of everything, and of TRL's steps in a round
_THEIRS = """
import json, sys, time
folder, prompts, num_steps, num_tokens, limit_s = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
import datasets, transformers, trl
times, cpu, lengths, begun = [], [], [], time.time()
class Note(transformers.TrainerCallback):
  def on_step_end(self, args, state, control, **_):
    times.append(time.time())
    cpu.append(time.process_time())
    control.should_training_stop = len(times) > 1 and times[-1] - begun > limit_s
def reward(completions, completion_ids, **_):
  lengths.extend(map(len, completion_ids))
  return [text.count('e') / max(len(text), 1) for text in completions]
args = trl.GRPOConfig(
  output_dir=folder + '/trl', per_device_train_batch_size=64, num_generations=8, max_completion_length=num_tokens,
  max_steps=num_steps, bf16=False, use_cpu=True, gradient_checkpointing=False, beta=0.0, report_to='none',
  save_strategy='no', logging_steps=1000, disable_tqdm=True, learning_rate=1e-6)
data = datasets.Dataset.from_list([json.loads(line) for line in open(prompts)])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='float32')
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
trl.GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer,
                callbacks=[Note()]).train()
number = 64 * (len(times) - 1)
print(json.dumps([number / (times[-1] - times[0]), (cpu[-1] - cpu[0]) / number, sum(lengths) / len(lengths)]))
"""
# The first dimension of all activations is nearly constant, so that the head's weight of it is a bias of the end token.
_MODEL = """
import json, math, sys, torch, transformers
folder, sizes, mean_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, bos_token_id=1, eos_token_id=2,
                                  pad_token_id=0)
model = transformers.LlamaForCausalLM(config)
if mean_tokens:
  with torch.no_grad():
    model.model.embed_tokens.weight[:, 0] = 1.0
    constant = model.model(torch.arange(100, 164)[None]).last_hidden_state[0, :, 0].mean()
    model.lm_head.weight[2, 0] = math.log((config.vocab_size - 1) / (mean_tokens - 1)) / constant
model.save_pretrained(folder)
"""


def share_of_e(prompt, completion, record):
  """Returns the fraction of the text that is the letter e."""
  return completion.count('e') / max(len(completion), 1)


def cpu_seconds(pid: int) -> float:
  """Returns the CPU seconds of a process and its children since their start."""
  fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
  children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
  return sum(map(int, fields[11:15])) / os.sysconf('SC_CLK_TCK') + sum(map(cpu_seconds, map(int, children)))


def run(*command: str, watched: Path | None = None) -> tuple[str, list[float]]:
  """Returns the output of a program, and its CPU seconds at each line of the `watched` file."""
  env = {name: value for name, value in os.environ.items() if name != 'OMP_NUM_THREADS'}  # it would bind torch only
  env |= {'PYTHONPATH': f'{ROOT}:{ROOT / "scripts"}'}
  cpu: list[float] = []
  with tempfile.TemporaryFile('w+') as printed:
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=printed, stderr=subprocess.STDOUT)
    while process.poll() is None:
      if watched and watched.exists() and len(watched.read_text().splitlines()) > len(cpu):
        cpu.append(cpu_seconds(process.pid))
      time.sleep(0.02)
    printed.seek(0)
    text = printed.read()
  if process.returncode:
    sys.exit(f'{" ".join(command)[:300]}\n{text[-6000:]}')
  return text, cpu


class Workload:
  """A model and prompts for both sides; `numbers` has the figures of each round, by name."""

  def __init__(self, directory: Path, sizes: dict[str, int], mean_tokens: int, trl: str | None):
    directory.mkdir()
    self._directory, self._folder, self._trl = directory, directory / 'model', trl
    self._prompts = directory / 'prompts.jsonl'
    run(sys.executable, '-c', _MODEL, str(self._folder), json.dumps(sizes), str(mean_tokens))
    paths = sorted(ROOT.glob('docs/*.md'))
    texts = [line for path in paths for line in path.read_text().splitlines() if len(line) > 60]
    train_bpe(texts, str(self._folder / 'tokenizer.json'), VOCAB)
    named = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': '<bos>', 'eos_token': '<eos>'}
    (self._folder / 'tokenizer_config.json').write_text(json.dumps(named | {'pad_token': '<pad>'}))
    tokenizer = Tokenizer.from_file(str(self._folder / 'tokenizer.json'))
    self._asked = [text[:50] for text in texts[:NUM_PROMPTS]]
    self._prompts.write_text(''.join(json.dumps({'prompt': text}) + '\n' for text in self._asked))
    self._seq_len = max(len(tokenizer.encode(text).ids) for text in self._asked) + NUM_TOKENS
    self.numbers: dict[str, list[float]] = {}

  def note(self, **numbers: float) -> None:
    for name, number in numbers.items():
      self.numbers.setdefault(name, []).append(number)

  def ratio(self, name: str, other: str) -> float | None:
    """Returns the median of the rounds' ratios."""
    pairs = zip(self.numbers[name], self.numbers.get(other, ()), strict=False)
    return median(ratios) if (ratios := [a / b for a, b in pairs]) else None

  def measure(self, number: int) -> None:
    """Runs a round: our steps and TRL's, without counting steps that compile."""
    self.job = self._directory / f'job{number}'
    settings = {'model': self._folder, 'data': self._prompts, 'reward': 'bench_rl:share_of_e'}
    settings |= {'seq_len': self._seq_len, 'max_tokens': NUM_TOKENS, 'batch_size': NUM_ROWS, 'group_size': GROUP}
    settings |= {'task.learner.num_microbatches': NUM_ROWS // 4, 'log_every_steps': FIRST, 'trackers': ()}
    flags = [part for name, value in settings.items() for part in ('--set', f'{name}={value}')]
    flags += ['--job_log_dir', str(self.job), '--num_train_steps', str(LAST)]
    watched = self.job / 'metrics.jsonl'
    _, cpu = run(
      sys.executable, '-m', 'spmd_tasks.main', '--exp', 'tune.Grpo', '--mode', 'train', *flags, watched=watched
    )
    lines = [json.loads(line) for line in watched.read_text().splitlines()]
    first, last = ([line['step'] for line in lines].index(step) for step in (FIRST, LAST))
    samples = NUM_ROWS * (LAST - FIRST)
    self.note(ours=samples / (lines[last]['time'] - lines[first]['time']), our_cpu=(cpu[last] - cpu[first]) / samples)
    self.note(our_tokens=sum(line['completion_tokens'] for line in lines) / len(lines))
    for line in lines[first:]:
      self.note(rollout_tokens_per_second=line['rollout_tokens_per_second'], mismatch=line['sampler_mismatch_max'])
    if self._trl:
      counts = map(str, (LAST, NUM_TOKENS, TRL_LIMIT_S))
      printed, _ = run(self._trl, '-c', _THEIRS, str(self._folder), str(self._prompts), *counts)
      self.note(**dict(zip(('trl', 'trl_cpu', 'trl_tokens'), json.loads(printed.splitlines()[-1]), strict=True)))
    print(f'{self._directory.name}, round {number + 1}: { ({k: round(v[-1], 4) for k, v in self.numbers.items()}) }')
    sys.stdout.flush()

  def decode(self) -> float:
    """Returns tokens per second of --mode decode_once, with as many prompts as the counted steps of a round."""
    wanted = self._directory / 'wanted.jsonl'
    draws = {'n': GROUP, 'max_tokens': NUM_TOKENS, 'temperature': 1.0, 'top_k': 0, 'top_p': 1.0}
    wanted.write_text(''.join(json.dumps({'prompt': text, **draws}) + '\n' for text in self._asked) * (LAST - FIRST))
    flags = ['--mode', 'decode_once', '--job_log_dir', str(self.job), '--decode_input', str(wanted)]
    sizes = {'num_slots': NUM_ROWS, 'max_len': self._seq_len}
    flags += [part for size, value in sizes.items() for part in ('--set', f'task.decode.{size}={value}')]
    run(sys.executable, '-m', 'spmd_tasks.main', *flags)
    (metrics,) = (self.job / 'decode').rglob('metrics.jsonl')
    return json.loads(metrics.read_text().splitlines()[-1])['tokens_per_second']

  def result(self, suffix: str) -> dict[str, object]:
    rollouts = median(self.numbers['rollout_tokens_per_second'])
    return {
      f'samples_over_trl{suffix}': self.ratio('ours', 'trl'),
      f'cpu_of_trl_over_ours{suffix}': self.ratio('trl_cpu', 'our_cpu'),
      f'rollout_over_decode{suffix}': rollouts / self.decode(),
      f'mismatch_max{suffix}': max(self.numbers['mismatch']),
      f'rounds{suffix}': self.numbers,
    }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--trl', help='the Python of an environment with TRL; without it ours is measured alone')
  parser.add_argument('--quick', action='store_true', help='a smaller model, one round')
  args = parser.parse_args()
  sizes = {**(QUICK_SIZES if args.quick else SIZES), 'vocab_size': VOCAB, 'max_position_embeddings': 256}
  started = time.monotonic()
  with tempfile.TemporaryDirectory() as name:
    workloads = {
      suffix: Workload(Path(name) / f'workload{suffix}', sizes, mean_tokens, args.trl)
      for suffix, mean_tokens in MEAN_TOKENS.items()
    }
    for number in range(1 if args.quick else 3):
      round_started = time.monotonic()
      for workload in workloads.values():
        workload.measure(number)
      now = time.monotonic()
      if now - started + 1.5 * (now - round_started) > LIMIT_S:  # decoding takes half a round at most
        break
    results = [workload.result(suffix) for suffix, workload in workloads.items()]
  print_result(**{name: value for result in results for name, value in result.items()})


if __name__ == '__main__':
  main()
