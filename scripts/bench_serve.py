#!/usr/bin/env python
"""Measures serving: continuous against static batching, and the overhead of the scheduler and of HTTP.

    .venv/bin/python scripts/bench_serve.py [--quick]

64 fixed requests of mixed lengths run on 8 slots of a small model with random weights, on one CPU device. The last line
is one JSON object:

  ratio: decode steps of continuous / of static batching, which waits for the longest text; goal: at most 0.7.
  tokens_per_second_ratio: tokens per second of continuous / of static batching; goal: at least 1.3.
  slot_use: slots in use per decode step of continuous batching, while requests wait; goal: at least 0.90.
  same_tokens: whether both generate the same tokens.
  engine_over_floor: CPU time of the engine's step with full slots / of a handwritten step (bare_decode.py) that
    generates the same tokens, measured in turn; goal: at most 1.1.
  full_step_ms: a step with full slots. `bare` launches one step ahead, reads it, and ignores the tokens.
  scheduler_overhead, http_overhead: relative to `bare`, median over rounds; goal: at most 0.1. Through HTTP every
    request is a stream to a client in another process on the same cores (stream_client.py).
  event_loop_ms, client_ms: CPU time of the server's event loop and of the client per step with full slots, start and
    end included.
  queue_full_ms: p50, p95, p99 of the time to refuse a request through HTTP when the queue is full; goal: at most 50.
  ms: the same percentiles of the time to the first token, the time per token and the time between events, when all
    requests of the trace arrive at once through HTTP.
  load: the machine's load average at the end.
"""

import argparse
import json
import os
from pathlib import Path
import queue
from statistics import median
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from alternation import alternate, paired_ratio, print_result
import bare_decode
import jax
import numpy as np

from spmd_tasks.config import resolve
from spmd_tasks.decoding import DecodeSteps, Request
from spmd_tasks.decoding.constraints import Grammars
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.requests import chunk_prompt
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.experiment import partition_job
from spmd_tasks.inputs import ChatTemplate
from spmd_tasks.serving.requests import ServedModel
from spmd_tasks.serving.server import listen, run_server
from spmd_tasks.serving.settings import ServerSettings

SIZES = ('model_dims=256', 'num_layers=4', 'num_heads=4', 'hidden_dims=768', 'seq_len=256', 'batch_size=8')
QUICK_SIZES = ('model_dims=128', 'num_layers=1', 'num_heads=1', 'hidden_dims=16', 'seq_len=64', 'batch_size=2')
MODEL = 'lm.StdlibTiny'
STEPS_PER_ROUND = 8  # of the engine against the floor


class Run(NamedTuple):
  """The result of one replay of the trace."""

  num_steps: int
  seconds: float
  slot_use: float | None
  tokens: list[list[int]]


def make_trace(num_requests, max_len):
  """Returns (prompt tokens, number of tokens to generate) of each request, fixed, short and long."""
  rng = np.random.default_rng(0)
  most = max_len // 2
  prompts = [rng.integers(3, 259, size=int(n)).tolist() for n in rng.integers(4, most, size=num_requests)]
  lengths = np.minimum(most, 2 + rng.exponential(most / 3, size=num_requests)).astype(int).tolist()
  return list(zip(prompts, lengths, strict=True))


def make_engine(sizes):
  """Returns a warmed-up engine with random weights."""
  job = resolve(
    MODEL, [*sizes, 'ici_mesh_shape=1,1,1', 'task.decode.num_slots=8', 'task.decode.num_top_logprobs=1']
  ).build()
  model = partition_job(job)
  steps = DecodeSteps(model)
  engine = ModelEngine(steps, model.init(0).variables)
  engine.warm_up()
  return engine, steps, job.tokenizer


def sequences_of(trace, tokenizer):
  return [
    GeneratedSequence(Request(ids=tuple(ids), max_tokens=length, seed=i), tokenizer.decode, has_logprobs=True)
    for i, (ids, length) in enumerate(trace)
  ]


def tokens_by_sequence(deltas, sequences):
  tokens = {id(sequence): [] for sequence in sequences}
  for delta in deltas:
    tokens[id(delta.sequence)] += [entry.token for entry in delta.logprobs]
  return [tokens[id(sequence)] for sequence in sequences]


def run_static(engine, trace, tokenizer):
  """Replays the trace in static batches: the scheduler gets a batch only after it has finished the previous one."""
  scheduler, sequences, deltas = Scheduler(engine), sequences_of(trace, tokenizer), []
  began = time.perf_counter()
  for start in range(0, len(sequences), engine.num_slots):
    scheduler.submit(sequences[start : start + engine.num_slots])
    while scheduler.has_work:
      deltas += scheduler.advance()
  return Run(scheduler.num_steps, time.perf_counter() - began, None, tokens_by_sequence(deltas, sequences))


