"""Lists what one device does in a train step, from the step's jaxpr: no compiler and no devices are needed.

    for operation, count in trace_step(model).walk():     # model: partitioned over target.abstract_mesh(...)
      flops += count * operation.flops

The jaxpr says which products a step computes and how weights, batches and activations are split where the model
constrains them. In between, the walk propagates the mesh axes of every dim, as XLA's partitioner does: elementwise
operations keep them, a contraction over a split dim leaves partial sums, and a value that is constrained to other axes
is gathered, exchanged or reduced. Inside a `shard_map` shapes are those of one device and collectives are written out.

What is only known after compilation is replaced by rules: partial sums in the shape of a weight are reduce-scattered to
the weight's own axes, since the optimizer reads them there, and the same operation on the same arrays runs once.
"""

from collections.abc import Iterable, Mapping, Sequence
import json
import math
import re
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import PartitionSpec
import numpy as np

from spmd_tasks.layers.moe import BALANCED_SHARE_NAME, FURTHER_PASSES_NAME
from spmd_tasks.planning.operations import Array, Axes, Block, Operation, itemsize
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.compilation import CompiledStep
from spmd_tasks.sharding.specs import axes_of, num_parts, spec_axes
from spmd_tasks.sharding.weights import PINNED_HOST


def trace_step(model: PartitionedModel, step: CompiledStep | None = None) -> Block:
  """Returns the operations of one device in a step of a model, by default its train step.

  The model's mesh says for which devices: a Mesh, or an AbstractMesh whose `abstract_device` stands for them.
  """
  jaxpr, arguments = (step or model.train_step).make_jaxpr()
  return walk_jaxpr(jaxpr, arguments, dict(model.mesh.shape), _weight_axes(model))


def walk_jaxpr(
  jaxpr: ClosedJaxpr,
  arguments: Any,
  axis_sizes: Mapping[str, int],
  weight_axes: Mapping[tuple[int, ...], Axes] | None = None,
) -> Block:
  """Returns the operations of one device in any computation.

  Args:
    jaxpr: the computation.
    arguments: its arguments: a tree of arrays, or of their shapes, with NamedShardings.
    axis_sizes: of the mesh.
    weight_axes: shape of a weight -> the axes to which partial sums of this shape are scattered.
  """
  walk = _Walk(axis_sizes, weight_axes or {})
  inputs = [walk.argument(leaf) for leaf in jax.tree.leaves(arguments)]
  constants = [walk.constant(value) for value in jaxpr.consts]
  outputs = walk.run(jaxpr.jaxpr, constants, inputs)
  return _without_dead_code(Block(walk.operations, (*inputs, *constants), tuple(outputs)))


def _weight_axes(model: PartitionedModel) -> dict[tuple[int, ...], Axes]:
  """Returns the axes of the weights by their shapes, whole and without the dims that count layers."""
  by_shape: dict[tuple[int, ...], Axes] = {}
  for spec, leaf in zip(
    jax.tree.leaves(model.state_specs.weights, is_leaf=lambda x: isinstance(x, PartitionSpec)),
    jax.tree.leaves(model.abstract_state.weights),
    strict=True,
  ):
    axes = tuple(spec_axes(spec, len(leaf.shape)))
    for start in range(len(leaf.shape)):
      if len(leaf.shape) - start > 1 or start == 0:
        by_shape.setdefault(tuple(leaf.shape[start:]), axes[start:])
  return by_shape


def _summed(x: Array) -> float:
  """Returns how many bytes of partial sums there are for each byte of the array."""
  return itemsize(x.summed_as) / itemsize(x.dtype) if x.summed_as is not None else 1.0


# --- the walk ---

_VIEWS = frozenset({
  'reshape', 'squeeze', 'expand_dims', 'sharding_constraint', 'name', 'pvary', 'stop_gradient',
  'copy', 'reshard', 'bitcast_convert_type', 'random_wrap', 'random_unwrap', 'pcast',
})  # fmt: skip
_LINEAR = frozenset({'convert_element_type', 'transpose', 'neg', 'copy', 'name', 'pvary', 'reduce_precision', 'pcast'})
_REDUCTIONS = frozenset({
  'reduce', 'reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and', 'reduce_or', 'argmax', 'argmin',
})  # fmt: skip
_NAMED_COLLECTIVES = {
  'psum': 'all_reduce', 'psum_invariant': 'all_reduce', 'pmax': 'all_reduce', 'pmin': 'all_reduce',
  'all_gather': 'all_gather', 'all_gather_invariant': 'all_gather', 'reduce_scatter': 'reduce_scatter',
  'psum_scatter': 'reduce_scatter', 'all_to_all': 'all_to_all', 'ragged_all_to_all': 'all_to_all',
  'ppermute': 'collective_permute',
}  # fmt: skip


