"""Runs an optax transformation on the weights of single layers, as in a model without a scan.

A stack [L, D, F] is given to it as L leaves D x F (`layer_matrix`), as its WeightSpec declares them. The norm of a
weight is then the norm of one layer, and a norm over a tree, or over a group of a mask, covers all layers, without any
knowledge of what the transformation does.

The transformation is traced on such a tree, and its program is evaluated in stacks (`stacked_evaluation.py`): Adam on
80 layers is one computation on [80, D, F]. Its state has the layout of the weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import contextvars
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.learning.layer_weights import layer_matrix
from spmd_tasks.learning.stacked_evaluation import OfLayer, evaluate, own_value
from spmd_tasks.sharding import WeightSpec

_paths_read: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar('paths_read', default=None)


class Layers:
  """A pytree node with one leaf per layer of a weight.

  To functions that take it for a leaf, as those of `flax.traverse_util`, it looks like the weight of one layer.

  Attributes:
    layers: one leaf, or a small tree, per layer and expert.
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
  """A dict of weights whose Layers have no entry in key paths: every layer has the path of its weight."""


def _flatten_layers(node: Layers) -> Any:
  if (read := _paths_read.get()) is not None:
    read.append(True)
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
  """Returns (init, update) of whole weights, whose results are those of layers.

  `init` is weights -> state, `update` (grads, state, weights, *arguments) -> (updates, state), of float32 weights. A
  state has the structure that it would have for the weights of one layer;
  its arrays of a stacked weight are stacked. Raises a UserError, which names the optimizer, if it tells weights apart
  both by their paths and by a tree of dicts.
  """
  specs: list[WeightSpec] = jax.tree.leaves(weight_specs)
  if all(layer_matrix(spec) == spec.shape for spec in specs):
    return init, update
  stacks = [_Stack(spec, i) for i, spec in enumerate(specs)]
  structure: Any = jax.tree.structure(weight_specs)
  tree = structure.unflatten(stacks)

  def init_layers(weights: Any) -> Any:
    [of_init] = _traced([init], tree, (), name)
    return _join(of_init.outputs, of_init.evaluate(_split(weights, stacks)), stacks)

  def update_layers(grads: Any, state: Any, weights: Any, *arguments: Any) -> Any:
    of_init, of_update = _traced([init, update], tree, arguments, name)
    of_state = _split_state(of_init.outputs, state, stacks)
    leaves = [*_split(grads, stacks), *of_state, *_split(weights, stacks), *jax.tree.leaves(arguments)]
    return _join(of_update.outputs, of_update.evaluate(leaves), stacks)

  return init_layers, update_layers


class _Stack:
  """One weight as its layers: `dims` count them, each is a `matrix`."""

  def __init__(self, spec: WeightSpec, weight: int):
    self.shape, self.dims, self.matrix = spec.shape, spec.shape[: spec.num_separate_dims], layer_matrix(spec)
    self.indices, self.weight = list(np.ndindex(*self.dims)), weight

  def abstract(self, num: int | None = None) -> Layers:
    """Returns the shapes of its first `num` layers, of all by default."""
    return Layers([jax.ShapeDtypeStruct(self.matrix, jnp.float32)] * (num or len(self.indices)), self.weight)

  def split(self, x: jax.Array, shape: tuple[int, ...]) -> list[Any]:
    """Returns the values of single layers, of that shape each, of an array that holds all."""
    if len(self.indices) == 1:
      return [jnp.reshape(x, shape)]
    stack = jnp.reshape(x, (*self.dims, *shape))
    return [OfLayer(stack, self.weight, index) for index in self.indices]

  def join(self, values: Sequence[Any]) -> jax.Array:
    """Returns one array with the values of all layers; an array like the matrices has the shape of the weight."""
    first, num = values[0], len(self.dims)
    if isinstance(first, OfLayer) and all(
      isinstance(x, OfLayer) and (x.key, x.weight, x.index) == (first.key, self.weight, index)
      for x, index in zip(values, self.indices)
    ):
      stack = first.stack
    elif all(x is first for x in values):
      stack = jnp.broadcast_to(first, (*self.dims, *jnp.shape(first)))
    else:
      stack = jnp.stack([own_value(x, {}) for x in values])
      stack = stack.reshape(*self.dims, *stack.shape[1:])
    return stack.reshape(self.shape) if stack.shape[num:] == self.matrix else stack


def _split(tree: Any, stacks: Sequence[_Stack]) -> list[OfLayer]:
  leaves = jax.tree.leaves(tree)
  return [value for stack, x in zip(stacks, leaves, strict=True) for value in stack.split(x, stack.matrix)]


