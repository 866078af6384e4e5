"""Reports a plan: as text for a terminal, and as plan.html; both from the dictionary of plan.json alone.

    print(format_plan(json.loads(Path('plan.json').read_text())))

Both have the same rows. The page is the template plan_page.html: it needs no network and no script, escapes every name,
follows light and dark, and can be printed.
"""

from collections.abc import Mapping, Sequence
import math
import re
from typing import Any

import jinja2

Json = Mapping[str, Any]
_COMPILERS = {'tpu': 'the compiler of TPUs', 'gpu': 'the compiler of GPUs', 'cpu': 'the compiler of CPUs'}
_MAX_ARRAYS = 12
_MAX_NAME = 80
TIME_COLUMNS = ('term', 'seconds', 'share', 'without it', 'work', 'rate', 'basis of the rate')
SEARCH_COLUMNS = ('step', 'gain', 'MFU', 'memory', 'flags', 'why')
WEIGHT_COLUMNS = ('weight', 'shape', 'split over', 'stored as', 'waste', 'per device', 'why')
_SHORTER = (
  (re.compile(r'^jit\(\w+\)/'), ''),
  (re.compile(r'/[\w(]*=[^/]*'), ''),  # a scope that states a number
  (re.compile(r'transpose\(jvp\(\w*\)\)/'), 'backward: '),
  (re.compile(r'jvp\(\w*\)/'), 'forward: '),
  (re.compile(r'/(while|body|closed_call|checkpoint|rematted_computation)(?=/|$)'), ''),
)


def format_plan(plan: Json) -> str:
  """Returns the verdict, then memory, collectives, time, weights, pipeline and what is assumed."""
  verdict, pipeline = _verdict(plan), plan['pipeline']
  head = f'{verdict["head"].upper()}: ' if verdict['head'] else ''
  lines = [
    f'{plan["experiment"]} on {plan["target"]}: {_devices(plan)}',
    f'{plan["num_params"]:,} parameters, {plan["tokens_per_step"]:,} tokens a step',
    *(f'note: {note}' for note in plan['notes']),
    f'{head}{verdict["words"]}' + (f'; {verdict["detail"]}' if verdict['detail'] else ''),
    *_table(_figures(plan)),
  ]
  for name, planned in plan['steps'].items():
    step = _step(planned)
    memory = [*step['memory'], (_whose(plan), size(step['peak']), ''), *((*row, '') for row in step['elsewhere'])]
    lines += _section(f'memory per device, {name} step' if len(plan['steps']) > 1 else 'memory per device', memory)
    lines += _section('largest at the peak', step['largest'])
    lines += _section('collectives, sent by one device in a step', step['collectives'], 12)
    lines += _section('time of a step', [TIME_COLUMNS, *step['time']] if step['time'] else [])
  for title, rows in _search(plan).items():
    lines += _section(title, [SEARCH_COLUMNS, *rows], 12)
  weights = [WEIGHT_COLUMNS, *map(_weight, plan['weights'])]
  lines += _section('weights, the largest on a device first', weights, 13)
  if pipeline:
    lines += _section('pipeline', [(f'{_pipeline(pipeline)}; {pipeline["num_ticks"]} ticks',)])
  lines += _section('assumed', [(line,) for line in plan['assumptions']])
  seconds = sum(step['trace_seconds'] + step['compile_seconds'] for step in plan['steps'].values())
  versions = ', '.join(f'{package} {version}' for package, version in plan['versions'].items())
  took = f'{"compiled" if plan["compiler"] else "estimated"} in {duration(seconds)}'
  if found := plan.get('search'):
    took += f', and {found["num_plans"]} plans of --search in {duration(found["seconds"])},'
  return '\n'.join([*lines, '', f'{took} by {versions}', ''])


