"""The claim `kernels`: each kernel of the train step, and all its gradients, agree with float64.

The step is traced, whole, for this machine's accelerator, or on a CPU for a TPU and for a GPU. Each kernel then runs
alone in the shapes that one device has: compiled on an accelerator; interpreted on a CPU, where sizes are reduced. The
inputs are those at which kernels fail: empty, odd and unaligned groups of rows, rows after the last group that are NaN,
documents of one token, rows of padding, and logits so far apart that single keys decide.

A number may differ from float64 by rounding, and by a multiple of what the plain computation differs by on the same
device (`_decide`).

Shapes: B rows, T tokens, H query heads, G key/value heads, K features of a head, V features of a value; R rows, E
groups, I inputs, O outputs.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import shlex
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.layers.attention import AttentionOptions, implementations
from spmd_tasks.layers.attention.implementations import Heads, attention_layout
from spmd_tasks.layers.base import KernelCall, layer_scope
from spmd_tasks.layers.moe.grouped_matmul import GROUPED_MATMUL_BACKENDS
from spmd_tasks.planning.targets import PlannedDevice, mesh_of, parse_target
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.verification._cases import Bench, Case, Verdict, skipped_case
from spmd_tasks.verification._settings import scaled_mesh

_INTERPRETED_FOR = ('v5e:1x1', 'h200:1')  # on a CPU
_LONGEST = 8192  # T: the reference has [T, T] of one head in float64
# A number may differ from float64 by two roundings, and by _TIMES_PLAIN * share * (the sum of its terms' absolute
# values). The share is the plain computation's error on the same device, relative to that sum, but at most
# _LARGEST_SHARE, the error of products of bfloat16.
_TIMES_PLAIN = 8
_LARGEST_SHARE = 2.0**-7
_NUM_COLUMNS = 16  # of a group's matrix that are compared, over all its tiles

Arrays = dict[str, Any]


def kernel_cases(bench: Bench) -> Iterator[Case]:
  """Yields a case for each kernel that the step uses, in each of its shapes."""
  device = jax.devices()[0]
  job = bench.source.whole()
  mesh_spec = _own_mesh(job, bench.num_devices)
  if device.platform == 'cpu':
    meshes = [parse_target(name).abstract_mesh(mesh_spec) for name in _INTERPRETED_FOR]
  else:
    capability = getattr(device, 'compute_capability', '')
    kind = PlannedDevice(device.device_kind, 1, device.platform, compute_capability=capability)
    meshes = [mesh_of(mesh_spec, kind)]
  try:
    kernels = dict.fromkeys(kernel for mesh in meshes for kernel in _kernels_of_step(job, mesh))
  except UserError as error:  # of the experiment, on its own mesh
    yield skipped_case('kernels', 'all', f'refused: {error}')
    return
  if not kernels:
    yield skipped_case('kernels', 'all', 'the step uses no kernel')
  for kernel in kernels:
    if device.platform == 'cpu' and kernel.name == 'cudnn':
      yield skipped_case('kernels', str(kernel), 'cuDNN runs on NVIDIA GPUs alone')
      continue
    kernel = kernel.reduced() if device.platform == 'cpu' else kernel
    yield Case(claim='kernels', subject=str(kernel), decide=functools.partial(_decide, kernel=kernel))


def _own_mesh(job: Job, num_devices: int) -> MeshSpec:
  """Returns the experiment's mesh; on `num_devices` devices if it asks for all there are."""
  spec = job.experiment.mesh_spec()
  if -1 not in spec.ici_mesh_shape:
    return spec
  names, sizes = zip(*scaled_mesh(job.experiment, num_devices))
  return MeshSpec(axis_names=names, ici_mesh_shape=sizes)


def _kernels_of_step(job: Job, mesh: Any) -> 'list[_Attention | _GroupedMatmul]':
  calls: list[KernelCall] = []
  with layer_scope(on_kernel=calls.append):
    partition_job(job, mesh).train_step.make_jaxpr()
  kernels = [
    _Attention.of(call) if call.kind == 'attention' else _GroupedMatmul.of(call)
    for call in calls
    if call.implementation in ('splash', 'cudnn', 'megablox', 'triton')
  ]
  return list(dict.fromkeys(kernels))


