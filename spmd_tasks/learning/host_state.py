"""Optimizer state in the host's memory: an update has the state of a few layers on the device at a time.

`streamed` turns an update rule into one whose state stays on the host. A loop over the layers of all stacks copies the
state of one layer to the device (of each stage of a pipeline, one layer), updates it there, and writes it back to its
place on the host. Weights without a stack follow, a few at a time, each group in a loop of its own, of one step: what
is not in a loop XLA copies to the device as early as it likes.

The rule is traced once, on the whole tree, with stacks as short as one step of the loop. What a group of weights needs
of this program is found by dead code elimination. So any optimizer will do whose update of a weight reads no other
weight, and no other's gradient or state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
import jax.numpy as jnp
from jax.sharding import NamedSharding

from spmd_tasks.errors import UserError
from spmd_tasks.learning import optimizer_specs
from spmd_tasks.learning.optimizers import Optimizer
from spmd_tasks.learning.skipping import SkippableTransformation
from spmd_tasks.sharding import WeightSpec, padding
from spmd_tasks.sharding.specs import current_sharding_scope, num_parts, spec_axes
from spmd_tasks.sharding.weights import PINNED_HOST, leaves_by_name

_Name = tuple[str, int]  # of an array, see _Program
_RuleOf = Callable[[Any], SkippableTransformation]  # from a tree of WeightSpec
_SHARED = -1  # in place of the index of a weight, for what belongs to no weight, such as a count of steps
_MAX_SHARE = 1 / 32  # of the whole state: what weights without a stack have on the device together


def host_state_specs(abstract_state: Any, weight_specs: Any) -> Any:
  """Returns `state_weight_specs` in which the leaves that belong to a weight are stored in the host's memory."""
  return jax.tree.map(
    lambda spec, owner: dataclasses.replace(spec, memory_kind=PINNED_HOST) if spec.shape and owner >= 0 else spec,
    optimizer_specs.state_weight_specs(abstract_state, weight_specs),
    optimizer_specs.weight_indices(abstract_state, weight_specs),
  )


def sharded_first(grads: Any, weight_specs: Any) -> Any:
  """Returns gradients of which each device has its shard before anything reads them.

  Otherwise XLA, where it sums a gradient over all devices, slices the sum for the norm and again for the update, until
  which the whole sum stays in memory.
  """
  return jax.tree.map(lambda x, spec: jax.lax.optimization_barrier(_constrain(x, spec)), grads, weight_specs)


