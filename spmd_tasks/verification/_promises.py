"""Turns off the settings with which numbers may differ, by the documentation, between two cuts into microbatches.

Some numbers depend on how a batch is cut into microbatches, and the guides say so: dropout draws a mask for each
microbatch of a pipeline; the learner's microbatches are balanced each by itself, cut groups of an expert's capacity
anew, and weigh what routers report by their tokens. A claim that compares with another cut turns these off on both
sides and says so.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from spmd_tasks.verification._settings import Source

# Fields of the model, and the value that makes each independent of microbatches.
_RANDOM = {'dropout_rate': 0.0, 'jitter_eps': 0.0}
_OF_GROUPS = {'group_size': None, 'load_balance_shards': 1}
_AUX_WEIGHTS = 'task.loss.aux_loss_weights'
# What the loss of a language model reports of tokens; all else is reported by layers.
_OF_TOKENS = ('loss', 'loss_weight', 'cross_entropy', 'accuracy', 'z_loss')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnedOff:
  """Overrides by which two cuts into microbatches agree, and the metrics that then do, None for all."""

  overrides: tuple[str, ...]
  metrics: tuple[str, ...] | None = None

  @property
  def remark(self) -> str | None:
    """A phrase for the report; None if nothing is turned off."""
    parts = [f'with {" ".join(self.overrides)} on both sides'] if self.overrides else []
    parts += ['without the metrics that layers report'] if self.metrics is not None else []
    return ', '.join(parts) + ': they depend on microbatches' if parts else None


def for_a_pipeline(source: Source) -> TurnedOff:
  """Returns what to turn off to compare a pipeline with layers in sequence."""
  return TurnedOff(overrides=_turn_off(source, _RANDOM))


def for_few_rows(source: Source, *, is_pipeline: bool) -> TurnedOff:
  """Returns what to turn off where a batch gets other rows, which groups and shards of it may not divide."""
  return TurnedOff(overrides=_turn_off(source, _OF_GROUPS | (_RANDOM if is_pipeline else {})))


def for_accumulation(source: Source) -> TurnedOff:
  """Returns what to turn off to compare the learner's microbatches with the full batch."""
  overrides = _turn_off(source, _RANDOM | _OF_GROUPS)
  weights = source.values.get(_AUX_WEIGHTS)
  aux = weights.get('dict', {}) if isinstance(weights, Mapping) else {}
  overrides += tuple(f'{_AUX_WEIGHTS}.{name}=0' for name, weight in aux.items() if weight)
  has_routers = bool(source.paths_ending('load_balance_shards'))
  return TurnedOff(overrides=overrides, metrics=_OF_TOKENS if aux or has_routers else None)


def _turn_off(source: Source, off: Mapping[str, Any]) -> tuple[str, ...]:
  return tuple(
    f'{path}={value}'
    for field, value in off.items()
    for path in source.paths_ending(field)
    if source.values[path] != value
  )
