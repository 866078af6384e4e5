"""Keeps sown values out of a model's state.

Linen stores sown values in collections, like the variables that modules declare. Kept from step to step they would
grow, because every call appends to them. So the state has only declared variables, and a step updates only these.
"""

from collections.abc import Iterator, Mapping, Set
import contextlib
import functools
from typing import Any

from absl import logging
import flax
from flax import traverse_util
import flax.linen as nn
import jax

Path = tuple[str, ...]  # a variable's collection, the names of its modules, and its own


def sown_values(model: nn.Module, rngs: dict[str, jax.Array], *positional: Any, **named: Any) -> tuple[Any, set[Path]]:
  """Returns the variables of `model.init` with these arguments, and the paths of sown values among them.

  A module reserves the name of a declared variable in every call, but the name of a sown value only in the call that
  creates it. So the model is initialized twice, the second time (only traced) with the variables of the first.
  """
  with _reserved_names() as in_init:
    variables = model.init(rngs, *positional, **named)
  if variables.keys() <= {'params'}:
    return variables, set()

  def init_again(variables: Any) -> Any:
    scope = flax.core.bind(variables, rngs, mutable=list(variables), flags={'initializing': True})
    return model.clone(parent=scope)(*positional, **named)

  with _reserved_names() as declared:
    jax.eval_shape(init_again, variables)
  return variables, in_init - declared


@contextlib.contextmanager
def _reserved_names() -> Iterator[set[Path]]:
  """Collects the paths of the variables whose names modules reserve when a model is called in this context."""
  paths: set[Path] = set()

  def collect(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    returned = next_fun(*args, **kwargs)
    module = context.module
    if module.scope is not None:
      for name, collections in module.scope.reservations.items():
        paths.update((collection, *module.path, name) for collection in collections if collection is not None)
    return returned

  with nn.intercept_methods(collect):
    yield paths


def without_sown(variables: Mapping[str, Any], sown: Set[Path]) -> dict[str, Any]:
  """Returns variables by collection without the values at these paths; collections and modules left empty go too."""
  flat = traverse_util.flatten_dict(variables)
  return traverse_util.unflatten_dict({path: value for path, value in flat.items() if path not in sown})


def declared_updates(updated: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the updated values of `variables`, without sown values."""
  paths = traverse_util.flatten_dict(variables).keys()
  return without_sown(updated, traverse_util.flatten_dict(updated).keys() - paths)


@functools.cache
def warn_of_sown(model: str, paths: frozenset[Path]) -> None:
  """Warns once that no loss and no metric reads what a model sows."""
  names = sorted('/'.join(path) for path in paths)
  if names:
    logging.warning(
      'the model %s sows %s%s: sown values are not saved, and no loss reads them; return them with the predictions, so '
      'that the loss can add them or report them as metrics.',
      *(model, ', '.join(names[:3]), f' and {len(names) - 3} more' if len(names) > 3 else ''),
    )