def plan_page(plan: Json) -> str:
  """Returns plan.html."""
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('spmd_tasks.planning', ''),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters['size'] = size
  return environment.get_template('plan_page.html').render(
    plan=plan,
    devices=_devices(plan),
    verdict=_verdict(plan),
    figures=_figures(plan),
    steps={name: _step(step) for name, step in plan['steps'].items()},
    weight_columns=WEIGHT_COLUMNS,
    weights=[_weight(row) for row in plan['weights']],
    pipeline=plan['pipeline'] and _pipeline(plan['pipeline']),
    search=_search(plan),
    search_columns=SEARCH_COLUMNS,
    time_columns=TIME_COLUMNS,
    whose=_whose(plan),
    made=f'Compiled by {_COMPILERS[plan["compiler"]]}' if plan['compiler'] else 'Estimated from the traced step',
  )


def _whose(plan: Json) -> str:
  return 'the compiler says' if plan['compiler'] else 'together'


def _limit(terms: Sequence[Json]) -> str:
  """Returns the name of the term that takes longest."""
  return terms[0]['name'] if terms else 'nothing'


def _section(title: str, rows: Sequence[Sequence[str]], most: int | None = None) -> list[str]:
  left_out = len(rows) - len(rows[:most])
  more = [f'  and {left_out} more: --plan_out DIR writes all to plan.json'] * (left_out > 0)
  return ['', f'{title}:', *_table(rows[:most]), *more] if rows else []


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
  """Aligns cells to the left, indented by two spaces."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  return ['  ' + '  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _devices(plan: Json) -> str:
  dcn = plan['dcn_mesh'] or {}
  axes = [
    f'{axis} {length}' + (f' ({dcn[axis]} over DCN)' if dcn.get(axis, 1) > 1 else '')
    for axis, length in plan['mesh'].items()
    if length > 1
  ]
  slices = f' in {plan["num_slices"]} slices' if plan['num_slices'] > 1 else ''
  return f'{plan["num_devices"]:,} devices{slices}, ' + ('mesh ' + ' x '.join(axes) if axes else 'one device')


def _verdict(plan: Json) -> dict[str, str]:
  peak, limit = max(step['peak_bytes'] for step in plan['steps'].values()), plan['hbm_bytes']
  if plan['fits'] is None or not limit:
    return {'colour': 'open', 'head': '', 'words': f'needs {size(peak)} per device', 'detail': ''}
  words = f'{size(peak)} of {size(limit)} per device, {percent(peak / limit)}'
  if plan['fits']:
    return {'colour': 'good', 'head': 'Fits', 'words': words, 'detail': f'{size(max(limit - peak, 0))} are free.'}
  return {'colour': 'bad', 'head': 'Does not fit', 'words': words, 'detail': f'{size(peak - limit)} too much.'}


def _figures(plan: Json) -> list[tuple[str, str, str]]:
  """Returns the main figures of the first step: label, value, note."""
  rows = []
  if plan['predicted_step_s'] is not None:
    assumed = plan['shares'].get('assumed')
    basis = f'; {percent(assumed)} of it by assumed rates' if assumed else ''
    rows.append(('predicted step', duration(plan['predicted_step_s']), f'{_limit(plan["terms"])} limit it{basis}'))
    rows += _math_and_comms(plan['terms'])
  if plan['predicted_mfu'] is not None:
    rows.append(('predicted MFU', percent(plan['predicted_mfu']), 'of the bfloat16 peak'))
  if plan['tokens_per_s_per_chip'] is not None:
    rows.append(('tokens per second', f'{plan["tokens_per_s_per_chip"]:,.0f}', 'per device'))
  if plan['pipeline']:
    rows.append(('pipeline bubble', percent(plan['pipeline']['bubble']), 'of the ticks'))
  rows.append(('arguments', size(plan['argument_bytes']), f'+ {size(plan["temp_bytes"])} temporaries'))
  return rows


def _math_and_comms(terms: Sequence[Json]) -> list[tuple[str, str, str]]:
  """Returns T_math, and T_comms with the FLOPs for each byte that is sent, if any is."""
  math_terms = [term for term in terms if term['unit'] == 'FLOP']
  networks = [term for term in terms if term['name'].startswith('network ')]
  flops, sent = (sum(term['work'] for term in group) for group in (math_terms, networks))
  seconds = [sum(term['seconds'] for term in group) for group in (math_terms, networks)]
  rows = [('T_math', duration(seconds[0]), f'{quantity(flops, "FLOP")} per device')]
  if sent:
    intensity = f'{quantity(sent, "B")} sent, {quantity(flops / sent, "FLOP")} per byte'
    rows.append(('T_comms', duration(seconds[1]), f'not hidden; {intensity}'))
  return rows


def _step(step: Json) -> dict[str, Any]:
  """Returns the rows of one step's tables, and the colours of its memory."""
  peak, seconds = step['peak_bytes'] or 1, step['predicted_step_s']
  held = {name: part for name, part in step['memory'].items() if part}
  rest = peak - sum(held.values())
  held |= {'not attributed': rest} if rest > 0.005 * peak else {}
  limit = step['hbm_bytes']
  full = max(sum(held.values()), limit or 0)
  time = [
    (
      term['name'],
      duration(term['seconds']),
      percent(term['seconds'] / seconds),
      duration(seconds - term['seconds']),
      quantity(term['work'], term['unit']),
      quantity(term['rate'], f'{term["unit"]}/s'),
      ': '.join(filter(None, (term['basis'], term['source']))),
    )
    for term in step['terms']
    if seconds
  ]
  return {
    'fits': step['fits'],
    'peak': peak,
    'predicted': duration(seconds),
    'memory': [(_words(name), size(part), percent(part / peak)) for name, part in held.items()],
    'shares': [100 * part / full for part in held.values()],  # percent of the bar
    'limit': limit and 100 * limit / full,
    'elsewhere': [
      (name, size(step[key]))
      for name, key in (("in the chip's own memory", 'on_chip_bytes'), ("in the host's memory", 'host_bytes'))
      if step[key]
    ],
    'largest': _largest(step['largest'], step['peak_bytes']),
    'collectives': _collectives(step['collectives']),
    'time': time,
  }


