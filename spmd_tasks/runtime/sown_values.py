"""Tells what a model's modules `sow` from its state: sown values are results of one call.

    with noting_sown() as sown:
      predictions, updated = model.apply(variables, batch, mutable=names)
    updated = without_sown(updated, sown)

Linen stores what `sow` gets beside the variables that modules declare. Kept from step to step, it would grow: each call
appends to it, or adds to it.
"""

from collections.abc import Collection, Iterator, Mapping
import contextlib
import contextvars
import functools
from typing import Any

from absl import logging
from flax import traverse_util
import flax.linen as nn

Path = tuple[str, ...]  # a variable's collection, the names of its modules, and its own

_sown: contextvars.ContextVar[set[Path] | None] = contextvars.ContextVar('sown', default=None)


@contextlib.contextmanager
def noting_sown() -> Iterator[set[Path]]:
  """Context in which models are called (traced). It gets the paths of the values that `sow` stores anew.

  A variable that a module has declared, and updates by `sow`, is not among them.
  """
  _wrap_sow()
  paths: set[Path] = set()
  token = _sown.set(paths)
  try:
    yield paths
  finally:
    _sown.reset(token)


@functools.cache
def _wrap_sow() -> None:
  """Makes `nn.Module.sow` note what it stores, for good: threads may call models meanwhile."""
  sow: Any = nn.Module.sow

  @functools.wraps(sow)
  def noting(self: nn.Module, col: str, name: str, *args: Any, **kwargs: Any) -> bool:
    paths = _sown.get()
    is_new = paths is not None and self.scope is not None and not self.scope.has_variable(col, name)
    is_stored = sow(self, col, name, *args, **kwargs)
    if is_stored and is_new:
      assert paths is not None
      paths.add((col, *self.path, name))
    return is_stored

  nn.Module.sow = noting  # type: ignore[method-assign]


def without_sown(variables: Mapping[str, Any], sown: Collection[Path]) -> dict[str, Any]:
  """Returns variables by collection without the values at these paths, and without what is then empty."""
  kept = dict(variables)
  for collection in {path[0] for path in sown}.intersection(kept):
    flat = traverse_util.flatten_dict(kept.pop(collection))
    if flat := {path: value for path, value in flat.items() if (collection, *path) not in sown}:
      kept[collection] = traverse_util.unflatten_dict(flat)
  return kept


@functools.cache
def warn_of_sown(model: str, paths: frozenset[Path]) -> None:
  """Says once what a model sows, as no loss and no metric sees it."""
  names = sorted('/'.join(path) for path in paths)
  if names:
    logging.warning(
      'the model %s sows %s%s: sown values are results of one call, which are not saved and which no loss reads; '
      'return them with the predictions, where the loss can add them or make metrics of them.',
      *(model, ', '.join(names[:3]), f' and {len(names) - 3} more' if len(names) > 3 else ''),
    )
