"""Makes plan.html: one static page with pictures, from the dictionary of plan.json alone.

    Path('plan.html').write_text(plan_page(json.loads(Path('plan.json').read_text())))

The page is the template plan_page.html, which escapes everything; here are the numbers of its pictures. It needs no
network and no script, follows light and dark, and can be printed. A key of the plan that is missing leaves its part of
the page out. Colours are classes, which the page's style sheet fills for light and dark.
"""

import collections
from collections.abc import Mapping, Sequence
import math
import re
from typing import Any

import jinja2

Plan = Mapping[str, Any]
_COMPILERS = {'tpu': 'the compiler of TPUs', 'gpu': 'the compiler of GPUs', 'cpu': 'the compiler of CPUs'}
_KINDS = {
  'cycles': "compiler's cycles",
  'roofline': 'others, by their roofline',
  'kernel': 'kernels',
  'ici': 'ICI, not hidden',
  'dcn': 'DCN, not hidden',
  'host': 'copies to and from the host, not hidden',
}
_NETWORKS = {'ici': 'ICI', 'dcn': 'DCN'}
_COLOURS = 9  # bg0 ... bg8, of which the last is grey
_MAX_LINES = 16  # more parts of a weight than these are not drawn one by one
_SHORTER = (
  (re.compile(r'^jit\(\w+\)/'), ''),
  (re.compile(r'transpose\(jvp\(\w*\)\)/'), 'backward: '),
  (re.compile(r'jvp\(\w*\)/'), 'forward: '),
  (re.compile(r'/(while|body|closed_call|checkpoint|rematted_computation)(?=/|$)'), ''),
)


def plan_page(plan: Plan) -> str:
  """Returns the page.

  Args:
    plan: what plan.json holds: `fits`, `hbm_bytes`, `peak_bytes`, `predicted_step_s`, ... as `Plan.to_json` gives it.
  """
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('spmd_tasks.planning', ''), autoescape=True, trim_blocks=True, lstrip_blocks=True
  )
  environment.filters |= {
    'size': size, 'duration': duration, 'quantity': quantity, 'percent': percent, 'words': _words, 'layer': _layer,
    'bool': bool,
  }  # fmt: skip
  figures = {**(plan.get('chip_figures') or {}), **(plan.get('roofline') or {})}
  figures['hbm_bytes'] = (plan.get('roofline') or {}).get('hbm_bytes')  # moved in a step, not what a chip has
  can_draw = all(figures.get(key) for key in ('flops', 'hbm_bytes', 'peak_flops', 'hbm_bandwidth'))
  bounds, kinds = _times(plan, figures)
  mesh = plan.get('mesh') or {}
  weights = sorted(plan.get('weights') or (), key=lambda row: -(row.get('bytes_per_device') or 0))
  return environment.get_template('plan_page.html').render(
    plan=plan,
    subtitle=_subtitle(plan),
    verdict=_verdict(plan),
    figures=_figures(plan),
    memory=_memory(plan),
    bounds=bounds,
    kinds=kinds,
    figures_of_chip=figures,
    roof=_roofline(figures, plan.get('predicted_step_s')) if can_draw else None,
    collectives=_collectives(plan),
    ticks=_ticks(_shown_ticks(plan['pipeline'])) if plan.get('pipeline') else None,
    weights=[_weight(row, mesh) for row in weights],
    compiler=_COMPILERS.get(str(plan.get('compiler')), plan.get('compiler')),
  )


def _subtitle(plan: Plan) -> str:
  dcn = plan.get('dcn_mesh') or {}
  axes = [
    f'{axis} {length}' + (f' ({dcn[axis]} over DCN)' if dcn.get(axis, 1) > 1 else '')
    for axis, length in (plan.get('mesh') or {}).items()
    if length > 1
  ]
  slices = plan.get('num_slices') or 1
  devices = f'{plan["num_devices"]:,} devices' if plan.get('num_devices') else None
  parts = [
    plan.get('chip'),
    devices and (f'{devices} in {slices} slices' if slices > 1 else devices),
    'mesh ' + ' x '.join(axes) if axes else 'one device',
    f'{plan["step"]} step' if plan.get('step') else None,
  ]
  return ' · '.join(part for part in parts if part)


