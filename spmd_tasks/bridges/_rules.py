"""Converts the weights of one model to another by a table of invertible rules.

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

Weights are a flat mapping from names to arrays. A slot is a whole weight, or an index into its leading, stacked dims:
`('stack/norm', 3)` is layer 3 of a weight [L, D], and `('experts/up', 3, 7)` is expert 7 of that layer. A rule connects
slots of both sides by invertible operations.

`check` needs only shapes and reports every weight without a rule. `convert_lazily` reads nothing; reading a part of a
target weight later reads the parts of the source that it needs.
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
  """A weight, or its slice at `index` in the leading dims."""

  name: str
  index: tuple[int, ...] = ()

  def __str__(self) -> str:
    return self.name + (str(list(self.index)) if self.index else '')


SlotLike = Slot | str | tuple[Any, ...]


class Rule:
  """Connects slots of the source with slots of the target: the operations, applied in order, convert the former.

  A slot may be written as a name, a slot with an index as (name, *index), and several slots as a list.
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
  """The rules between the weights of two models.

  Attributes:
    rules: the rules, which together use every weight of both sides exactly once.
    source, target: the names of the two sides in errors.
  """

  rules: tuple[Rule, ...]
  source: str
  target: str

  def inverse(self) -> 'RuleTable':
    """Returns the table of the reverse conversion."""
    return RuleTable(rules=tuple(rule.inverse() for rule in self.rules), source=self.target, target=self.source)

  def check(self, source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Checks that the rules convert all of `source` to all of `target`.

    Args:
      source: arrays or jax.ShapeDtypeStructs, by name.
      target: the same for the other side.

    Raises:
      UserError: a weight is unused, missing, used twice, or has a different shape than its rule computes. The message
        lists all such weights.
    """
    problems = [
      *_misuses(self.source, source, [slot for rule in self.rules for slot in rule.source]),
      *_misuses(self.target, target, [slot for rule in self.rules for slot in rule.target]),
    ]
    problems = problems or [problem for rule in self.rules for problem in self._mismatches(rule, source, target)]
    if problems:
      raise UserError(
        f'the weights of {self.source} and {self.target} do not match:\n{describe_mismatches(problems)}\n'
        'Compare the settings of both models.'
      )

  def convert_lazily(self, source: Mapping[str, LazyArray], target: Mapping[str, Any]) -> dict[str, LazyArray]:
    """Returns the weights of the target as lazy arrays.

    Args:
      source: the weights of the source.
      target: arrays or jax.ShapeDtypeStructs with the dtypes of the target.
    """
    parts: dict[str, dict[tuple[int, ...], Any]] = {}
    for rule in self.rules:
      arrays = rule.apply(tuple(source[slot.name][slot.index] for slot in rule.source))
      for slot, array in zip(rule.target, arrays, strict=True):
        # Cast before stacking, so that one part is cast at a time.
        parts.setdefault(slot.name, {})[slot.index] = array.astype(target[slot.name].dtype)
    return {name: _stack_lazily(parts_by_index) for name, parts_by_index in parts.items()}

  def _mismatches(self, rule: Rule, source: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[str]:
    shapes = tuple(tuple(source[slot.name].shape[len(slot.index) :]) for slot in rule.source)
    try:
      results = _result_shapes(rule.operations, shapes)
    except (ValueError, TypeError, IndexError) as error:
      yield f'{rule} cannot be applied to {_text(shapes)}: {error}'
      return
    expected = tuple(tuple(target[slot.name].shape[len(slot.index) :]) for slot in rule.target)
    if results != expected:
      yield f'{rule} gives {_text(results)}, but {self.target} has {_text(expected)}'


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
      yield f'{side} has {name} {list(shape)}, which has no counterpart on the other side'
      continue
    indices = list(itertools.product(*map(range, shape[: len(used[name][0])])))
    if sorted(used[name]) != indices:
      num_used = len(set(used[name]) & set(indices))
      yield f'{side} has {name} {list(shape)}, of which {num_used} of {len(indices)} are used'


@functools.lru_cache(maxsize=4096)
def _result_shapes(operations: tuple[Operation, ...], shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
  abstract = tuple(jax.ShapeDtypeStruct(shape, 'float32') for shape in shapes)
  results = jax.eval_shape(lambda *arrays: Rule([], [], *operations).apply(arrays), *abstract)
  return tuple(array.shape for array in results)


def _text(shapes: tuple[Shape, ...]) -> str:
  return ', '.join(str(list(shape)) for shape in shapes)


def _stack_lazily(parts: Mapping[tuple[int, ...], Any]) -> LazyArray:
  """Stacks the parts by index, dim by dim."""
  if () in parts:
    return _lazy_arrays.lazy_array(parts[()])
  first_indices = sorted({index[0] for index in parts})
  return _lazy_arrays.stack(
    [_stack_lazily({index[1:]: part for index, part in parts.items() if index[0] == i}) for i in first_indices], 0
  )
