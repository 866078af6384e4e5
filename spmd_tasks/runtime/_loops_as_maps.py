"""Runs the loops of a traced function whose iterations do not need one another side by side, by `jax.vmap`.

A model's init draws its layers' weights in a loop over layers, which passes each layer's output to the next one. Nobody
reads these outputs, so they are left out, and the iterations that remain are independent. XLA does not split a loop
over devices: every stage of a pipeline would draw the weights of all stages. As one array over layers, each device
draws its own shards. The numbers are the same; a loop that draws by another generator than Threefry, whose numbers
would not be, stays a loop.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, subjaxprs
from jax.interpreters import partial_eval


def run_loops_as_maps(traced: jax.stages.Traced, *arguments: Any) -> Any:
  """Returns what the function of `traced` returns for arguments, of the shapes that it was traced for."""
  closed = traced.jaxpr
  needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
  results = _run(ClosedJaxpr(needed, closed.consts), jax.tree.leaves(arguments))
  return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)


def _run(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
  jaxpr = closed.jaxpr
  values: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True))

  def read(variable: Var | Literal) -> Any:
    return variable.val if isinstance(variable, Literal) else values[variable]

  for equation in jaxpr.eqns:
    with equation.ctx.manager:
      results = _run_equation(equation, [read(variable) for variable in equation.invars])
    values.update(zip(equation.outvars, results, strict=True))
  return [read(variable) for variable in jaxpr.outvars]


def _run_equation(equation: JaxprEqn, arguments: list[Any]) -> Sequence[Any]:
  params = equation.params
  if _is_map(equation):
    axes = [None] * params['num_consts'] + [0] * (len(arguments) - params['num_consts'])
    return jax.vmap(lambda *slices: _run(params['jaxpr'], slices), in_axes=axes, axis_size=params['length'])(*arguments)
  if equation.primitive.name == 'jit' and _has_map(params['jaxpr'].jaxpr):
    return _run(params['jaxpr'], arguments)
  results = equation.primitive.bind(*arguments, **equation.primitive.get_bind_params(params))
  return results if equation.primitive.multiple_results else [results]


def _is_map(equation: JaxprEqn) -> bool:
  params = equation.params
  return equation.primitive.name == 'scan' and params['num_carry'] == 0 and not _may_change(params['jaxpr'].jaxpr)


def _may_change(jaxpr: Jaxpr) -> bool:
  """Whether random numbers may differ under `jax.vmap`: those of XLA's own generator do (keys `rbg`, `unsafe_rbg`)."""
  names = {equation.primitive.name for equation in jaxpr.eqns}
  kinds = {str(variable.aval) for equation in jaxpr.eqns for variable in (*equation.invars, *equation.outvars)}
  return 'rng_bit_generator' in names or any('rbg' in kind for kind in kinds) or any(map(_may_change, subjaxprs(jaxpr)))


def _has_map(jaxpr: Jaxpr) -> bool:
  return any(map(_is_map, jaxpr.eqns)) or any(map(_has_map, subjaxprs(jaxpr)))
