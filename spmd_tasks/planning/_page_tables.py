"""Makes the tables of plan.html: suggestions, the largest tensors, operations, collectives and weights."""

import collections
from collections.abc import Mapping, Sequence
import math
import re
from typing import Any

from spmd_tasks.planning._markup import Html, duration, join, percent, size, table, tag
from spmd_tasks.planning._pictures import bars, weight_drawing

Plan = Mapping[str, Any]
_NETWORKS = {'ici': 'ICI', 'dcn': 'DCN'}
_SHORTER = (
  (re.compile(r'^jit\(\w+\)/'), ''),
  (re.compile(r'transpose\(jvp\(\w*\)\)/'), 'backward: '),
  (re.compile(r'jvp\(\w*\)/'), 'forward: '),
  (re.compile(r'/(while|body|closed_call|checkpoint|rematted_computation)(?=/|$)'), ''),
)


def suggestions(plan: Plan) -> Html | None:
  """Lists the changes that were tried to make the plan fit, or the ranked settings of a search."""
  tried = plan.get('suggestions')
  if not tried:
    return None

  def row(each: Mapping[str, Any]) -> list[Any]:
    verdict = (
      tag('span', 'fits', class_='tag good') if each.get('fits') else tag('span', 'does not fit', class_='tag bad')
    )
    seconds = each.get('predicted_step_s')
    setting = join([join(tag('code', override), ' ') for override in each.get('setting') or ()]) or 'as it is'
    cells = [setting, verdict, size(each.get('peak_bytes')), '-' if seconds is None else duration(seconds)]
    return [*cells, each.get('note') or ''] if has_notes else cells

  has_notes = any(each.get('note') for each in tried)
  header = ['setting', '', 'peak', 'predicted step', *(['note'] if has_notes else [])]
  return join(
    tag('h2', 'Settings that were tried by compiling'),
    table(header, [row(each) for each in tried], numeric=(2, 3), class_='broad'),
  )


def steps(plan: Plan) -> Html | None:
  """Lists memory and time of several compiled steps; the rest of the page is about the first."""
  if len(plan.get('steps') or {}) < 2:
    return None
  rows = []
  for name, each in plan['steps'].items():
    fits = {True: ('fits', 'good'), False: ('does not fit', 'bad')}.get(each.get('fits'), ('', ''))
    verdict = tag('span', fits[0], class_=f'tag {fits[1]}') if fits[0] else ''
    rows.append([name, verdict, size(each.get('peak_bytes')), duration(each.get('predicted_step_s'))])
  table_ = table(['step', '', 'peak', 'predicted'], rows, numeric=(2, 3))
  return join(tag('h2', 'Steps'), table_, tag('p', 'All that follows is about the first.', class_='pale'))


def largest(plan: Plan) -> Html | None:
  """The largest tensors that are alive at the peak."""
  if not plan.get('largest'):
    return None
  rows = [
    [join(tag('code', _shape_text(each)), tag('div', _layer(each), class_='small')), size(each.get('bytes'))]
    for each in plan['largest'][:9]
  ]
  return tag('div', table(['largest tensors', 'bytes'], rows, numeric=(1,)))


def operations(plan: Plan) -> Html | None:
  """The operations that take longest."""
  top = plan.get('top_operations')
  if not top:
    return None
  rows = []
  longest = max(each.get('share') or 0 for each in top) or 1
  for each in top[:10]:
    width = f'width:{100 * (each.get("share") or 0) / longest:.1f}%'
    share = tag('div', tag('div', class_='fill bg2', style=width), class_='track', style='min-width:4rem')
    name = join(tag('code', each.get('name')), tag('div', _layer(each), class_='small'))
    rows.append([name, duration(each.get('seconds')), percent(each.get('share')), share, f'{each.get("count") or 1:,}'])
  header = ['operation', 'time per step', 'share', '', 'times']
  return join(tag('h3', 'Top operations'), table(header, rows, numeric=(1, 2, 4), class_='broad'))