def _split_state(layered: Any, state: Any, stacks: Sequence[_Stack]) -> list[Any]:
  """Returns the leaves of a state of layers, given its shapes and the state in stacks."""
  rest, leaves = iter(jax.tree.leaves(state)), []
  for node in jax.tree.leaves(layered, is_leaf=_is_layers):
    if not _is_layers(node):
      leaves.append(next(rest))
      continue
    of_leaves = [stacks[node.weight].split(next(rest), x.shape) for x in jax.tree.leaves(node.layers[0])]
    leaves += [value for of_layer in zip(*of_leaves) for value in of_layer]
  return leaves


def _join(layered: Any, values: list[Any], stacks: Sequence[_Stack]) -> Any:
  """Returns a tree in stacks, given the shapes of one of layers and its leaves."""
  rest = iter(values)

  def join(node: Any) -> Any:
    if not _is_layers(node):
      return own_value(next(rest), {})
    treedef: Any = jax.tree.structure(node.layers[0])
    of_layers = [[next(rest) for _ in jax.tree.leaves(layer)] for layer in node.layers]
    return treedef.unflatten([stacks[node.weight].join(of_leaf) for of_leaf in zip(*of_layers, strict=True)])

  return jax.tree.map(join, layered, is_leaf=_is_layers)


def _with_paths(tree: Any) -> Any:
  """Returns a tree of dicts in which layers have the key path of their weight."""
  return _DictOfLayers((k, _with_paths(v)) for k, v in tree.items()) if isinstance(tree, dict) else tree


def _without_paths(tree: Any) -> Any:
  is_dict = lambda node: isinstance(node, _DictOfLayers)
  return jax.tree.map(
    lambda node: {k: _without_paths(v) for k, v in node.items()} if is_dict(node) else node,
    tree,
    is_leaf=lambda node: is_dict(node) or _is_layers(node),
  )


def _traced(functions: Sequence[Any], stacks: Any, arguments: Sequence[Any], name: str) -> 'list[_Program]':
  """Traces the init, or the init and the update, of a transformation for a tree of stacks.

  Labels and masks of a transformation may look for a weight in a tree of dicts, of which a stack is a leaf or a
  subtree; or by its key path, to which Layers add an entry. If this changes anything, paths are kept and dicts are not.
  """

  def programs(weights: Any) -> list[_Program]:
    of_init = _Program(functions[0], [weights])
    of_update = [_Program(f, [weights, of_init.raw_outputs, weights, *arguments]) for f in functions[1:]]
    return [of_init, *of_update]

  def shown(weights: Any) -> str | None:
    try:
      return str([program.jaxpr for program in programs(weights)])
    except Exception:
      return None

  with _watch_paths() as read:
    error = None
    try:
      found = programs(jax.tree.map(lambda stack: stack.abstract(), stacks))
    except Exception as raised:
      error = raised
  if read:
    alone = shown(jax.tree.map(lambda stack: stack.abstract(1).layers[0], stacks))
    if alone is None or alone != shown(jax.tree.map(lambda stack: stack.abstract(1), stacks)):
      try:
        return programs(_with_paths(jax.tree.map(lambda stack: stack.abstract(), stacks)))
      except ValueError as raised:
        raise UserError(
          f'{name} tells weights apart by their key paths and by a tree of dicts, which it cannot do at once for '
          f'stacked layers ({str(raised).splitlines()[0]}): make all labels and masks with '
          'jax.tree_util.tree_map_with_path.'
        ) from raised
  if error is not None:
    raise error
  return found


@contextlib.contextmanager
def _watch_paths() -> Iterator[list[bool]]:
  """Yields a list that is not empty once key paths of Layers are read, by a label or by JAX to name an argument."""
  read: list[bool] = []
  token = _paths_read.set(read)
  try:
    yield read
  finally:
    _paths_read.reset(token)


class _Program:
  """A function of trees of layers, traced.

  Attributes:
    jaxpr: of its leaves.
    raw_outputs: the tree of its outputs' shapes; `outputs` without _DictOfLayers.
  """

  def __init__(self, function: Callable[..., Any], trees: Sequence[Any]):
    leaves = jax.tree.leaves(list(trees))
    inputs: Any = jax.tree.structure(list(trees))
    structures: list[Any] = []

    def of_leaves(*leaves: Any) -> list[Any]:
      outputs, structure = jax.tree.flatten(function(*inputs.unflatten(leaves)))
      structures.append(structure)
      return outputs

    self.jaxpr, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
    self.raw_outputs = structures[0].unflatten(shapes)
    self.outputs = _without_paths(self.raw_outputs)

  def evaluate(self, leaves: Sequence[Any]) -> list[Any]:
    """Returns the outputs' leaves, given arrays and values of layers."""
    return evaluate(self.jaxpr, leaves)
