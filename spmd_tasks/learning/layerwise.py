"""Runs any optax transformation so that a stack of layers learns as its layers would, one by one.

Some transformations read a weight as a whole: its norm (LAMB, LARS), its rms (Adafactor), its matrix (Muon), its number
of dims (a mask). To them [L, D, F] is L matrices D x F. What a transformation reads shows in its jaxprs, one for whole
weights and one for the weights of single layers (`layer_matrix`):

* it treats all elements alike, and reads at most sums over all weights (Adam, clipping by the global norm): a stack
  makes no difference, so it runs on whole weights;
* else, no weight's update depends on another weight: it runs on layers, by `jax.vmap` over stacks and experts;
* else (`clip_by_global_norm` before LAMB) it is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.learning.layer_weights import layer_matrix
from spmd_tasks.learning.optimizer_specs import map_state
from spmd_tasks.sharding import WeightSpec

# fmt: off
_ELEMENTWISE = frozenset((
  'abs', 'add', 'add_any', 'and', 'atan2', 'cbrt', 'ceil', 'clamp', 'convert_element_type', 'copy', 'cos', 'div',
  'eq', 'erf', 'exp', 'exp2', 'expm1', 'floor', 'ge', 'gt', 'integer_pow', 'is_finite', 'le', 'log', 'log1p',
  'logistic', 'lt', 'max', 'min', 'mul', 'ne', 'neg', 'not', 'or', 'pow', 'rem', 'round', 'rsqrt', 'select_n', 'sign',
  'sin', 'sqrt', 'square', 'stop_gradient', 'sub', 'tan', 'tanh', 'xor',
))
# fmt: on
_KEEPS_ORDER = frozenset(('broadcast_in_dim', 'expand_dims', 'reshape', 'squeeze'))
_CALLS = ('closed_call', 'custom_jvp_call', 'custom_vjp_call', 'jit', 'pjit', 'remat')
_SUMS = {'reduce_sum': 'add', 'reduce_max': 'max', 'reduce_min': 'min', 'reduce_and': 'and', 'reduce_or': 'or'}


def layerwise(
  init: Callable[[Any], Any], update: Callable[..., tuple[Any, Any]], weight_specs: Any, arguments: Any, name: str
) -> tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]:
  """Returns (init, update) of whole weights, whose results are those of layers.

  `init` is weights -> state, `update` (grads, state, weights, *arguments) -> (updates, state); the arguments may be
  their shapes and dtypes. Raises a UserError, which names the optimizer, if it can neither run on whole weights nor on
  layers.
  """
  specs: list[WeightSpec] = jax.tree.leaves(weight_specs)
  num = len(specs)
  matrices = [layer_matrix(spec) for spec in specs]
  if matrices == [spec.shape for spec in specs]:
    return init, update
  structure: Any = jax.tree.structure(weight_specs)
  tree_of = structure.unflatten
  whole = _Trace(init, update, tree_of, [spec.shape for spec in specs], arguments)
  layers = _Trace(init, update, tree_of, matrices, arguments)
  if whole.treats_alike() and layers.treats_alike() and _equations(whole.update) == _equations(layers.update):
    return init, update
  if not layers.is_separate():
    raise UserError(
      f'{name} reads single weights and several at once, so it would not be the same for a stack of layers as for the '
      'layers: clip by learner.clip_global_norm instead of in the chain, or choose an optimizer that treats each '
      'weight by itself.'
    )
  separate = [spec.shape[: spec.num_separate_dims] for spec in specs]
  groups: list[Any] = [None, *dict.fromkeys(separate)]  # None: what belongs to no weight

  def run(function: Callable[..., Any], owners: list[int | None], shapes: Sequence[Any], inputs: list[Any]) -> Any:
    """Calls a function of the leaves of layers for each group of weights; returns outputs by group."""
    outputs = {}
    for group in groups:
      mine = [owner is not None and separate[owner] == group for owner in owners]

      def call(*mapped: jax.Array, mine: list[bool] = mine) -> list[Any]:
        own = iter(mapped)
        return function(
          [
            next(own) if is_mine else x if owner is None else jnp.zeros(shape, x.dtype)
            for x, owner, shape, is_mine in zip(inputs, owners, shapes, mine)
          ]
        )

      for _ in group or ():
        call = jax.vmap(call)
      outputs[group] = call(*[x.reshape(*group, *s) for x, s, is_mine in zip(inputs, shapes, mine) if is_mine])
    return outputs

  def pick(outputs: Any, index: int, owner: int | None) -> jax.Array:
    if owner is None:
      return outputs[None][index]
    leaf = outputs[separate[owner]][index]
    # What has the matrix's shape is stored, and split over the mesh, as the weight is.
    return leaf.reshape(specs[owner].shape) if leaf.shape == (*separate[owner], *matrices[owner]) else leaf

  weights: list[Any] = list(range(num))
  state_tree: Any = jax.tree.structure(layers.state)
  state_shapes = [leaf.shape for leaf in jax.tree.leaves(layers.state)]

  def init_layers(weights_tree: Any) -> Any:
    outputs = run(lambda w: jax.tree.leaves(init(tree_of(w))), weights, matrices, jax.tree.leaves(weights_tree))
    return state_tree.unflatten([pick(outputs, k, owner) for k, owner in enumerate(layers.owners)])

  def update_layers(grads: Any, state: Any, weights_tree: Any, *arguments: Any) -> tuple[Any, Any]:
    def of_layers(x: list[Any]) -> list[Any]:
      state = state_tree.unflatten(x[2 * num :])
      return jax.tree.leaves(update(tree_of(x[:num]), state, tree_of(x[num : 2 * num]), *arguments))

    inputs = [leaf for tree in (grads, weights_tree, state) for leaf in jax.tree.leaves(tree)]
    shapes = [*matrices, *matrices, *state_shapes]
    outputs = run(of_layers, [*weights, *weights, *layers.owners], shapes, inputs)
    picked = [pick(outputs, k, owner) for k, owner in enumerate([*weights, *layers.owners])]
    return tree_of(picked[:num]), state_tree.unflatten(picked[num:])

  return init_layers, update_layers


class _Trace:
  """The jaxprs of a transformation for weights of given shapes.

  Attributes:
    init, update: weights -> state, and (grads, state, weights, arguments) -> (updates, state).
    state: its shapes.
    owners: of each leaf of the state, the index of its weight; None for a leaf that belongs to no weight.
  """

  def __init__(self, init: Any, update: Any, tree_of: Any, shapes: Sequence[tuple[int, ...]], arguments: Any):
    weights = tree_of([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    closed, self.state = jax.make_jaxpr(init, return_shape=True)(weights)
    self.init, self.shapes, self.weights = closed.jaxpr, shapes, list(range(len(shapes)))
    self.update = jax.make_jaxpr(update)(weights, self.state, weights, *arguments).jaxpr
    found = map_state(lambda _, leaf, index: -1 if index is None else index, self.state, tree_of(self.weights))
    self.owners = [None if index < 0 else index for index in jax.tree.leaves(found)]

  def _run(self, interpret: Callable[..., list[Any]], weights: list[Any], state: list[Any], rest: Any) -> list[Any]:
    num_rest = len(self.update.invars) - 2 * len(weights) - len(state)
    return interpret(self.update, [*weights, *state, *weights, *[rest] * num_rest])

  def is_separate(self) -> bool:
    """Returns whether what belongs to a weight depends on no other weight, and the rest on none."""
    weights: list[Any] = [frozenset((i,)) for i in self.weights]
    state = [frozenset() if owner is None else frozenset((owner,)) for owner in self.owners]
    found = [*_dependencies(self.init, weights), *self._run(_dependencies, weights, state, frozenset())]
    return all(each <= own for each, own in zip(found, [*state, *weights, *state], strict=True))

  def treats_alike(self) -> bool:
    """Returns whether updates treat all elements of a weight alike, and read no sums but those over all weights."""
    state = []
    for leaf, owner in zip(jax.tree.leaves(self.state), self.owners):
      if leaf.shape != (() if owner is None else self.shapes[owner]):
        return False
      state.append(owner)
    try:
      found = self._run(lambda jaxpr, inputs: _kinds(jaxpr, inputs, len(self.weights)), self.weights, state, None)
    except _ReadsMoreError:
      return False
    return all(kind in (None, own) for kind, own in zip(found, [*self.weights, *state], strict=True))


def _dependencies(jaxpr: Any, inputs: list[frozenset[int]]) -> list[frozenset[int]]:
  """Returns what each output of a jaxpr depends on; outputs of a loop or operation depend on all of its inputs."""
  known = dict(zip(jaxpr.invars, inputs, strict=True))

  def of(atom: Any) -> frozenset[int]:
    return frozenset() if isinstance(atom, Literal) else known.get(atom, frozenset())

  for equation in jaxpr.eqns:
    read = [of(atom) for atom in equation.invars]
    if (inner := _inner(equation)) is None:
      found = [frozenset().union(*read)] * len(equation.outvars)
    else:
      branches = [_dependencies(each, read[len(read) - len(each.invars) :]) for each in inner]
      predicate = read[0] if equation.primitive.name == 'cond' else frozenset()
      found = [predicate.union(*same) for same in zip(*branches)]
    known.update(zip(equation.outvars, found, strict=True))
  return [of(atom) for atom in jaxpr.outvars]


class _ReadsMoreError(Exception):
  """A value depends on more of a weight than single elements or sums over all weights."""


def _kinds(jaxpr: Any, inputs: list[Any], num_weights: int) -> list[Any]:
  """Returns what each output of a jaxpr is, given what its inputs are.

  None: the same number everywhere, whatever the shapes. An int: elements of that weight. (operation, set of ints): the
  sum, maximum, ... of all elements of these weights; of all weights, it is a number like others.
  """
  known = dict.fromkeys(jaxpr.constvars) | dict(zip(jaxpr.invars, inputs, strict=True))
  for equation in jaxpr.eqns:
    kinds = [None if isinstance(x, Literal) else known[x] for x in equation.invars]
    if (inner := _inner(equation)) is not None:
      branches = [_kinds(each, kinds[len(kinds) - len(each.invars) :], num_weights) for each in inner]
      if equation.primitive.name == 'cond' and kinds[0] is not None:
        raise _ReadsMoreError
      found = [_joined([kind for kind in same if kind is not None]) for same in zip(*branches)]
    else:
      found = [_kind_of(equation, kinds, num_weights)] * len(equation.outvars)
    known.update(zip(equation.outvars, found, strict=True))
  return [None if isinstance(x, Literal) else known[x] for x in jaxpr.outvars]


def _kind_of(equation: Any, kinds: list[Any], num_weights: int) -> Any:
  name, is_scalar = equation.primitive.name, all(not x.aval.shape for x in equation.outvars)
  read = [kind for kind in kinds if kind is not None]
  if not read and (is_scalar or name in _ELEMENTWISE):
    return None
  if name in _KEEPS_ORDER and len(kinds) == 1:
    source, target = equation.invars[0].aval, equation.outvars[0].aval
    if source.size == target.size or (not read and source.size == 1):
      return kinds[0]
  elif name in _ELEMENTWISE and all(isinstance(kind, int) for kind in read):
    return _joined(read)
  elif is_scalar and (name in _SUMS or name == 'dot_general') and all(isinstance(kind, int) for kind in read):
    return (_SUMS.get(name, 'add'), frozenset((_joined(read),)))
  elif read and all(isinstance(kind, tuple) for kind in read):
    (operation, weights), *others = read
    zeros = [x for x in equation.invars if isinstance(x, Literal) and not x.val]
    if name in ('convert_element_type', 'copy') or (name == operation == 'add' and len(zeros) == 1):
      return read[0]
    if name == operation and len(read) == len(kinds) and all(other[0] == operation for other in others):
      weights = weights.union(*[other[1] for other in others])
      # Of one weight alone, a sum over all weights looks like one over each.
      return None if len(weights) == num_weights > 1 else (operation, weights)
  return _refuse()


def _joined(kinds: list[Any]) -> Any:
  """Returns the one kind that there is, None for none."""
  return _refuse() if len({*kinds}) > 1 else next(iter(kinds), None)


def _refuse() -> Any:
  raise _ReadsMoreError


def _inner(equation: Any) -> list[Any] | None:
  """Returns the jaxprs of a call or of the branches of a conditional; None of any other equation."""
  name, params = equation.primitive.name, equation.params
  if name == 'cond':
    return [branch.jaxpr for branch in params['branches']]
  if name in ('scan', 'while'):
    return None
  jaxpr = params.get('jaxpr') or params.get('call_jaxpr') or params.get('fun_jaxpr')
  return None if jaxpr is None else [getattr(jaxpr, 'jaxpr', jaxpr)]


def _equations(jaxpr: Any) -> list[Any]:
  """Returns the operations of a jaxpr with the numbers among their operands, without shapes and changes of shape."""
  found: list[Any] = []
  for equation in jaxpr.eqns:
    name, numbers = equation.primitive.name, [str(x.val) for x in equation.invars if isinstance(x, Literal)]
    inner = [each for jaxpr in _inner(equation) or () for each in _equations(jaxpr)]
    if numbers or inner or name not in _KEEPS_ORDER:
      found += inner if name in _CALLS else [(name, *numbers), *inner]
  return found
