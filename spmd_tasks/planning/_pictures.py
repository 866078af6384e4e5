"""Draws the pictures of a plan as inline SVG: a weight's split, the roofline, the ticks of a pipeline.

Colours are classes, which the page's style sheet fills for light and dark.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from spmd_tasks.layers.pipeline import Schedule
from spmd_tasks.planning._markup import Html, duration, join, percent, quantity, tag

_HATCH = 'url(#hatch)'
_MAX_LINES = 16  # more parts than these are not drawn one by one
WIDTH, HEIGHT = 92, 44  # of the drawing of a weight


def hatch_pattern() -> Html:
  """The pattern of padding and of bubbles, which every drawing of the page refers to."""
  line = tag('path', d='M0,6 L6,0', class_='hatch')
  pattern = tag('pattern', line, id='hatch', width=6, height=6, patternUnits='userSpaceOnUse')
  return tag('svg', tag('defs', pattern), width=0, height=0, style='position:absolute', aria_hidden='true')


def weight_drawing(weight: Mapping[str, Any], mesh: Mapping[str, int]) -> Html:
  """Draws two dims of a weight: lines between the parts, the first device's part filled, padding hatched.

  Args:
    weight: a row of plan.json's `weights`.
    mesh: axis -> size.
  """
  shape, padded = weight['shape'], weight.get('padded_shape') or weight['shape']
  parts = [math.prod(mesh.get(axis, 1) for axis in axes) for axes in weight.get('spec') or [[]] * len(padded)]
  by_interest = sorted(range(len(padded)), key=lambda dim: (-(parts[dim] > 1), -padded[dim]))
  drawn = sorted(by_interest[:2])
  if not drawn:
    return Html('')
  rows, columns = (drawn[0], drawn[1]) if len(drawn) == 2 else (None, drawn[0])
  height = HEIGHT if rows is not None else 14
  top = (HEIGHT - height) / 2
  behind = [dim for dim in range(len(padded)) if parts[dim] > 1 and dim not in drawn]
  shapes = []
  for offset in (6, 3) if behind else ():  # a pile: a third dim is split too
    shapes.append(tag('rect', x=offset, y=top - offset + 6, width=WIDTH, height=height, class_='behind'))
  top += 6

  def of(dim: int | None, length: float) -> tuple[int, float]:
    """The parts of a dim that are drawn, and the length of its padding."""
    if dim is None:
      return 1, 0.0
    waste = (padded[dim] - shape[dim]) / padded[dim] * length if padded[dim] else 0.0
    return min(parts[dim], _MAX_LINES), max(waste, 2.5) if waste else 0.0

  (num_rows, waste_y), (num_columns, waste_x) = of(rows, height), of(columns, WIDTH)
  shapes.append(tag('rect', x=0, y=top, width=WIDTH, height=height, class_='whole'))
  own = {'width': round(WIDTH / num_columns, 2), 'height': round(height / num_rows, 2)}
  shapes.append(tag('rect', x=0, y=top, **own, class_='own'))
  if waste_x:
    shapes.append(tag('rect', x=round(WIDTH - waste_x, 2), y=top, width=round(waste_x, 2), height=height, fill=_HATCH))
  if waste_y:
    shapes.append(
      tag('rect', x=0, y=round(top + height - waste_y, 2), width=WIDTH, height=round(waste_y, 2), fill=_HATCH)
    )
  for at in range(1, num_columns):
    x = round(at * WIDTH / num_columns, 2)
    shapes.append(tag('line', x1=x, y1=top, x2=x, y2=top + height, class_='cut'))
  for at in range(1, num_rows):
    y = round(top + at * height / num_rows, 2)
    shapes.append(tag('line', x1=0, y1=y, x2=WIDTH, y2=y, class_='cut'))
  shapes.append(tag('rect', x=0, y=top, width=WIDTH, height=height, class_='frame'))
  label = f'{weight["name"]} in {" x ".join(map(str, parts))} parts'
  box = f'-1 -1 {WIDTH + 8} {HEIGHT + 8}'
  return tag('svg', tag('title', label), shapes, viewBox=box, width=WIDTH + 8, height=HEIGHT + 8, class_='weight')


def roofline(figures: Mapping[str, Any], step_s: float | None) -> Html:
  """Draws the roofline (Williams et al., 2009): attainable FLOP/s over FLOPs per byte of HBM, and the step in it.

  Args:
    figures: plan.json's `roofline`.
    step_s: the predicted step time.
  """
  peak, bandwidth = figures['peak_flops'], figures['hbm_bandwidth']
  intensity = figures['flops'] / max(figures['hbm_bytes'], 1)
  reached = figures['flops'] / step_s if step_s else None
  attainable = min(peak, intensity * bandwidth)
  ridge = peak / bandwidth
  low_x, high_x = (
    10 ** math.floor(math.log10(min(intensity, ridge) / 5)),
    10 ** math.ceil(math.log10(max(intensity, ridge) * 3)),
  )
  low_y = 10 ** math.floor(math.log10(min(reached or attainable, attainable, low_x * bandwidth)))
  high_y = 10 ** math.ceil(math.log10(peak * 1.5))
  left, top, width, height = 74, 12, 410, 210

  def x_of(value: float) -> float:
    return round(left + width * math.log10(value / low_x) / math.log10(high_x / low_x), 1)

  def y_of(value: float) -> float:
    return round(top + height * (1 - math.log10(value / low_y) / math.log10(high_y / low_y)), 1)

  shapes = []
  for power in range(round(math.log10(low_x)), round(math.log10(high_x)) + 1):
    x = x_of(10**power)
    shapes.append(tag('line', x1=x, y1=top, x2=x, y2=top + height, class_='grid'))
    shapes.append(tag('text', f'{10**power:g}', x=x, y=top + height + 16, text_anchor='middle'))
  for power in range(round(math.log10(low_y)), round(math.log10(high_y)) + 1):
    y = y_of(10**power)
    shapes.append(tag('line', x1=left, y1=y, x2=left + width, y2=y, class_='grid'))
    shapes.append(tag('text', quantity(10**power), x=left - 8, y=y + 4, text_anchor='end'))
  roof = f'M{x_of(low_x)},{y_of(low_x * bandwidth)} L{x_of(ridge)},{y_of(peak)} L{x_of(high_x)},{y_of(peak)}'
  shapes.append(tag('path', d=roof, class_='roof'))
  peak_label = f'peak {quantity(peak, "FLOP/s")}'
  shapes.append(tag('text', peak_label, x=left + width - 4, y=y_of(peak) - 7, text_anchor='end', class_='strong'))
  run, rise = x_of(ridge) - x_of(low_x), y_of(low_x * bandwidth) - y_of(peak)
  middle = f'{x_of(low_x) + run * 0.45} {y_of(low_x * bandwidth) - rise * 0.45 - 8}'
  along = f'translate({middle}) rotate({-math.degrees(math.atan2(rise, run)):.1f})'
  hbm_label = f'HBM {quantity(bandwidth, "B/s")}'
  shapes.append(tag('text', hbm_label, transform=along, text_anchor='middle', class_='strong'))
  x = x_of(intensity)
  shapes.append(tag('line', x1=x, y1=y_of(attainable), x2=x, y2=top + height, class_='drop'))
  if reached:
    side = {'x': x - 10, 'text_anchor': 'end'} if x > left + width / 2 else {'x': x + 10}
    shapes.append(tag('circle', cx=x, cy=y_of(reached), r=5.5, class_='point'))
    words = f'this step: {percent(reached / attainable)} of attainable'
    shapes.append(tag('text', words, y=top + height - 10, class_='strong', **side))
  axis = 'FLOPs per byte of HBM'
  shapes.append(tag('text', axis, x=left + width / 2, y=top + height + 34, text_anchor='middle'))
  turned = f'translate(14 {top + height / 2}) rotate(-90)'
  shapes.append(tag('text', 'FLOP/s per device', transform=turned, text_anchor='middle'))
  label = f'Roofline: {quantity(intensity)} FLOPs per byte, the ridge is at {quantity(ridge)}'
  box = f'0 0 {left + width + 20} {top + height + 42}'
  return tag('svg', tag('title', label), shapes, viewBox=box, class_='chart', role='img')


def tick_rows(pipeline: Mapping[str, Any]) -> list[list[str | None]]:
  """Returns what each stage processes in each tick: None in a bubble, 'F3', 'F3.1' (repeat 1), 'F3 B3' (both).

  Of gpipe and circular the forward pass; the backward pass has the same ticks in the reverse order. Of one forward, one
  backward the backward pass; the forward pass is gpipe's.

  Args:
    pipeline: plan.json's `pipeline`, with stages, microbatches, repeats and schedule.
  """
  stages, microbatches, repeats = pipeline['stages'], pipeline['microbatches'], pipeline.get('repeats') or 1
  schedule = Schedule(num_stages=stages, num_microbatches=microbatches, num_repeats=repeats)

  def entry(stage: int, tick: int) -> str | None:
    microbatch, repeat, is_work = schedule.work(stage, tick)
    return (f'F{microbatch}.{repeat}' if repeats > 1 else f'F{microbatch}') if is_work else None

  if pipeline.get('schedule') == 'one_forward_one_backward':
    rows = [[entry(stages - 1 - stage, tick) for tick in range(schedule.num_ticks)] for stage in range(stages)]
    return [[each and f'{each} B{each[1:]}' for each in row] for row in rows]
  return [[entry(stage, tick) for tick in range(schedule.num_ticks)] for stage in range(stages)]


def pipeline_ticks(ticks: Sequence[Sequence[str | None]]) -> Html:
  """Draws which microbatch each stage processes in each tick; bubbles are hatched.

  Args:
    ticks: as `tick_rows` makes them.
  """
  num_ticks = max(map(len, ticks), default=0)
  cell_x = 30 if num_ticks <= 24 else 22 if num_ticks <= 80 else 9
  is_split = any(entry and ' ' in entry for row in ticks for entry in row)
  cell_y, left = (36 if is_split else 24), 62
  shapes = []
  for stage, row in enumerate(ticks):
    y = 18 + stage * cell_y
    shapes.append(tag('text', f'stage {stage}', x=left - 8, y=y + 16, text_anchor='end'))
    for tick, entry in enumerate(row):
      box: dict[str, float] = {'x': left + tick * cell_x, 'y': y, 'width': cell_x - 1, 'height': cell_y - 2}
      if entry is None:
        shapes.append(tag('rect', **box, fill=_HATCH, class_='bubble'))
        continue
      halves = entry.split()  # one forward, one backward: both in a tick
      for at, half in enumerate(halves):
        microbatch, _, repeat = half[1:].partition('.')
        shade = 'tick-b' if half[0] == 'B' else f'tick-{int(repeat or 0) % 3}'
        box['height'] = (cell_y - 1) / len(halves) - 1
        box['y'] = y + at * (cell_y - 1) / len(halves)
        shapes.append(tag('rect', tag('title', f'stage {stage}, tick {tick}: {half}'), **box, class_=shade))
        if cell_x > 12:
          middle = {'x': box['x'] + cell_x / 2, 'y': box['y'] + box['height'] / 2 + 4}
          shapes.append(tag('text', microbatch, **middle, text_anchor='middle', class_=f'on-{shade}'))
  for tick in range(0, num_ticks, 1 if cell_x > 20 and num_ticks <= 24 else 5 if cell_x > 12 else 10):
    shapes.append(tag('text', tick, x=left + (tick + 0.5) * cell_x, y=12, text_anchor='middle'))
  width, height = left + num_ticks * cell_x + 4, 22 + len(ticks) * cell_y
  return tag('svg', shapes, viewBox=f'0 0 {width} {height}', width=width, height=height, class_='ticks', role='img')


def bars(rows: Sequence[tuple[Any, float, str, str]], total: float | None = None) -> Html:
  """Makes horizontal bars of HTML, so that their text stays readable on a narrow page.

  Args:
    rows: (label, value, text of the value, class of the colour).
    total: the value of a full bar; None: the largest.
  """
  full = total or max((value for _, value, _, _ in rows), default=0) or 1
  return tag(
    'div',
    [
      join(
        tag('div', label, class_='bar-label'),
        tag(
          'div', tag('div', class_=f'fill {colour}', style=f'width:{min(100, 100 * value / full):.2f}%'), class_='track'
        ),
        tag('div', text, class_='bar-value'),
      )
      for label, value, text, colour in rows
    ],
    class_='bars',
  )


def times(rows: Sequence[tuple[Any, float | None, str]]) -> Html:
  """Makes bars of seconds: (label, seconds, class of the colour); None is left out."""
  return bars([(label, seconds, duration(seconds), colour) for label, seconds, colour in rows if seconds is not None])