def _verdict(plan: Plan) -> dict[str, Any]:
  peak = max(each.get('peak_bytes') or 0 for each in (plan, *(plan.get('steps') or {}).values())) or None
  limit = plan.get('hbm_bytes')
  if plan.get('fits') is None or not limit:
    words = f'Needs {size(peak)} per device' if peak else 'Memory is not known'
    return {'colour': 'open', 'words': words, 'detail': 'No limit is known for these devices.'}
  if plan['fits']:
    detail = f'{size(limit - peak)} ({percent(1 - peak / limit)}) are free at the peak.' if peak else None
    return {'colour': 'good', 'words': f'Fits: {size(peak)} of {size(limit)} per device', 'detail': detail}
  detail = f'{size(peak - limit)} too much: {peak / limit:.2f} times what a device has.' if peak else None
  words = f'Does not fit: needs {size(peak)} of {size(limit)} per device'
  return {'colour': 'bad', 'words': words, 'detail': detail}


def _figures(plan: Plan) -> list[tuple[str, ...]]:
  """The boxes under the verdict: label, value and perhaps a note."""
  boxes: list[tuple[str, ...]] = []
  low, high = plan.get('predicted_step_low_s'), plan.get('predicted_step_high_s')
  is_estimated = 'cycles' in (plan.get('time_by_kind') or {})  # else every operation takes its roofline
  if plan.get('predicted_step_s') is not None:
    span = (f'{duration(low)} to {duration(high)}',) if low is not None and high is not None else ()
    boxes.append(('predicted step' if is_estimated else 'step at best', duration(plan['predicted_step_s']), *span))
  if plan.get('predicted_mfu') is not None:
    label = 'predicted MFU' if is_estimated else 'MFU at best'
    boxes.append((label, percent(plan['predicted_mfu']), 'of the bfloat16 peak'))
  if plan.get('tokens_per_s_per_chip') is not None:
    boxes.append(('tokens per second', f'{plan["tokens_per_s_per_chip"]:,.0f}', 'per chip'))
  if (plan.get('roofline') or {}).get('flops'):
    boxes.append(('work', quantity(plan['roofline']['flops'], 'FLOP'), 'per device and step'))
  if plan.get('pipeline'):
    boxes.append(('pipeline bubble', percent(plan['pipeline'].get('bubble')), 'of the ticks'))
  if plan.get('argument_bytes') is not None:
    temporaries = () if plan.get('temp_bytes') is None else (f'+ {size(plan["temp_bytes"])} temporaries',)
    boxes.append(('arguments', size(plan['argument_bytes']), *temporaries))
  return boxes


def _memory(plan: Plan) -> dict[str, Any] | None:
  held = {name: part for name, part in (plan.get('memory') or {}).items() if part}
  if not held:
    return None
  total = sum(held.values())
  peak, limit = plan.get('peak_bytes') or total, plan.get('hbm_bytes')
  parts = [(name, part, f'bg{at % _COLOURS}') for at, (name, part) in enumerate(held.items())]
  if peak - total > 0.005 * peak:
    parts.append(('not attributed', peak - total, 'bg8'))
  is_small = bool(limit) and peak < 0.1 * (limit or 0)  # the bar is then the peak, because nothing could be seen
  full = max(sum(part for _, part, _ in parts), 0 if is_small else limit or 0)
  return {'parts': parts, 'peak': peak, 'limit': limit, 'is_small': is_small, 'full': full}


def _times(plan: Plan, figures: Mapping[str, Any]) -> tuple[list[tuple], list[tuple]]:
  """Rows of bars, (label, seconds, text, colour): what each resource alone needs; what the step is made of."""
  bounds = [
    ('matmuls at the peak', figures.get('compute_s'), 'bg0'),
    ('HBM traffic', figures.get('hbm_s'), 'bg1'),
    ('ICI traffic', figures.get('ici_s'), 'bg2'),
    ('DCN traffic', figures.get('dcn_s'), 'bg3'),
    ('host traffic', figures.get('host_s'), 'bg3'),
  ]
  bounds = [bound for bound in bounds if bound[1]]
  if bounds and plan.get('predicted_step_s') is not None:
    bounds.append(('predicted step', plan['predicted_step_s'], 'bg6'))
  kinds = [
    (_KINDS.get(kind) or _words(kind), seconds, f'bg{at % _COLOURS}')
    for at, (kind, seconds) in enumerate((plan.get('time_by_kind') or {}).items())
  ]

  def with_text(rows: list[tuple]) -> list[tuple]:
    return [(label, seconds, duration(seconds), colour) for label, seconds, colour in rows if seconds is not None]

  return with_text(bounds), with_text(kinds)


