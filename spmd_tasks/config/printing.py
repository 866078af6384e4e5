"""Saved configs as text: the whole of one, and what differs between two."""

from collections.abc import Mapping
from typing import Any

from spmd_tasks.config.encoding import show


def format_config(saved: Mapping[str, Any]) -> str:
  """`path = value` lines, sorted: the experiment's own fields, then its parts; a class stands above its fields."""
  config = saved['config']
  own = sorted(path for path in config if not _is_in_part(path))
  parts = sorted((path for path in config if _is_in_part(path)), key=lambda path: path.split('.'))
  lines = [f'experiment = {saved["experiment"]}'] + [f'{path} = {show(config[path])}' for path in own + parts]
  return '\n'.join(lines) + '\n'


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """`path: old -> new` of every path at which two saved configs differ, sorted; the experiment's name first."""
  lines = []
  if old['experiment'] != new['experiment']:
    lines.append(f'experiment: {old["experiment"]} -> {new["experiment"]}')
  before, after = old['config'], new['config']
  for path in sorted({*before, *after}, key=lambda path: path.split('.')):
    sides = [show(config[path]) if path in config else 'absent' for config in (before, after)]
    if sides[0] != sides[1]:
      lines.append(f'{path}: {sides[0]} -> {sides[1]}')
  return lines


def _is_in_part(path: str) -> bool:
  return path.split('.')[0] in ('task', 'train_input', 'eval_inputs', 'decode_inputs')
