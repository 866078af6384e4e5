"""Runs an optax transformation on the weights of single layers, as in a model without a scan.

The transformation sees a stack [L, D, F] as L leaves [D, F] (`layer_matrix`). So the norm of a weight is the norm of
one layer, and a norm over a tree, or over a group of a mask, includes all layers, whatever the transformation computes.

The transformation is traced on a tree of layers, and its jaxpr is evaluated on stacks (`stacked_evaluation.py`): Adam
on 80 layers is one computation on [80, D, F]. Its state is stacked like the weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import contextvars
import dataclasses
import math
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr
import jax.numpy as jnp
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.learning.layer_weights import layer_matrix
from spmd_tasks.learning.stacked_evaluation import LayerValue, evaluate, layer_value
from spmd_tasks.sharding import WeightSpec

_path_reads: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar('path_reads', default=None)


class Layers:
  """A pytree node with one leaf per layer of a weight.

  If a function takes it for a leaf, as functions of `flax.traverse_util` do, it looks like the weight of one layer.

  Attributes:
    layers: a leaf or a small tree for each layer and expert.
    weight: the index of the weight among all weights.
  """

  def __init__(self, layers: Iterable[Any], weight: int):
    self.layers, self.weight = tuple(layers), weight

  @property
  def shape(self) -> tuple[int, ...]:
    return self.layers[0].shape

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def dtype(self) -> Any:
    return self.layers[0].dtype


class _DictOfLayers(dict):
  """A dict of weights whose layers have the key path of their weight, because Layers add no entry to it."""


def _flatten_layers(node: Layers) -> Any:
  if (reads := _path_reads.get()) is not None:
    reads.append(True)
  return [(jax.tree_util.SequenceKey(i), layer) for i, layer in enumerate(node.layers)], node.weight


def _flatten_dict(node: _DictOfLayers) -> Any:
  keys = sorted(node)
  counts = tuple((len(node[k].layers), node[k].weight) if isinstance(node[k], Layers) else None for k in keys)
  children = [
    (jax.tree_util.DictKey(k), child)
    for k in keys
    for child in (node[k].layers if isinstance(node[k], Layers) else (node[k],))
  ]
  return children, (tuple(keys), counts)


def _unflatten_dict(aux: Any, children: Any) -> _DictOfLayers:
  rest = iter(children)
  return _DictOfLayers(
    (k, next(rest) if count is None else Layers([next(rest) for _ in range(count[0])], count[1]))
    for k, count in zip(*aux)
  )


jax.tree_util.register_pytree_with_keys(
  Layers, _flatten_layers, lambda weight, layers: Layers(layers, weight), lambda node: (node.layers, node.weight)
)
jax.tree_util.register_pytree_with_keys(_DictOfLayers, _flatten_dict, _unflatten_dict)


def _is_layers(node: Any) -> bool:
  return isinstance(node, Layers)


def layerwise(
  init: Callable[[Any], Any], update: Callable[..., tuple[Any, Any]], weight_specs: Any, name: str
) -> tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]:
  """Returns (init, update) for stacked weights that compute what the given functions compute for single layers.

  `init` is weights -> state, `update` is (grads, state, weights, *arguments) -> (updates, state); weights are float32.
  The state has the structure of a state for one layer's weights, and arrays are stacked like their weights. Raises a
  UserError, which names the optimizer, if the optimizer selects weights both by key paths and by a tree of dicts.
  """
  specs: list[WeightSpec] = jax.tree.leaves(weight_specs)
  if all(layer_matrix(spec) == spec.shape for spec in specs):
    return init, update
  stacks = [_Stack(spec, i) for i, spec in enumerate(specs)]
  structure: Any = jax.tree.structure(weight_specs)
  tree = structure.unflatten(stacks)

  def init_layers(weights: Any) -> Any:
    [init_program] = _trace([init], tree, (), name)
    return _join(init_program.outputs, init_program.evaluate(_split(weights, stacks)), stacks)

  def update_layers(grads: Any, state: Any, weights: Any, *arguments: Any) -> Any:
    init_program, update_program = _trace([init, update], tree, arguments, name)
    state_leaves = _split_state(init_program.outputs, state, stacks)
    leaves = [*_split(grads, stacks), *state_leaves, *_split(weights, stacks), *jax.tree.leaves(arguments)]
    return _join(update_program.outputs, update_program.evaluate(leaves), stacks)

  return init_layers, update_layers


def are_layers_apart(
  init: Callable[[Any], Any],
  update: Callable[..., tuple[Any, Any]],
  weight_specs: Any,
  name: str,
  arguments: Sequence[Any],
) -> bool:
  """Returns whether the update of a layer, and of its state, reads no other layer of its weight or of another.

  The functions are those of `layerwise`. They are traced for stacks of two layers.
  """
  short = [
    dataclasses.replace(spec, shape=(*[2] * min(n, 1), *[1] * (n - 1), *spec.shape[n:]))
    for spec in jax.tree.leaves(weight_specs)
    for n in [spec.num_separate_dims]
  ]
  tree = jax.tree.unflatten(jax.tree.structure(weight_specs), [_Stack(spec, i) for i, spec in enumerate(short)])
  init_program, update_program = _trace([init, update], tree, arguments, name)
  weights = jax.tree.map(lambda stack: stack.abstract(), tree)
  layer_names = lambda tree: [
    (node.weight, i) if _is_layers(node) else None
    for node in jax.tree.leaves(tree, is_leaf=_is_layers)
    for i, layer in enumerate(node.layers if _is_layers(node) else [node])
    for _ in jax.tree.leaves(layer)
  ]
  names = [*layer_names(weights), *layer_names(init_program.outputs), *layer_names(weights)]
  names += [None] * (len(update_program.jaxpr.in_avals) - len(names))
  outputs = names[: len(update_program.jaxpr.out_avals)]  # in place of the gradients, updates
  for layer in {*outputs}:
    _, is_used = dce_jaxpr(update_program.jaxpr.jaxpr, [each == layer for each in outputs])
    if {each for each, used in zip(names, is_used) if used} - {layer, None}:
      return False
  return True


class _Stack:
  """A stacked weight: `dims` are the sizes of the dims that count layers, `matrix` is the shape of one layer."""

  def __init__(self, spec: WeightSpec, weight: int):
    self.shape, self.dims, self.matrix = spec.shape, spec.shape[: spec.num_separate_dims], layer_matrix(spec)
    self.indices, self.weight = list(np.ndindex(*self.dims)), weight

  def abstract(self, num: int | None = None) -> Layers:
    """Returns the shapes of the first `num` layers, by default of all layers."""
    return Layers([jax.ShapeDtypeStruct(self.matrix, jnp.float32)] * (num or len(self.indices)), self.weight)

  def split(self, x: jax.Array, shape: tuple[int, ...]) -> list[Any]:
    """Splits a stacked array into the values of single layers, each of the given shape."""
    if len(self.indices) == 1:
      return [jnp.reshape(x, shape)]
    stack = jnp.reshape(x, (*self.dims, *shape))
    return [LayerValue(stack, self.weight, index) for index in self.indices]

  def join(self, values: Sequence[Any]) -> jax.Array:
    """Stacks the values of all layers; if they have the shape `matrix`, the result has the shape of the weight."""
    first, num = values[0], len(self.dims)
    if isinstance(first, LayerValue) and all(
      isinstance(x, LayerValue) and (x.key, x.weight, x.index) == (first.key, self.weight, index)
      for x, index in zip(values, self.indices)
    ):
      stack = first.stack
    elif all(x is first for x in values):
      stack = jnp.broadcast_to(first, (*self.dims, *jnp.shape(first)))
    else:
      stack = jnp.stack([layer_value(x, {}) for x in values])
      stack = stack.reshape(*self.dims, *stack.shape[1:])
    return stack.reshape(self.shape) if stack.shape[num:] == self.matrix else stack


def _split(tree: Any, stacks: Sequence[_Stack]) -> list[LayerValue]:
  leaves = jax.tree.leaves(tree)
  return [value for stack, x in zip(stacks, leaves, strict=True) for value in stack.split(x, stack.matrix)]


def _split_state(layered: Any, state: Any, stacks: Sequence[_Stack]) -> list[Any]:
  """Splits a stacked state into the leaves of `layered`, a tree of Layers and other shapes."""
  rest, leaves = iter(jax.tree.leaves(state)), []
  for node in jax.tree.leaves(layered, is_leaf=_is_layers):
    if not _is_layers(node):
      leaves.append(next(rest))
      continue
    values_by_leaf = [stacks[node.weight].split(next(rest), x.shape) for x in jax.tree.leaves(node.layers[0])]
    leaves += [value for layer_values in zip(*values_by_leaf) for value in layer_values]
  return leaves


def _join(layered: Any, values: list[Any], stacks: Sequence[_Stack]) -> Any:
  """Stacks the values of the leaves of `layered`, a tree of Layers and other shapes."""
  rest = iter(values)

  def join(node: Any) -> Any:
    if not _is_layers(node):
      return layer_value(next(rest), {})
    treedef: Any = jax.tree.structure(node.layers[0])
    values_by_layer = [[next(rest) for _ in jax.tree.leaves(layer)] for layer in node.layers]
    return treedef.unflatten([stacks[node.weight].join(leaf) for leaf in zip(*values_by_layer, strict=True)])

  return jax.tree.map(join, layered, is_leaf=_is_layers)


def _with_paths(tree: Any) -> Any:
  """Converts dicts to _DictOfLayers, in which layers have the key path of their weight."""
  return _DictOfLayers((k, _with_paths(v)) for k, v in tree.items()) if isinstance(tree, dict) else tree


def _without_paths(tree: Any) -> Any:
  is_dict = lambda node: isinstance(node, _DictOfLayers)
  return jax.tree.map(
    lambda node: {k: _without_paths(v) for k, v in node.items()} if is_dict(node) else node,
    tree,
    is_leaf=lambda node: is_dict(node) or _is_layers(node),
  )


def _trace(functions: Sequence[Any], stacks: Any, arguments: Sequence[Any], name: str) -> 'list[_Program]':
  """Traces the init, or the init and the update, of a transformation for a tree of stacks.

  Labels and masks of a transformation select weights either in a tree of dicts, in which Layers may be a leaf or a
  subtree; or by key paths, to which Layers add an entry. If this entry changes the traced program for one layer, traces
  again with _DictOfLayers, in which key paths are right and nodes are not dicts.
  """

  def trace(weights: Any) -> list[_Program]:
    init_program = _Program(functions[0], [weights])
    update_programs = [_Program(f, [weights, init_program.raw_outputs, weights, *arguments]) for f in functions[1:]]
    return [init_program, *update_programs]

  def jaxprs_text(weights: Any) -> str | None:
    try:
      return str([program.jaxpr for program in trace(weights)])
    except Exception:
      return None

  with _record_path_reads() as path_reads:
    error = None
    try:
      programs = trace(jax.tree.map(lambda stack: stack.abstract(), stacks))
    except Exception as raised:
      error = raised
  if path_reads:
    one_layer = jaxprs_text(jax.tree.map(lambda stack: stack.abstract(1).layers[0], stacks))
    if one_layer is None or one_layer != jaxprs_text(jax.tree.map(lambda stack: stack.abstract(1), stacks)):
      try:
        return trace(_with_paths(jax.tree.map(lambda stack: stack.abstract(), stacks)))
      except ValueError as raised:
        raise UserError(
          f'{name} selects weights of stacked layers both by key paths and by a tree of dicts '
          f'({str(raised).splitlines()[0]}): make all labels and masks with jax.tree_util.tree_map_with_path.'
        ) from raised
  if error is not None:
    raise error
  return programs


@contextlib.contextmanager
def _record_path_reads() -> Iterator[list[bool]]:
  """Yields a list that is not empty once key paths of Layers are read, by a label or by JAX to name an argument."""
  reads: list[bool] = []
  token = _path_reads.set(reads)
  try:
    yield reads
  finally:
    _path_reads.reset(token)


class _Program:
  """A traced function of trees of layers.

  Attributes:
    jaxpr: the jaxpr from the leaves of the inputs to the leaves of the outputs.
    raw_outputs: the shapes of the outputs.
    outputs: the same tree with plain dicts instead of _DictOfLayers.
  """

  def __init__(self, function: Callable[..., Any], trees: Sequence[Any]):
    leaves = jax.tree.leaves(list(trees))
    inputs: Any = jax.tree.structure(list(trees))
    structures: list[Any] = []

    def flat_function(*leaves: Any) -> list[Any]:
      outputs, structure = jax.tree.flatten(function(*inputs.unflatten(leaves)))
      structures.append(structure)
      return outputs

    self.jaxpr, shapes = jax.make_jaxpr(flat_function, return_shape=True)(*leaves)
    self.raw_outputs = structures[0].unflatten(shapes)
    self.outputs = _without_paths(self.raw_outputs)

  def evaluate(self, leaves: Sequence[Any]) -> list[Any]:
    """Evaluates the jaxpr on arrays and values of layers."""
    return evaluate(self.jaxpr, leaves)
