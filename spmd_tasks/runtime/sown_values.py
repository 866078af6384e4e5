"""Separates what a model's modules `sow` from its state: sown values are results of one call.

Linen stores sown values beside the variables that modules declare. Kept from step to step, they would grow: each call
appends to them, or adds to them. So the state has declared variables alone, and a step updates what the state has.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Set
import contextlib
import functools
from typing import Any

from absl import logging
from flax import traverse_util
import flax.linen as nn
import jax

Path = tuple[str, ...]  # a variable's collection, the names of its modules, and its own


def sown_values(init: Callable[[], Any], apply: Callable[[Any], Any]) -> tuple[Any, Set[Path]]:
  """Returns the variables that `init` gives, and the paths of those that no module declares.

  A module reserves the name of a variable that it declares in each call, but that of a sown value only in the call that
  adds it. `apply(variables)` calls the model with these variables, all of them mutable. Modules that only `init` calls
  keep what they have.
  """
  with _noting_names() as in_init:
    variables = init()
  if variables.keys() <= {'params'}:
    return variables, set()
  with _noting_names() as declared:
    jax.eval_shape(apply, nn.meta.unbox(variables))
  sown = {
    (collection, *module, name)
    for module in declared
    for collection, name in in_init[module] - declared[module]
    if collection != 'params'
  }
  return variables, sown


@contextlib.contextmanager
def _noting_names() -> Iterator[dict[Path, set[tuple[str, str]]]]:
  """Context in which a model is called (traced). It gets the collections and names that each module reserves."""
  names = collections.defaultdict[Path, set[tuple[str, str]]](set)

  def note(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    returned = next_fun(*args, **kwargs)
    module = context.module
    if module.scope is not None:
      reserved = names[module.path]
      for name, of_name in module.scope.reservations.items():
        reserved.update((collection, name) for collection in of_name if collection is not None)
    return returned

  with nn.intercept_methods(note):
    yield names


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