@dataclasses.dataclass(frozen=True)
class _Slices:
  """How a stack is taken apart: a step takes one layer of each part of each stacked dim. Without dims: not at all.

  Attributes:
    parts: the number of parts into which the mesh splits each stacked dim.
    counts: the number of layers of one part.
  """

  parts: tuple[int, ...] = ()
  counts: tuple[int, ...] = ()

  @property
  def num_steps(self) -> int:
    return math.prod(self.counts)

  def short(self, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the layers of one step of a stack."""
    return (*self.parts, *shape[len(self.parts) :])

  def index(self, step: jax.Array) -> list[jax.Array]:
    """Returns which layer of each part a step takes: an int32 scalar for each stacked dim."""
    sizes = [math.prod(self.counts[dim + 1 :]) for dim in range(len(self.counts))]
    return [step // size % count for size, count in zip(sizes, self.counts)]

  def take(self, x: jax.Array, step: jax.Array) -> jax.Array:
    """Returns the layers of a step: [parts..., ...]."""
    if not self.parts:
      return x
    block = jax.lax.dynamic_slice(self._blocks(x), self._starts(x, step), self._block(x.shape))
    return block.reshape(self.short(x.shape))

  def put(self, x: jax.Array, layers: jax.Array, step: jax.Array) -> jax.Array:
    """Returns x with the layers of a step replaced by `layers` [parts..., ...]."""
    if not self.parts:
      return layers
    block = layers.reshape(self._block(x.shape))
    return jax.lax.dynamic_update_slice(self._blocks(x), block, self._starts(x, step)).reshape(x.shape)

  def numbers(self, step: jax.Array) -> jax.Array:
    """Returns the number of each layer of a step in the order of the whole stack: int32 [parts...]."""
    numbers = jnp.zeros(self.parts, jnp.int32)
    for dim, (part, count, i) in enumerate(zip(self.parts, self.counts, self.index(step))):
      numbers = numbers * (part * count) + jax.lax.broadcasted_iota(jnp.int32, self.parts, dim) * count + i
    return numbers

  def _block(self, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = [(part, 1) if part > 1 else (1,) for part in self.parts]
    return (*itertools.chain(*sizes), *shape[len(self.parts) :])

  def _blocks(self, x: jax.Array) -> jax.Array:
    sizes = [(part, count) if part > 1 else (count,) for part, count in zip(self.parts, self.counts)]
    return x.reshape(*itertools.chain(*sizes), *x.shape[len(self.parts) :])

  def _starts(self, x: jax.Array, step: jax.Array) -> list[jax.Array]:
    zero = jnp.zeros((), jnp.int32)
    starts = [(zero, i) if part > 1 else (i,) for part, i in zip(self.parts, self.index(step))]
    return [*itertools.chain(*starts), *[zero] * (x.ndim - len(self.parts))]


class _Layout:
  """Where an optimizer's state is, and how each weight is taken apart.

  Attributes:
    specs: of the leaves of the state, without padding.
    owners: by leaf, the index of the weight to which it belongs, or _SHARED.
    slices: by weight.
  """

  def __init__(self, optimizer: Optimizer, weight_specs: Any, abstract_state: Any):
    self.specs: list[WeightSpec] = jax.tree.leaves(host_state_specs(abstract_state, weight_specs))
    self.owners: list[int] = jax.tree.leaves(optimizer_specs.weight_indices(abstract_state, weight_specs))
    weights: list[WeightSpec] = jax.tree.leaves(weight_specs)
    self.slices = [_Slices()] * len(weights)
    if optimizer.updates_layers_apart(weight_specs):
      self.slices = [self._slices(spec, i) for i, spec in enumerate(weights)]

  def owner(self, name: _Name) -> int:
    """Returns the index of the weight to which an array belongs, or _SHARED."""
    kind, i = name
    return self.owners[i] if kind == 'state' else _SHARED if kind == 'argument' else i

  def slices_of(self, name: _Name) -> _Slices:
    owner = self.owner(name)
    return _Slices() if owner == _SHARED else self.slices[owner]

  def to_device(self, name: _Name, x: jax.Array) -> jax.Array:
    """Copies an array, or layers of it, to the device if it is stored on the host."""
    return jax.device_put(x, jax.memory.Space.Device) if self._is_on_host(name) else x

  def to_host(self, name: _Name, x: jax.Array) -> jax.Array:
    """Copies an array, or layers of it, to the host if it is stored there."""
    return jax.device_put(x, jax.memory.Space.Host) if self._is_on_host(name) else x

  def unpadded(self, name: _Name, x: jax.Array) -> jax.Array:
    """Slices off the padding of an array that is stored on the host; other arrays have none."""
    if not self._is_on_host(name):
      return x
    spec = self.specs[name[1]]
    shape = self.slices_of(name).short(spec.shape)
    return _constrain(padding.unpad(x, jax.ShapeDtypeStruct(shape, x.dtype)), spec)

  def padded(self, name: _Name, x: jax.Array) -> jax.Array:
    """Pads an array that is stored on the host; the inverse of `unpadded`."""
    scope = current_sharding_scope()
    if scope is None or not self._is_on_host(name):
      return x
    spec = self.specs[name[1]]
    return padding.pad_evenly(_constrain(x, spec), scope.spec(spec.split_dims), scope.mesh.shape)

  def _is_on_host(self, name: _Name) -> bool:
    return name[0] == 'state' and self.specs[name[1]].memory_kind == PINNED_HOST

  def _slices(self, spec: WeightSpec, weight: int) -> _Slices:
    """Returns how a stack is taken apart: not at all if it is uneven on the mesh, or a leaf of its state no stack."""
    scope, stacked = current_sharding_scope(), spec.shape[: spec.stacked]
    parts = (1,) * spec.stacked
    if scope is not None:
      axes = spec_axes(scope.spec(spec.split_dims), len(spec.shape))
      parts = tuple(num_parts(dim, scope.mesh.shape) for dim in axes[: spec.stacked])
    slices = _Slices(parts, tuple(size // part for size, part in zip(stacked, parts)))
    is_even = all(size % part == 0 for size, part in zip(stacked, parts))
    leaves = (leaf for leaf, owner in zip(self.specs, self.owners) if owner == weight)
    is_stacked = all(leaf.shape[: spec.stacked] == stacked for leaf in leaves)
    return slices if is_even and is_stacked and slices.num_steps > 1 else _Slices()

  def groups(self) -> Iterator[list[int]]:
    """Yields weights whose state is on the device together: stacks of the same length, then single weights."""
    stacks: dict[tuple[int, ...], list[int]] = {}
    for weight, slices in enumerate(self.slices):
      stacks.setdefault(slices.counts, []).append(weight)
    whole = stacks.pop((), [])
    yield from stacks.values()
    num_bytes = [0] * len(self.slices)
    for spec, owner in zip(self.specs, self.owners):
      if owner != _SHARED:
        num_bytes[owner] += math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize
    group = list[int]()
    for weight in whole:
      if group and sum(num_bytes[each] for each in (*group, weight)) > _MAX_SHARE * sum(num_bytes):
        yield group
        group = []
      group.append(weight)
    if group:
      yield group


def _constrain(x: jax.Array, spec: WeightSpec) -> jax.Array:
  scope = current_sharding_scope()
  if scope is None:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(scope.mesh, scope.spec(spec.split_dims)))


class _Program:
  """An update rule, traced for stacks of one step.

  An input is named by its kind ('grad', 'state', 'weight', 'numbers' or 'argument') and the index of its weight, of its
  leaf of the state, or of the argument. Outputs are 'weight' and 'state'.
  """

  def __init__(self, rule_of: _RuleOf, optimizer: Optimizer, weight_specs: Any, layout: _Layout, arguments: Any):
    self._optimizer, self._layout, self._names = optimizer, layout, [*leaves_by_name(weight_specs)]
    specs, structure = jax.tree.flatten(weight_specs)
    short = [dataclasses.replace(spec, shape=cut.short(spec.shape)) for spec, cut in zip(specs, layout.slices)]
    rule = rule_of(jax.tree.unflatten(structure, short))
    weights = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in short])
    grads = jax.tree.map(lambda weight: jax.ShapeDtypeStruct(weight.shape, jnp.float32), weights)
    state = jax.eval_shape(rule.init, grads)
    numbers = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(cut.parts, jnp.int32) for cut in layout.slices])
    takes_numbers = optimizer.updates_layers_apart(weight_specs)

    def update(grads: Any, state: Any, weights: Any, numbers: Any, arguments: Any) -> tuple[Any, Any]:
      named = {'layer_numbers': numbers, **arguments} if takes_numbers else arguments
      return rule.update(grads, state, weights, **named)

    trees = {'grad': grads, 'state': state, 'weight': weights, 'numbers': numbers, 'argument': arguments}
    self._closed = jax.make_jaxpr(update)(*trees.values())
    self._inputs = [(kind, i) for kind, tree in trees.items() for i in range(len(jax.tree.leaves(tree)))]
    self._outputs = [(kind, i) for kind, i in self._inputs if kind == 'weight']
    self._outputs += [(kind, i) for kind, i in self._inputs if kind == 'state']

  def part(self, weights: Sequence[int]) -> Callable[[Mapping[_Name, Any]], dict[_Name, Any]]:
    """Returns the function from inputs to the outputs of some weights, or to those that are shared.

    Raises a UserError if these outputs depend on other weights.
    """
    outputs = [name for name in self._outputs if self._layout.owner(name) in weights]
    jaxpr, is_used = dce_jaxpr(self._closed.jaxpr, [self._layout.owner(name) in weights for name in self._outputs])
    used = [name for name, used in zip(self._inputs, is_used) if used]
    others = {self._layout.owner(name) for name in used} - {_SHARED, *weights}
    if others:
      updated = 'its state' if _SHARED in weights else f'the weight {self._names[weights[0]]}'
      raise UserError(
        'learner.state_on_host has the state of a few weights on the device at a time, but '
        f'{type(self._optimizer).__name__} reads the weight {self._names[min(others)]} to update {updated}: set it to '
        'False, or choose an optimizer that updates each weight by itself (learner.clip_global_norm can clip before).'
      )

    def function(inputs: Mapping[_Name, Any]) -> dict[_Name, Any]:
      results = jaxpr_as_fun(ClosedJaxpr(jaxpr, self._closed.consts))(*[inputs[name] for name in used])
      return dict(zip(outputs, results, strict=True))

    return function


def streamed(rule_of: _RuleOf, optimizer: Optimizer, weight_specs: Any) -> SkippableTransformation:
  """Returns an optimizer's update rule for a state that is stored on the host, as `host_state_specs` says.

  `update` takes and returns such a state, padded as it is stored on the mesh of the current sharding scope. Numbers are
  those of the rule itself. It raises a UserError if the update of a weight depends on other weights.

  Args:
    rule_of: function of a tree of WeightSpec that returns the rule: its `update` returns new weights.
    optimizer: whose rule it is.
    weight_specs: of all weights.
  """
  init = rule_of(weight_specs).init

  def update(grads: Any, state: Any, weights: Any = None, **arguments: Any) -> tuple[Any, Any]:
    abstract = jax.tree.map(lambda grad: jax.ShapeDtypeStruct(grad.shape, jnp.float32), grads)
    layout = _Layout(optimizer, weight_specs, jax.eval_shape(init, abstract))
    program = _Program(rule_of, optimizer, weight_specs, layout, arguments)
    trees = {'grad': grads, 'state': state, 'weight': weights, 'argument': arguments}
    arrays = {(kind, i): x for kind, tree in trees.items() for i, x in enumerate(jax.tree.leaves(tree))}
    shared = {name: x for name, x in arrays.items() if layout.owner(name) == _SHARED}
    new = program.part([_SHARED])(shared)
    for group in layout.groups():
      names = {kind: [name for name in arrays if name[0] == kind and layout.owner(name) in group] for kind in trees}
      fixed = {name: arrays[name] for name in names['grad']}
      stored = {name: arrays[name] for name in (*names['weight'], *names['state'])}
      # One group after the other.
      fixed, stored, _ = jax.lax.optimization_barrier((fixed, stored, [*new.values()][-1:]))
      new |= _update_group(layout, program, group, fixed | shared, stored, arguments['is_finite'])
    unflatten = lambda kind: jax.tree.unflatten(
      jax.tree.structure(trees[kind]), [new[name] for name in arrays if name[0] == kind]
    )
    return unflatten('weight'), unflatten('state')

  return SkippableTransformation(init, update)


def _update_group(
  layout: _Layout,
  program: _Program,
  group: Sequence[int],
  fixed: Mapping[_Name, Any],
  stored: dict[_Name, Any],
  is_finite: jax.Array,
) -> dict[_Name, Any]:
  """Returns the new weights and states of a group.

  A step writes the results of the step before. So results are not written where they are computed, and XLA fuses, and
  rounds, what it fuses if the whole state is on the device.

  Args:
    layout: of the state.
    program: the update rule.
    group: indices of weights.
    fixed: the gradients, and what belongs to no weight.
    stored: the weights, and their state on the host.
    is_finite: bool scalar; a step that is not leaves weights and states as they are.
  """
  update = program.part(group)

  def take(arrays: Mapping[_Name, Any], step: Any) -> dict[_Name, Any]:
    return {name: layout.to_device(name, layout.slices_of(name).take(x, step)) for name, x in arrays.items()}

  def put(stored: dict[_Name, Any], layers: Mapping[_Name, Any], step: Any) -> dict[_Name, Any]:
    return {name: layout.slices_of(name).put(x, layout.to_host(name, layers[name]), step) for name, x in stored.items()}

  def compute(stored: Mapping[_Name, Any], step: Any) -> dict[_Name, Any]:
    numbers = {('numbers', weight): layout.slices[weight].numbers(step) for weight in group}
    layers = {name: layout.unpadded(name, x) for name, x in take(stored, step).items()}
    return {name: layout.padded(name, x) for name, x in update(take(fixed, step) | layers | numbers).items()}

  num_steps = layout.slices[group[0]].num_steps
  if num_steps == 1:
    # A loop, whose length is known when all gradients are: XLA copies nothing to the device before it begins.
    count = is_finite.astype(jnp.int32)
    return jax.lax.fori_loop(0, count, lambda _, stored: put(stored, compute(stored, None), None), stored)
  for weight in group:
    program.part([weight])  # raises an error: a step has all weights of the group, but not all of their layers

  def body(carry: Any, step: jax.Array) -> Any:
    stored, layers = carry
    stored = put(stored, layers, jnp.maximum(step - 1, 0))
    return (stored, compute(stored, step)), None

  first, last = jnp.int32(0), jnp.int32(num_steps - 1)
  (stored, layers), _ = jax.lax.scan(body, (stored, take(stored, first)), jnp.arange(num_steps, dtype=jnp.int32))
  return put(stored, layers, last)
