"""Makes the numbers of a learner's update arguments of the compiled step, so that one program serves many learners.

    update = NumberedUpdate.trace(function, *abstract_arguments)
    update(update.numbers, *arguments)                   # what function(*arguments) returns

The numbers are the scalar constants of the traced update: learning rates, steps and other settings of schedules,
decays, also in optax and in a user's own functions. Jobs that differ only in numbers have equal programs, which a cache
of compiled programs finds. Constants with which XLA makes a program simpler stay: 0, 1, -1 and infinities, exponents,
and what loops read. So do the constants of functions that are compiled on their own, as by `jax.jit`.

A constant that one line of Python uses several times, such as a decay for each weight, is one number. Other equal
constants are different numbers, so that programs do not depend on which numbers happen to be equal.

Results equal those with constants up to the last bits, because XLA reassociates products with constants. Every job
has the numbers as arguments, in a sweep or alone, so these have the same bits.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun, primitives
from jax.interpreters.partial_eval import dce_jaxpr
import numpy as np

_DTYPES = ('float32', 'int32')
_LOOPS = ('scan', 'while')


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NumberedUpdate:
  """A function with its scalar constants as an argument; `trace` makes it.

  Attributes:
    numbers: the values of the constants: float32 or int32 scalars.
  """

  numbers: tuple[np.ndarray, ...]
  _function: Callable[..., Any]
  _closed: ClosedJaxpr  # its first constants are the numbers
  _inputs: Any  # the structure, shapes and dtypes of the arguments
  _outputs: Any  # the structure of the results

  @classmethod
  def trace(cls, function: Callable[..., Any], *abstract_arguments: Any) -> 'NumberedUpdate':
    """Traces a function of trees of arrays, given their shapes and dtypes."""
    closed, outputs = jax.make_jaxpr(function, return_shape=True)(*abstract_arguments)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    numbers = _Numbers()
    equations = [numbers.replace_in(equation) for equation in jaxpr.eqns]
    results = [numbers.replace(atom, 'results') for atom in jaxpr.outvars]
    values = numbers.values
    jaxpr = jaxpr.replace(constvars=[*numbers.variables, *jaxpr.constvars], eqns=equations, outvars=results)
    return cls(
      numbers=tuple(values),
      _function=function,
      _closed=ClosedJaxpr(jaxpr, [*values, *closed.consts]),
      _inputs=_abstract(abstract_arguments),
      _outputs=jax.tree.structure(outputs),
    )

  def __call__(self, numbers: Sequence[jax.typing.ArrayLike], *arguments: Any) -> Any:
    """Returns the results for these numbers instead of the function's own.

    If the arguments do not have the shapes and dtypes for which it was traced, as with a loss in bfloat16, calls the
    function, with its own numbers.
    """
    if _abstract(arguments) != self._inputs:
      return self._function(*arguments)
    consts = [*numbers, *self._closed.consts[len(numbers) :]]
    results = jaxpr_as_fun(ClosedJaxpr(self._closed.jaxpr, consts))(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(self._outputs, results)


class _Numbers:
  """Replaces constants of a jaxpr by variables."""

  def __init__(self) -> None:
    self._variables: dict[Any, Var] = {}  # by the line, the dtype and the value

  @property
  def variables(self) -> list[Var]:
    return [*self._variables.values()]

  @property
  def values(self) -> list[np.ndarray]:
    return [np.asarray(value, dtype) for _, dtype, value in self._variables]

  def replace(self, atom: Any, line: Any) -> Any:
    """Returns the variable of a constant that is a number; returns other atoms unchanged."""
    if not isinstance(atom, Literal) or np.ndim(atom.val) or str(_dtype(atom)) not in _DTYPES:
      return atom
    value = np.asarray(atom.val, _dtype(atom))
    if not np.isfinite(value) or value in (-1, 0, 1):
      return atom
    return self._variables.setdefault((line, str(value.dtype), value.item()), Var(atom.aval))

  def replace_in(self, equation: Any) -> Any:
    """Returns an equation of a jaxpr with variables instead of numbers."""
    name, operands, line = equation.primitive.name, equation.invars, equation.source_info.traceback
    if name in _LOOPS:
      return equation
    if name == 'pow':
      return equation.replace(invars=[self.replace(operands[0], line), operands[1]])
    if name == 'div' and isinstance(operands[1], Literal) and _dtype(operands[1]) == np.float32:
      # XLA divides by a constant in the same way, which is faster and has other bits than a division.
      inverse = Literal(1 / np.asarray(operands[1].val, np.float32), operands[1].aval)
      equation = equation.replace(primitive=primitives.mul_p, params={}, invars=[operands[0], inverse])
    return equation.replace(invars=[self.replace(atom, line) for atom in equation.invars])


def _dtype(constant: Literal) -> Any:
  return getattr(constant.aval, 'dtype', None)


def _abstract(tree: Any) -> Any:
  leaves, structure = jax.tree.flatten(tree)
  return structure, [(tuple(x.shape), x.dtype) for x in leaves]
