"""What the documentation promises, and what it does not: settings by which numbers may differ, to be turned off.

Some numbers depend on how a batch is cut into microbatches, and the guides say so: dropout draws a mask for each
microbatch, capacity is counted within one, the learner's balance loss balances each. A claim that compares with another
cut turns these off on both sides and says so.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import sys
from typing import Any

# Field of the model -> (the value that makes it independent of microbatches, why it is not).
_BY_MICROBATCH: Mapping[str, tuple[Any, str]] = {
  'dropout_rate': (0.0, 'a mask for each microbatch'),
  'jitter_eps': (0.0, 'a mask for each microbatch'),
  'group_size': (None, 'groups are cut from a microbatch'),
}
_BALANCE_LOSS = 'task.loss.aux_loss_weights.load_balance_loss'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnedOff:
  """Overrides by which two cuts into microbatches agree, metrics that still may differ, and a remark for the report."""

  overrides: tuple[str, ...]
  ignored: tuple[str, ...] = ()

  @property
  def remark(self) -> str | None:
    parts = [f'with {" ".join(self.overrides)} on both sides'] if self.overrides else []
    parts += [f'without the metric {name}' for name in self.ignored]
    return ', '.join(parts) + ', which depend on microbatches' if parts else None


def for_a_pipeline(values: Mapping[str, Any]) -> TurnedOff:
  """Returns what to turn off to compare a pipeline with layers in sequence."""
  return TurnedOff(overrides=_by_microbatch(values))


def for_accumulation(values: Mapping[str, Any]) -> TurnedOff:
  """Returns what to turn off to compare the learner's microbatches with the full batch."""
  overrides, ignored = list(_by_microbatch(values)), []
  weights = values.get('task.loss.aux_loss_weights')
  if isinstance(weights, Mapping) and 'load_balance_loss' in weights.get('dict', {}):
    overrides.append(f'{_BALANCE_LOSS}=0')
  if any(path.endswith('.load_balance_shards') for path in values):  # a model with routers
    ignored.append('load_balance_loss')
  return TurnedOff(overrides=tuple(overrides), ignored=tuple(ignored))


def _by_microbatch(values: Mapping[str, Any]) -> tuple[str, ...]:
  return tuple(
    f'{path}={off}'
    for path, value in values.items()
    if path.startswith('task.model') and (field := path.rpartition('.')[2]) in _BY_MICROBATCH
    for off, _ in [_BY_MICROBATCH[field]]
    if value != off
  )


def paths_of(values: Mapping[str, Any], part: type) -> list[str]:
  """Returns the paths of the model's parts of a class, such as PipelinedStack, or of a subclass of the user's."""
  return [
    path
    for path, value in values.items()
    if path.startswith('task.model') and isinstance(value, Mapping) and _names(value.get('symbol'), part)
  ]


def _names(symbol: Any, part: type) -> bool:
  """Whether a symbol, such as 'package:Class', is that of a class or a subclass."""
  module, _, name = str(symbol).partition(':')
  found = getattr(sys.modules.get(module), name, None)  # loaded: the experiment was built
  return isinstance(found, type) and issubclass(found, part)


def paths_ending(values: Mapping[str, Any], field: str) -> list[str]:
  """Returns the paths of a field in all parts of the model."""
  return [path for path in values if path.startswith('task.model.') and path.rpartition('.')[2] == field]


def set_all(paths: Sequence[str], value: Any) -> tuple[str, ...]:
  """Returns the overrides that give all these fields one value."""
  return tuple(f'{path}={value}' for path in paths)