def _decide(bench: Bench, kernel: Any) -> Verdict:
  """Compares a kernel with float64, input by input, up to the first difference."""
  run, run_plainly = jax.jit(kernel.run), jax.jit(kernel.run_plainly)
  closest, num_inputs = 0.0, 0
  for name, inputs in kernel.inputs(np.random.default_rng(bench.seed)):
    num_inputs += 1
    exact = kernel.reference({key: np.asarray(x, np.float64) for key, x in inputs.items()})
    results, plain = (jax.device_get(function(inputs)) for function in (run, run_plainly))
    for part, (value, scale) in exact.items():
      unit = _rounding_unit(results[part].dtype)
      error = np.abs(kernel.compared(part, results[part], inputs) - value)
      plain_error = np.abs(kernel.compared(part, plain[part], inputs) - value)
      with np.errstate(divide='ignore', invalid='ignore'):
        ratio = np.where(scale > 0, (plain_error - unit * np.abs(value)) / scale, 0)
      share_of_plain = min(max(float(np.nanmax(ratio, initial=0)), kernel.least_share), _LARGEST_SHARE)
      allowed = 2 * unit * np.abs(value) + _TIMES_PLAIN * share_of_plain * scale
      wrong = ~(error <= allowed)  # NaN too
      if wrong.any():
        excess = np.where(wrong, np.nan_to_num(error - allowed, nan=np.inf), -1)
        place = np.unravel_index(np.argmax(excess), error.shape)
        return _broken(bench, kernel, f'{part} for {name}', float(error[place]), float(allowed[place]))
      with np.errstate(divide='ignore', invalid='ignore'):
        closest = max(closest, float(np.nanmax(np.where(allowed > 0, error / allowed, 0), initial=0)))
  return Verdict(
    status='held', detail=f'{num_inputs} inputs, forward and gradients; at most {100 * closest:.0f}% of what is allowed'
  )


def _broken(bench: Bench, kernel: Any, what: str, difference: float, allowed: float) -> Verdict:
  command = f'spmd-tasks {shlex.join(bench.source.flags)} --mode verify --claims kernels'
  settings = [f'{path}={kernel.plain}' for path in bench.source.paths_ending(kernel.field)]
  flags = (
    ' '.join(f'--set {shlex.quote(setting)}' for setting in settings) or f'{kernel.field}={kernel.plain} of its layer'
  )
  return Verdict(
    status='BROKEN',
    detail=f'{what} differs by {difference:.3g}, allowed {allowed:.3g}',
    notes=(f'until it is mended, take the plain computation: {flags}', f'reproduce it: {command}'),
    failure={
      'claim': 'kernels',
      'kernel': kernel.name,
      'leaf': what,
      'difference': difference,
      'allowed': allowed,
      'settings': settings,
      'command': command,
    },
  )


