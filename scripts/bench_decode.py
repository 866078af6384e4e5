#!/usr/bin/env python
"""Measures generation: whether its cost follows the tokens in use, and how it compares with transformers.

    .venv/bin/python scripts/bench_decode.py             # a Llama of 60M parameters, about 6 minutes
    .venv/bin/python scripts/bench_decode.py --quick     # a small one, 1 to 2 minutes
    .venv/bin/python scripts/bench_decode.py --jobs runs/large runs/small    # only drafts, with trained models
    .venv/bin/python scripts/bench_decode.py --jobs runs/heads               # only drafts by the model's own heads

Both sides load the same folder of random weights. All times are CPU times, on one pinned core, measured in turn. The
last line is one JSON object; null is a figure that cannot be measured here.

  step_4096_over_256: a step of 32 slots whose texts have 64 tokens, with max_len 4,096 / with 256; goal: at most 1.15.
  step_8192_over_128: the same of 8 slots; goal: at most 1.2.
  one_of_8_over_single: a step of 8 slots of which one is busy / a step of one slot; goal: at most 1.2.
  chunk_over_first: reading 256 tokens after 256 others, of 4,096 positions / reading the first 256; goal: at most 1.3.
  full_over_reads: a step with full caches (8 slots of 4,096), less a step of short texts / reading the caches once.
  over_transformers: tokens per CPU second of `generate` with the defaults / of transformers', with prompts, by batch.
  over_continuous_batching: the same against transformers' `generate_batch`, 32 prompts of mixed lengths.
  bytes_over_used: bytes of the cache / bytes of the tokens in it, at their most, with 64 texts that grow to 64 tokens,
    max_len 4,096 and max_cache_tokens 4,096; goal: at most 1.1.
  prefix_prefill_share: of 64 prompts with a shared beginning, the tokens that are read / all tokens.
  delay_steps: the longest time between two tokens of 31 texts while a prompt of 4,000 tokens is read / their median.
  drafts_over_plain: CPU seconds of 8 repetitive prompts without drafts / with 4 (the texts are compared).
  second_generate_ms: from the call of a second `generate` to its first launch, with 32 slots of 4,096.
  step_ms: of the steps above.
"""

import argparse
import dataclasses
import functools
import os
from pathlib import Path
from statistics import median
import tempfile
import time

from alternation import alternate, paired_ratio, print_result
import jax
import numpy as np

from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.origin import variables_from_folder
from spmd_tasks.config import resolve
from spmd_tasks.decoding import DecodeSettings, DecodeSteps, Request, SamplingParams, generate
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.requests import Chunk
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.experiment import partition_job
from spmd_tasks.loading import load, load_draft

SIZES = {'vocab_size': 32_000, 'hidden_size': 512, 'intermediate_size': 1536, 'num_hidden_layers': 8}
QUICK_SIZES = {'vocab_size': 2000, 'hidden_size': 128, 'intermediate_size': 384, 'num_hidden_layers': 2}
TEXT = 64  # tokens of the texts whose steps are measured
NEW = 64  # tokens that follow each prompt in the comparisons with transformers


def no_text(ids):
  del ids
  return ''


def make_theirs(folder, sizes):
  """Writes a Llama with random weights; returns it as transformers has it."""
  import torch
  import transformers

  torch.manual_seed(0)
  torch.set_num_threads(1)
  transformers.utils.logging.disable_progress_bar()
  config = transformers.LlamaConfig(
    **sizes, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=8192, eos_token_id=None
  )
  model = transformers.LlamaForCausalLM(config).eval()
  model.save_pretrained(folder)
  return model


class Ours:
  """The model with compiled steps for any settings."""

  def __init__(self, folder):
    job = resolve('hf.Model', [f'model={folder}', 'ici_mesh_shape=1,1,1', 'seq_len=512']).build()
    self.model = partition_job(job)
    self.variables = variables_from_folder(self.model, open_folder(folder))
    self._vocab_size = job.task.model.embedding.vocab_size

  def prompts(self, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(3, self._vocab_size, size=length).tolist()) for length in lengths]

  def steps(self, **settings):
    return DecodeSteps(self.model, DecodeSettings(eos_ids=(), **settings))

  def engine(self, num_busy, **settings):
    """Makes an engine whose first slots hold texts of TEXT tokens."""
    engine = ModelEngine(self.steps(**settings), self.variables)
    engine.reset()
    size = engine.prefill_chunk
    for slot, ids in enumerate(self.prompts([TEXT] * num_busy)):
      request = Request(ids=ids, max_tokens=engine.max_len - TEXT)
      for start in range(0, TEXT, size):
        chunk = Chunk(request=request, slot=slot, start=start, stop=min(start + size, TEXT))
        engine.prefill([chunk]).read()
    keep = np.arange(engine.num_slots) < num_busy
    return engine, lambda: engine.step(keep).read().tokens

  def run(self, steps, prompts, num_tokens=NEW):
    requests = [Request(ids=ids, max_tokens=num_tokens) for ids in prompts]
    texts = dict(generate(steps, self.variables, requests, decode=no_text))
    return [texts[i].ids for i in range(len(requests))]


