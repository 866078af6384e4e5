"""Evaluates a program that repeats itself for every layer of a stack as a program of stacks.

An operation that each layer of a weight has, on its own values and on values that are equal for all, is done once, by
`jax.vmap` over the stack. What reads several layers is done with the values of each.
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
class OfLayer:
  """The value of one layer, `stack[index]`; the stack has those of all layers of the weight."""

  stack: jax.Array
  weight: int
  index: tuple[int, ...]

  @property
  def key(self) -> Any:
    """The same for all layers."""
    return 'stack', id(self.stack)

  @property
  def num_layers(self) -> int:
    return math.prod(self.stack.shape[: len(self.index)])


def own_value(x: Any, known: dict[Any, Any]) -> Any:
  """Returns the value of a layer as an array, the same one whenever it is asked for."""
  if not isinstance(x, OfLayer):
    return x
  if (x.key, x.index) not in known:
    shape = x.stack.shape[len(x.index) :]
    ends = (*[i + 1 for i in x.index], *shape)
    known[x.key, x.index] = jax.lax.reshape(jax.lax.slice(x.stack, (*x.index, *[0] * len(shape)), ends), shape)
  return known[x.key, x.index]


@dataclasses.dataclass(frozen=True, eq=False)
class _Operation:
  """One operation of a program: `compute` is a function of its operands, values that have numbers, as its outputs do.

  Operations with equal keys compute the same. The level is 1 + that of the operands; the same computation of several
  layers has one level.
  """

  key: Any
  compute: Callable[..., Sequence[Any]]
  operands: list[int]
  outputs: list[int]
  level: int


class _Operations:
  """The operations of a program, without calls and conditionals."""

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
        outputs = self._add(key, _function_of(jaxpr, equation), operands, len(equation.outvars))
      numbers.update(zip(equation.outvars, outputs, strict=True))
    return [number_of(x) for x in jaxpr.outvars]


def _select(*cases: Any) -> list[Any]:
  return [jax.lax.select_n(*cases)]


def _function_of(jaxpr: Any, equation: Any) -> Callable[..., Sequence[Any]]:
  """Returns the function that one equation of a jaxpr is."""

  def compute(*operands: Any) -> Sequence[Any]:
    is_variable = [not isinstance(x, Literal) for x in equation.invars]
    alone = Jaxpr(
      constvars=(),
      invars=list(itertools.compress(equation.invars, is_variable)),
      outvars=equation.outvars,
      eqns=[equation],
      debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*itertools.compress(operands, is_variable))

  return compute


def evaluate(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
  """Evaluates a jaxpr of which inputs may be values of layers.

  An operation that every layer of a weight has, on values of its own and on equal ones of others, is one of stacks.
  """
  program = _Operations(closed, inputs)
  values: dict[int, Any] = program.values
  known: dict[Any, Any] = {}

  def compute(operation: _Operation, operands: Sequence[Any]) -> None:
    operands = [own_value(x, known) for x in operands]
    key = operation.key, *map(id, operands)
    if key not in known:
      known[key] = operation.compute(*operands)
    values.update(zip(operation.outputs, known[key]))

  for _, level in itertools.groupby(sorted(program.operations, key=_level), _level):
    by_key: dict[Any, list[Any]] = {}
    for operation in level:
      operands = [values[x] for x in operation.operands]
      layers = {(x.weight, x.index) for x in operands if isinstance(x, OfLayer)}
      if len(layers) == 1:
        [(weight, index)] = layers
        key = weight, operation.key, *[x.key if isinstance(x, OfLayer) else id(x) for x in operands]
        by_key.setdefault(key, []).append((index, operation, operands))
      else:
        compute(operation, operands)
    for (weight, *_), alike in by_key.items():
      index, operation, operands = alike[0]
      num_layers = next(x.num_layers for x in operands if isinstance(x, OfLayer))
      if len({index for index, *_ in alike}) < num_layers:
        for _, operation, operands in alike:
          compute(operation, operands)
        continue
      function = operation.compute
      for _ in index:
        function = jax.vmap(function, in_axes=[0 if isinstance(x, OfLayer) else None for x in operands])
      stacks = function(*[x.stack if isinstance(x, OfLayer) else x for x in operands])
      for index, operation, _ in alike:
        values.update((x, OfLayer(stack, weight, index)) for x, stack in zip(operation.outputs, stacks))
  return [values[x] for x in program.outputs]


def _level(operation: _Operation) -> int:
  return operation.level


def _key(param: Any) -> Any:
  """Returns a hashable value that is equal for parameters of equal operations."""
  if isinstance(param, ClosedJaxpr):
    return param if param.consts else str(param)
  if isinstance(param, (tuple, list)):
    return tuple(map(_key, param))
  try:
    hash(param)
  except TypeError:
    return str(param)
  return param
