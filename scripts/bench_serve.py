#!/usr/bin/env python
"""Serving, on a fixed trace of requests of mixed lengths: continuous against static batching, and what HTTP costs.

    .venv/bin/python scripts/bench_serve.py [--quick]

64 requests for 8 slots of a small model with drawn weights, on one CPU device. The last line is one JSON object:

  ratio: decode steps of continuous batching over those of batches that wait for their longest; at most 0.7 wanted.
  tokens_per_second_ratio: the same of tokens per second; at least 1.3 wanted.
  slot_use: of continuous batching while requests wait; at least 0.90 wanted.
  same_tokens: whether both gave the same tokens.
  full_step_ms: a step in full slots. `bare` launches one ahead and reads, and does nothing with the tokens.
  scheduler_overhead, http_overhead: over that; at most 0.1 wanted. Through HTTP every request is streamed, to a client
    that is another process and takes the same cores.
  event_loop_ms: the CPU time of the server's event loop for each step in full slots, start and end included.
  ms: p50, p95, p99 of the time to first token, the time per token and the time between events, for the trace through
    HTTP where all requests come at once.
"""

import argparse
import asyncio
import json
import queue
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import numpy as np

SIZES = ('model_dims=256', 'num_layers=4', 'num_heads=4', 'hidden_dims=768', 'seq_len=256', 'batch_size=8')
QUICK_SIZES = ('model_dims=16', 'num_layers=1', 'num_heads=1', 'hidden_dims=16', 'seq_len=64', 'batch_size=2')
MODEL = 'lm.StdlibTiny'


class Run(NamedTuple):
  """One replay of the trace; slot_use is that of decode steps while requests wait."""

  num_steps: int
  seconds: float
  slot_use: float | None
  tokens: list[list[int]]


def make_trace(num_requests, max_len):
  """(prompt tokens, number of tokens to generate) of each request: short and long ones, the same each time."""
  rng = np.random.default_rng(0)
  most = max_len // 2
  prompts = [rng.integers(3, 259, size=int(n)).tolist() for n in rng.integers(4, most, size=num_requests)]
  lengths = np.minimum(most, 2 + rng.exponential(most / 3, size=num_requests)).astype(int).tolist()
  return list(zip(prompts, lengths, strict=True))


def make_engine(sizes):
  """A warm engine with drawn weights."""
  from spmd_tasks.config.resolve import resolve
  from spmd_tasks.decoding.engine import ModelEngine
  from spmd_tasks.programs.decode_requests import find_tokenizer
  from spmd_tasks.programs.job_setup import partition_job
  from spmd_tasks.runtime.decode_steps import DecodeSteps

  job = resolve(MODEL, [*sizes, 'ici_mesh_shape=1,1,1', 'task.decode.num_top_logprobs=1']).build()
  model = partition_job(job)
  steps = DecodeSteps(model)
  engine = ModelEngine(steps, model.init(0).weights)
  engine.warm_up()
  return engine, steps, find_tokenizer(job)


def sequences_of(trace, tokenizer):
  from spmd_tasks.decoding.requests import Request
  from spmd_tasks.decoding.sequence import Sequence

  return [
    Sequence(Request(ids=tuple(ids), max_tokens=length, seed=i), tokenizer.decode, has_logprobs=True)
    for i, (ids, length) in enumerate(trace)
  ]


def tokens_by_sequence(deltas, sequences):
  tokens = {id(sequence): [] for sequence in sequences}
  for delta in deltas:
    tokens[id(delta.sequence)] += [entry.token for entry in delta.logprobs]
  return [tokens[id(sequence)] for sequence in sequences]


def run_static(engine, trace, tokenizer):
  """Through the same scheduler, which is given a batch only when it has nothing left to do."""
  from spmd_tasks.decoding.scheduler import Scheduler

  scheduler, sequences, deltas = Scheduler(engine), sequences_of(trace, tokenizer), []
  began = time.perf_counter()
  for start in range(0, len(sequences), engine.num_slots):
    scheduler.submit(sequences[start : start + engine.num_slots])
    while scheduler.has_work:
      deltas += scheduler.advance()
  return Run(scheduler.num_steps, time.perf_counter() - began, None, tokens_by_sequence(deltas, sequences))


def run_continuous(engine, trace, tokenizer):
  """All requests at once; slot use is counted while some of them wait."""
  from spmd_tasks.decoding.scheduler import Scheduler

  scheduler, sequences, deltas, use = Scheduler(engine), sequences_of(trace, tokenizer), [], None
  scheduler.submit(sequences)
  began = time.perf_counter()
  while scheduler.has_work:
    deltas += scheduler.advance()
    if not scheduler.num_queued and use is None:
      read = sum(sequence.num_tokens for sequence in sequences) - scheduler.num_prefills
      use = read / (scheduler.num_steps * engine.num_slots)
  return Run(scheduler.num_steps, time.perf_counter() - began, use, tokens_by_sequence(deltas, sequences))


def seconds_per_full_step(engine, num_steps):
  """The bare loop."""
  from spmd_tasks.decoding.requests import Request

  for slot in range(engine.num_slots):
    engine.prefill([Request(ids=(5,), max_tokens=engine.max_len - 1)], [slot])
  keep = np.ones(engine.num_slots, np.bool_)
  launched = engine.step(keep)
  began = time.perf_counter()
  for _ in range(num_steps):
    following = engine.step(keep)
    launched.read()
    launched = following
  launched.read()
  seconds = (time.perf_counter() - began) / num_steps
  engine.reset()
  return seconds


