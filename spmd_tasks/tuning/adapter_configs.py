"""Adds low-rank adapters to the config of a model, by patterns of the names of its weights."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import fiddle as fdl

from spmd_tasks.layers import LowRankAdapter, adaptable_weights
from spmd_tasks.sharding import matching_names


def add_adapters(
  model: fdl.Config, patterns: Sequence[str], adapter: LowRankAdapter, *, setting: str = 'patterns'
) -> list[str]:
  """Gives a low-rank adapter to each weight whose name a pattern is found in; returns the names.

  Args:
    model: the config of a LanguageModel, which is changed. A weight that has an adapter gets this one instead.
    patterns: regular expressions that are searched in names such as 'stack/layers/attention/query/kernel'.
    adapter: its settings; `names` is not read.
    setting: where the patterns are from, for errors.

  Raises:
    UserError: a pattern is in no name; the message names near ones.
  """
  places = adaptable_weights(model, class_of=class_of)
  names = matching_names(patterns, places, setting=setting)
  chosen: dict[int, tuple[Any, list[str]]] = {}
  for name in names:
    layer, projection = places[name]
    chosen.setdefault(id(layer), (layer, []))[1].append(projection)
  for layer, projections in chosen.values():
    kept = []
    for other in layer.adapters:
      others = tuple(name for name in other.names if name not in projections)
      if others:
        other.names = others
        kept.append(other)
    layer.adapters = (*kept, _config(dataclasses.replace(adapter, names=tuple(projections))))
  return names


def _config(adapter: LowRankAdapter) -> fdl.Config[LowRankAdapter]:
  return fdl.Config(LowRankAdapter, **dataclasses.asdict(adapter))


def class_of(node: Any) -> Any:
  """Returns the class of a layer, given its module or config."""
  return fdl.get_callable(node) if isinstance(node, fdl.Buildable) else type(node)