class _Walk:
  """An abstract interpreter of jaxprs."""

  def __init__(self, axis_sizes: Mapping[str, int], weight_axes: Mapping[tuple[int, ...], Axes]):
    self.sizes, self.weight_axes = axis_sizes, weight_axes
    self.operations: list[Operation] = []
    self.name = ''
    self.constrained: dict[tuple[int, ...], Axes] = {}  # shape -> the axes of the constraint that splits it most
    self.known: dict[Any, Any] = {}  # results of the block by what computes them: XLA computes them once

  # -- arrays --

  def array(self, aval: Any, axes: Axes | None = None, **fields: Any) -> Array:
    shape = tuple(getattr(aval, 'shape', ()))
    axes = ((),) * len(shape) if axes is None else tuple(axes)
    axes = tuple(tuple(axis for axis in dim if self.sizes[axis] > 1) for dim in axes)
    parts = tuple(num_parts(dim, self.sizes) for dim in axes)
    return Array(shape, getattr(aval, 'dtype', None), axes, parts, **fields)

  def argument(self, leaf: Any) -> Array:
    on_host = leaf.sharding.memory_kind == PINNED_HOST
    return self.array(leaf, tuple(spec_axes(leaf.sharding.spec, len(leaf.shape))), on_host=on_host)

  def constant(self, value: Any) -> Array:
    if (
      np.ndim(value) == 0
      and not isinstance(value, jax.core.Tracer)
      and not jax.dtypes.issubdtype(getattr(value, 'dtype', np.float32), jax.dtypes.extended)
    ):
      key = 'constant', np.asarray(value).item(), str(getattr(value, 'dtype', type(value)))
      return self.known.setdefault(key, self.array(np.asarray(value), value=np.asarray(value)))
    is_known = (
      isinstance(value, np.ndarray | jax.Array) and value.size <= 1 << 22 and not isinstance(value, jax.core.Tracer)
    )
    return self.array(value, value=np.asarray(value) if is_known else None)

  def like(self, x: Array, axes: Axes | None = None, **changes: Any) -> Array:
    return self.array(
      x,
      x.axes if axes is None else axes,
      **({'on_host': x.on_host, 'partial': x.partial, 'summed_as': x.summed_as, 'is_uniform': x.is_uniform} | changes),
    )

  @staticmethod
  def kept(x: Array) -> dict[str, Any]:
    """Returns what a linear operation keeps of its operand."""
    return {
      'partial': x.partial,
      'summed_as': x.summed_as or x.dtype if x.partial else None,
      'on_host': x.on_host,
      'is_uniform': x.is_uniform,
    }

  # -- communication --

  def collect(self, kind: str, group: Iterable[str], x: Array, result: Array, num_bytes: float) -> None:
    group = tuple(axis for axis in self.sizes if axis in set(group) and self.sizes[axis] > 1)
    if group and num_bytes:
      self.add('collective', (x,), (result,), collective=kind, group=group, bytes=num_bytes)

  def add(self, kind: str, inputs: Sequence[Array], outputs: Sequence[Array], **fields: Any) -> None:
    operation = Operation(
      kind=kind, name=fields.pop('name', self.name), inputs=tuple(inputs), outputs=tuple(outputs), **fields
    )
    self.operations.append(operation)

  def reduced(self, x: Array) -> Array:
    """Returns the sum of a partial value: an all-reduce."""
    if not x.partial:
      return x
    key = 'reduced', id(x)
    if key not in self.known:
      result = self.like(x, partial=frozenset())
      n = num_parts(tuple(x.partial), self.sizes)
      self.collect('all_reduce', x.partial, x, result, 2 * x.local_bytes * _summed(x) * (n - 1) / n)
      self.known[key] = x, result
    return self.known[key][1]

  def moved(self, x: Array, axes: Axes) -> Array:
    """Returns the array split over other axes: scatters partial sums, exchanges axes that moved, gathers the others."""
    axes = tuple(tuple(axis for axis in dim if self.sizes[axis] > 1) for dim in axes)
    if x.axes == axes:
      return x
    key = 'moved', id(x), axes
    if key not in self.known:
      self.known[key] = x, self._moved(x, axes)
    return self.known[key][1]

  def _moved(self, x: Array, axes: Axes) -> Array:
    wanted = {axis for dim in axes for axis in dim}
    present = {axis for dim in x.axes for axis in dim}
    if scattered := x.partial & wanted:
      n = num_parts(tuple(scattered), self.sizes)
      kept = tuple(tuple(axis for axis in dim if axis in present | scattered) for dim in axes)
      result = self.like(x, kept, partial=x.partial - scattered)
      self.collect('reduce_scatter', scattered, x, result, x.local_bytes * _summed(x) * (n - 1) / n)
      x = result
      present = {axis for dim in x.axes for axis in dim}
    exchanged = {axis for dim, new in zip(x.axes, axes) for axis in dim if axis not in new and axis in wanted}
    if exchanged:
      n = num_parts(tuple(exchanged), self.sizes)
      places = [tuple(axis for axis in dim if axis in present) for dim in axes]
      gone = [tuple(axis for axis in dim if axis not in wanted) for dim in x.axes]
      result = self.like(x, tuple((*new, *old) for new, old in zip(places, gone)))
      self.collect('all_to_all', exchanged, x, result, x.local_bytes * (n - 1) / n)
      x = result
    gathered = {axis for dim, new in zip(x.axes, axes) for axis in dim if axis not in new}
    if gathered:
      n = num_parts(tuple(gathered), self.sizes)
      result = self.like(x, tuple(tuple(axis for axis in dim if axis not in gathered) for dim in x.axes))
      self.collect('all_gather', gathered, x, result, result.local_bytes * (n - 1) / n)
      x = result
    if x.axes == axes:
      return x
    result = self.like(x, axes)  # each device takes its part
    self.add('view', (x,), (result,))
    return result

  def settled(self, x: Array) -> Array:
    """Scatters partial sums in the shape of a weight to the weight's axes; other values stay."""
    if not x.partial:
      return x
    known = (start for start in range(max(1, len(x.shape) - 1)) if x.shape[start:] in self.weight_axes)
    if (start := next(known, None)) is None:
      return x
    axes = (*x.axes[:start], *self.weight_axes[x.shape[start:]])  # dims in front count layers
    free = tuple(tuple(axis for axis in dim if axis in x.partial or axis in old) for dim, old in zip(axes, x.axes))
    used = {axis for dim in free for axis in dim}
    merged = tuple((*(axis for axis in old if axis not in used), *new) for old, new in zip(x.axes, free))
    return self.reduced(self.moved(x, merged))

  # -- jaxprs --

  def run(self, jaxpr: Jaxpr, constants: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
    env: dict[Any, Array] = {}

    def read(atom: Any) -> Array:
      if isinstance(atom, Literal):
        return self.constant(np.asarray(atom.val)) if np.ndim(atom.val) == 0 else self.constant(atom.val)
      return env[atom]

    env.update(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))
    outer = self.name
    for eqn in jaxpr.eqns:
      stack = str(eqn.source_info.name_stack)
      self.name = f'{outer}/{stack}' if outer and stack else outer or stack
      inputs = [read(atom) for atom in eqn.invars]
      outputs = self.once(eqn, inputs)
      env.update(zip(eqn.outvars, outputs, strict=True))
    self.name = outer
    return [read(atom) for atom in jaxpr.outvars]

  def once(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    """Returns the results of an equation, which are computed once in a block for the same inputs."""
    try:
      key = (
        eqn.primitive.name,
        *map(id, inputs),
        *map(str, (var.aval for var in eqn.outvars)),
        *sorted(eqn.params.items()),
      )
      hash(key)
    except TypeError:
      return self.equation(eqn, inputs)
    if any('NamedAxis' not in type(effect).__name__ for effect in eqn.effects):
      return self.equation(eqn, inputs)
    if key not in self.known:
      self.known[key] = inputs, self.equation(eqn, inputs)
    return self.known[key][1]

  def equation(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    name, params = eqn.primitive.name, eqn.params
    if name in _NAMED_COLLECTIVES:
      return self.named_collective(eqn, inputs)
    if rule := getattr(self, f'_{name.replace("-", "_")}', None):
      return rule(eqn, inputs)
    if 'dot_product_attention' in name:
      return self.attention_kernel(eqn, inputs, name)
    if name in _REDUCTIONS:
      return self.reduction(eqn, inputs)
    if name == 'call_hi_primitive':  # jax.checkpoint with jax_remat3
      params = params['_prim'].params
    for inner in params.values():  # jit, custom_jvp, ...; the jaxprs of sort and reduce_window take scalars
      jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
      shapes = [getattr(var.aval, 'shape', None) for var in getattr(jaxpr, 'invars', ())]
      if isinstance(jaxpr, Jaxpr) and shapes == [x.shape for x in inputs]:
        return self.call(inner, inputs)
    return self.elementwise(eqn, inputs)

  def call(self, jaxpr: ClosedJaxpr | Jaxpr, inputs: list[Array]) -> list[Array]:
    if isinstance(jaxpr, ClosedJaxpr):
      return self.run(jaxpr.jaxpr, [self.constant(value) for value in jaxpr.consts], inputs)
    return self.run(jaxpr, [], inputs)

  # -- rules --

  def elementwise(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    """An operation whose dims are those of its largest inputs."""
    if not eqn.outvars:  # jax.debug.print
      return []
    out = eqn.outvars[0].aval
    shape = tuple(getattr(out, 'shape', ()))
    same = [x for x in inputs if len(x.shape) == len(shape)]
    partial: frozenset[str] = frozenset()
    summed_as = None
    if any(x.partial for x in inputs):
      all_partial = {x.partial for x in same}
      is_sum = eqn.primitive.name in ('add', 'add_any', 'sub') and len(same) == len(inputs) and len(all_partial) == 1
      factors = [x for x in inputs[eqn.primitive.name == 'div' :] if not x.partial]
      is_scaled = (
        eqn.primitive.name in ('mul', 'div')
        and not any(x.partial and _summed(x) < 1 for x in inputs)  # after an upcast the sum is due
        and bool(inputs[0].partial) + (eqn.primitive.name == 'mul' and bool(inputs[1].partial)) == 1
        and not any(axis in x.partial for x in inputs for factor in factors for dim in factor.axes for axis in dim)
      )
      if is_scaled and not inputs[0].partial:
        inputs = inputs[::-1]
      if eqn.primitive.name == 'select_n' and any(x.is_uniform for x in inputs[1:]):  # a choice between it and zero
        inputs = sorted(inputs, key=lambda x: not x.partial)
        is_scaled = not any(axis in inputs[0].partial for x in inputs[1:] for dim in x.axes for axis in dim)
      if is_sum or is_scaled or (eqn.primitive.name in _LINEAR and len(inputs) == 1):
        partial = inputs[0].partial
        summed_as = min((inputs[0].summed_as or inputs[0].dtype, out.dtype), key=itemsize)
      else:
        inputs = [self.resolved(x, inputs) for x in inputs]
        same = [x for x in inputs if len(x.shape) == len(shape)]
    axes = self.merged_axes(shape, same)
    inputs = [self.moved(x, axes) if x.shape == shape else x for x in inputs]
    kind = 'view' if eqn.primitive.name in _VIEWS else 'elementwise'
    if same and eqn.primitive.name == 'convert_element_type' and same[0].dtype == out.dtype:
      kind = 'view'
    on_host = bool(same) and all(x.on_host for x in same)
    is_uniform = len(inputs) == 1 and inputs[0].is_uniform
    outputs = []
    for var in eqn.outvars:
      fits = tuple(getattr(var.aval, 'shape', ())) == shape
      outputs.append(
        self.array(
          var.aval, axes if fits else None, partial=partial, summed_as=summed_as, on_host=on_host, is_uniform=is_uniform
        )
      )
    self.add(kind, inputs, outputs)
    return outputs

  def resolved(self, x: Array, others: Sequence[Array]) -> Array:
    """Sums a partial value before an operation that is not linear; scatters it where another operand is split."""
    x = self.settled(x)
    if not x.partial:
      return x
    targets = [other.axes for other in others if other.shape == x.shape and not other.partial]
    if x.shape in self.constrained:
      targets.append(self.constrained[x.shape])
    for target in targets:
      used = {axis for dim in x.axes for axis in dim}
      new = (tuple(axis for axis in dim if axis in x.partial and axis not in used) for dim in target)
      x = self.moved(x, tuple((*old, *new) for old, new in zip(x.axes, new)))
    return self.reduced(x)

  def merged_axes(self, shape: tuple[int, ...], arrays: Sequence[Array]) -> Axes:
    """Returns the axes of a result: per dim the operands' that are free, the larger operand's first."""
    used: set[str] = set()
    dims: list[tuple[str, ...]] = [()] * len(shape)
    for x in sorted(arrays, key=lambda x: -sum(len(dim) for dim in x.axes)):
      for i, dim in enumerate(x.axes):
        if x.shape[i] == shape[i] and not dims[i] and not used.intersection(dim):
          dims[i] = dim
          used.update(dim)
    return tuple(dims)

  def reduction(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    (x, *_), dims = inputs, set(eqn.params['dimensions' if eqn.primitive.name == 'reduce' else 'axes'])
    x = x if eqn.primitive.name == 'reduce_sum' else self.resolved(x, ())
    over = {axis for i in dims for axis in x.axes[i]}
    axes = tuple(dim for i, dim in enumerate(x.axes) if i not in dims)
    outputs = [self.array(var.aval, axes, partial=x.partial | over) for var in eqn.outvars]
    self.add('reduction', (x,), outputs)
    if eqn.primitive.name != 'reduce_sum':
      outputs = [self.reduced(out) for out in outputs]
    return outputs

  def _sharding_constraint(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    (x,), sharding = inputs, eqn.params.get('sharding') or eqn.params.get('dst_sharding')
    spec = getattr(sharding, 'spec', None)
    if spec is None:
      return [x]
    free = eqn.params.get('unconstrained_dims') or ()
    entries = [*spec, *[None] * (len(x.shape) - len(spec))]
    is_free = lambda i: i in free or entries[i] is PartitionSpec.UNCONSTRAINED
    axes = tuple(x.axes[i] if is_free(i) else axes_of(entry) for i, entry in enumerate(entries))
    before = self.constrained.get(x.shape)
    if before is None or num_parts(sum(axes, ()), self.sizes) > num_parts(sum(before, ()), self.sizes):
      self.constrained[x.shape] = axes
    moved = self.moved(x, axes)
    result = self.like(moved)
    self.add('view', (moved,), (result,))
    return [result]

  _reshard = _sharding_constraint

  def _transpose(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    (x,), order = inputs, eqn.params['permutation']
    result = self.array(eqn.outvars[0].aval, tuple(x.axes[i] for i in order), **self.kept(x))
    self.add('elementwise', (x,), (result,))
    return [result]

  def _broadcast_in_dim(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    x, dims = inputs[0], eqn.params['broadcast_dimensions']
    if math.prod(x.shape) < math.prod(eqn.params['shape']):
      x = self.resolved(x, ())
    axes: list[tuple[str, ...]] = [()] * len(eqn.params['shape'])
    for i, dim in enumerate(dims):
      axes[dim] = x.axes[i] if x.shape[i] == eqn.params['shape'][dim] else ()
    result = self.array(eqn.outvars[0].aval, tuple(axes), **self.kept(x) | {'is_uniform': x.is_uniform or not x.shape})
    self.add('elementwise', (x,), (result,))
    return [result]

  def _reshape(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    x, shape = inputs[0], tuple(eqn.outvars[0].aval.shape)
    axes = _reshaped_axes(x, shape, self.sizes)
    kept = {axis for dim in axes for axis in dim}
    if lost := {axis for dim in x.axes for axis in dim} - kept:
      x = self.moved(x, tuple(tuple(axis for axis in dim if axis not in lost) for dim in x.axes))
    result = self.array(eqn.outvars[0].aval, axes, **self.kept(x))
    self.add('view', (x,), (result,))
    return [result]

  def _optimization_barrier(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    outputs = [self.like(x) for x in inputs]
    for x, result in zip(inputs, outputs):
      self.add('view', (x,), (result,))
    return outputs

  def _squeeze(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    (x,), dims = inputs, {d % len(inputs[0].shape) for d in eqn.params['dimensions']}
    axes = tuple(dim for i, dim in enumerate(x.axes) if i not in dims)
    result = self.array(eqn.outvars[0].aval, axes, **self.kept(x))
    self.add('view', (x,), (result,))
    return [result]

  def _expand_dims(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    (x,), dims, old = inputs, set(eqn.params['dimensions']), iter(inputs[0].axes)
    axes = tuple(() if i in dims else next(old) for i in range(len(eqn.outvars[0].aval.shape)))
    result = self.array(eqn.outvars[0].aval, axes, **self.kept(x))
    self.add('view', (x,), (result,))
    return [result]

  def cut(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    """A slice, or a part of it: dims of another size are not split, unless their number of parts still fits."""
    x, outputs = inputs[0], []
    for var in eqn.outvars:
      shape = var.aval.shape
      axes = tuple(
        dim if new == old or (new and new % parts == 0 and old % parts == 0) else ()
        for dim, parts, new, old in zip(x.axes, x.parts, shape, x.shape)
      )
      outputs.append(self.array(var.aval, axes, **self.kept(x)))
    self.add('elementwise', inputs, outputs)
    return outputs

  _slice = _split = _dynamic_slice = _pad = _rev = cut

  def _concatenate(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    inputs = [self.resolved(x, ()) for x in inputs]
    result = self.array(eqn.outvars[0].aval, self.merged_axes(eqn.outvars[0].aval.shape, inputs))
    self.add('elementwise', inputs, (result,))
    return [result]

  def _stack(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    inputs, dim = [self.resolved(x, ()) for x in inputs], eqn.params['axis']
    axes = list(self.merged_axes(inputs[0].shape, inputs))
    axes.insert(dim % (len(axes) + 1), ())
    result = self.array(eqn.outvars[0].aval, tuple(axes))
    self.add('elementwise', inputs, (result,))
    return [result]

  def _unstack(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    (x,), dim = inputs, eqn.params['axis'] % len(inputs[0].shape)
    axes = x.axes[:dim] + x.axes[dim + 1 :]
    outputs = [self.array(var.aval, axes, **self.kept(x)) for var in eqn.outvars]
    self.add('elementwise', (x,), outputs)
    return outputs

  def _ffi_call(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    name = eqn.params['target_name']
    return self.attention_kernel(eqn, inputs, name) if 'fmha' in name else self.elementwise(eqn, inputs)

  def _dynamic_update_slice(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    target, update = inputs[0], self.resolved(inputs[1], inputs[:1])
    axes = self.merged_axes(target.shape, [target])
    if not any(target.axes):
      axes = tuple(dim if new == old else () for dim, new, old in zip(update.axes, update.shape, target.shape))
    result = self.array(eqn.outvars[0].aval, axes, on_host=target.on_host, partial=target.partial)
    self.add('elementwise', (update,), (result,), bytes=2 * update.local_bytes)
    return [result]

  def _device_put(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    outputs = []
    for x, place in zip(inputs, eqn.params['devices']):
      kind = str(getattr(place, 'memory_kind', place))
      on_host = 'host' in kind.lower()
      result = self.like(x, on_host=on_host)
      if on_host != x.on_host:
        self.add('host', (x,), (result,), bytes=x.size_bytes, to_host=on_host)
      else:
        self.add('view', (x,), (result,))
      outputs.append(result)
    return outputs

  def _dot_general(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    (lhs_dims, rhs_dims), (lhs_batch, rhs_batch) = eqn.params['dimension_numbers']
    lhs, rhs = (self.resolved(x, ()) for x in inputs)
    lhs, rhs = self.contraction_operands(lhs, rhs, eqn.params['dimension_numbers'])
    lhs_free = [i for i in range(len(lhs.shape)) if i not in (*lhs_dims, *lhs_batch)]
    rhs_free = [i for i in range(len(rhs.shape)) if i not in (*rhs_dims, *rhs_batch)]
    batch = [left or right for left, right in zip((lhs.axes[i] for i in lhs_batch), (rhs.axes[i] for i in rhs_batch))]
    axes = (*batch, *(lhs.axes[i] for i in lhs_free), *(rhs.axes[i] for i in rhs_free))
    contracted = [
      left or right for left, right in zip((lhs.axes[i] for i in lhs_dims), (rhs.axes[i] for i in rhs_dims))
    ]
    over = {axis for dim in contracted for axis in dim}
    result = self.array(eqn.outvars[0].aval, axes, partial=frozenset(over))
    local = lambda x, dims, split: math.prod(-(-x.shape[i] // num_parts(s, self.sizes)) for i, s in zip(dims, split))
    depth = local(lhs, lhs_dims, contracted)
    rows, columns = (math.prod(x.local_shape[i] for i in free) for x, free in ((lhs, lhs_free), (rhs, rhs_free)))
    copies = local(lhs, lhs_batch, batch)
    dtype = max((np.dtype(x.dtype) for x in inputs), key=lambda dtype: dtype.itemsize).name
    if min(rows, columns) == 1:  # no matrix unit can do more than the vector units
      self.add('reduction', (lhs, rhs), (result,))
      return [result]
    self.add(
      'product',
      (lhs, rhs),
      (result,),
      flops=2.0 * copies * rows * columns * depth,
      sizes=(rows, columns, depth),
      dtype=dtype,
    )
    return [result]

  def contraction_operands(self, lhs: Array, rhs: Array, numbers: Any) -> tuple[Array, Array]:
    """Gathers what no device could multiply: axes that split different dims of the two operands."""
    (lhs_dims, rhs_dims), (lhs_batch, rhs_batch) = numbers
    pairs = {**dict(zip(lhs_dims, rhs_dims)), **dict(zip(lhs_batch, rhs_batch))}
    of_lhs = {axis: i for i, dim in enumerate(lhs.axes) for axis in dim}
    of_rhs = {axis: i for i, dim in enumerate(rhs.axes) for axis in dim}
    clashing = {axis for axis in of_lhs if axis in of_rhs and pairs.get(of_lhs[axis]) != of_rhs[axis]}
    for left, right in pairs.items():  # one dim, split over different axes
      if lhs.axes[left] and rhs.axes[right] and lhs.axes[left] != rhs.axes[right]:
        clashing |= set(lhs.axes[left]) ^ set(rhs.axes[right])
    # An operand whose contracted dim has the axis is gathered, so that the result is split; else the smaller one.
    of_contracted = [
      {axis for i in dims for axis in x.axes[i]} & clashing for x, dims in ((lhs, lhs_dims), (rhs, rhs_dims))
    ]
    rest = clashing - of_contracted[0] - of_contracted[1]
    of_contracted[lhs.local_bytes >= rhs.local_bytes] |= rest
    lhs, rhs = (
      self.moved(x, tuple(tuple(axis for axis in dim if axis not in gone) for dim in x.axes))
      for x, gone in zip((lhs, rhs), of_contracted)
    )
    return lhs, rhs

  def _conv_general_dilated(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    params, out = eqn.params, eqn.outvars[0].aval
    lhs_spec, rhs_spec, out_spec = params['dimension_numbers']  # batch and features, then the window's dims
    lhs, rhs = (
      self.moved(x, tuple(dim if i in spec[:2] else () for i, dim in enumerate(x.axes)))
      for x, spec in zip((self.resolved(x, ()) for x in inputs), (lhs_spec, rhs_spec))
    )
    lhs, rhs = self.contraction_operands(lhs, rhs, (((lhs_spec[1],), (rhs_spec[1],)), ((), ())))
    of_out = {out_spec[0]: lhs.axes[lhs_spec[0]], out_spec[1]: rhs.axes[rhs_spec[0]]}
    over = lhs.axes[lhs_spec[1]] or rhs.axes[rhs_spec[1]]
    axes = tuple(of_out.get(i, ()) for i in range(len(out.shape)))
    result = self.array(out, axes, partial=frozenset(over))
    columns = result.local_shape[out_spec[1]]
    rows = math.prod(result.local_shape) // columns
    depth = math.prod(rhs.shape) // rhs.shape[rhs_spec[0]] // num_parts(over, self.sizes)
    flops = 2.0 * rows * columns * depth / math.prod(params['lhs_dilation'])  # in between are zeros
    dtype = np.dtype(lhs.dtype).name
    self.add('product', (lhs, rhs), (result,), flops=flops, sizes=(rows, columns, depth), dtype=dtype)
    return [result]

  def _ragged_dot_general(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    return self.grouped_product(eqn, inputs)

  _ragged_dot = _ragged_dot_general

  def grouped_product(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    """A product of rows with the matrices of their groups, or of rows with rows for the matrices' gradients.

    Rows that balanced routing leaves without a group are neither multiplied nor read: see `_balanced_share`.
    """
    out = eqn.outvars[0].aval
    lhs, rhs, *_ = _matrices(inputs)
    axes = lhs.axes[:1] + ((),) * (len(out.shape) - 1) if len(out.shape) == len(lhs.shape) else None
    outputs = [self.array(var.aval, axes if var is eqn.outvars[0] else None) for var in eqn.outvars]
    if len(rhs.shape) >= 3:  # rows times matrices
      columns, depth, of_rows = out.shape[-1], lhs.local_shape[-1], (lhs, outputs[0])
    else:  # rows [M, K] or [K, M] with rows [M, N]: [E, K, N]
      depth, columns, of_rows = out.shape[-2], out.shape[-1], (lhs, rhs)
    share = _balanced_share(self.name)
    rows = share * (math.prod(lhs.local_shape) // depth)
    moved = sum(x.local_bytes for x in (*inputs, *outputs)) - (1 - share) * sum(x.local_bytes for x in of_rows)
    self.add(
      'grouped',
      inputs,
      outputs,
      flops=2.0 * rows * columns * depth,
      sizes=(rows, columns, depth),
      bytes=moved,
      dtype=np.dtype(lhs.dtype).name,
    )
    return outputs

  def _pallas_call(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    kernel = eqn.params['jaxpr']
    name = str(eqn.params.get('name') or kernel.debug_info.func_name)
    if ('splash' in name or 'flash' in name) and len(_queries_keys_values(inputs)) >= 3:
      return self.attention_kernel(eqn, inputs, name)
    if 'dot_general' in str(kernel) and len(_matrices(inputs)) >= 2:
      return self.grouped_product(eqn, inputs)
    return self.elementwise(eqn, inputs)

  def attention_kernel(self, eqn: Any, inputs: list[Array], name: str) -> list[Array]:
    """An attention kernel: products of queries with keys, of which a causal or windowed one skips blocks."""
    query, key, value, *_ = _queries_keys_values(inputs)
    is_cudnn = 'fmha' in name or 'dot_product_attention' in name
    is_backward = 'bwd' in name or 'Backward' in name or 'dkv' in name or 'dq' in name
    if is_cudnn:  # [B, T, H, K]
      length, num_keys, scores = query.local_shape[1], key.local_shape[1], 5 if is_backward else 2
      share = (1 + 1 / max(length, 1)) / 2
    else:  # [H, T, K], features of all heads in a row too
      num_keys = key.local_shape[-2]
      has_parts = any(len(var.aval.shape) > len(query.shape) for var in eqn.outvars)  # of the queries' gradients
      scores = 4 + has_parts if 'dkv' in name else 3 if 'dq' in name else 2
      share = _computed_share(eqn.params, inputs, query.local_shape[-2], num_keys)
    head_dim, value_dim = key.local_shape[-1], value.local_shape[-1]
    size = math.prod(query.local_shape[:-1]) * (query.local_shape[-1] // head_dim or 1)
    flops = scores * share * size * num_keys * (head_dim + value_dim)
    outputs = []
    for var in eqn.outvars:
      fits = len(var.aval.shape) == len(query.shape)
      outputs.append(self.array(var.aval, query.axes if fits and var.aval.shape[0] == query.shape[0] else None))
    self.add('attention', inputs, outputs, flops=flops, sizes=(head_dim, value_dim), dtype='bfloat16')
    return outputs

  def _gather(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    numbers = eqn.params['dimension_numbers']
    operand, indices = self.resolved(inputs[0], ()), inputs[1]
    out = eqn.outvars[0].aval
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims))
    index_axes = {axis for dim in indices.axes for axis in dim}
    together = {
      axis
      for of_operand, of_index in batching.items()
      for axis in operand.axes[of_operand]
      if axis in indices.axes[of_index]
    }
    clashing = {axis for dim in operand.axes for axis in dim if axis in index_axes} - together
    if clashing:
      operand = self.moved(operand, tuple(tuple(axis for axis in dim if axis not in clashing) for dim in operand.axes))
    collapsed = {*numbers.collapsed_slice_dims, *batching}
    kept = iter(
      [
        operand.axes[i] if eqn.params['slice_sizes'][i] == operand.shape[i] else ()
        for i in range(len(operand.shape))
        if i not in collapsed
      ]
    )
    rows = dict(enumerate(indices.axes[:-1]))
    rows |= {of_index: rows[of_index] or operand.axes[of_operand] for of_operand, of_index in batching.items()}
    batch = iter(rows.values())
    axes = tuple(next(kept, ()) if i in numbers.offset_dims else next(batch, ()) for i in range(len(out.shape)))
    over = {axis for i in numbers.collapsed_slice_dims for axis in operand.axes[i]}
    result = self.array(out, axes, partial=frozenset(over))
    is_rows = len(out.shape) >= 2 and math.prod(result.local_shape) > 1 << 12
    self.add('gather' if is_rows else 'elementwise', (operand, indices), (result,), bytes=2 * result.local_bytes)
    return [result]

  def _scatter_add(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    target, indices, updates = inputs
    numbers = eqn.params['dimension_numbers']
    batch = [i for i in range(len(updates.shape)) if i not in numbers.update_window_dims]  # as the dims of the indices
    batching = dict(zip(numbers.operand_batching_dims, (batch[i] for i in numbers.scatter_indices_batching_dims)))
    over = {axis for i in batch if i not in batching.values() for axis in updates.axes[i]}
    kept = iter([updates.axes[i] for i in numbers.update_window_dims])
    axes = tuple(
      updates.axes[batching[i]] if i in batching else () if i in numbers.inserted_window_dims else next(kept, ())
      for i in range(len(target.shape))
    )
    axes = self.merged_axes(target.shape, [self.array(eqn.outvars[0].aval, axes), target]) if not over else axes
    result = self.array(eqn.outvars[0].aval, axes, partial=frozenset(over) | updates.partial)
    is_rows = len(updates.shape) >= 2 and math.prod(updates.local_shape) > 1 << 12
    self.add(
      'gather' if is_rows else 'elementwise', (target, indices, updates), (result,), bytes=2 * updates.local_bytes
    )
    return [result]

  _scatter = _scatter_mul = _scatter_min = _scatter_max = _scatter_sub = _scatter_add

  def _iota(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    result = self.array(eqn.outvars[0].aval, is_uniform=True)
    self.add('elementwise', inputs, (result,))
    return [result]

  def named_collective(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    params, kind = eqn.params, _NAMED_COLLECTIVES[eqn.primitive.name]
    names = params.get('axes', params.get('axis_name', ()))
    names = (names,) if isinstance(names, str) else tuple(names)
    n = num_parts(tuple(name for name in names if isinstance(name, str)), self.sizes)
    outputs = []
    for x, var in zip(inputs, eqn.outvars):
      axes = x.axes if len(x.axes) == len(var.aval.shape) else None
      result = self.array(var.aval, axes)
      num_bytes = {
        'all_reduce': 2 * x.local_bytes * (n - 1) / n,
        'all_gather': result.local_bytes * (n - 1) / n,
        'collective_permute': x.local_bytes,
      }.get(kind, x.local_bytes * (n - 1) / n)
      before = len(self.operations)
      self.collect(kind, names, x, result, num_bytes if n > 1 else 0)
      if len(self.operations) == before:
        self.add('view', (x,), (result,))
      outputs.append(result)
    return outputs + [self.array(var.aval) for var in eqn.outvars[len(outputs) :]]

  # -- control flow --

  def _shard_map(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    params = eqn.params
    manual = set(params.get('manual_axes') or params.get('newly_manual_axes') or params['mesh'].axis_names)
    entered = []
    for x, spec, var in zip(inputs, params['in_specs'], params['jaxpr'].invars):
      wanted = spec_axes(spec, len(x.shape))
      rest = tuple(tuple(axis for axis in dim if axis not in manual) for dim in x.axes)
      asked = {axis for dim in wanted for axis in dim}
      x = self.resolved(x, ()) if x.partial - asked else x
      x = self.moved(x, tuple((*new, *old) for new, old in zip(wanted, rest)))
      key = 'entered', id(x), str(var.aval)
      if key not in self.known:
        value = x.value if x.shape == tuple(var.aval.shape) else None
        inner = self.array(var.aval, rest, on_host=x.on_host, value=value, is_uniform=x.is_uniform)
        self.add('view', (x,), (inner,))
        self.known[key] = x, inner
      entered.append(self.known[key][1])
    results = self.call(params['jaxpr'], entered)
    outputs = []
    for x, spec, var in zip(results, params['out_specs'], eqn.outvars):
      dims = spec_axes(spec, len(x.shape))
      result = self.array(var.aval, tuple((*new, *old) for new, old in zip(dims, x.axes)), on_host=x.on_host)
      self.add('view', (x,), (result,))
      outputs.append(result)
    return outputs

  def _remat2(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    if eqn.params.get('prevent_cse'):
      again = [self.like(x, value=x.value) for x in inputs]
      for x, copy in zip(inputs, again):
        self.add('view', (x,), (copy,))
      inputs = again
    return self.call(eqn.params['jaxpr'], inputs)

  _checkpoint = _remat2

  def _scan(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    params = eqn.params
    num_consts, num_carry = _scan_sizes(params, inputs)
    inputs = [self.resolved(x, ()) for x in inputs]
    consts, carry, stacked = (
      inputs[:num_consts],
      inputs[num_consts : num_consts + num_carry],
      inputs[num_consts + num_carry :],
    )
    body = params['jaxpr']
    avals = [var.aval for var in body.jaxpr.invars]
    entered = [self.like(x, value=x.value) for x in consts]
    slices = [
      self.array(aval, x.axes[1:], on_host=x.on_host) for x, aval in zip(stacked, avals[num_consts + num_carry :])
    ]
    carried = [self.like(x, is_uniform=False) for x in carry]
    outer, name, known = self.operations, self.name, self.known
    for attempt in range(4):
      self.operations, self.known = [], {}
      results = self.call(body, [*entered, *carried, *slices])
      changed = False
      for i, (x, y) in enumerate(zip(carried, results)):
        y = y if not y.partial else self.settled(y)
        if x.axes != y.axes and attempt < 2 and not any(x.axes):
          carried[i], changed = self.like(y, partial=frozenset(), is_uniform=False), True
      if not changed:
        break
    results = [self.resolved(x, ()) for x in results]
    results = [
      self.moved(y, x.axes) if i < num_carry else y
      for i, (x, y) in enumerate(zip([*carried, *results[num_carry:]], results))
    ]
    block = Block(self.operations, (*entered, *carried, *slices), tuple(results))
    self.operations, self.name, self.known = outer, name, known
    outputs = [
      self.array(var.aval, x.axes if i < num_carry else ((), *x.axes), on_host=x.on_host)
      for i, (var, x) in enumerate(zip(eqn.outvars, results))
    ]
    self.add('loop', inputs, outputs, body=block, count=params['length'])
    return outputs

  def _while(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    """Counts a loop over microbatches once for each of them. Passes for overflowing experts are not counted."""
    params = eqn.params
    skipped, num_consts = params['cond_nconsts'], params['body_nconsts']
    rest = [self.resolved(x, ()) for x in inputs[skipped:]]
    count = 0 if FURTHER_PASSES_NAME in self.name else _num_microbatches(params['body_jaxpr'].jaxpr)
    outer, name, known = self.operations, self.name, self.known
    consts = [self.like(x, value=x.value) for x in rest[:num_consts]]
    carried = [self.like(x, is_uniform=False) for x in rest[num_consts:]]
    for attempt in range(3):
      self.operations, self.known = [], {}
      results = [self.resolved(x, ()) for x in self.call(params['body_jaxpr'], [*consts, *carried])]
      adopted = [y if attempt < 2 and not any(x.axes) else x for x, y in zip(carried, results)]
      if all(x.axes == y.axes for x, y in zip(carried, adopted)):
        break
      carried = [self.like(x, is_uniform=False) for x in adopted]
    results = [self.moved(y, x.axes) for x, y in zip(carried, results)]
    block = Block(self.operations, (*consts, *carried), tuple(results))
    self.operations, self.name, self.known = outer, name, known
    outputs = [self.array(var.aval, x.axes) for var, x in zip(eqn.outvars, results)]
    self.add('loop' if count else 'view', rest, outputs, body=block if count else None, count=count)
    return outputs

  def _cond(self, eqn: Any, inputs: list[Array]) -> list[Array]:
    """Counts the branch with the most FLOPs, or the most operations."""
    outer, best, known = self.operations, None, self.known
    for branch in eqn.params['branches']:
      self.operations, self.known = [], {}
      results = self.call(branch, inputs[1:])
      weight = sum(operation.flops * count for operation, count in Block(self.operations).walk()), len(self.operations)
      if best is None or weight > best[0]:
        best = weight, self.operations, results
    assert best is not None
    self.operations, self.known = outer + best[1], known
    return best[2]


def _matrices(inputs: Sequence[Array]) -> list[Array]:
  """Returns the operands of a grouped product, without its groups' sizes."""
  matrices = [x for x in inputs if x.dtype is not None and len(x.shape) >= 2]
  floating = [x for x in matrices if jax.dtypes.issubdtype(x.dtype, np.floating)]
  return floating + [x for x in matrices if np.dtype(x.dtype) == np.int8]


def _balanced_share(name: str) -> float:
  """Returns the share of a grouped product's rows that have a group if routing is balanced, by its name stack."""
  stated = re.findall(rf'{BALANCED_SHARE_NAME}=([\d.e-]+)', name)
  return float(stated[-1]) if stated else 1.0


def _queries_keys_values(inputs: Sequence[Array]) -> list[Array]:
  """Returns the operands of an attention kernel; other arrays follow."""
  arrays = (x for x in inputs if x.dtype is not None and len(x.shape) >= 3)
  return [x for x in arrays if jax.dtypes.issubdtype(x.dtype, np.floating)]


def _reshaped_axes(x: Array, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Axes:
  """Returns the axes after a reshape: among dims with the same product, the axes go to the first dims that they divide.

  Only axes that no dim can have are lost.
  """
  axes: list[tuple[str, ...]] = [()] * len(shape)
  i = j = 0
  while i < len(x.shape) and j < len(shape):
    first_i, first_j, old, new = i, j, x.shape[i], shape[j]
    while old != new and max(i - len(x.shape), j - len(shape)) < -1:
      if (old < new and i + 1 < len(x.shape)) or j + 1 >= len(shape):
        i += 1
        old *= x.shape[i]
      else:
        j += 1
        new *= shape[j]
    if i == first_i and j == first_j:
      axes[j] = x.axes[i]  # which need not divide it
    else:
      rest = [axis for dim in x.axes[first_i : i + 1] for axis in dim]
      for k in range(first_j, j + 1):
        left = shape[k]
        while rest and left % sizes[rest[0]] == 0:
          left //= sizes[rest[0]]
          axes[k] = (*axes[k], rest.pop(0))
    i, j = i + 1, j + 1
  return tuple(axes)


def _without_dead_code(block: Block) -> Block:
  """Drops operations whose results nothing reads."""

  def live(operations: list[Operation], outputs: Iterable[Array]) -> list[Operation]:
    needed, kept = {id(x) for x in outputs}, []
    for operation in reversed(operations):
      if operation.outputs and not any(id(x) in needed for x in operation.outputs):
        continue
      if operation.body is not None:
        operation.body.operations = live(operation.body.operations, operation.body.outputs)
      needed.update(id(x) for x in operation.inputs)
      kept.append(operation)
    return kept[::-1]

  block.operations = live(block.operations, block.outputs)
  return block


def _computed_share(params: Mapping[str, Any], inputs: Sequence[Array], num_queries: int, num_keys: int) -> float:
  """Returns the share of all pairs of queries and keys that a splash kernel computes: whole blocks, by its mask.

  The kernel's second operand says for each head, and each pair of blocks in its grid, whether a part (1) or all (2) of
  the block is needed.
  """
  mask = inputs[1].value
  if mask is None or mask.ndim != 3:
    return 0.5
  stated = json.loads(dict(params.get('metadata') or {}).get('xprof_metadata', '{}'))
  phase = next((f'_{name}' for name in ('dkv', 'dq') if name in str(params.get('name'))), '')
  rows, columns = mask.shape[-2:]  # fewer than there are blocks, if the mask leaves a band
  block_q, block_kv = (stated.get(f'block_{name}{phase}') for name in ('q', 'kv'))
  block_q, block_kv = block_q or num_queries // rows, block_kv or num_keys // columns
  return float(np.sum(mask > 0)) / len(mask) * block_q * block_kv / (num_queries * num_keys)


def _scan_sizes(params: Mapping[str, Any], inputs: Sequence[Any]) -> tuple[int, int]:
  """Returns how many of a scan's inputs are constants, and how many are carried."""
  if 'num_consts' in params:
    return params['num_consts'], params['num_carry']
  constants, carried, _ = params['ft_in'].update(list(inputs)).unpack()  # from jax 0.12 on
  return len(list(constants)), len(list(carried))


def _num_microbatches(body: Jaxpr) -> int:
  """Returns the size of the first dim from which a loop's body takes one element at a time, most often; 1 if none."""
  sizes: list[int] = []

  def look(jaxpr: Jaxpr) -> None:
    for eqn in jaxpr.eqns:
      if eqn.primitive.name == 'dynamic_slice' and eqn.params['slice_sizes'][0] == 1:
        aval: Any = eqn.invars[0].aval
        sizes.append(aval.shape[0])
      elif eqn.primitive.name in ('jit', 'pjit', 'closed_call'):
        look(eqn.params['jaxpr'].jaxpr if 'jaxpr' in eqn.params else eqn.params['call_jaxpr'].jaxpr)

  look(body)
  return max(set(sizes), key=sizes.count) if sizes else 1
