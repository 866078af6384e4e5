"""Measures and checks spmd_tasks on one GPU: kernels, training, decoding and serving, compared with other programs.

    scripts/gpu_check --out DIR [--sections env,kernels] [--budget 570] [--tiny]

Each section runs in its own process with a time limit, the most important first; failures and timeouts are recorded,
and the next section runs. DIR gets gpu_check.json, gpu_check.md and log.txt. The last line on stdout is one JSON
object, and the exit code is 0 if nothing failed. With --tiny all sizes are small, and everything runs on the CPU.

A row has the applicable fields of: ms, busy_ms (the GPU's part), tokens_per_s, tflops, mfu, peak_gb, compile_s;
`kernels`, the longest ones; `error`, relative in the 2-norm to the plain computation, or absolute in `unit`, and its
`limit`; `failure`. Section `plan` has the predictions of --mode plan.

Shapes: B batch, T sequence, H query heads, G key/value heads, K head dim; R rows, E experts, D in, F out.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import datetime
import functools
import http.client
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']
LIMITS = {'env': 60, 'kernels': 110, 'dense': 140, 'moe': 110, 'train': 150, 'serve': 120, 'decode': 170}
LIMITS |= {'verify': 90, 'pytorch': 110, 'plan': 120}  # seconds
LEAST_S = 20  # a section is not begun with less
Row = dict[str, Any]


def sizes(tiny: bool) -> Any:
  """The sizes of everything; `steps` are warm ones and all."""
  if tiny:
    shape = dict(vocab_size=320, model_dims=32, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dims=64)
    moe = ('mesh.num_devices=1', 'mesh.num_expert_partitions=1', 'num_layers=1', 'seq_len=32', 'batch_size=2')
    kernels = dict(square=128, copy=2**16, attention=[(2, 64, 4, 2, 16)], experts=(128, 4, 32, 48))
    kernels |= dict(pages=[(2, 2, 4, 2, 16, 64)])
    decode = dict(slots=(2,), max_len=64, new_tokens=4, requests=2, llama=None)
    rest = dict(moe=('moe.StdlibTiny', moe), steps=(2, 4), platform='cpu')
    return SimpleNamespace(shape=shape | dict(seq_len=64, batch_size=2), **kernels, **decode, **rest)
  shape = dict(vocab_size=32_000, model_dims=2048, num_layers=24, num_heads=16, num_kv_heads=8, hidden_dims=5632)
  moe = ('mesh.num_devices=1', 'mesh.num_replicas=1', 'num_layers=4', 'vocab_size=32000', 'seq_len=4096')
  attention = [(8, 2048, 16, 8, 128), (4, 2048, 8, 4, 256)]
  kernels = dict(square=8192, copy=2**28, attention=attention, experts=(32_768, 64, 2048, 1408))
  long, latent = (4, 1, 32, 8, 128, 32_768), (32, 1, 128, 1, 576, 4096)
  kernels |= dict(pages=[(32, 1, 32, 8, 128, 4096), (32, 16, 32, 8, 128, 4096), long, latent])
  decode = dict(slots=(1, 32, 128), max_len=1024, new_tokens=64, requests=64)
  llama = dict(num_slots=32, max_len=4096, prefill_chunk=512, min_bucket=512, weights_dtype='bfloat16')
  decode |= dict(llama=('ici_mesh_shape=1,1,1', *(f'task.decode.{n}={v}' for n, v in llama.items())))
  rest = dict(moe=('moe.Qwen3Moe30B', (*moe, 'batch_size=4', 'remat_policy=attention')), steps=(4, 20), platform='gpu')
  return SimpleNamespace(shape=shape | dict(seq_len=2048, batch_size=16), **kernels, **decode, **rest)


def dense_job(size: Any, slots: int = 1) -> tuple[str, tuple[str, ...]]:
  """lm.Dense1B on one device, with the learning rate of bare_step.py."""
  decode = dict(num_slots=slots, max_len=size.max_len, prefill_chunk=64, min_bucket=64, weights_dtype='bfloat16')
  fields = size.shape | {f'task.decode.{name}': value for name, value in decode.items()}
  fixed = ('ici_mesh_shape=1,1,1', 'learning_rate=3e-3', f'num_train_steps={size.steps[1]}', 'eval_batches=1')
  return 'lm.Dense1B', (*fixed, 'log_every_steps=2', *(f'{name}={value}' for name, value in fields.items()))


def moe_row(size: Any) -> str:
  return f'{size.moe[0]} {" ".join(size.moe[1][2:])}'


def decode_jobs(size: Any) -> list[tuple[str, tuple[str, tuple[str, ...]], int, int, int]]:
  """Returns (row name, job, slots, tokens per prompt, tokens to compare) for each measurement of `decode`."""
  jobs = [(f'{slots} slots of {size.max_len}', dense_job(size, slots), slots, 8, 4) for slots in size.slots]
  return jobs + ([('lm.Llama8B, 32 full slots of 4096', ('lm.Llama8B', size.llama), 32, 3900, 0)] if size.llama else [])


def binary(mode: str, experiment: str, overrides: tuple[str, ...], *flags: Any) -> list[str]:
  command = [sys.executable, '-m', 'spmd_tasks.main', '--mode', mode, '--exp', experiment, *map(str, flags)]
  return command + [flag for override in overrides for flag in ('--set', override)]


def milliseconds(run: Callable[[], Any], count: int = 10) -> float:
  """Returns the median of `count` measurements of four runs each, after a warm-up; a wait per run would add time."""
  import jax

  times = []
  for _ in range(count + 1):
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(4)])
    times.append(1e3 * (time.perf_counter() - start) / 4)
  return statistics.median(times[1:])


def row(what: str, measure: Callable[..., Row], *args: Any) -> Row:
  """Returns the row of a measurement; a failure becomes part of the row, so that the next one runs."""
  try:
    return {'what': what, **measure(*args)}
  except Exception as error:
    traceback.print_exc()
    return {'what': what, 'failure': f'{type(error).__name__}: {error}'[:400]}


def distance(actual: Any, wanted: Any) -> float:
  import numpy as np

  actual, wanted = (np.asarray(x, np.float32) for x in (actual, wanted))
  return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))


def peak_memory() -> Row:
  import jax

  stats = jax.devices()[0].memory_stats() or {}
  return {'peak_gb': stats['peak_bytes_in_use'] / 1e9} if 'peak_bytes_in_use' in stats else {}


def rates(seconds: float, tokens: float, flops: float, device_kind: str) -> Row:
  from spmd_tasks.runtime.flops import peak_flops_per_device

  peak = peak_flops_per_device(device_kind)
  figures = dict(ms=1e3 * seconds, tokens_per_s=tokens / seconds, tflops=flops / seconds / 1e12)
  return figures | ({'mfu': flops / seconds / peak} if peak else {})


def device_time(run: Callable[[], Any], count: int) -> Row:
  """Returns how long the GPU is busy in each of the `count` steps of `run`, and its longest kernels."""
  import jax

  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    (path,) = Path(folder).glob('plugins/profile/*/*.xplane.pb')
    planes = [plane for plane in jax.profiler.ProfileData.from_file(str(path)).planes if 'GPU' in plane.name]
    lines = [line for plane in planes for line in plane.lines if line.name.startswith('Stream')]
    events = sorted((event.start_ns, event.duration_ns, event.name) for line in lines for event in line.events)
  busy = until = 0.0
  totals: collections.Counter[str] = collections.Counter()
  counts: collections.Counter[str] = collections.Counter()
  for start, duration, name in events:
    busy += max(0.0, start + duration - max(until, start))
    until = max(until, start + duration)
    totals[name] += duration
    counts[name] += 1
  longest = totals.most_common(40)
  kernels = [f'{ns / 1e6 / count:.3f} ms, {counts[name] / count:.0f} x {name[:100]}' for name, ns in longest]
  return {'busy_ms': busy / 1e6 / count, 'kernels': kernels} if events else {}


def train_on_one_batch(case: Any, make: Callable[[], Any], batch: Any, size: Any, losses: list[float]) -> Row:
  """Compiles a step of bench_step.Case and runs it, launching every step without waiting for the previous one."""
  import jax

  from spmd_tasks.runtime.flops import model_flops

  start = time.perf_counter()
  stepper = make()
  compile_s = time.perf_counter() - start
  warm, count = size.steps
  stepper.batch = batch
  losses += [float(stepper()[1]['loss']) for _ in range(warm)]
  jax.block_until_ready(stepper.state)
  start = time.perf_counter()
  last = [stepper()[1]['loss'] for _ in range(count - warm)][-1]
  jax.block_until_ready((last, stepper.state))
  seconds = (time.perf_counter() - start) / (count - warm)
  model, text = case.model, stepper.compiled.as_text()
  assert float(last) < losses[0], f'the loss does not fall: {losses[0]} to {last}'
  flops = model_flops(model)
  kernels = ('__cudnn$fmha', 'triton', 'mosaic_gpu', 'cublas', ' conditional(')
  counts = ''.join(f', {text.count(name)} {name}' for name in kernels if name in text)
  note = f'{model.total_num_params / 1e9:.2f}B parameters, losses {losses[0]:.3f} to {float(last):.3f}{counts}'
  figures = rates(seconds, batch['ids'].size, flops, jax.devices()[0].device_kind)
  figures |= {'compile_s': compile_s, 'note': note} | peak_memory()
  return figures | device_time(lambda: jax.block_until_ready([stepper() for _ in range(4)][-1]), 4)


# ---------------------------------------------------------------- sections


def env(size: Any) -> Iterator[Row]:
  """Yields versions, the machine's rates, and missing packages with what needs them."""
  import jax
  import jax.numpy as jnp

  device = jax.devices()[0]
  if device.platform != size.platform:
    raise SystemExit(f'JAX sees no GPU but {device}: install jax[cuda13], or run --tiny on the CPU.')

  def version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      return importlib.metadata.version(name)
    return None

  missing = []
  for use, requirements in ({'training': PROJECT['dependencies']} | PROJECT['optional-dependencies']).items():
    names = [requirement.split('>')[0].partition('[')[0] for requirement in requirements]
    if use in ('training', 'serve') and (absent := [name for name in names if version(name) is None]):
      missing.append(f'missing for {use}: {", ".join(absent)}')
  names = ('jax', 'jaxlib', 'jax-cuda13-plugin', 'nvidia-cudnn-cu13', 'flax', 'torch', 'transformers')
  versions = {'python': sys.version.split()[0]} | {name: version(name) for name in names if version(name)}
  query = ['nvidia-smi', '--query-gpu=name,driver_version,memory.total,power.limit', '--format=csv,noheader']
  driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which('nvidia-smi') else None
  yield {'what': device.device_kind, 'note': '; '.join(missing), 'versions': versions, 'driver': driver}
  n = size.square
  a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
  product, add = jax.jit(lambda a, b: a @ b), jax.jit(lambda x: x + 1)
  ms = milliseconds(lambda: product(a, b))
  yield {'what': f'bfloat16 product of {n} x {n}', 'ms': ms, 'tflops': 2 * n**3 / ms / 1e9}
  x = jnp.zeros(size.copy, jnp.float32)
  ms = milliseconds(lambda: add(x))
  yield {'what': 'memory, read and written', 'ms': ms, 'note': f'{2 * x.nbytes / ms / 1e9:.2f} TB/s'}