def _roofline(figures: Mapping[str, Any], step_s: float | None) -> dict[str, Any]:
  """Places the roofline (Williams et al., 2009): attainable FLOP/s over FLOPs per byte of HBM, and the step in it."""
  peak, bandwidth = figures['peak_flops'], figures['hbm_bandwidth']
  intensity, ridge = figures['flops'] / max(figures['hbm_bytes'], 1), peak / bandwidth
  reached = figures['flops'] / step_s if step_s else None
  attainable = min(peak, intensity * bandwidth)
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

  def powers(low: float, high: float) -> list[float]:
    return [10**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]

  run, rise = x_of(ridge) - x_of(low_x), y_of(low_x * bandwidth) - y_of(peak)
  middle = f'{x_of(low_x) + run * 0.45} {y_of(low_x * bandwidth) - rise * 0.45 - 8}'
  return {
    'left': left,
    'top': top,
    'width': width,
    'height': height,
    'columns': [(x_of(value), f'{value:g}') for value in powers(low_x, high_x)],
    'rows': [(y_of(value), quantity(value)) for value in powers(low_y, high_y)],
    'path': f'M{x_of(low_x)},{y_of(low_x * bandwidth)} L{x_of(ridge)},{y_of(peak)} L{x_of(high_x)},{y_of(peak)}',
    'peak_y': y_of(peak),
    'along': f'translate({middle}) rotate({-math.degrees(math.atan2(rise, run)):.1f})',
    'x': x_of(intensity),
    'attainable_y': y_of(attainable),
    'reached_y': y_of(reached) if reached else None,
    'share': reached / attainable if reached else None,
    'label': f'Roofline: {quantity(intensity)} FLOPs per byte, the ridge is at {quantity(ridge)}',
  }


def _collectives(plan: Plan) -> dict[str, list]:
  """Bars of bytes over each axis and network, and a line per kind, axes, network and way of collective."""
  per_axis: dict[tuple[str, str], float] = collections.defaultdict(float)
  lines: dict[tuple, list[Mapping[str, Any]]] = collections.defaultdict(list)
  for each in plan.get('collectives') or ():
    axes, network = ' + '.join(each.get('axes') or ()) or 'unknown axis', str(each.get('network') or 'ici')
    is_async = 'asynchronous' if each.get('is_asynchronous') else 'synchronous'
    per_axis[axes, network] += _bytes_of(each)
    how = 'inside a matmul' if each.get('is_collective_matmul') else is_async
    lines[each.get('kind'), axes, _NETWORKS.get(network, network), how].append(each)
  made = [
    {
      **dict(zip(('kind', 'axes', 'network', 'how'), key)),
      'total': sum(map(_bytes_of, members)),
      'count': sum(each.get('count') or 1 for each in members),
      'main': max(members, key=_bytes_of),
    }
    for key, members in lines.items()
  ]
  bars = [
    (f'{axes} over {_NETWORKS.get(network, network)}', total, size(total), 'bg3' if network == 'dcn' else 'bg2')
    for (axes, network), total in per_axis.items()
  ]
  return {
    'per_axis': sorted(bars, key=lambda bar: -bar[1]),
    'lines': sorted(made, key=lambda line: -line['total']),
  }


def _bytes_of(collective: Mapping[str, Any]) -> float:
  return (collective.get('bytes_per_device') or 0) * (collective.get('count') or 1)


def _weight(row: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, Any]:
  """A weight's row: its dims as texts, how many copies there are, and the numbers of its drawing."""
  shape, padded = row['shape'], row.get('padded_shape') or row['shape']
  spec, names = row.get('spec') or [[]] * len(padded), row.get('split_dims') or [None] * len(shape)
  dims = []
  for name, true, stored, axes in zip(names, shape, padded, spec):
    label = name if isinstance(name, str) else '+'.join(map(str, name or ()))
    split = ' + '.join(f'{axis} {mesh.get(axis, 1)}' for axis in axes)
    text = f'{label} {true:,}' + (f' (stored {stored:,})' if stored != true else '')
    dims.append(text + (f' / {split}' if _num_parts(axes, mesh) > 1 else ''))
  copies = _num_parts(row.get('replicated_over') or (), mesh)
  return {'row': row, 'dims': dims, 'copies': copies, 'drawing': _drawing(row['name'], shape, padded, spec, mesh)}