def _largest(arrays: Sequence[Json], peak: int) -> list[tuple[str, ...]]:
  """Returns one row for all arrays of one shape, place and reason, the largest first, and one for everything else."""
  groups: dict[tuple[str, ...], list[int]] = {}
  for x in arrays:
    key = size(x['bytes']), f'{x["dtype"]}{x["shape"]}', x['part'], _layer(x), x['why']
    groups.setdefault(key, []).append(x['bytes'])
  shown = sorted(groups.items(), key=lambda item: -sum(item[1]))[:_MAX_ARRAYS]
  rest = peak - sum(sum(each) for _, each in shown)
  rows = [(f'{len(each)} x {key[0]}' if len(each) > 1 else key[0], *key[1:]) for key, each in shown]
  return [*rows, (size(rest), '', '', 'everything else', '')] if rest > 0 and rows else rows


def _search(plan: Json) -> dict[str, list[tuple[str, ...]]]:
  """Returns the tables of `--search` by title."""
  search = plan.get('search')
  if not search:
    return {}
  start = search['start']
  plans = f'{search["num_plans"]} plans in {search["seconds"]:.0f} s'
  best = f'the fastest that fits, and others with less memory, of {plans}'
  single = [row for row in search['single'] if row['predicted_step_s'] < 2 * start['predicted_step_s']]
  tables = {
    best: search['best'],
    f'nothing fits, of {plans}; what needs least': [] if search['best'] else search['nearest'],
    'what one change alone does': single,
  }
  return {title: [_setting(row, start) for row in rows] for title, rows in tables.items() if rows}