def kernels(size: Any) -> Iterator[Row]:
  """Compares attention and grouped matmuls, forward and backward, and paged attention with the plain computation."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from spmd_tasks.layers.attention.implementations import attend
  from spmd_tasks.layers.moe.grouped_matmul import GROUPED_MATMUL_BACKENDS, grouped_matmul

  def both_passes(function: Callable[..., Any]) -> Any:
    def run(cotangent, *arguments):
      out, pull_back = jax.vjp(function, *arguments)
      return out, *pull_back(cotangent.astype(out.dtype))

    return jax.jit(run)

  def prepare(
    function: Any, cotangent: Any, arguments: Any, wanted: Any, flops: float, select: Any
  ) -> Callable[[], Row]:
    forward, both = jax.jit(function), both_passes(function)
    jax.block_until_ready((forward(*arguments), both(cotangent, *arguments)))

    def measure() -> Row:
      figures = [select(x) for x in jax.device_get(both(cotangent, *arguments))]
      errors = [distance(x, w) for x, w in zip(figures, wanted, strict=True)]
      ms, both_ms = milliseconds(lambda: forward(*arguments)), milliseconds(lambda: both(cotangent, *arguments))
      note = f'with the backward pass {both_ms:.2f} ms; errors {", ".join(f"{x:.1e}" for x in errors)}'
      return {'ms': ms, 'tflops': flops / ms / 1e9, 'error': max(errors), 'limit': 2e-2, 'note': note}

    return measure

  cases: list[tuple[Any, ...]] = []  # (what, what compiles it and returns what measures it, its arguments)
  for shape in size.pages:
    B, T, H, G, K, S = shape
    cases.append((f'pages, {B} x {T}, {H} heads of {K}, {G} in the cache of {S}', pages, size, *shape))

  keys = jax.random.split(jax.random.key(0), 4)
  R, E, D, F = size.experts
  rng = np.random.default_rng(0)
  counts = np.bincount(rng.choice(E, R), minlength=E).astype(np.int32)
  shapes = ((R, D), (E, D, F), (R, F))
  rows, weights, d_out = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=False))
  ends = np.cumsum(counts)[:4]  # four experts are compared
  parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=False)]
  wide, matrices, d_wide = (np.asarray(x, np.float32) for x in (rows[: ends[-1]], weights[:4], d_out[: ends[-1]]))
  wanted = (
    np.concatenate([wide[part] @ w for part, w in zip(parts, matrices, strict=True)]),
    np.concatenate([d_wide[part] @ w.T for part, w in zip(parts, matrices, strict=True)]),
    np.stack([wide[part].T @ d_wide[part] for part in parts]),
  )
  select = lambda x: x[: ends[-1]] if x.ndim == 2 else x[:4]
  for name in sorted(set(GROUPED_MATMUL_BACKENDS) - {'megablox'}):
    function = functools.partial(grouped_matmul, group_sizes=jnp.asarray(counts), backend=name)
    what = f'experts {name}, {R} rows, {E} of {D} x {F}'
    cases.append((what, prepare, function, d_out, (rows, weights), wanted, 2 * R * D * F, select))

  two_rows = lambda x: x[:2]
  others = ('blockwise', 'xla')
  for B, T, H, G, K in size.attention:
    shapes = [(B, T, n, K) for n in (H, G, G, H)]
    *arguments, cotangent = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))
    documents = jnp.asarray(np.broadcast_to(1 + np.arange(T) * 4 // T, (B, T)), jnp.int32)
    for case, segments in (('packed', documents), ('causal', None)):
      few = None if segments is None else segments[:2]
      plain = both_passes(functools.partial(attend, segment_ids=few, implementation='xla'))
      with jax.default_matmul_precision('highest'):
        wanted = jax.device_get(plain(*(two_rows(x).astype(jnp.float32) for x in (cotangent, *arguments))))
      for name in (*(['cudnn'] if size.platform == 'gpu' else []), *others):
        function = functools.partial(attend, segment_ids=segments, implementation=name)
        what = f'attention {name}, {case}, {B} x {T}, {H} heads of {K}'
        cases.append((what, prepare, function, cotangent, arguments, wanted, 2 * B * H * T * T * K, two_rows))
      others = () if size.platform == 'gpu' else others  # which take long to compile: in one case
  with concurrent.futures.ThreadPoolExecutor(8 if size.platform == 'gpu' else 1) as pool:
    prepared = [(what, pool.submit(*arguments)) for what, *arguments in cases]
  for what, measure in prepared:  # after all compilations
    yield row(what, lambda measure=measure: measure.result()())


def pages(size: Any, B: int, T: int, H: int, G: int, K: int, S: int) -> Callable[[], Row]:
  """Measures attention of T tokens of B rows to up to S tokens in blocks; with one head, values are the keys."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from spmd_tasks.decoding import paged_attention_gpu
  from spmd_tasks.decoding.cache_arrays import CachedArray
  from spmd_tasks.decoding.cached_attention import EarlierTokens
  from spmd_tasks.layers.attention._plain import AttentionOptions

  rng, b, options = np.random.default_rng(0), 16, AttentionOptions(softmax_scale=K**-0.5)
  starts = jnp.asarray(rng.integers(1, S + 1, B), jnp.int32)
  tables = jnp.asarray(rng.permutation(B * S // b).reshape(1, B, -1), jnp.int32)
  shapes = [(B, G, H // G * T, K), *[(2, B * S // b, G, b, K)] * (1 if G == 1 else 2)]
  query, *stored = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(shapes))

  def cached(tables: Any, stored: Any) -> Any:
    return [CachedArray(x, (jnp.int32(1),), tables, B) for x in stored]

  @jax.jit
  def by_kernel(query: Any, tables: Any, *stored: Any) -> Any:
    keys, values = (cached(tables, stored) * 2)[:2]
    interpret = size.platform != 'gpu'
    return paged_attention_gpu.attend_to_pages(query, keys, values, starts, options, T, interpret=interpret)

  @jax.jit
  def plain(query: Any, tables: Any, *stored: Any) -> Any:
    keys, values = ([x.entries(0, S).astype(jnp.float32) for x in cached(tables, stored)] * 2)[:2]
    logits = jnp.einsum('BGQK,BGSK->BGQS', query.astype(jnp.float32), keys) * options.scale(K)
    seen = jnp.arange(S)[None] < starts[:, None]
    return jnp.einsum('BGQS,BGSK->BGQK', jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e30)), values)

  @jax.jit
  def by_loop(query: Any, tables: Any, *stored: Any) -> Any:
    keys, values = (cached(tables, stored) * 2)[:2]
    queries = jnp.moveaxis(query.reshape(B, G, H // G, T, K), 3, 1).reshape(B, T, H, K)
    new = queries[:, :, :G]
    positions = starts[:, None] + jnp.arange(T)[None]
    earlier = EarlierTokens(keys=keys, values=values, implementation='xla')
    return earlier.attend(queries, new, new, None, positions, options)

  arguments = query, tables, *stored
  with jax.default_matmul_precision('highest'):
    wanted = plain(*arguments)
  jax.block_until_ready((by_kernel(*arguments), by_loop(*arguments)))

  def measure() -> Row:
    _, total, attended = by_kernel(*arguments)
    ms, loop_ms = milliseconds(lambda: by_kernel(*arguments)), milliseconds(lambda: by_loop(*arguments))
    num_bytes = int(starts.sum()) * G * K * 2 * len(stored)
    note = f'{num_bytes / ms / 1e6:.0f} GB/s; the loop takes {loop_ms:.2f} ms'
    return {'ms': ms, 'error': distance(attended / total, wanted), 'limit': 2e-2, 'note': note}

  return measure


def dense(size: Any) -> Iterator[Row]:
  """Measures the train step of lm.Dense1B on the standard library's text, and the handwritten one (bare_step.py)."""
  import bench_step
  import jax.numpy as jnp

  name, overrides = dense_job(size)
  case = bench_step.Case(overrides, name)
  (batch,) = case.batches(1)
  how = dict(dtype=jnp.bfloat16, remat=True, implementation='cudnn' if size.platform == 'gpu' else None)
  ours, theirs = [], []
  yield row(f'{name}, ours', train_on_one_batch, case, case.ours, batch, size, ours)
  figures = row(f'{name}, by hand', train_on_one_batch, case, lambda: case.bare(**how), batch, size, theirs)
  worst = max((abs(a / b - 1) for a, b in zip(ours, theirs, strict=False)), default=0.0)
  yield figures | {'error': worst, 'limit': 2e-2}  # of the losses of the first steps


def moe(size: Any) -> Iterator[Row]:
  """Measures the train step of a mixture of experts."""
  import bench_step

  def measure() -> Row:
    case = bench_step.Case(size.moe[1], size.moe[0])
    return train_on_one_batch(case, case.ours, case.batches(1)[0], size, [])

  yield row(moe_row(size), measure)


def train(size: Any) -> Iterator[Row]:
  """Measures the binary, with input, logs and a checkpoint, which `serve` then uses."""

  def measure() -> Row:
    start = time.perf_counter()
    done = subprocess.run(binary('train', *dense_job(size), '--job_log_dir', 'job'))
    assert done.returncode == 0, f'exit code {done.returncode}; log.txt says why'
    lines = [json.loads(line) for line in Path('job/metrics.jsonl').read_text(encoding='utf-8').splitlines()]
    startup = json.loads(Path('job/startup.json').read_text(encoding='utf-8'))
    tokens = statistics.median(line['tokens_per_second'] for line in lines[2:])
    figures = {'tokens_per_s': tokens, 'ms': 1e3 * size.shape['seq_len'] * size.shape['batch_size'] / tokens}
    figures |= {'mfu': lines[-1]['mfu']} if 'mfu' in lines[-1] else {}
    note = f'first step after {startup["total"]:.0f} s, checkpoint and end after {time.perf_counter() - start:.0f} s'
    return figures | {'compile_s': startup.get('compile'), 'note': note}

  yield row('--mode train', measure)


def serve(size: Any) -> Iterator[Row]:
  """Measures --mode serve with the checkpoint of `train`: one request, then many at once."""
  command = binary('serve', *dense_job(size, size.requests), '--job_log_dir', 'job', '--port', 0)
  start, address, model = time.perf_counter(), '', ''
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  for line in process.stdout or ():
    print(line, end='')
    if line.startswith('Serving '):
      model, address = line.split()[1].rstrip(','), line.split('http://')[1].strip().rstrip('/')
      break
  else:
    raise SystemExit(f'the server ended with exit code {process.wait()} before it listened')
  yield {'what': 'start of the server', 'ms': 1e3 * (time.perf_counter() - start)}

  def ask(number: int) -> float:
    begun = time.perf_counter()
    connection = http.client.HTTPConnection(address, timeout=100)
    body = {'model': model, 'prompt': f'def f{number}(', 'max_tokens': size.new_tokens, 'ignore_eos': True}
    connection.request('POST', '/v1/completions', json.dumps(body), {'Content-Type': 'application/json'})
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == 200, text[:300]
    count = json.loads(text)['usage']['completion_tokens']
    assert count == size.new_tokens, f'{count} tokens in place of {size.new_tokens}'
    return time.perf_counter() - begun

  def measure(requests: int) -> Row:
    begun = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(requests) as threads:
      slowest = max(threads.map(ask, range(requests)))
    return {'ms': 1e3 * slowest, 'tokens_per_s': requests * size.new_tokens / (time.perf_counter() - begun)}

  yield row(f'one request for {size.new_tokens} tokens', measure, 1)
  yield row(f'{size.requests} at once; ms of the slowest', measure, size.requests)
  process.terminate()
  process.wait()


def decode(size: Any) -> Iterator[Row]:
  """Measures the engine's steps with all slots in use; compares log-probabilities with a forward pass of the text."""
  import bench_step
  import jax

  from spmd_tasks.decoding import DecodeSteps, Request
  from spmd_tasks.decoding.engine import ModelEngine
  from spmd_tasks.decoding.generated_sequence import GeneratedSequence
  from spmd_tasks.decoding.scheduler import Scheduler
  from spmd_tasks.decoding.scoring import score_texts
  from spmd_tasks.inputs.tokenizers import decode_generated

  @functools.partial(jax.jit, static_argnums=(1, 2))
  def draw(number: int, shape: Any, dtype: Any) -> Any:
    return (0.02 * jax.random.normal(jax.random.key(number), shape)).astype(dtype)

  def weights_of(steps: DecodeSteps) -> Any:
    """Returns initialized weights for the steps; a train state would need the optimizer's memory as well."""
    leaves = jax.tree_util.tree_leaves_with_path(steps.storage.padded)
    is_norm = ['norm' in jax.tree_util.keystr(path) for path, _ in leaves]
    drawn = [draw(i, leaf.shape, leaf.dtype) for i, (_, leaf) in enumerate(leaves)]
    placed = [jax.device_put(x + is_one, leaf.sharding) for x, is_one, (_, leaf) in zip(drawn, is_norm, leaves)]
    return jax.tree.unflatten(jax.tree.structure(steps.storage.padded), placed)

  def measure(job: tuple[str, tuple[str, ...]], slots: int, prompt_len: int, compared: int) -> Row:
    name, overrides = job
    case = bench_step.Case(overrides, name)
    steps = DecodeSteps(case.model)
    engine = ModelEngine(steps, weights_of(steps))
    start = time.perf_counter()
    engine.warm_up()
    figures: Row = {'compile_s': time.perf_counter() - start}
    prompts = [tuple((5 + 7 * slot + i) % 250 for i in range(prompt_len)) for slot in range(slots)]
    requests = [Request(ids=ids, max_tokens=steps.max_len - prompt_len) for ids in prompts]
    to_text = functools.partial(decode_generated, case.job.tokenizer)  # of a larger vocabulary than the tokenizer's
    sequences = [
      GeneratedSequence(request, to_text, has_logprobs=i < min(compared, 1)) for i, request in enumerate(requests)
    ]
    scheduler = Scheduler(engine, prefill_budget=slots * steps.max_len)
    scheduler.submit(sequences)
    start = time.perf_counter()
    deltas = [delta for _ in range(2 + compared) for delta in scheduler.advance()]
    note = f'prompts and {2 + compared} steps in {time.perf_counter() - start:.2f} s'
    if compared:
      entries = [entry for delta in deltas if delta.sequence is sequences[0] for entry in delta.logprobs]
      text = prompts[0], tuple(entry.token for entry in entries)
      ((_, score),) = score_texts(steps, engine.weights, [text], num_rows=1)
      error = max(abs(entry.logprob - other) for entry, other in zip(entries, score.logprobs, strict=True))
      figures |= {'error': error, 'limit': 0.1, 'unit': 'nats'}
      note += f'; {len(entries)} log-probabilities compared'
    launch, launches = engine.step, []

    def timed(*arguments: Any, **named: Any) -> Any:
      begun = time.perf_counter()
      launched = launch(*arguments, **named)
      launches.append(time.perf_counter() - begun)
      return launched

    engine.step = timed
    start = time.perf_counter()
    for _ in range(size.new_tokens):  # a step is launched before the one before is read
      scheduler.advance()
    seconds = (time.perf_counter() - start) / size.new_tokens
    note = f'{1e3 * statistics.median(launches):.2f} ms of the host to launch a step; {note}'
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(engine.weights))
    note = f'weights at {num_bytes / seconds / 1e9:.0f} GB/s; {note}'
    figures |= {'ms': 1e3 * seconds, 'tokens_per_s': slots / seconds, 'note': note} | peak_memory()
    return figures | device_time(lambda: [scheduler.advance() for _ in range(4)], 4)

  for what, *arguments in decode_jobs(size):
    yield row(what, measure, *arguments)


def verify(size: Any) -> Iterator[Row]:
  """Compares the kernels of both train steps with float64: --mode verify --claims kernels."""
  for experiment, overrides in (dense_job(size), size.moe):
    command = binary('verify', experiment, overrides, '--claims', 'kernels')
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    failed = [f'{failure["case"]}: {failure}' for failure in json.loads(done.stdout.splitlines()[-1])['failures']]
    yield {'what': f'kernels of {experiment}'} | ({'failure': failed[0]} if failed else {})


def pytorch(size: Any) -> Iterator[Row]:
  """Measures lm.Dense1B's shapes as transformers' Llama, in autocast bfloat16, causal, without segments or remat."""
  if missing := [name for name in ('torch', 'transformers') if not importlib.util.find_spec(name)]:
    yield {'what': 'PyTorch', 'skipped': f'not installed: {", ".join(missing)}'}
    return
  import torch
  from transformers import LlamaConfig, LlamaForCausalLM

  device, shape, T = 'cuda' if size.platform == 'gpu' else 'cpu', size.shape, size.shape['seq_len']
  B = max(1, shape['batch_size'] // 4)  # what fits without remat
  theirs = dict(model_dims='hidden_size', hidden_dims='intermediate_size', num_layers='num_hidden_layers')
  theirs |= dict(num_heads='num_attention_heads', num_kv_heads='num_key_value_heads', vocab_size='vocab_size')
  settings = {name: shape[ours] for ours, name in theirs.items()}

  def measure() -> Row:
    torch.manual_seed(0)
    with torch.device(device):
      config = LlamaConfig(**settings, tie_word_embeddings=True, use_cache=False, attn_implementation='sdpa')
      model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, shape['vocab_size'], (B, T), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for layer in model.model.layers if device == 'cuda' else ():
      layer.compile()  # one program for all of them

    def step() -> Any:
      with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
      loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()
      optimizer.zero_grad()
      return loss.detach()

    (warm, count), begun = size.steps, time.perf_counter()
    losses = [float(step()) for _ in range(warm)]
    start = time.perf_counter()
    losses.append(float([step() for _ in range(count - warm)][-1]))
    seconds = (time.perf_counter() - start) / (count - warm)
    num = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    flops = 3 * B * T * (2 * num + 4 * shape['num_layers'] * T * shape['model_dims'])
    figures = rates(seconds, B * T, flops, torch.cuda.get_device_name() if device == 'cuda' else 'cpu')
    figures |= {'peak_gb': torch.cuda.max_memory_allocated() / 1e9} if device == 'cuda' else {}
    note = f'torch {torch.__version__}, {B} x {T}, losses {losses[0]:.3f} to {losses[-1]:.3f}'
    return figures | {'compile_s': start - begun, 'note': note}

  yield row("PyTorch, transformers' Llama", measure)


def plan(size: Any) -> Iterator[Row]:
  """Yields the predictions of --mode plan for the steps of `dense`, `moe` and `decode`."""

  def measure(step: str, job: tuple[str, tuple[str, ...]]) -> Row:
    flags = ('--target', f'{size.target}:1', '--plan_out', 'plan', '--plan_steps', step)
    done = subprocess.run(binary('plan', *job, *flags), stdout=subprocess.DEVNULL)
    assert done.returncode == 0, f'exit code {done.returncode}; log.txt says why'
    report = json.loads(Path('plan/plan.json').read_text(encoding='utf-8'))
    figures = {'peak_gb': report['steps'][step]['peak_bytes'] / 1e9, 'mfu': report['predicted_mfu']}
    seconds, versions = (
      report['predicted_step_s'],
      (f'{name} {version}' for name, version in report['versions'].items()),
    )
    return figures | {'ms': seconds and 1e3 * seconds, 'note': f'{size.target}:1, by {", ".join(versions)}'}

  jobs = [(f'dense: {dense_job(size)[0]}, ours', 'train', dense_job(size))]
  if size.platform == 'gpu':  # --tiny: one is enough
    jobs += [(f'moe: {moe_row(size)}', 'train', size.moe)]
    jobs += [(f'decode: {what}', 'decode', job) for what, job, *_ in decode_jobs(size)]
  for entry in jobs:
    yield row(entry[0], measure, *entry[1:])


RUN: dict[str, Callable[[Any], Iterator[Row]]] = {name: globals()[name] for name in LIMITS}


# ---------------------------------------------------------------- the driver


def judge(status: str, rows: list[Row]) -> str:
  """Returns the first failure of a section, or ''."""
  for entry in rows:
    if 'failure' in entry:
      return f'{entry["what"]}: {entry["failure"]}'
    if 'limit' in entry and not entry['error'] <= entry['limit']:
      return f'{entry["what"]}: error {entry["error"]:.2g}, at most {entry["limit"]:g} wanted'
  return status


def table(result: dict[str, Any]) -> str:
  columns = {'ms': '.4g', 'busy_ms': '.4g', 'tokens_per_s': ',.0f', 'tflops': '.4g', 'mfu': '.1%'}
  columns |= {'peak_gb': '.1f', 'compile_s': '.1f'}
  planned = {entry['what']: entry for entry in result['sections'].get('plan', {}).get('rows', [])}
  versions = ', '.join(f'{name} {version}' for name, version in result['versions'].items())
  lines = [f'# {result["device"]}, {result["date"]}', '', f'{versions}; driver {result["driver"]}', '']
  lines += [f'| section | what | {" | ".join(columns)} | planned ms | error | remark |', '|' + '---|' * 12]
  for name, section in result['sections'].items():
    for entry in section['rows']:
      cells = [format(entry[key], style) if entry.get(key) is not None else '' for key, style in columns.items()]
      plan_ms = planned.get(f'{name}: {entry["what"]}', {}).get('ms')
      error = f'{entry["error"]:.1e} {entry.get("unit", "")}' if 'error' in entry else ''
      remark = entry.get('skipped') or entry.get('failure') or entry.get('note', '')
      cells = [name, entry['what'], *cells, f'{plan_ms:.4g}' if plan_ms else '', error, remark]
      lines.append(f'| {" | ".join(cells)} |'.replace('\n', ' '))
  wrong = [f'* {name}: {section["wrong"]}' for name, section in result['sections'].items() if section['wrong']]
  return '\n'.join([*lines, '', *(wrong or ['Nothing failed.'])]) + '\n'


def child_environment(work: Path, tiny: bool) -> dict[str, str]:
  """The variables of sections; in a checkout that nobody has installed, also what names the project's extensions."""
  variables = {'JAX_COMPILATION_CACHE_DIR': str(work / 'cache'), 'XLA_CLIENT_MEM_FRACTION': '0.92', **os.environ}
  variables |= {'JAX_PLATFORMS': 'cpu'} if tiny else {}
  if not importlib.metadata.entry_points(group='spmd_tasks.extensions'):
    folder = work / 'site' / 'spmd_tasks-0.dist-info'
    folder.mkdir(parents=True)
    (folder / 'METADATA').write_text('Metadata-Version: 2.1\nName: spmd-tasks\nVersion: 0\n', encoding='utf-8')
    points = (f'{name} = {value}' for name, value in PROJECT['entry-points']['spmd_tasks.extensions'].items())
    (folder / 'entry_points.txt').write_text('\n'.join(['[spmd_tasks.extensions]', *points]), encoding='utf-8')
    variables['PYTHONPATH'] = f'{folder.parent}:{variables.get("PYTHONPATH", ROOT)}'
  return variables


def run_section(name: str, args: argparse.Namespace, work: Path, limit_s: float, log: Any) -> tuple[str, list[Row]]:
  """Runs a section in its own process; returns its failure, or '', and its rows."""
  target = work / f'{name}.json'
  flags = ['--section', name, '--to', target, '--target', args.target, *(['--tiny'] if args.tiny else [])]
  print(f'--- {name}', file=log, flush=True)
  process = subprocess.Popen(
    [sys.executable, __file__, *map(str, flags)], stdout=log, stderr=log, cwd=work, start_new_session=True, env=args.env
  )
  try:
    code = process.wait(timeout=limit_s)
    status = f'exit code {code}; log.txt says why' if code else ''
  except subprocess.TimeoutExpired:
    status = f'stopped after {limit_s:.0f} s'
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
    process.wait()
  rows = json.loads(target.read_text(encoding='utf-8')) if target.exists() else []
  return judge(status, rows), rows


def drive(args: argparse.Namespace, work: Path) -> int:
  out = Path(args.out).absolute()
  out.mkdir(parents=True, exist_ok=True)
  begun, args.env = time.monotonic(), child_environment(work, args.tiny)
  args.target = args.target or 'cpu'
  result: dict[str, Any] = {'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')}
  result |= {'device': 'unknown', 'driver': None, 'versions': {}, 'sections': {}}
  with open(out / 'log.txt', 'w', encoding='utf-8') as log:
    for name in args.sections.split(','):
      start, left = time.monotonic(), args.budget - (time.monotonic() - begun)
      wrong, rows = 'not begun: no time was left', []
      if left >= LEAST_S:
        limit_s = left if args.tiny else min(LIMITS[name], left)
        wrong, rows = run_section(name, args, work, limit_s, log)
      section = {'rows': rows, 'wrong': wrong, 'seconds': round(time.monotonic() - start, 1)}
      result['sections'][name] = section
      if name == 'env' and rows:
        result |= {'device': rows[0]['what'], 'driver': rows[0]['driver'], 'versions': rows[0]['versions']}
        if args.target == 'cpu':
          kind = result['device'].lower()
          args.target = next((chip for chip in ('gb200', 'b200', 'h200', 'h100') if chip in kind), 'cpu')
      (out / 'gpu_check.json').write_text(json.dumps(result, indent=1), encoding='utf-8')
      (out / 'gpu_check.md').write_text(table(result), encoding='utf-8')
      print(f'{name}: {wrong or "ok"}, {section["seconds"]:.0f} s', file=sys.stderr, flush=True)
      if name == 'env' and not rows:
        break  # no GPU
  print(table(result))
  wrong = {name: section['wrong'] for name, section in result['sections'].items() if section['wrong']}
  skipped = [entry['skipped'] for s in result['sections'].values() for entry in s['rows'] if 'skipped' in entry]
  seconds = {name: section['seconds'] for name, section in result['sections'].items()}
  summary = {'ok': not wrong, 'wrong': wrong, 'skipped': skipped, 'device': result['device'], 'date': result['date']}
  print(json.dumps(summary | {'seconds': seconds, 'out': str(out)}))
  return 1 if wrong else 0


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', default=os.environ.get('OUT', 'runs/gpu_check'), help='default: $OUT or runs/gpu_check')
  parser.add_argument('--sections', default=','.join(RUN), help=f'names with commas; default: {",".join(RUN)}')
  parser.add_argument('--budget', type=float, default=570, help='seconds for all sections')
  parser.add_argument('--tiny', action='store_true', help='small sizes, on the CPU')
  parser.add_argument('--target', help='the chip of `plan`; default: that of this machine')
  parser.add_argument('--section', choices=RUN, help=argparse.SUPPRESS)
  parser.add_argument('--to', type=Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if unknown := set(args.sections.split(',')) - set(RUN):
    parser.error(f'--sections names {sorted(unknown)[0]!r}: choose from {", ".join(RUN)}.')
  if 'serve' in args.sections.split(',') and 'train' not in args.sections.partition('serve')[0].split(','):
    parser.error('--sections: serve serves what train has trained, so name train before it.')
  if args.section:
    size, rows = sizes(args.tiny), []
    size.target = args.target
    for entry in RUN[args.section](size):
      rows.append(entry)
      args.to.write_text(json.dumps(rows), encoding='utf-8')  # whatever happens to the next
    return 0
  with tempfile.TemporaryDirectory(prefix='gpu_check.') as work:
    return drive(args, Path(work))


if __name__ == '__main__':
  sys.exit(main())