def run_continuous(engine, trace, tokenizer):
  """Replays the trace with all requests queued at once; counts slot use while requests wait."""
  scheduler, sequences, deltas, use = Scheduler(engine), sequences_of(trace, tokenizer), [], None
  scheduler.submit(sequences)
  began = time.perf_counter()
  while scheduler.has_work:
    deltas += scheduler.advance()
    if not scheduler.num_queued and use is None:
      read = sum(sequence.num_tokens for sequence in sequences) - scheduler.num_prefills
      use = read / (scheduler.num_steps * engine.num_slots)
  return Run(scheduler.num_steps, time.perf_counter() - began, use, tokens_by_sequence(deltas, sequences))


def fill_slots(engine, tokenizer):
  """Reads a prompt of one token into every slot, in blocks of its own, and launches one step."""
  sequences = sequences_of([([5 + slot], engine.max_len - 1) for slot in range(engine.num_slots)], tokenizer)
  for slot, sequence in enumerate(sequences):
    engine.prefill(chunk_prompt(sequence.request, slot, engine.prefill_chunk))
  engine.step(np.ones(engine.num_slots, np.bool_))


def seconds_per_full_step(engine, tokenizer, num_steps):
  """Times the bare loop over the engine."""
  fill_slots(engine, tokenizer)
  keep = np.ones(engine.num_slots, np.bool_)
  launched = engine.step(keep)
  launched.read()
  began = time.perf_counter()
  for _ in range(num_steps):
    following = engine.step(keep)
    launched.read()
    launched = following
  launched.read()
  seconds = (time.perf_counter() - began) / num_steps
  engine.reset()
  return seconds


def seconds_per_scheduled_step(engine, tokenizer, num_steps):
  """Times the same steps with the scheduler, text and log-probabilities."""
  scheduler = Scheduler(engine, prefill_budget=engine.num_slots * engine.max_len)
  scheduler.submit(sequences_of([([5 + slot], num_steps) for slot in range(engine.num_slots)], tokenizer))
  scheduler.advance()
  assert (scheduler.num_active, scheduler.num_steps) == (engine.num_slots, 1)
  before, began = scheduler.num_steps, time.perf_counter()
  while scheduler.has_work:
    scheduler.advance()
  return (time.perf_counter() - began) / (scheduler.num_steps - before)


def compare_with_floor(engine, tokenizer, num_rounds):
  """Returns the median over rounds of the engine's CPU time / the floor's; checks that both give the same numbers."""
  fill_slots(engine, tokenizer)
  keep, bare_step = np.ones(engine.num_slots, np.bool_), bare_decode.make_step()
  state = bare_decode.init_state(engine.weights['params'], engine.num_slots, engine.max_len)
  state['tokens'] = 5 + np.arange(engine.num_slots, dtype=np.int32)

  def floor():
    nonlocal state
    for _ in range(STEPS_PER_ROUND):
      state, outputs = bare_step(engine.weights['params'], state)
    return outputs

  def ours():
    for _ in range(STEPS_PER_ROUND):
      launched = engine.step(keep)
    outputs = launched.read()
    return outputs.tokens, outputs.logprobs

  for _ in range(2):  # the tokens of the prefill and of the step that fill_slots launched
    state, _ = bare_step(engine.weights['params'], state)
  for (tokens, logprobs), (wanted, wanted_logprobs) in zip([ours(), ours()], [floor(), floor()], strict=True):
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(logprobs, wanted_logprobs, atol=1e-4)
  times = alternate({'engine': ours, 'floor': floor}, num_rounds)
  engine.reset()
  return paired_ratio(times, 'engine', 'floor', clock='cpu')


def run_http(engine, steps, tokenizer, trace, *, extra=None, max_queued=None):
  """Serves the trace to stream_client.py; returns its result and the CPU time of the event loop."""
  settings = ServerSettings(port=0, max_queued=max_queued or len(trace))
  sock, lines, stop = listen(settings), queue.Queue(), threading.Event()
  served = ServedModel(
    name=MODEL,
    created=0,
    step=0,
    tokenizer=tokenizer,
    chat_template=ChatTemplate(),
    settings=steps.settings,
    max_len=steps.max_len,
    vocab_size=steps.vocab_size,
    grammars=Grammars(tokenizer, vocab_size=steps.vocab_size, end_ids=()),
  )
  cpu_seconds = []

  def run():
    began = time.thread_time()
    run_server(engine, served, settings, sock, announce=lines.put, stop=stop)
    cpu_seconds.append(time.thread_time() - began)

  def body(ids, length, seed):
    return {'model': MODEL, 'prompt': ids, 'max_tokens': length, 'ignore_eos': True, 'seed': seed}

  settings_of_client = {
    'address': sock.getsockname()[:2],
    'bodies': [body(ids, length, i) for i, (ids, length) in enumerate(trace)],
    'extra': None if extra is None else body(*extra, 0),
  }
  thread = threading.Thread(target=run)
  thread.start()
  lines.get(timeout=120)
  try:
    client = subprocess.run(
      [sys.executable, Path(__file__).with_name('stream_client.py')],
      input=json.dumps(settings_of_client),
      stdout=subprocess.PIPE,
      text=True,
      timeout=600,
      check=True,
    )
  finally:
    stop.set()
    thread.join()
  result = json.loads(client.stdout)
  return result | {'client_seconds': result['cpu_seconds'], 'cpu_seconds': cpu_seconds[0]}


