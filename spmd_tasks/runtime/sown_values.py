"""Separates what a model's modules `sow` from its state: sown values are results of one call.

Linen stores sown values beside the variables that modules declare. Kept from step to step, they would grow: each call
appends to them, or adds to them. So the state has declared variables alone, and a step updates what the state has.
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
  """Returns the variables of `model.init` with these arguments, and the paths of those that no module declares.

  A module reserves the name of a variable that it declares in each call, but that of a sown value only in a call that
  adds it. So the model is initialized twice, the second time (traced only) with the variables of the first.
  """
  with _noting_names() as in_init:
    variables = model.init(rngs, *positional, **named)
  if variables.keys() <= {'params'}:
    return variables, set()

  def init_again(variables: Any) -> Any:
    scope = flax.core.bind(variables, rngs, mutable=list(variables), flags={'initializing': True})
    return model.clone(parent=scope)(*positional, **named)

  with _noting_names() as declared:
    jax.eval_shape(init_again, variables)
  return variables, in_init - declared


@contextlib.contextmanager
def _noting_names() -> Iterator[set[Path]]:
  """Context in which a model is called. It gets the paths of the variables whose names modules reserve."""
  paths: set[Path] = set()

  def note(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    returned = next_fun(*args, **kwargs)
    module = context.module
    if module.scope is not None:
      for name, collections in module.scope.reservations.items():
        paths.update((collection, *module.path, name) for collection in collections if collection is not None)
    return returned

  with nn.intercept_methods(note):
    yield paths


def without_sown(variables: Mapping[str, Any], sown: Set[Path]) -> dict[str, Any]:
  """Returns variables by collection without the values at these paths, and without what is then empty."""
  flat = traverse_util.flatten_dict(variables)
  return traverse_util.unflatten_dict({path: value for path, value in flat.items() if path not in sown})


def of_state(updated: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a call has updated of these variables, without what it has sown."""
  paths = traverse_util.flatten_dict(variables).keys()
  return without_sown(updated, traverse_util.flatten_dict(updated).keys() - paths)


@functools.cache
def warn_of_sown(model: str, paths: frozenset[Path]) -> None:
  """Logs once what a model sows, as no loss and no metric sees it."""
  names = sorted('/'.join(path) for path in paths)
  if names:
    logging.warning(
      'the model %s sows %s%s: sown values are results of one call, which are not saved and which no loss reads; '
      'return them with the predictions, where the loss can add them or make metrics of them.',
      *(model, ', '.join(names[:3]), f' and {len(names) - 3} more' if len(names) > 3 else ''),
    )
