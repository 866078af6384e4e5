"""Formats plan.json as text for a terminal.

print(format_plan(plan.to_json()))
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_GIB = 2**30
_MAX_WEIGHTS = 12
_MAX_COLLECTIVES = 12
_MAX_BUFFERS = 8
_MAX_NAME = 70
_KINDS = {
  'cycles': 'cycles that the compiler estimates',
  'roofline': 'operations at their roofline',
  'kernel': 'hand-written kernels',
  'ici': 'waiting for ICI',
  'dcn': 'waiting for DCN',
  'host': 'waiting for copies to and from the host',
}

Json = Mapping[str, Any]


def format_plan(plan: Json) -> str:
  """Returns the verdict, then memory, weights, collectives, time, pipeline, suggestions and what is assumed."""
  sections = [_verdict(plan), *(section for name in plan['steps'] for section in _step(plan, name)), _weights(plan)]
  sections += [_pipeline(plan), _suggestions(plan), _list('assumed', plan.get('assumptions', ())), _versions(plan)]
  return '\n\n'.join('\n'.join(lines) for lines in sections if lines) + '\n'


def _verdict(plan: Json) -> list[str]:
  axes = ' x '.join(f'{axis} {size}' for axis, size in plan['mesh'].items() if size > 1) or 'one device'
  slices = f' in {plan["num_slices"]} slices' if plan['num_slices'] > 1 else ''
  head = f'{plan["experiment"]} on {plan["target"]}: {plan["num_devices"]:,} devices{slices}, mesh {axes}'
  size = f'{plan["num_params"]:,} parameters, {plan["tokens_per_step"]:,} tokens a step'
  return [head, size, *(f'note: {note}' for note in plan['notes']), _fits(plan), *_speed(plan)]


def _fits(plan: Json) -> str:
  needed = f'{bytes_text(plan["peak_bytes"])} per device'
  if plan['fits'] is None:
    return f'needs {needed}'
  available, difference = plan['hbm_bytes'], plan['hbm_bytes'] - plan['peak_bytes']
  if plan['fits']:
    used = plan['peak_bytes'] / available
    return f'FITS: {needed} of {bytes_text(available)}, {used:.0%}' + (
      f', {bytes_text(difference)} free' if difference >= 0 else ''
    )
  return f'DOES NOT FIT: {needed}, {bytes_text(-difference)} more than the {bytes_text(available)} that there are'


def _speed(plan: Json) -> list[str]:
  seconds = plan.get('predicted_step_s')
  if seconds is None:
    return []
  rate = plan.get('tokens_per_s_per_chip')
  facts = [f'{duration(seconds)} a step']
  if plan.get('predicted_step_low_s') is not None:
    facts[0] += f' ({duration(plan["predicted_step_low_s"])} to {duration(plan["predicted_step_high_s"])})'
  facts += [] if rate is None else [f'{rate:,.0f} tokens/s per device']
  facts += [] if plan.get('predicted_mfu') is None else [f'MFU {plan["predicted_mfu"]:.1%}']
  is_estimated = 'cycles' in (plan.get('time_by_kind') or {})  # else every operation takes its roofline
  return [('predicted: ' if is_estimated else 'at best, by rooflines: ') + ', '.join(facts)]


def _step(plan: Json, name: str) -> Iterator[list[str]]:
  step = plan['steps'][name]
  peak = step['peak_bytes'] or 1
  rows = [(_words(part), bytes_text(size), f'{size / peak:.0%}') for part, size in step['memory'].items() if size]
  title = f'memory per device, {name} step' if len(plan['steps']) > 1 else 'memory per device'
  rows.append(('the compiler says', bytes_text(step['peak_bytes']), ''))
  yield [f'{title}:', *table(rows)]
  if step.get('largest'):
    largest = [
      (
        bytes_text(each['bytes']),
        f'{each["dtype"]}{each["shape"]}',
        each['part'],
        _tail(each['op_name'] or each['name']),
      )
      for each in step['largest'][:_MAX_BUFFERS]
    ]
    yield ['largest at the peak:', *table(largest)]
  if step.get('collectives'):
    yield _collectives(step['collectives'])
  if step.get('top_operations'):
    operations = [
      (
        duration(each['seconds']),
        f'{each["share"]:.0%}',
        f'{each["count"]:,} x',
        _tail(each['op_name'] or each['name']),
      )
      for each in step['top_operations'][:10]
    ]
    yield ['operations that take longest:', *table(operations)]
  if step.get('predicted_step_s') is not None:
    yield _time(step)


def _collectives(collectives: Sequence[Json]) -> list[str]:
  """One line per kind, axes, network and whether it is asynchronous: those of many layers together."""
  groups: dict[tuple[str, ...], list[float]] = {}
  for each in collectives:
    key = (each['kind'], ' x '.join(each['axes']) or '-', each['network'], 'async' if each['is_asynchronous'] else '')
    count, sent = groups.setdefault(key, [0, 0])
    groups[key] = [count + each['count'], sent + each['count'] * each['bytes_per_device']]
  largest = sorted(groups.items(), key=lambda item: -item[1][1])
  rows = [(kind, axes, network, f'{n:,.0f} x', bytes_text(sent), a) for (kind, axes, network, a), (n, sent) in largest]
  return ['collectives, sent by one device in a step:', *table(rows[:_MAX_COLLECTIVES]), *_more(rows, _MAX_COLLECTIVES)]


def _time(step: Json) -> list[str]:
  """Lists the predicted time by kind, and the time that each resource alone would need."""
  seconds = step['predicted_step_s']
  rows = [
    (_KINDS.get(kind, kind), duration(spent), f'{spent / seconds:.0%}') for kind, spent in step['time_by_kind'].items()
  ]
  if step.get('hidden_s'):
    rows.append(('collectives behind other work', duration(step['hidden_s']), ''))
  roofline = step['roofline']
  alone = [
    ('matrix products', roofline['compute_s'], f'{roofline["flops"] / 1e12:,.1f} TFLOP'),
    ('HBM', roofline['hbm_s'], bytes_text(roofline['hbm_bytes'])),
    ('ICI', roofline['ici_s'], bytes_text(roofline['ici_bytes'])),
    ('DCN', roofline['dcn_s'], bytes_text(roofline['dcn_bytes'])),
    ('memory of the host', roofline['host_s'], bytes_text(roofline['host_bytes'])),
  ]
  rows += [(f'{name} alone, at its peak', duration(spent), amount) for name, spent, amount in alone if spent]
  return ['time of a step:', *table(rows)]


def _weights(plan: Json) -> list[str]:
  rows = [('weight', 'shape', 'split over', 'stored as', 'waste', 'per device', 'why')]
  for row in plan['weights'][:_MAX_WEIGHTS]:
    spec = ', '.join('+'.join(axes) or '-' for axes in row['spec'])
    stored = str(row['padded_shape']) if row['padded_shape'] != row['shape'] else '-'
    waste = f'{row["waste"]:.2%}' if row['waste'] else '-'
    rows.append(
      (row['name'], str(row['shape']), f'({spec})', stored, waste, bytes_text(row['bytes_per_device']), row['why'])
    )
  return ['weights, the largest on a device first:', *table(rows), *_more(plan['weights'], _MAX_WEIGHTS)]


def _pipeline(plan: Json) -> list[str]:
  pipeline = plan['pipeline']
  if pipeline is None:
    return []
  repeats = f', {pipeline["repeats"]} repeats' if pipeline['repeats'] > 1 else ''
  return [
    f'pipeline: {pipeline["stages"]} stages, {pipeline["microbatches"]} microbatches, {pipeline["schedule"]}{repeats}: '
    f'{pipeline["num_ticks"]} ticks, of which {pipeline["bubble"]:.1%} are bubble on each stage'
  ]


def format_suggestions(plan: Json) -> str:
  """Returns the changes that were tried, one per line."""
  return '\n'.join(_suggestions(plan)) + '\n'


def _suggestions(plan: Json) -> list[str]:
  if not plan['suggestions']:
    return []
  rows = []
  for each in plan['suggestions']:
    verdict, setting = 'fits' if each['fits'] else 'does not fit', ' '.join(each['setting'])
    seconds = '' if each.get('predicted_step_s') is None else f'{duration(each["predicted_step_s"])} a step'
    needed = '' if each['peak_bytes'] is None else bytes_text(each['peak_bytes'])
    rows.append((setting, verdict, needed, seconds, each.get('note') or ''))
  return ['settings, each of them compiled:', *table(rows)]


def _versions(plan: Json) -> list[str]:
  versions = ', '.join(f'{package} {version}' for package, version in plan['versions'].items())
  seconds = sum(step['trace_seconds'] + step['compile_seconds'] for step in plan['steps'].values())
  return [f'compiled in {seconds:.0f} s by {versions}']


def _list(title: str, lines: Sequence[str]) -> list[str]:
  return [f'{title}:', *(f'  {line}' for line in lines)] if lines else []


def _more(rows: Sequence[Any], shown: int) -> list[str]:
  return [f'  and {len(rows) - shown} more: --plan_out DIR writes all to plan.json'] if len(rows) > shown else []


def _words(key: str) -> str:
  return key.replace('_', ' ')


def _tail(name: str) -> str:
  """The end of a long name, which says most."""
  return name if len(name) <= _MAX_NAME else f'...{name[3 - _MAX_NAME :]}'


def bytes_text(num_bytes: float) -> str:
  """Formats bytes: 23.8 GiB, 512.0 MiB, 3.1 KiB."""
  for unit, size in (('GiB', _GIB), ('MiB', 2**20), ('KiB', 2**10)):
    if abs(num_bytes) >= size:
      return f'{num_bytes / size:,.1f} {unit}'
  return f'{num_bytes:.0f} B'


def duration(seconds: float) -> str:
  """Formats seconds: 1.28 s, 12.3 ms, 45 us."""
  for unit, size in (('s', 1.0), ('ms', 1e-3)):
    if seconds >= size:
      return f'{seconds / size:.3g} {unit}'
  return f'{seconds * 1e6:.3g} us'


def table(rows: Sequence[Sequence[str]]) -> list[str]:
  """Aligns cells to the left, indented by two spaces."""
  if not rows:
    return []
  widths = [max(map(len, column)) for column in zip(*rows)]
  return ['  ' + '  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
