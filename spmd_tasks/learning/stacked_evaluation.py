"""Evaluates a jaxpr that repeats the same operations for every layer of a stack as operations on whole stacks.

If every layer of a weight has the same operation, on its own values and on values that all layers share, it is
evaluated once by `jax.vmap` over the stack. An operation that reads several layers is evaluated on the values of single
layers.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class LayerValue:
  """The value of one layer, `stack[index]`; the stack has the values of all layers of a weight."""

  stack: jax.Array
  weight: int
  index: tuple[int, ...]

  @property
  def key(self) -> Any:
    """Identifies the stack: equal for all layers."""
    return 'stack', id(self.stack)

  @property
  def num_layers(self) -> int:
    return math.prod(self.stack.shape[: len(self.index)])


def layer_value(x: Any, cache: dict[Any, Any]) -> Any:
  """Returns a LayerValue as an array, and any other value unchanged. The cache makes equal calls return one array."""
  if not isinstance(x, LayerValue):
    return x
  if (x.key, x.index) not in cache:
    shape = x.stack.shape[len(x.index) :]
    ends = (*[i + 1 for i in x.index], *shape)
    cache[x.key, x.index] = jax.lax.reshape(jax.lax.slice(x.stack, (*x.index, *[0] * len(shape)), ends), shape)
  return cache[x.key, x.index]


@dataclasses.dataclass(frozen=True, eq=False)
class _Operation:
  """One operation of a program: `compute` maps the values of `operands` to the values of `outputs`, both by number.

  Operations with equal keys have the same `compute`. The level is 1 + the largest level of the operands, so equal
  operations of several layers are on one level.
  """

  key: Any
  compute: Callable[..., Sequence[Any]]
  operands: list[int]
  outputs: list[int]
  level: int


class _Operations:
  """The operations of a jaxpr, with calls inlined and conditionals as selects."""

  def __init__(self, closed: ClosedJaxpr, inputs: Sequence[Any]):
    self.values: dict[int, Any] = {}
    self.levels: list[int] = []
    self.operations: list[_Operation] = []
    self._constants: dict[Any, int] = {}
    self.outputs = self._visit(closed, [self._value(x) for x in inputs])

  def _number(self, level: int) -> int:
    self.levels.append(level)
    return len(self.levels) - 1

  def _value(self, x: Any) -> int:
    number = self._number(0)
    self.values[number] = x
    return number

  def _constant(self, x: Any) -> int:
    array = np.asarray(x)
    key = type(x), array.dtype.str, array.shape, array.tobytes()
    if key not in self._constants:
      self._constants[key] = self._value(x)
    return self._constants[key]

  def _add(self, key: Any, compute: Callable[..., Sequence[Any]], operands: list[int], num_outputs: int) -> list[int]:
    level = 1 + max((self.levels[x] for x in operands), default=0)
    outputs = [self._number(level) for _ in range(num_outputs)]
    self.operations.append(_Operation(key, compute, operands, outputs, level))
    return outputs

  def _visit(self, closed: ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
    jaxpr = closed.jaxpr
    numbers = dict(zip(jaxpr.invars, inputs, strict=True)) | {
      variable: self._value(x) for variable, x in zip(jaxpr.constvars, closed.consts)
    }
    number_of = lambda x: self._constant(x.val) if isinstance(x, Literal) else numbers[x]
    for equation in jaxpr.eqns:
      name, params, operands = equation.primitive.name, equation.params, [number_of(x) for x in equation.invars]
      called = params.get('jaxpr') or params.get('call_jaxpr') or params.get('fun_jaxpr')
      if name == 'cond':
        cases = [self._visit(branch, operands[1:]) for branch in params['branches']]
        outputs = [self._add('select', _select, [operands[0], *case], 1)[0] for case in zip(*cases)]
      elif called is not None and name != 'scan':
        outputs = self._visit(called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ()), operands)
      else:
        literals = tuple(isinstance(x, Literal) for x in equation.invars)
        key = (name, literals, *((k, _key(v)) for k, v in sorted(params.items())))
        outputs = self._add(key, _equation_function(jaxpr, equation), operands, len(equation.outvars))
      numbers.update(zip(equation.outvars, outputs, strict=True))
    return [number_of(x) for x in jaxpr.outvars]


def _select(*cases: Any) -> list[Any]:
  return [jax.lax.select_n(*cases)]


def _equation_function(jaxpr: Any, equation: Any) -> Callable[..., Sequence[Any]]:
  """Returns one equation of a jaxpr as a function."""

  def compute(*operands: Any) -> Sequence[Any]:
    is_variable = [not isinstance(x, Literal) for x in equation.invars]
    single = Jaxpr(
      constvars=(),
      invars=list(itertools.compress(equation.invars, is_variable)),
      outvars=equation.outvars,
      eqns=[equation],
      debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jaxpr_as_fun(ClosedJaxpr(single, ()))(*itertools.compress(operands, is_variable))

  return compute


def evaluate(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
  """Evaluates a jaxpr on inputs that may be LayerValues; so may be the results."""
  program = _Operations(closed, inputs)
  values: dict[int, Any] = program.values
  cache: dict[Any, Any] = {}

  def compute(operation: _Operation, operands: Sequence[Any]) -> None:
    operands = [layer_value(x, cache) for x in operands]
    key = operation.key, *map(id, operands)
    if key not in cache:
      cache[key] = operation.compute(*operands)
    values.update(zip(operation.outputs, cache[key]))

  for _, level in itertools.groupby(sorted(program.operations, key=_level), _level):
    by_key: dict[Any, list[Any]] = {}
    for operation in level:
      operands = [values[x] for x in operation.operands]
      layers = {(x.weight, x.index) for x in operands if isinstance(x, LayerValue)}
      if len(layers) == 1:
        [(weight, index)] = layers
        key = weight, operation.key, *[x.key if isinstance(x, LayerValue) else id(x) for x in operands]
        by_key.setdefault(key, []).append((index, operation, operands))
      else:
        compute(operation, operands)
    for (weight, *_), layer_operations in by_key.items():
      index, operation, operands = layer_operations[0]
      num_layers = next(x.num_layers for x in operands if isinstance(x, LayerValue))
      if len({index for index, *_ in layer_operations}) < num_layers:
        for _, operation, operands in layer_operations:
          compute(operation, operands)
        continue
      function = operation.compute
      for _ in index:
        function = jax.vmap(function, in_axes=[0 if isinstance(x, LayerValue) else None for x in operands])
      stacks = function(*[x.stack if isinstance(x, LayerValue) else x for x in operands])
      for index, operation, _ in layer_operations:
        values.update((x, LayerValue(stack, weight, index)) for x, stack in zip(operation.outputs, stacks))
  return [values[x] for x in program.outputs]


def _level(operation: _Operation) -> int:
  return operation.level


def _key(param: Any) -> Any:
  """Returns a hashable value that is equal for the parameters of equal operations."""
  if isinstance(param, ClosedJaxpr):
    return param if param.consts else str(param)
  if isinstance(param, (tuple, list)):
    return tuple(map(_key, param))
  try:
    hash(param)
  except TypeError:
    return str(param)
  return param