def _drawing(
  name: str, shape: Sequence[int], padded: Sequence[int], spec: Sequence[Sequence[str]], mesh: Mapping[str, int]
) -> dict[str, Any] | None:
  """Two dims of a weight: lines between the parts, the first device's part filled, padding hatched."""
  parts = [_num_parts(axes, mesh) for axes in spec]
  by_interest = sorted(range(len(padded)), key=lambda dim: (-(parts[dim] > 1), -padded[dim]))
  drawn = sorted(by_interest[:2])
  if not drawn:
    return None
  rows, columns = (drawn[0], drawn[1]) if len(drawn) == 2 else (None, drawn[0])
  height = 44 if rows is not None else 14
  behind = [dim for dim in range(len(padded)) if parts[dim] > 1 and dim not in drawn]

  def of(dim: int | None, length: float) -> tuple[int, float]:
    """The parts of a dim that are drawn, and the length of its padding."""
    if dim is None:
      return 1, 0.0
    waste = (padded[dim] - shape[dim]) / padded[dim] * length if padded[dim] else 0.0
    return min(parts[dim], _MAX_LINES), max(waste, 2.5) if waste else 0.0

  (num_rows, waste_y), (num_columns, waste_x) = of(rows, height), of(columns, 92)
  return {
    'label': f'{name} in {" x ".join(map(str, parts))} parts',
    'pile': (6, 3) if behind else (),  # a third dim is split too
    'top': (44 - height) / 2 + 6,
    'height': height,
    'rows': num_rows,
    'columns': num_columns,
    'waste_x': waste_x,
    'waste_y': waste_y,
  }


def _num_parts(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
  return math.prod(mesh.get(axis, 1) for axis in axes)


def _shown_ticks(pipeline: Mapping[str, Any]) -> list[Sequence[str | None]]:
  """Each stage's half of the ticks that is drawn: forward, of which backward is the mirror; of 1F1B backward."""
  is_1f1b = pipeline.get('schedule') == 'one_forward_one_backward'
  return [row[len(row) // 2 :] if is_1f1b else row[: len(row) // 2] for row in pipeline.get('ticks') or ()]


def _ticks(rows: Sequence[Sequence[str | None]]) -> dict[str, Any]:
  """Places which microbatch each stage processes in each tick; bubbles are hatched."""
  num_ticks = max(map(len, rows), default=0)
  cell_x = 30 if num_ticks <= 24 else 22 if num_ticks <= 80 else 9
  cell_y, left = (36 if any(entry and ' ' in entry for row in rows for entry in row) else 24), 62
  boxes: list[dict[str, Any]] = []
  for stage, row in enumerate(rows):
    for tick, entry in enumerate(row):
      halves = entry.split() if entry else [None]  # one forward, one backward: both in a tick
      for at, half in enumerate(halves):
        height = (cell_y - 1) / len(halves) - 1
        y = 18 + stage * cell_y + at * (cell_y - 1) / len(halves)
        box: dict[str, Any] = {'x': left + tick * cell_x, 'y': y, 'width': cell_x - 1, 'height': height, 'title': None}
        if half is not None:
          microbatch, _, repeat = half[1:].partition('.')
          shade = 'tick-b' if half[0] == 'B' else f'tick-{int(repeat or 0) % 3}'
          box |= {'title': f'stage {stage}, tick {tick}: {half}', 'shade': shade, 'text': microbatch}
        boxes.append(box)
  every = 1 if cell_x > 20 and num_ticks <= 24 else 5 if cell_x > 12 else 10
  return {
    'cell': cell_x,
    'boxes': boxes,
    'stages': [{'y': 34 + stage * cell_y} for stage in range(len(rows))],
    'numbers': [(left + (tick + 0.5) * cell_x, tick) for tick in range(0, num_ticks, every)],
    'width': left + num_ticks * cell_x + 4,
    'height': 22 + len(rows) * cell_y,
  }


def _layer(operation: Mapping[str, Any]) -> str:
  """Returns the place in the model of an operation or a tensor, without what JAX's transformations add to its name."""
  name = str(operation.get('op_name') or operation.get('name') or '')
  for pattern, short in _SHORTER:
    name = pattern.sub(short, name)
  return name


def _words(key: Any) -> str:
  """A key of the plan as words."""
  return str(key).replace('_', ' ')


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