def seconds_per_http_step(times, num_steps):
  """Returns seconds per step of streams of equal length, from the last one's first event to the end of all."""
  assert all(len(of_stream) == num_steps for of_stream in times), 'some tokens have no text of their own'
  return (max(of_stream[-1] for of_stream in times) - max(of_stream[0] for of_stream in times)) / (num_steps - 1)


def percentiles_ms(values):
  """Returns p50, p95, p99 of seconds; nothing if there are none, as a slow client may not fill the queue."""
  return [float(1000 * np.percentile(values, p)) for p in (50, 95, 99)] if len(values) else []


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='a tiny model and a short trace: does it run?')
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')
  engine, steps, tokenizer = make_engine(QUICK_SIZES if args.quick else SIZES)
  trace = make_trace(16 if args.quick else 64, engine.max_len)
  num_tokens = sum(length for _, length in trace)
  print(f'{len(trace)} requests, {num_tokens} tokens to generate, {engine.num_slots} slots of {engine.max_len}')
  num_rounds = 1 if args.quick else 7
  floor_ratio = compare_with_floor(engine, tokenizer, 2 if args.quick else 20)
  runs = {'static': [], 'continuous': []}
  for _ in range(min(3, num_rounds) + 1):  # the first round is not counted
    runs['static'].append(run_static(engine, trace, tokenizer))
    runs['continuous'].append(run_continuous(engine, trace, tokenizer))
  static, continuous = (min(runs[name][1:], key=lambda run: run.seconds) for name in ('static', 'continuous'))
  http = run_http(engine, steps, tokenizer, trace)

  num_steps = engine.max_len // 2
  full = [([5 + slot], num_steps) for slot in range(engine.num_slots)]
  bare, scheduled, served, http_steps = [], [], [], []
  for _ in range(num_rounds):
    bare.append(seconds_per_full_step(engine, tokenizer, num_steps))
    scheduled.append(seconds_per_scheduled_step(engine, tokenizer, num_steps))
    served.append(run_http(engine, steps, tokenizer, full))
    http_steps.append(seconds_per_http_step(served[-1]['times'], num_steps))

  longest = engine.max_len - 1
  waiting = 2 * engine.num_slots
  # Requests fill the slots and half of the queue; the request that is sent repeatedly fills the rest.
  crowd = run_http(engine, steps, tokenizer, [([5], longest)] * waiting, extra=([5], longest), max_queued=waiting)

  times = http['times']
  seconds = max(of_stream[-1] for of_stream in times)
  per_token = [(t[-1] - t[0]) / max(1, length - 1) for t, (_, length) in zip(times, trace, strict=True)]
  print_result(
    ratio=continuous.num_steps / static.num_steps,
    tokens_per_second_ratio=static.seconds / continuous.seconds,
    slot_use=continuous.slot_use,
    same_tokens=continuous.tokens == static.tokens,
    decode_steps={'static': static.num_steps, 'continuous': continuous.num_steps},
    tokens_per_second={
      'static': num_tokens / static.seconds,
      'continuous': num_tokens / continuous.seconds,
      'http': num_tokens / seconds,
    },
    engine_over_floor=floor_ratio,
    full_step_ms={'bare': 1e3 * min(bare), 'scheduler': 1e3 * min(scheduled), 'http': 1e3 * min(http_steps)},
    scheduler_overhead=median(a / b for a, b in zip(scheduled, bare, strict=True)) - 1,
    http_overhead=median(a / b for a, b in zip(http_steps, bare, strict=True)) - 1,
    event_loop_ms=1e3 * min(run['cpu_seconds'] for run in served) / num_steps,
    client_ms=1e3 * min(run['client_seconds'] for run in served) / num_steps,
    queue_full_ms=percentiles_ms(crowd['refused']),
    num_refused=len(crowd['refused']),
    ms={
      'ttft': percentiles_ms([of_stream[0] for of_stream in times]),
      'tpot': percentiles_ms(per_token),
      'inter_token': percentiles_ms(np.concatenate([np.diff(of_stream) for of_stream in times])),
    },
    load=os.getloadavg()[0],
  )


if __name__ == '__main__':
  main()