def compare(programs, num_rounds):
  """Returns (ratio of the first program's CPU time to the second's, milliseconds of both)."""
  times = alternate(programs, num_rounds)
  first, second = programs
  return paired_ratio(times, first, second, clock='cpu'), {name: 1e3 * median(t.cpu) for name, t in times.items()}


def measure_steps(ours, num_rounds):
  """Returns what the cost of single steps and prefills follows."""
  result, step_ms = {}, {}

  def note(name, programs, rounds=num_rounds):
    result[name], ms = compare(programs, rounds)
    step_ms.update(ms)
    print(name, round(result[name], 3), {key: round(value, 2) for key, value in ms.items()}, flush=True)

  def step(slots, max_len, busy=None):
    return ours.engine(slots if busy is None else busy, num_slots=slots, max_len=max_len)[1]

  note('step_4096_over_256', {'32 x 4096': step(32, 4096), '32 x 256': step(32, 256)})
  note('step_8192_over_128', {'8 x 8192': step(8, 8192), '8 x 128': step(8, 128)})
  note('one_of_8_over_single', {'1 of 8 x 512': step(8, 512, busy=1), '1 x 512': step(1, 512)})

  engine, short = ours.engine(8, num_slots=8, max_len=4096, prefill_chunk=256)
  cache = engine._state.cache  # the benchmark's own look at memory
  result['bytes_over_used'] = bytes_over_used(ours, sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) / (8 * 4096))
  host = [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]
  full_engine, full = ours.engine(8, num_slots=8, max_len=4096)
  # As if so many tokens had been read: the time does not depend on what the cache holds.
  positions = jax.device_put(np.full(8, 4096 - 2 * num_rounds - 8, np.int32), full_engine._state.positions.sharding)
  full_engine._state = full_engine._state.replace(positions=positions)
  times = alternate({'full': full, 'short': short, 'read': lambda: [leaf.max() for leaf in host]}, num_rounds)
  full_ms, short_ms, read_ms = (1e3 * median(times[name].cpu) for name in ('full', 'short', 'read'))
  result['full_over_reads'] = (full_ms - short_ms) / read_ms
  step_ms.update({'8 x 4096 full': full_ms, '8 x 4096': short_ms, 'reading 8 x 4096': read_ms})
  print('full_over_reads', result['full_over_reads'], flush=True)

  (ids,) = ours.prompts([512])
  request = Request(ids=ids, max_tokens=1)

  def chunk(start):
    return lambda: engine.prefill([Chunk(request=request, slot=0, start=start, stop=start + 256)]).read()

  chunk(0)()
  note('chunk_over_first', {'second chunk': lambda: chunk(256)().tokens, 'first chunk': lambda: chunk(0)().tokens}, 4)
  return {**result, 'step_ms': step_ms}


