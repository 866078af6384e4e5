"""RuleTable: converts the weights of one model into those of another, by invertible rules.

    table = RuleTable(
      rules=(
        Rule('lm.head.w', 'embedding/table', Transpose((1, 0))),
        Rule('a.qkv', ['q', 'k', 'v'], Split(-2, (32, 8, 8)), Transpose((1, 0))),
        *(Rule(f'layers.{i}.norm', ('stack/norm', i)) for i in range(num_layers)),
      ),
      source='the checkpoint',
      target='the model',
    )
    table.check(abstract_source, abstract_target)
    weights = table.convert_lazily(lazy_source, abstract_target)
    source = table.inverse().convert_lazily(weights, abstract_source)

A tree of weights is a flat mapping of names. A slot is a whole weight, or one place in its leading, stacked dims:
`('stack/norm', 3)` is layer 3 of a weight [L, D], and `('experts/up', 3, 7)` is expert 7 of that layer. A rule connects
slots of both sides by operations, each of which has an inverse.

`check` needs shapes only and finds every weight without a rule. `convert_lazily` reads nothing: when a part of a target
weight is read later, the parts of the source that it needs are read.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import itertools
from typing import Any

import jax

from spmd_tasks.bridges import _lazy_arrays
from spmd_tasks.bridges._lazy_arrays import LazyArray
from spmd_tasks.bridges._operations import Arrays, Operation, Shape
from spmd_tasks.checkpoints.verifying import describe_mismatches
from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True)
class Slot:
  """A weight, or the place `index` in its leading dims."""

  name: str
  index: tuple[int, ...] = ()

  def __str__(self) -> str:
    return self.name + (str(list(self.index)) if self.index else '')


SlotLike = Slot | str | tuple[Any, ...]


class Rule:
  """Connects slots of the source and slots of the target: applies the operations in turn to the former, in order.

  A slot may be written as a name, and a slot with an index as (name, *index). Several slots are a list.
  """

  def __init__(self, source: SlotLike | list[SlotLike], target: SlotLike | list[SlotLike], *operations: Operation):
    self.source = _slots(source)
    self.target = _slots(target)
    self.operations = operations

  def inverse(self) -> 'Rule':
    return Rule([*self.target], [*self.source], *(op.inverse() for op in reversed(self.operations)))

  def __str__(self) -> str:
    sides = (', '.join(map(str, slots)) or 'nothing' for slots in (self.source, self.target))
    return ' -> '.join(sides)

  def apply(self, arrays: Arrays) -> Arrays:
    for operation in self.operations:
      arrays = operation(arrays)
    return arrays


def _slots(slots: SlotLike | list[SlotLike]) -> tuple[Slot, ...]:
  if isinstance(slots, list):
    return tuple(slot for item in slots for slot in _slots(item))
  if isinstance(slots, str):
    return (Slot(slots),)
  return (slots if isinstance(slots, Slot) else Slot(slots[0], tuple(slots[1:])),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleTable:
  """The rules between two trees of weights.

  Attributes:
    rules: together they use every weight of both sides exactly once.
    source, target: what the sides are called in errors.
  """

  rules: tuple[Rule, ...]
  source: str
  target: str

  def inverse(self) -> 'RuleTable':
    """Returns the table that converts back."""
    return RuleTable(rules=tuple(rule.inverse() for rule in self.rules), source=self.target, target=self.source)

  def check(self, source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Checks that the rules convert all of `source` into all of `target`, arrays or jax.ShapeDtypeStructs by name.

    Raises:
      UserError: a weight is left over, missing, used twice, or has another shape than its rule gives; all are named.
    """
    problems = [
      *_misuses(self.source, source, [slot for rule in self.rules for slot in rule.source]),
      *_misuses(self.target, target, [slot for rule in self.rules for slot in rule.target]),
    ]
    problems = problems or [problem for rule in self.rules for problem in self._mismatches(rule, source, target)]
    if problems:
      raise UserError(
        f'the weights of {self.source} and of {self.target} do not fit each other:\n{describe_mismatches(problems)}\n'
        'Compare the settings of both models.'
      )

  def convert_lazily(self, source: Mapping[str, LazyArray], target: Mapping[str, Any]) -> dict[str, LazyArray]:
    """Returns each weight of the target, in the dtype that it has there, as an array that is read part by part.

    `target` has arrays or jax.ShapeDtypeStructs.
    """
    parts: dict[str, dict[tuple[int, ...], Any]] = {}
    for rule in self.rules:
      arrays = rule.apply(tuple(source[slot.name][slot.index] for slot in rule.source))
      for slot, array in zip(rule.target, arrays, strict=True):
        # Cast before they are stacked: one part after the other, not all at once.
        parts.setdefault(slot.name, {})[slot.index] = array.astype(target[slot.name].dtype)
    return {name: _stack_lazily(found) for name, found in parts.items()}

  def _mismatches(self, rule: Rule, source: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[str]:
    given = tuple(tuple(source[slot.name].shape[len(slot.index) :]) for slot in rule.source)
    try:
      made = _result_shapes(rule.operations, given)
    except (ValueError, TypeError, IndexError) as error:
      yield f'{rule} cannot be applied to {_text(given)}: {error}'
      return
    wanted = tuple(tuple(target[slot.name].shape[len(slot.index) :]) for slot in rule.target)
    if made != wanted:
      yield f'{rule} gives {_text(made)}, but {self.target} has {_text(wanted)}'


def _misuses(side: str, weights: Mapping[str, Any], slots: list[Slot]) -> Iterator[str]:
  """Describes each weight that the slots do not use exactly once."""
  used: dict[str, list[tuple[int, ...]]] = {}
  for slot in slots:
    used.setdefault(slot.name, []).append(slot.index)
  for name in used.keys() - weights.keys():
    yield f'{side} has no {name}'
  for name, weight in weights.items():
    shape = tuple(weight.shape)
    if name not in used:
      yield f'{side} has {name} {list(shape)}, which nothing on the other side corresponds to'
      continue
    places = list(itertools.product(*map(range, shape[: len(used[name][0])])))
    if sorted(used[name]) != places:
      yield f'{side} has {name} {list(shape)}, of which {len(set(used[name]) & set(places))} of {len(places)} are used'


@functools.lru_cache(maxsize=4096)
def _result_shapes(operations: tuple[Operation, ...], shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
  abstract = tuple(jax.ShapeDtypeStruct(shape, 'float32') for shape in shapes)
  made = jax.eval_shape(lambda *arrays: Rule([], [], *operations).apply(arrays), *abstract)
  return tuple(array.shape for array in made)


def _text(shapes: tuple[Shape, ...]) -> str:
  return ', '.join(str(list(shape)) for shape in shapes)


def _stack_lazily(parts: Mapping[tuple[int, ...], Any]) -> LazyArray:
  """Stacks the parts by index, dim by dim, so that a part of any dim is read without the rest."""
  if () in parts:
    return _lazy_arrays.lazy_array(parts[()])
  places = sorted({index[0] for index in parts})
  return _lazy_arrays.stack(
    [_stack_lazily({index[1:]: part for index, part in parts.items() if index[0] == i}) for i in places], 0
  )
