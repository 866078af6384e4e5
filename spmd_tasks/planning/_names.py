"""Finds JAX's name of what an instruction belongs to, also where the compiler made the instruction and gave it none.

A loop that the compiler rewrote has the name that most of its body has. Any other instruction without a name has that
of the nearest instruction that needs its result, or else of the nearest one that its operands come from: an all-gather
is named after the product that it is for.
"""

import collections

from spmd_tasks.planning._instructions import Computation, Instruction
from spmd_tasks.planning._lifetimes import origin_of
from spmd_tasks.planning.scheduled_program import ScheduledProgram

_MAX_DEPTH = 6
_LOOP = '/while/body'


def op_name_of(program: ScheduledProgram, computation: Computation, instruction: Instruction) -> str:
  """Returns JAX's name of an instruction, such as 'jit(train_step)/jvp(LanguageModel)/stack/while'; '' if none fits."""
  if is_jax_name(instruction.op_name):
    return instruction.op_name
  if instruction.opcode == 'while':
    return _loop_name(program, instruction) or instruction.op_name
  fused = program.graph.called(instruction) if instruction.opcode == 'fusion' else None
  inside = [fused.root, *reversed(fused.instructions)] if fused else []
  named = next((each.op_name for each in inside if is_jax_name(each.op_name)), '')
  return named or _nearest(program, computation, instruction, forwards=True) or _nearest(
    program, computation, instruction, forwards=False
  ) or instruction.op_name  # fmt: skip


def is_jax_name(op_name: str) -> bool:
  """Whether a name is a path of JAX's, 'jit(f)/...', and not one that the compiler made up, such as 'broadcast.83'."""
  return '/' in op_name


def loop_element_name(program: ScheduledProgram, loop: Instruction, index: int) -> str:
  """Returns JAX's name of what a loop's body writes to element `index` of its state; '' if the body only hands it on.

  Of an update, as of a stack of all layers' activations, that is the name of what is written, not of the update; it is
  '.../while/carry' if that is what the pass of the loop received.
  """
  body = program.graph.called(loop, 'body')
  origin = origin_of(body, body.root.name, (index,)) if body else None
  if body is None or origin is None:
    return ''
  writer = body.by_name[origin[0]]
  made = [body.by_name[name] for name in writer.operands if not _is_carried(body, name)]
  for each in sorted(made, key=lambda each: -each.shape.num_bytes):
    name = each.op_name if is_jax_name(each.op_name) else _nearest(program, body, each, forwards=False)
    if name:
      return name
  return f'{writer.op_name.split(_LOOP)[0]}/while/carry' if _LOOP in writer.op_name else writer.op_name


def _is_carried(body: Computation, name: str) -> bool:
  origin = origin_of(body, name, ())
  return origin is None or body.by_name[origin[0]].opcode in ('parameter', 'constant')


def _loop_name(program: ScheduledProgram, loop: Instruction) -> str:
  body = program.graph.called(loop, 'body')
  names = [each.op_name.split(_LOOP)[0] for each in body.instructions if _LOOP in each.op_name] if body else []
  return f'{collections.Counter(names).most_common(1)[0][0]}/while' if names else ''


def _nearest(program: ScheduledProgram, computation: Computation, start: Instruction, *, forwards: bool) -> str:
  frontier, seen = [start], {start.name}
  for _ in range(_MAX_DEPTH):
    reached: list[Instruction] = []
    for each in frontier:
      if forwards:
        reached += computation.users.get(each.name, ())
      else:
        reached += [computation.by_name[name] for name in each.operands if name in computation.by_name]
    frontier = [each for each in reached if each.name not in seen]
    seen.update(each.name for each in frontier)
    for each in frontier:
      if is_jax_name(each.op_name):
        return each.op_name
      if each.opcode == 'while' and (name := _loop_name(program, each)):
        return name
  return ''
