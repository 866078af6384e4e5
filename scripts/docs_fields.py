"""Adds each class's fields to its API entry: name, type, default, and the comment next to or above it.

A griffe extension (mkdocs.yml, `extensions`). Experiments, Linen modules and dataclasses declare fields that users set,
and describe them in comments; without this, the API reference would show none of them.
"""

from typing import Any

import griffe

_SECTION = 'Attributes:'


class FieldsOfClasses(griffe.Extension):
  """Appends an `Attributes:` section to docstrings of classes that have annotated fields and no such section."""

  def on_class(self, *, cls: griffe.Class, loader: Any, **kwargs: Any) -> None:
    fields: list[Any] = [
      member for name, member in cls.members.items() if not name.startswith('_') and _is_field(member)
    ]
    if not fields or cls.docstring is None or _SECTION in cls.docstring.value:
      return
    source = cls.filepath.read_text(encoding='utf-8').splitlines()  # type: ignore[union-attr]
    entries = [f'  {field.name} ({field.annotation}): {_description(field, source)}' for field in fields]
    cls.docstring.value = '\n'.join([cls.docstring.value, '', _SECTION, *entries])


def _is_field(member: Any) -> bool:
  return (
    member.is_attribute
    and not member.is_alias
    and member.annotation is not None
    and member.docstring is None
    and 'ClassVar' not in str(member.annotation)
    and 'property' not in member.labels
  )


def _description(field: Any, source: list[str]) -> str:
  default = '' if field.value is None else f'Default: `{" ".join(str(field.value).split())}`.'
  return ' '.join(part for part in (_comment(field, source), default) if part) or 'Required.'


def _comment(field: Any, source: list[str]) -> str:
  """Returns the comment after the field, or else the comment lines directly above it."""
  behind = source[field.endlineno - 1].rpartition('  # ')
  if behind[1]:
    return f'{behind[2].strip().rstrip(".")}.'
  lines: list[str] = []
  for line in reversed(source[: field.lineno - 1]):
    if not line.strip().startswith('# '):
      break
    lines.insert(0, line.strip().removeprefix('# '))
  return ' '.join(lines)