def collectives(plan: Plan) -> Html | None:
  """Bytes over each axis and network, and a line per kind of collective."""
  if plan.get('collectives') is None:
    return None
  heading = tag('h2', 'Collectives')
  if not plan['collectives']:
    return join(heading, tag('p', 'None were found in the compiled program.', class_='pale'))
  per_axis: dict[tuple[str, str], float] = collections.defaultdict(float)
  lines: dict[tuple, list[Mapping[str, Any]]] = collections.defaultdict(list)
  for each in plan['collectives']:
    axes, network = ' + '.join(each.get('axes') or ()) or 'unknown axis', str(each.get('network') or 'ici')
    per_axis[axes, network] += _bytes_of(each)
    lines[each.get('kind'), axes, network, _how(each)].append(each)
  pictures = bars(
    [
      (f'{axes} over {_NETWORKS.get(network, network)}', total, size(total), 'bg3' if network == 'dcn' else 'bg2')
      for (axes, network), total in sorted(per_axis.items(), key=lambda item: -item[1])
    ]
  )
  rows = []
  for (kind, axes, network, how), members in sorted(lines.items(), key=lambda item: -sum(map(_bytes_of, item[1]))):
    count, total = sum(each.get('count') or 1 for each in members), sum(map(_bytes_of, members))
    main = max(members, key=_bytes_of)
    name = join(
      tag('span', str(kind).replace('_', ' '), class_='nowrap'), tag('div', _layer(main), class_='small wide')
    )
    rows.append(
      [
        name,
        axes,
        _NETWORKS.get(network, network),
        f'{count:,}',
        size(total / count),
        size(total),
        tag('span', how, class_='tag' if how == 'synchronous' else 'tag good'),
      ]
    )
  header = ['kind', 'axis', 'network', 'per step', 'bytes each', 'bytes per step', '']
  caption = 'Bytes that one device sends per step, with loops counted by their trips.'
  return join(
    heading, tag('p', caption, class_='pale'), pictures, table(header, rows, numeric=(3, 4, 5), class_='broad')
  )


def weights(plan: Plan) -> Html | None:
  """A line and a drawing per weight: how it is split over the mesh, what is padded or replicated, and why."""
  rows = plan.get('weights')
  if not rows:
    return None
  mesh = plan.get('mesh') or {}
  by_size = sorted(rows, key=lambda row: -(row.get('bytes_per_device') or 0))
  body = [
    [weight_drawing(row, mesh), _weight_text(row, mesh), str(row.get('dtype') or ''), size(row.get('bytes_per_device'))]
    for row in by_size
  ]
  caption = (
    "Each drawing shows two dims of a weight; the filled part is one device's, red hatching is padding, and a pile "
    'means that a further dim is split.'
  )
  total = sum(row.get('bytes_per_device') or 0 for row in rows)
  body.append(['', tag('b', f'{len(rows)} weight{"s" * (len(rows) > 1)}'), '', tag('b', size(total))])
  header = ['', 'weight', 'dtype', 'per device']
  drawn = table(header, body, numeric=(3,), class_='broad')
  return join(tag('h2', 'Weights on the mesh'), tag('p', caption, class_='pale'), drawn)


def _weight_text(row: Mapping[str, Any], mesh: Mapping[str, int]) -> Html:
  shape, padded = row['shape'], row.get('padded_shape') or row['shape']
  names = row.get('split_dims') or [None] * len(shape)
  spec = row.get('spec') or [[]] * len(shape)
  dims = []
  for name, true, stored, axes in zip(names, shape, padded, spec):
    label = name if isinstance(name, str) else '+'.join(map(str, name or ()))
    split = ' + '.join(f'{axis} {mesh.get(axis, 1)}' for axis in axes)
    text = f'{label} {true:,}' + (f' (stored {stored:,})' if stored != true else '')
    dims.append(tag('span', text, f' / {split}' if _num_parts(axes, mesh) > 1 else '', class_='nowrap'))
  marks = []
  if row.get('replicated_over'):
    copies = _num_parts(row['replicated_over'], mesh)
    if copies > 1:
      marks.append(tag('span', f'{copies} copies over {", ".join(row["replicated_over"])}', class_='tag warn'))
  if row.get('waste'):
    marks.append(tag('span', f'{percent(row["waste"])} padding', class_='tag bad'))
  why = row.get('why')
  shown = join([join(dim, ', ' if at < len(dims) - 1 else '') for at, dim in enumerate(dims)])
  below = tag('div', [join(mark, ' ') for mark in marks], tag('span', why, class_='why')) if marks or why else None
  return join(tag('code', row.get('name')), tag('div', '[', shown, ']', class_='small'), below)


def _num_parts(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
  return math.prod(mesh.get(axis, 1) for axis in axes)


def _how(collective: Mapping[str, Any]) -> str:
  if collective.get('is_collective_matmul'):
    return 'inside a matmul'
  return 'asynchronous' if collective.get('is_asynchronous') else 'synchronous'


def _bytes_of(collective: Mapping[str, Any]) -> float:
  return (collective.get('bytes_per_device') or 0) * (collective.get('count') or 1)


def _shape_text(buffer: Mapping[str, Any]) -> str:
  shape = buffer.get('shape')
  dims = shape if isinstance(shape, str) else ','.join(map(str, shape or ()))
  return f'{buffer.get("dtype") or ""}[{dims}]' if shape is not None else str(buffer.get('name') or '')


def _layer(operation: Mapping[str, Any]) -> str:
  """Returns the place in the model of an operation or a tensor, without what JAX's transformations add to its name."""
  name = str(operation.get('op_name') or operation.get('name') or '')
  for pattern, short in _SHORTER:
    name = pattern.sub(short, name)
  return name