def _rounding_unit(dtype: Any) -> float:
  return float(jnp.finfo(dtype).eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GroupedMatmul:
  """A grouped matmul: rows [R, I] times the matrices [E, I, O] of their groups."""

  name: str
  num_rows: int
  num_groups: int
  num_in: int
  num_out: int
  dtype: str
  weight_dtype: str

  least_share = 2.0**-22  # products are accumulated in float32
  field, plain = 'backend', 'loop'  # the field that chooses the computation, and its plain form

  @classmethod
  def of(cls, call: KernelCall) -> '_GroupedMatmul':
    rows, weights = call.operands
    num_groups, num_in, num_out = weights.shape
    dtypes = {'dtype': rows.dtype.name, 'weight_dtype': weights.dtype.name}
    sizes = {'num_rows': len(rows), 'num_groups': num_groups, 'num_in': num_in, 'num_out': num_out}
    return cls(name=call.implementation, **sizes, **dtypes)

  def reduced(self) -> '_GroupedMatmul':
    """Returns a smaller one that can be interpreted, of sizes that no tile divides where these are not divided."""
    limits = {'num_rows': 300, 'num_groups': 5, 'num_in': 160, 'num_out': 136}
    return dataclasses.replace(self, **{name: min(getattr(self, name), most) for name, most in limits.items()})

  def __str__(self) -> str:
    shape = f'[{self.num_rows}, {self.num_in}] x [{self.num_groups}, {self.num_in}, {self.num_out}]'
    return f'{self.name}, grouped matmul {shape} in {self.dtype}'

  def group_sizes(self, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    count, total = self.num_groups, self.num_rows
    shares = rng.dirichlet(np.full(count, 0.3))
    yield 'unequal groups', np.diff(np.floor(np.concatenate([[0.0], np.cumsum(shares)]) * total).astype(int))
    few = np.zeros(count, int)
    few[count // 2] = total // 3
    yield 'one group, first and last ones empty', few
    odd = np.minimum(1 + 2 * (np.arange(count) % 4), max(total // count, 1))
    odd[::3] = 0
    yield 'groups of few rows, every third empty', odd
    yield 'no rows', np.zeros(count, int)
    yield 'equal groups', np.full(count, total // count)

  def inputs(self, rng: np.random.Generator) -> Iterator[tuple[str, Arrays]]:
    """Yields (name, inputs); rows after the last group and their cotangents are NaN."""
    weights = jnp.asarray(rng.normal(size=(self.num_groups, self.num_in, self.num_out)), self.weight_dtype)
    for name, sizes in self.group_sizes(rng):
      rows, cotangent = (rng.normal(size=(self.num_rows, size)) for size in (self.num_in, self.num_out))
      for x in (rows, cotangent):
        x[sizes.sum() :] = np.nan
      dtype = self.dtype
      arrays = {'rows': jnp.asarray(rows, dtype), 'cotangent': jnp.asarray(cotangent, dtype), 'weights': weights}
      yield name, arrays | {'group_sizes': jnp.asarray(sizes, jnp.int32)}

  def run(self, inputs: Arrays, backend: str | None = None) -> Arrays:
    multiply = GROUPED_MATMUL_BACKENDS[backend or self.name]
    multiply_by_group = lambda rows, weights: multiply(rows, weights, inputs['group_sizes'])
    result, pull_back = jax.vjp(multiply_by_group, inputs['rows'], inputs['weights'])
    d_rows, d_weights = pull_back(inputs['cotangent'])
    return {'the result': result, 'the gradient of rows': d_rows, 'the gradient of matrices': d_weights}

  def run_plainly(self, inputs: Arrays) -> Arrays:
    return self.run(inputs, 'loop')

  def _columns(self, size: int) -> np.ndarray:
    return np.unique(np.linspace(0, size - 1, _NUM_COLUMNS).astype(int))

  def compared(self, part: str, x: Any, inputs: Arrays) -> np.ndarray:
    """Returns the columns that the reference has, without rows after the last group."""
    x = np.asarray(x, np.float64)
    x = x[..., self._columns(x.shape[-1])]
    return x if 'matrices' in part else x[: int(inputs['group_sizes'].sum())]

  def reference(self, inputs: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns (value, sum of its terms' absolute values) of some columns of each result."""
    sizes = inputs['group_sizes'].astype(int)
    outputs, ins = self._columns(self.num_out), self._columns(self.num_in)
    total = sizes.sum()
    result, d_rows = np.zeros((2, total, len(outputs))), np.zeros((2, total, len(ins)))
    d_weights = np.zeros((2, self.num_groups, self.num_in, len(outputs)))
    start = 0
    for group, size in enumerate(sizes):
      own = slice(start, start + size)
      rows, cotangent, matrix = inputs['rows'][own], inputs['cotangent'][own], inputs['weights'][group]
      for i, arrays in enumerate([(rows, cotangent, matrix), (np.abs(rows), np.abs(cotangent), np.abs(matrix))]):
        rows, cotangent, matrix = arrays
        result[i, own] = rows @ matrix[:, outputs]
        d_rows[i, own] = cotangent @ matrix[ins].T
        d_weights[i, group] = rows.T @ cotangent[:, outputs]
      start += size
    parts = ('the result', result), ('the gradient of rows', d_rows), ('the gradient of matrices', d_weights)
    return {name: (value, scale) for name, (value, scale) in parts}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attention:
  """The attention of one device's heads [T, H, K], [T, G, K] and [T, G, V]."""

  name: str
  length: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  value_dim: int
  dtype: str
  has_documents: bool
  has_sinks: bool
  options: AttentionOptions  # without sinks

  field, plain = 'implementation', 'blockwise'

  @property
  def least_share(self) -> float:
    return _rounding_unit(self.dtype) / 2  # attention weights are rounded

  @classmethod
  def of(cls, call: KernelCall) -> '_Attention':
    query, key, value, segment_ids, _ = call.operands
    options, layout = call.settings
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    group = num_heads // num_kv_heads
    num_kv_heads = -(-num_kv_heads // layout.num_heads)
    return cls(
      name=call.implementation,
      length=query.shape[1],
      num_heads=num_kv_heads * group,
      num_kv_heads=num_kv_heads,
      head_dim=query.shape[3],
      value_dim=value.shape[3],
      dtype=query.dtype.name,
      has_documents=segment_ids is not None,
      has_sinks=options.sinks is not None,
      options=dataclasses.replace(options, sinks=None),
    )

  def reduced(self) -> '_Attention':
    """Returns a smaller one that can be interpreted."""
    length = min(self.length, 200)
    group = min(self.num_heads // self.num_kv_heads, 2)
    window = self.options.window and max(min(self.options.window, length // 3), 1)
    return dataclasses.replace(
      self,
      length=length,
      num_heads=group,
      num_kv_heads=1,
      options=dataclasses.replace(self.options, window=window, gradient_keys=None),
    )

  def __str__(self) -> str:
    heads = f'{self.num_heads} heads on {self.num_kv_heads}, {self.head_dim} features'
    window = f', window {self.options.window}' if self.options.window else ''
    return f'{self.name}, attention of {self.length} tokens, {heads}{window} in {self.dtype}'

  def inputs(self, rng: np.random.Generator) -> Iterator[tuple[str, Arrays]]:
    """Yields (name, inputs) of one row each: queries, keys, values, cotangents, sinks and segment ids."""
    length = min(self.length, _LONGEST)
    ids = np.arange(length)
    documents = {'one document': np.ones(length, int)}
    if self.has_documents:
      starts = np.unique(rng.integers(1, length, size=max(length // 24, 1))) if length > 1 else np.zeros(0, int)
      packed = 1 + np.searchsorted(starts, ids, 'right')
      documents['documents of any length, then padding'] = np.where(ids < length - length // 5, packed, 0)
      documents['documents of one token, then one'] = np.minimum(1 + ids, max(length // 3, 1))
      documents['a row of padding'] = np.zeros(length, int)
    # Logits have a standard deviation of 3, so that one key more or less shows among thousands.
    factor = 3 / (self.options.scale(self.head_dim) * self.head_dim**0.5)
    for name, segments in documents.items():
      shapes = {'query': (self.num_heads, self.head_dim), 'key': (self.num_kv_heads, self.head_dim)}
      shapes |= {'value': (self.num_kv_heads, self.value_dim), 'cotangent': (self.num_heads, self.value_dim)}
      arrays = {key: rng.normal(size=(1, length, *shape)) for key, shape in shapes.items()}
      arrays['query'] *= factor
      inputs = {key: jnp.asarray(x, self.dtype) for key, x in arrays.items()}
      inputs['segments'] = jnp.asarray(segments[None], jnp.int32)
      inputs['sinks'] = jnp.asarray(rng.normal(size=self.num_heads), jnp.float32)
      yield name, inputs

  def _attend(self, implementation: str, query: Any, key: Any, value: Any, sinks: Any, segments: Any) -> jax.Array:
    options = dataclasses.replace(self.options, sinks=sinks if self.has_sinks else None)
    segments = segments if self.has_documents else None
    heads = Heads(query, key, value, segments, segments)
    if implementation == 'splash':
      interpret = jax.default_backend() != 'tpu'
      return implementations.attend_by_splash(heads, options, layout=attention_layout(None, 1), interpret=interpret)
    return implementations.attend(query, key, value, segments, options, implementation=implementation)  # type: ignore[arg-type]

  def run(self, inputs: Arrays, implementation: str | None = None) -> Arrays:
    attend = functools.partial(self._attend, implementation or self.name, segments=inputs['segments'])
    operands = [inputs[name] for name in ('query', 'key', 'value', 'sinks')]
    result, pull_back = jax.vjp(attend, *operands)
    gradients = pull_back(inputs['cotangent'])
    names = ('queries', 'keys', 'values', *(('sinks',) if self.has_sinks else ()))
    return {'the result': result} | {f'the gradient of {name}': x for name, x in zip(names, gradients)}

  def run_plainly(self, inputs: Arrays) -> Arrays:
    return self.run(inputs, 'blockwise')

  def compared(self, part: str, x: Any, inputs: Arrays) -> np.ndarray:
    """Returns what the reference has: the heads of the first and of the last key/value head."""
    del inputs
    x = np.asarray(x, np.float64)
    group = self.num_heads // self.num_kv_heads
    per_query = part in ('the result', 'the gradient of queries', 'the gradient of sinks')
    heads = [head for kv_head in self._kv_heads() for head in range(kv_head * group, (kv_head + 1) * group)]
    heads = heads if per_query else self._kv_heads()
    return x[heads] if 'sinks' in part else x[0][:, heads]

  def _kv_heads(self) -> list[int]:
    return sorted({0, self.num_kv_heads - 1})

  def reference(self, inputs: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns (value, sum of its terms' absolute values) of each result."""
    segments = inputs['segments'][0]
    distance = np.arange(len(segments))[:, None] - np.arange(len(segments))[None]
    may_see = distance >= 0 if self.options.causal else np.ones_like(distance, bool)
    if self.options.window is not None:
      may_see = may_see & (distance < self.options.window)
    if self.has_documents:
      may_see = may_see & (segments[:, None] == segments[None])
    group = self.num_heads // self.num_kv_heads
    by_head: dict[str, list[Any]] = {}
    for kv_head in self._kv_heads():
      key, value = inputs['key'][0][:, kv_head], inputs['value'][0][:, kv_head]
      shared = np.zeros((2, *key.shape)), np.zeros((2, *value.shape))
      for head in range(kv_head * group, (kv_head + 1) * group):
        query, cotangent = inputs['query'][0][:, head], inputs['cotangent'][0][:, head]
        sink = inputs['sinks'][head] if self.has_sinks else None
        result, d_query, d_key, d_value, d_sink = self._head(query, key, value, cotangent, sink, may_see)
        shared[0][:] += d_key
        shared[1][:] += d_value
        for name, x in (
          ('the result', result),
          ('the gradient of queries', d_query),
          ('the gradient of sinks', d_sink),
        ):
          by_head.setdefault(name, []).append(x)
      for name, x in zip(('the gradient of keys', 'the gradient of values'), shared):
        by_head.setdefault(name, []).append(x)
    if not self.has_sinks:
      del by_head['the gradient of sinks']
    exact = {name: np.stack(x, axis=-1 if 'sinks' in name else 2) for name, x in by_head.items()}  # [2, T, heads, ...]
    return {name: (value, scale) for name, (value, scale) in exact.items()}

  def _head(
    self, query: np.ndarray, key: np.ndarray, value: np.ndarray, cotangent: np.ndarray, sink: Any, may_see: np.ndarray
  ) -> tuple[np.ndarray, ...]:
    """Returns the result and the gradients of one head, each [2, ...]: its value, and the sum of absolute terms."""
    scale, cap = self.options.scale(self.head_dim), self.options.logit_cap
    logits = query @ key.T * scale
    slope: Any = 1.0
    if cap is not None:
      logits = cap * np.tanh(logits / cap)
      slope = 1 - np.square(logits / cap)
    logits = np.where(may_see, logits, -np.inf)
    highest = logits.max(-1, keepdims=True)
    highest = highest if sink is None else np.maximum(highest, sink)
    weights = np.exp(logits - highest)
    sink_weight = 0.0 if sink is None else np.exp(sink - highest)
    total = weights.sum(-1, keepdims=True) + sink_weight
    weights, sink_weight = weights / total, sink_weight / total
    result = np.stack([weights @ value, weights @ np.abs(value)])
    d_weights = cotangent @ value.T
    mean = (weights * d_weights).sum(-1, keepdims=True)
    # Kernels compute `mean` from their rounded result: this sum over features.
    mean_terms = np.abs((weights @ value) * cotangent).sum(-1, keepdims=True)
    d_logits = np.stack([weights * (d_weights - mean), weights * (np.abs(d_weights) + mean_terms)]) * slope * scale
    d_query = np.stack([d_logits[0] @ key, d_logits[1] @ np.abs(key)])
    d_key = np.stack([d_logits[0].T @ query, d_logits[1].T @ np.abs(query)])
    d_value = np.stack([weights.T @ cotangent, weights.T @ np.abs(cotangent)])
    d_sink = np.stack([-(sink_weight * mean).sum(), (sink_weight * mean_terms).sum()])
    return result, d_query, d_key, d_value, d_sink
