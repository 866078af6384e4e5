"""Builds HTML and SVG whose text is always escaped, and formats bytes, seconds and counts for people.

    tag('p', 'fits in ', tag('b', size(2**34)), class_='good')   # <p class="good">fits in <b>16.0 GiB</b></p>

A child that is an `Html` is taken as it is, every other one is text. So no name of the user's can become markup.
"""

import html
from typing import Any

_EMPTY = frozenset({'br', 'circle', 'line', 'path', 'rect', 'col'})  # elements without children


class Html(str):
  """Text that is HTML already."""


def join(*children: Any) -> Html:
  """Joins children; None is left out, lists and tuples are taken apart."""
  parts: list[str] = []
  for child in children:
    if isinstance(child, Html):
      parts.append(child)
    elif isinstance(child, list | tuple):
      parts.append(join(*child))
    elif child is not None:
      parts.append(html.escape(str(child)))
  return Html(''.join(parts))


def tag(name: str, *children: Any, **attributes: Any) -> Html:
  """Makes an element. Attributes that are None are left out; `class_` is `class`, and `stroke_width` `stroke-width`."""
  written = ''.join(
    f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
    for key, value in attributes.items()
    if value is not None
  )
  if name in _EMPTY and not children:
    return Html(f'<{name}{written}/>')
  return Html(f'<{name}{written}>{join(*children)}</{name}>')


def table(header: list[Any], rows: list[list[Any]], numeric: tuple[int, ...] = (), class_: str | None = None) -> Html:
  """Makes a table that scrolls by itself where the page is narrow; `numeric` columns are aligned to the right."""

  def cells(kind: str, row: list[Any]) -> Html:
    return join([tag(kind, cell, class_='num' if at in numeric else None) for at, cell in enumerate(row)])

  head = tag('thead', tag('tr', cells('th', header)))
  body = tag('tbody', [tag('tr', cells('td', row)) for row in rows])
  return tag('div', tag('table', head, body, class_=class_), class_='scroll')


def size(num_bytes: float | None) -> str:
  """Formats bytes in binary units, as compilers do: 15.75 GiB."""
  if num_bytes is None:
    return 'unknown'
  sign, left = ('-' if num_bytes < 0 else ''), abs(float(num_bytes))
  for unit in ('B', 'KiB', 'MiB', 'GiB', 'TiB'):
    if left < 1024 or unit == 'TiB':
      break
    left /= 1024
  digits = 0 if unit == 'B' else 2 if left < 100 and unit in ('GiB', 'TiB') else 1
  return f'{sign}{left:,.{digits}f} {unit}'


def duration(seconds: float | None) -> str:
  """Formats seconds: 1.28 s, 35.2 ms, 410 µs."""
  if seconds is None:
    return 'unknown'
  for factor, unit in ((1, 's'), (1e3, 'ms'), (1e6, 'µs')):
    if seconds * factor >= 1 or unit == 'µs':
      break
  value = seconds * factor
  if 0 < value < 1:
    return 'under 1 µs'
  return f'{value:,.0f} {unit}' if value >= 100 or value == 0 else f'{value:#.3g} {unit}'


def quantity(value: float | None, unit: str = '') -> str:
  """Formats a large number in decimal units: 459 TFLOP/s."""
  if value is None:
    return 'unknown'
  left = float(value)
  for prefix in ('', 'k', 'M', 'G', 'T', 'P', 'E'):
    if abs(left) < 1000 or prefix == 'E':
      break
    left /= 1000
  return f'{left:.3g} {prefix}{unit}'.strip() if unit or prefix else f'{left:.3g}'


def percent(fraction: float | None) -> str:
  """Formats a fraction as a percentage with the digits that it deserves."""
  if fraction is None:
    return 'unknown'
  return f'{fraction:.1%}' if fraction < 0.1 or 0.99 < fraction < 1 else f'{fraction:.0%}'