def bytes_over_used(ours, bytes_of_token):
  """Returns the ratio at the largest number of tokens that are in the cache at once."""
  engine = ModelEngine(ours.steps(num_slots=64, max_len=4096, max_cache_tokens=4096), ours.variables)
  engine.reset()
  scheduler = Scheduler(engine, prefill_budget=64 * 4096)
  # A text's last token is not written, as nothing follows it.
  requests = [Request(ids=ids, max_tokens=TEXT // 4 + 1) for ids in ours.prompts([TEXT - TEXT // 4] * 64)]
  sequences, most = [GeneratedSequence(request, no_text) for request in requests], 0
  scheduler.submit(sequences)
  while scheduler.has_work:
    scheduler.advance()
    running = [sequence for sequence in sequences if sequence.num_launched and sequence.finish_reason is None]
    most = max(most, sum(len(sequence.request.ids) + sequence.num_launched - 1 for sequence in running))
  return sum(leaf.nbytes for leaf in jax.tree.leaves(engine._state.cache)) / (bytes_of_token * most)


def measure_schedules(ours, quick):
  """Returns what a scheduler makes of shared prompts, and how a long prompt delays others."""
  engine = ModelEngine(ours.steps(num_slots=8, max_len=512, prefill_chunk=64), ours.variables)
  engine.reset()
  scheduler, (shared,) = Scheduler(engine), ours.prompts([256])
  prompts = [shared + own for own in ours.prompts([32] * 64, seed=1)]
  scheduler.submit(GeneratedSequence(Request(ids=ids, max_tokens=2), no_text) for ids in prompts)
  while scheduler.has_work:
    scheduler.advance()
  share = scheduler.num_prompt_tokens / (scheduler.num_prompt_tokens + scheduler.num_reused_tokens)

  engine = ModelEngine(ours.steps(num_slots=32, max_len=4096), ours.variables)
  engine.reset()
  scheduler = Scheduler(engine)
  scheduler.submit(GeneratedSequence(Request(ids=ids, max_tokens=200), no_text) for ids in ours.prompts([TEXT] * 31))
  while scheduler.num_queued or scheduler.num_steps < 40:
    scheduler.advance()

  def gaps(num):
    times = [time.process_time()]
    for _ in range(num):
      scheduler.advance()
      times.append(time.process_time())
    return np.diff(times)

  usual = float(np.median(gaps(10)))
  (long,) = ours.prompts([1000 if quick else 4000], seed=2)
  scheduler.submit([GeneratedSequence(Request(ids=long[:600], max_tokens=1), no_text)])  # compiles
  gaps(12)
  scheduler.submit([GeneratedSequence(Request(ids=long, max_tokens=1), no_text)])
  num_chunks = -(-len(long) // engine.prefill_chunk)
  return {'prefix_prefill_share': share, 'delay_steps': float(np.max(gaps(num_chunks + 2))) / usual - 1}


def measure_against_transformers(ours, theirs, quick):
  """Returns the ratios of tokens per CPU second, by batch, after a check that both give the same tokens."""
  import torch

  steps, ratios, same = ours.steps(), {}, []
  for batch in (1, 8, 32):
    prompts = ours.prompts([TEXT] * batch, seed=batch)
    ids = torch.tensor(prompts)

    def generate_theirs(ids=ids):
      with torch.inference_mode():
        return theirs.generate(
          ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )[:, TEXT:]

    def generate_ours(prompts=prompts):
      return np.array(ours.run(steps, prompts))

    same.append(float(np.mean(generate_ours() == generate_theirs().numpy())))
    times = {'theirs': [], 'ours': []}
    for _ in range(3 if batch == 1 else 2):
      for name, program in (('theirs', generate_theirs), ('ours', generate_ours)):
        began = time.process_time()
        program()
        times[name].append(time.process_time() - began)
    ratios[str(batch)] = median(a / b for a, b in zip(times['theirs'], times['ours'], strict=True))
    print('over_transformers', batch, round(ratios[str(batch)], 3), {k: min(v) for k, v in times.items()}, flush=True)
  prompts = ours.prompts(np.random.default_rng(0).integers(16, 200, size=32))
  try:
    continuous = seconds_of_continuous_batching(theirs, prompts)
  except Exception as error:  # it wants an accelerator in some versions
    print(f'transformers has no continuous batching here: {type(error).__name__}: {error}', flush=True)
    continuous = None
  ours.run(steps, prompts)
  began = time.process_time()
  ours.run(steps, prompts)
  seconds = time.process_time() - began
  return {
    'over_transformers': ratios,
    'same_tokens': min(same),
    'over_continuous_batching': None if continuous is None else continuous / seconds,
  }


def seconds_of_continuous_batching(theirs, prompts):
  import transformers

  config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
  continuous = transformers.ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=512, use_cuda_graph=False)
  seconds = 0.0
  for num in (1, len(prompts)):  # the first run warms up
    began = time.process_time()
    outputs = theirs.generate_batch(
      [list(ids) for ids in prompts[:num]],
      generation_config=config,
      continuous_batching_config=continuous,
      progress_bar=False,
    )
    seconds = time.process_time() - began
    lengths = {len(output.generated_tokens) for output in outputs.values()}
    if len(outputs) != num or lengths != {NEW}:
      raise RuntimeError(f'{len(outputs)} of {num} texts came back, of lengths {lengths}')
  return seconds


def measure_drafts(ours):
  """Returns what drafts save where texts repeat themselves, after a check that they change no token."""
  prompts = [ids * 4 for ids in ours.prompts([TEXT // 4] * 8)]
  plain, drafted = ours.steps(), ours.steps(num_drafts=4)
  if ours.run(plain, prompts) != ours.run(drafted, prompts):
    raise RuntimeError('drafts have changed a text')
  programs = {'plain': lambda: ours.run(plain, prompts), 'drafts': lambda: ours.run(drafted, prompts)}
  times = alternate(programs, 2, num_warmup=0)
  return {'drafts_over_plain': paired_ratio(times, 'plain', 'drafts', clock='cpu')}


def measure_draft_jobs(target, draft=None, *, quick=False):
  """Returns what drafts of a trained job give on 8 texts of the eval input.

  Keys name who guesses (the model's heads if it has any, else n-grams; a draft model) and how many tokens, the
  temperature, and the texts at once: the share of drafts that were right, tokens per text and step, tokens per CPU
  second with and without, and CPU seconds without drafts over those with.
  """
  result = {}
  lm = load(target, overrides=[] if draft is None else ['task.decode.num_drafts=4', f'task.decode.draft_model={draft}'])
  rows = next(lm.job.eval_inputs['valid'].make_iterator())['ids'][:8, :TEXT].tolist()
  draft_model, model = load_draft(lm.job, lm.partitioned), lm.job.task.model
  who = 'heads' if hasattr(model, 'nextn_head') else 'ngrams'
  for num in (8,) if quick else (8, 1):
    settings = DecodeSettings(max_len=2 * TEXT, num_slots=num, eos_ids=())
    kinds = {
      f'{who}_{k}': DecodeSteps(lm.partitioned, dataclasses.replace(settings, num_drafts=k))
      for k in {'heads': (1, 2), 'ngrams': (4,)}[who]
    }
    if draft_model is not None:
      kinds['model_4'] = DecodeSteps(lm.partitioned, dataclasses.replace(settings, num_drafts=4), draft=draft_model)
    plain = DecodeSteps(lm.partitioned, settings)
    for temperature in (0.0,) if quick else (0.0, 1.0):
      sampling = SamplingParams(temperature=temperature)
      requests = [Request(ids=tuple(ids), max_tokens=TEXT, seed=i, sampling=sampling) for i, ids in enumerate(rows)]

      def run(steps, requests=requests):
        return dict(generate(steps, lm.padded_variables, requests, decode=no_text))

      expected = run(plain)
      for name, steps in kinds.items():
        texts = run(steps)
        if [texts[i].ids for i in range(8)] != [expected[i].ids for i in range(8)]:
          print(f'{name} at {temperature}, {num} at once: other tokens; one row alone has other bits')
        accepted = sum(text.num_accepted for text in texts.values())
        drafted = sum(text.num_drafted for text in texts.values())
        programs = {'plain': functools.partial(run, plain), name: functools.partial(run, steps)}
        times = alternate(programs, 3, num_warmup=0)
        result[key := f'{name}_{temperature:g}_{num}'] = {
          'right': accepted / max(drafted, 1),
          'tokens_a_step': 8 * (TEXT - 1) / (8 * (TEXT - 1) - accepted),
          'tokens_a_cpu_second': {kind: 8 * TEXT / median(kind_times.cpu) for kind, kind_times in times.items()},
          'plain_over': paired_ratio(times, 'plain', name, clock='cpu'),
        }
        print(key, result[key], flush=True)
  return result


def measure_second_generate(ours):
  """Returns the milliseconds from the call of a second `generate` to its first result's first step."""
  steps, prompts, times = ours.steps(num_slots=32, max_len=4096), ours.prompts([4]), []
  for _ in range(3):
    began = time.process_time()
    ours.run(steps, prompts, num_tokens=1)
    times.append(time.process_time() - began)
  return {'second_generate_ms': 1e3 * min(times[1:])}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='a small model and few rounds')
  parser.add_argument(
    '--jobs', nargs='+', metavar='JOB', help='measure only drafts, of a trained job and maybe a smaller one'
  )
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  if args.jobs:
    print_result(drafts=measure_draft_jobs(*args.jobs, quick=args.quick), load=os.getloadavg()[0])
    return
  with tempfile.TemporaryDirectory() as directory:
    folder = str(Path(directory) / 'made')
    theirs = make_theirs(folder, QUICK_SIZES if args.quick else SIZES)
    ours = Ours(folder)
    result = measure_against_transformers(ours, theirs, args.quick)
    result |= measure_second_generate(ours) | measure_schedules(ours, args.quick) | measure_drafts(ours)
    result |= measure_steps(ours, 4 if args.quick else 8)
  print_result(ratio=result['step_4096_over_256'], **result, load=os.getloadavg()[0])


if __name__ == '__main__':
  main()
