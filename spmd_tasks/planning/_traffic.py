"""Counts the bytes that an instruction of a compiled program reads from and writes to the device's main memory.

A fusion reads its operands and writes its results; nothing in between goes through memory. Where it only looks up or
changes a slice of an operand, only the slice moves: loops over stacked layers do little else with their stacks. Arrays
in other memories than HBM (a TPU's vector memory) are not counted.
"""

from spmd_tasks.planning._hlo_text import Shape
from spmd_tasks.planning._instructions import Computation, Instruction
from spmd_tasks.planning.scheduled_program import ScheduledProgram

_NO_TRAFFIC = frozenset({
  'parameter', 'tuple', 'get-tuple-element', 'bitcast', 'constant', 'while', 'conditional', 'call', 'after-all',
  'partition-id', 'replica-id', 'iota', 'opt-barrier', 'optimization-barrier', 'async-start', 'async-update', 'unknown',
})  # fmt: skip
_SLICES = frozenset({'slice', 'dynamic-slice', 'gather'})
_VIEWS = frozenset({'bitcast', 'get-tuple-element'})


def hbm_bytes(program: ScheduledProgram, instruction: Instruction, computation: Computation) -> int:
  """Returns the bytes that one execution of an instruction moves; 0 for control flow, views and ends of async pairs."""
  if instruction.opcode in _NO_TRAFFIC or instruction.opcode.endswith('-done'):
    return 0
  if instruction.opcode == 'fusion':
    fused = program.graph.called(instruction)
    if fused is not None:
      return _fusion_bytes(instruction, computation, fused)
  operands = [computation.by_name[name].shape for name in instruction.operands if name in computation.by_name]
  if instruction.opcode in _SLICES:
    return 2 * _in_hbm(instruction.shape)
  if instruction.opcode == 'dynamic-update-slice':
    return 2 * _in_hbm(operands[1]) if len(operands) > 1 else 0
  written = 0 if instruction.opcode.endswith('-start') else _in_hbm(instruction.shape)
  if instruction.opcode.endswith('-start') and instruction.shape.elements:
    written = _in_hbm(instruction.shape.elements[0])
  return written + sum(map(_in_hbm, operands))


def _fusion_bytes(instruction: Instruction, computation: Computation, fused: Computation) -> int:
  users: dict[str, list[Instruction]] = {}
  for each in fused.instructions:
    for name in each.operands:
      users.setdefault(name, []).append(each)

  def read(name: str, shape: Shape) -> int:
    """The bytes read of a value: slices of it if nothing else is taken, none where it is changed in place."""
    total = 0
    for user in users.get(name, ()):
      if user.opcode in _SLICES and user.operands[0] == name:
        total += user.shape.stored_bytes
      elif user.opcode == 'dynamic-update-slice' and user.operands[0] == name:
        continue
      elif user.opcode == 'tuple' and user.is_root:
        continue  # handed on as it is
      elif user.opcode in _VIEWS:
        total += read(user.name, user.shape)
      else:
        return shape.stored_bytes
    return min(total, shape.stored_bytes)

  total = 0
  for parameter, name in zip(fused.parameters, instruction.operands):
    operand = computation.by_name.get(name)
    if operand is not None and _in_hbm(operand.shape):
      total += read(parameter.name, parameter.shape)
  roots = fused.root.operands if fused.root.opcode == 'tuple' else (fused.root.name,)
  for name, shape in zip(roots, instruction.shape.leaves()):
    if _in_hbm(shape):
      total += _written(fused, name, shape)
  return total


def _written(fused: Computation, name: str, shape: Shape) -> int:
  root = fused.by_name.get(name)
  while root is not None and root.opcode in _VIEWS and root.operands:
    root = fused.by_name.get(root.operands[0])
  if root is not None and root.opcode == 'parameter':
    return 0
  if root is not None and root.opcode == 'dynamic-update-slice' and root.operands[1] in fused.by_name:
    return fused.by_name[root.operands[1]].shape.stored_bytes
  return shape.stored_bytes


def _in_hbm(shape: Shape) -> int:
  return sum(leaf.stored_bytes for leaf in shape.leaves() if leaf.memory_space == 0)