def _setting(row: Json, start: Json) -> tuple[str, ...]:
  seconds = start['predicted_step_s']
  why = [
    f'{name} {"-" if change < 0 else "+"}{duration(abs(change))}'
    for name, change in list(row['changes_s'].items())[:3]
    if abs(change) > 0.005 * seconds
  ]
  return (
    duration(row['predicted_step_s']),
    f'{row["gain_s"] / seconds:+.1%}',
    '-' if row['predicted_mfu'] is None else percent(row['predicted_mfu']),
    size(row['peak_bytes']) + ('' if row['fits'] else ', too much'),
    row['flags'] or '(as it is)',
    ', '.join(why),
  )


def _collectives(collectives: Sequence[Json]) -> list[tuple[str, ...]]:
  """Returns one row per kind, axes, network and way: those of many layers together, the most bytes first."""
  groups: dict[tuple[str, ...], list[float]] = {}
  for each in collectives:
    how = 'asynchronous' if each['is_asynchronous'] else 'synchronous'
    how = 'inside a product' if each['is_collective_matmul'] else how
    key = _words(each['kind']), ' x '.join(each['axes']) or '-', each['network'].upper(), how
    count, sent = groups.setdefault(key, [0, 0])
    groups[key] = [count + each['count'], sent + each['count'] * each['bytes_per_device']]
  largest = sorted(groups.items(), key=lambda item: -item[1][1])
  return [(*key, f'{count:,.0f} x', size(sent)) for key, (count, sent) in largest]


def _weight(row: Json) -> tuple[str, ...]:
  spec = ', '.join('+'.join(axes) or '-' for axes in row['spec'])
  stored = str(row['padded_shape']) if row['padded_shape'] != row['shape'] else '-'
  waste = f'{row["waste"]:.2%}' if row['waste'] else '-'
  return row['name'], str(row['shape']), f'({spec})', stored, waste, size(row['bytes_per_device']), row['why']


def _pipeline(pipeline: Json) -> str:
  repeats = f', {pipeline["repeats"]} repeats' if pipeline['repeats'] > 1 else ''
  return (
    f'{pipeline["stages"]} stages, {pipeline["microbatches"]} microbatches, {_words(pipeline["schedule"])}{repeats}: '
    f'{pipeline["bubble"]:.1%} of the ticks are bubble on each stage'
  )


def _layer(operation: Json) -> str:
  """Returns the place in the model of an operation or an array, without what JAX's transformations add to its name."""
  name = operation['op_name'] or operation['name']
  for pattern, short in _SHORTER:
    name = pattern.sub(short, name)
  return name if len(name) <= _MAX_NAME else f'{name[: _MAX_NAME - 3]}...'


def _words(key: str) -> str:
  return key.replace('_', ' ')


def size(num_bytes: float | None) -> str:
  """Formats bytes in binary units, as compilers do: 15.75 GiB."""
  if num_bytes is None:
    return 'unknown'
  at = min(int(math.log2(max(abs(num_bytes), 1))) // 10, 3)
  return f'{num_bytes / 1024**at:,.{(0, 1, 1, 2)[at]}f} {("B", "KiB", "MiB", "GiB")[at]}'


def duration(seconds: float | None) -> str:
  """Formats seconds: 1.28 s, 35.2 ms, 410 µs."""
  if seconds is None:
    return 'unknown'
  factor, unit = (1.0, 's') if seconds >= 1 else (1e3, 'ms') if seconds >= 1e-3 else (1e6, 'µs')
  value = seconds * factor
  return f'{value:,.0f} {unit}' if value >= 100 or value == 0 else f'{value:#.3g} {unit}'


def quantity(value: float, unit: str) -> str:
  """Formats a large number in decimal units: 459 TFLOP."""
  at = min(max(int(math.log10(max(value, 1))) // 3, 0), 5)
  return f'{value / 1000**at:.3g} {" kMGTP"[at].strip()}{unit}'


def percent(fraction: float) -> str:
  """Formats a fraction as a percentage with the digits that it deserves."""
  return f'{fraction:.1%}' if fraction < 0.1 or 0.99 < fraction < 1 else f'{fraction:.0%}'
