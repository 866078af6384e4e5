"""Lists the modules that `peft` adapts in a family's model, each with those of our kernels that it holds.

    for module in peft_modules(folder):
      a, b = module.per_expert(lora_a, lora_b)                         # [E?, R, in], [E?, out, R]
      for slot, (row_of, column_of) in zip(module.slots, module.places(out, in_, num_input_dims)):
        ...                                                            # b[..., row_of, :], a[..., column_of]

A module is a Linear [out, in] (GPT-2: a Conv1D [in, out]), which may hold several kernels: queries, keys and values, or
gate and up. Or it is a parameter with the kernels of all experts, as transformers 5 holds them in memory, which `peft`
adapts by `target_parameters`; older folders have a Linear for each expert. The rules by which a family's tensors become
kernels, applied to the numbers of rows and columns, say where each of them goes.

Shapes: R rank, E experts.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from spmd_tasks.bridges._operations import Operation
from spmd_tasks.bridges._rules import Rule, Slot
from spmd_tasks.bridges.huggingface._describe import model_places
from spmd_tasks.bridges.huggingface._folder import Folder
from spmd_tasks.bridges.huggingface._tensors import gpt2_rules
from spmd_tasks.tuning.adapted_weights import adaptable_weights

_GATE_UP, _DOWN = 'gate_up_proj', 'down_proj'


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftModule:
  """A module of a family's model that `peft` adapts by one A and one B.

  Attributes:
    name: as the family's model has it; of a parameter of experts, that of the parameter.
    slots: the kernels that it holds; of experts, the places have no expert.
    operations: of the rule that makes these kernels from the weight.
    is_transposed: whether the weight is [in, out].
    num_experts: E, if it is a parameter with all experts; else None.
    takes_turns: whether the columns of gate and up take turns in it (gpt-oss).
    is_old: whether only older versions of `peft` and transformers write it.
  """

  name: str
  slots: tuple[Slot, ...]
  operations: tuple[Operation, ...] = ()
  is_transposed: bool = False
  num_experts: int | None = None
  takes_turns: bool = False
  is_old: bool = False

  def places(self, num_out: int, num_in: int, num_input_dims: int) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """Returns for each kernel the row [O...] and the column [I...] of the weight that each of its places is from."""
    if self.num_experts is None:
      return _places(self.operations, self.is_transposed, num_out, num_in, num_input_dims)
    num, columns = len(self.slots), np.arange(num_in)
    rows = np.arange(num_out).reshape((-1, num) if self.takes_turns else (num, -1))
    return [(rows[:, each] if self.takes_turns else rows[each], columns) for each in range(num)]

  def per_expert(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [E, R, in] and B [E, out, R] of a parameter with all experts; of a Linear, [R, in] and [out, R]."""
    if self.num_experts is None:
      return a, b
    return a.reshape(self.num_experts, -1, a.shape[1]), np.moveaxis(b.reshape(len(b), -1, self.num_experts), -1, 0)

  def joined(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A and B as `peft` saves them, two dims each: the inverse of `per_expert`."""
    if self.num_experts is None:
      return a, b
    return a.reshape(-1, a.shape[2]), np.moveaxis(b, 0, -1).reshape(b.shape[1], -1)

  def rank(self, num_rows: int) -> int:
    """Returns R for the number of A's rows."""
    return num_rows // (self.num_experts or 1)


def peft_modules(folder: Folder) -> list[PeftModule]:
  """Returns the modules of a folder's model whose kernels can all have adapters."""
  model = folder.build_model()
  adaptable, places = adaptable_weights(model), model_places(model)
  found = []
  for rule in folder.family.rules(folder.decoder, places):
    name = rule.source[0].name
    if len(rule.source) != 1 or not name.endswith('.weight') or not all(slot.name in adaptable for slot in rule.target):
      continue
    settings: dict[str, Any] = {'slots': rule.target, 'operations': rule.operations}
    settings |= {'is_transposed': folder.family.rule_maker is gpt2_rules, 'is_old': '/experts/' in rule.target[0].name}
    found.append(PeftModule(name=name.removesuffix('.weight'), **settings))
  mixture = folder.decoder.mixture
  for i, place in enumerate(places):
    if mixture is None or folder.decoder.num_encoder_layers or not folder.decoder.mixed[i]:
      continue
    for name, kernels in ((_GATE_UP, ('gate', 'up')), (_DOWN, ('down',))):
      slots = tuple(Slot(f'{place.prefix}ffn/experts/{kernel}', place.index) for kernel in kernels)
      if all(slot.name in adaptable for slot in slots):
        parameter = f'{folder.family.names.layer.format(i)}mlp.experts.{name}'
        routing = mixture.routing
        found.append(
          PeftModule(name=parameter, slots=slots, num_experts=routing.num_experts, takes_turns=routing.use_bias)
        )
  return found


def saved_prefix(module: PeftModule, others: Sequence[PeftModule]) -> str:
  """Returns what the names of a module's tensors begin with, if a folder has `others` too.

  `peft` wraps the module of experts once for each parameter, the first one innermost.
  """
  if module.num_experts is None:
    return module.name
  experts, _, parameter = module.name.rpartition('.')
  is_inner = parameter == _GATE_UP and any(other.name == f'{experts}.{_DOWN}' for other in others)
  return f'{experts}.base_layer' if is_inner else experts


def names_of_parameters(prefixes: Sequence[str], targets: Sequence[str]) -> Iterator[tuple[str, str]]:
  """Yields (prefix of tensors, name of the module), where parameters of experts get the parameter's name.

  `prefixes` are all that tensors of a folder begin with, `targets` the `target_parameters` of its config.
  """
  for prefix in prefixes:
    experts = prefix.removesuffix('.base_layer')
    if experts.rpartition('.')[2] != 'experts':
      yield prefix, prefix
      continue
    is_alone = f'{experts}.base_layer' not in prefixes
    is_down = any(f'.{experts}.{_DOWN}'.endswith(f'.{target}') for target in targets)
    is_inner = prefix != experts or (is_alone and not is_down)
    yield prefix, f'{experts}.{_GATE_UP if is_inner else _DOWN}'


@functools.lru_cache(maxsize=256)
def _places(
  operations: tuple[Operation, ...], is_transposed: bool, num_out: int, num_in: int, num_input_dims: int
) -> list[tuple[Any, Any]]:
  rows, columns = np.ogrid[:num_out, :num_in]
  numbers = [np.broadcast_to(each, (num_out, num_in)).astype(np.int32) for each in (rows, columns)]
  row_of, column_of = (Rule([], [], *operations).apply((each.T if is_transposed else each,)) for each in numbers)
  return [
    (rows[(0,) * num_input_dims], columns[(..., *[0] * (columns.ndim - num_input_dims))])
    for rows, columns in zip(row_of, column_of)
  ]