def run_http(engine, steps, tokenizer, trace):
  """What `replay` in another process gives, and the CPU time of the event loop."""
  from spmd_tasks.inputs.chat_template import ChatTemplate
  from spmd_tasks.serving.generation_request import ServedModel
  from spmd_tasks.serving.server import listen, serve, url_of
  from spmd_tasks.serving.settings import ServerSettings

  settings = ServerSettings(port=0, max_queued=len(trace))
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
  )
  cpu_seconds = []

  def run():
    began = time.thread_time()
    serve(engine, served, settings, sock, announce=lines.put, stop=stop)
    cpu_seconds.append(time.thread_time() - began)

  thread = threading.Thread(target=run)
  thread.start()
  lines.get(timeout=120)
  try:
    client = subprocess.run(
      [sys.executable, __file__, '--client', url_of(sock)],
      input=json.dumps(trace),
      capture_output=True,
      text=True,
      timeout=600,
      check=True,
    )
  finally:
    stop.set()
    thread.join()
  return json.loads(client.stdout) | {'cpu_seconds': cpu_seconds[0]}


async def replay(url, trace):
  """The client: all requests at once, each streamed."""
  import httpx

  async def ask(client, ids, length, seed):
    body = {'model': MODEL, 'prompt': ids, 'max_tokens': length, 'stream': True, 'ignore_eos': True, 'seed': seed}
    began, times = time.perf_counter(), []
    async with client.stream('POST', f'{url}/v1/completions', json=body) as response:
      assert response.status_code == 200, response.status_code
      async for line in response.aiter_lines():
        if line.startswith('data: {'):
          times.append(time.perf_counter() - began)
    return {
      'first': times[0],
      'between': np.diff(times).tolist(),
      'per_token': (times[-1] - times[0]) / max(1, length - 1),
    }

  limits = httpx.Limits(max_connections=None)
  async with httpx.AsyncClient(timeout=600, limits=limits) as client:
    await client.get(f'{url}/ready')
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(client, ids, length, i) for i, (ids, length) in enumerate(trace)))
    seconds = time.perf_counter() - began

  def percentiles(values):
    return [float(1000 * np.percentile(values, p)) for p in (50, 95, 99)]

  between = [value for answer in answers for value in answer['between']]
  return {
    'seconds': seconds,
    'ttft': percentiles([answer['first'] for answer in answers]),
    'tpot': percentiles([answer['per_token'] for answer in answers]),
    'inter_token': percentiles(between or [0.0]),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--quick', action='store_true', help='a tiny model and a short trace: does it run?')
  parser.add_argument('--client', metavar='URL', help='used by the script itself')
  args = parser.parse_args()
  if args.client:
    print(json.dumps(asyncio.run(replay(args.client, json.load(sys.stdin)))))
    return

  import jax

  jax.config.update('jax_platforms', 'cpu')
  engine, steps, tokenizer = make_engine(QUICK_SIZES if args.quick else SIZES)
  trace = make_trace(16 if args.quick else 64, engine.max_len)
  num_tokens = sum(length for _, length in trace)
  print(f'{len(trace)} requests, {num_tokens} tokens to generate, {engine.num_slots} slots of {engine.max_len}')
  num_rounds = 1 if args.quick else 3
  runs = {'static': [], 'continuous': []}
  for _ in range(num_rounds + 1):  # the first round is not counted
    runs['static'].append(run_static(engine, trace, tokenizer))
    runs['continuous'].append(run_continuous(engine, trace, tokenizer))
  static, continuous = (min(runs[name][1:], key=lambda run: run.seconds) for name in ('static', 'continuous'))
  http = run_http(engine, steps, tokenizer, trace)

  num_steps = engine.max_len // 2
  full = [([5], num_steps)] * engine.num_slots
  bare, scheduled, served = [], [], []
  for _ in range(num_rounds):
    bare.append(seconds_per_full_step(engine, num_steps))
    scheduled.append(run_continuous(engine, full, tokenizer).seconds / num_steps)
    served.append(run_http(engine, steps, tokenizer, full))
  http_step_s = min(run['seconds'] for run in served) / num_steps
  result = {
    'ratio': continuous.num_steps / static.num_steps,
    'tokens_per_second_ratio': static.seconds / continuous.seconds,
    'slot_use': continuous.slot_use,
    'same_tokens': continuous.tokens == static.tokens,
    'decode_steps': {'static': static.num_steps, 'continuous': continuous.num_steps},
    'tokens_per_second': {
      'static': num_tokens / static.seconds,
      'continuous': num_tokens / continuous.seconds,
      'http': num_tokens / http['seconds'],
    },
    'full_step_ms': {'bare': 1e3 * min(bare), 'scheduler': 1e3 * min(scheduled), 'http': 1e3 * http_step_s},
    'scheduler_overhead': min(scheduled) / min(bare) - 1,
    'http_overhead': http_step_s / min(bare) - 1,
    'event_loop_ms': 1e3 * min(run['cpu_seconds'] for run in served) / num_steps,
    'ms': {name: http[name] for name in ('ttft', 'tpot', 'inter_token')},
  }
  print(json.dumps(result))


if __name__ == '__main__':
  main()
