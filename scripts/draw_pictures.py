"""Draws the pictures of the docs from the real objects: `.venv/bin/python scripts/draw_pictures.py [DIRECTORY]`.

Every number in a picture comes from a resolved experiment, a partitioned model, a schedule or a scheduler, so that a
picture cannot disagree with the code; tests/test_pictures.py draws them again and compares. same_losses.svg comes from
jobs, which scripts/draw_losses.py runs.
"""

import argparse
from collections.abc import Callable, Sequence
import math
from pathlib import Path
from typing import Any

from draw_request import request_life
import svg

from spmd_tasks.config import resolve
from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.experiment import partition_job
from spmd_tasks.layers.pipeline import Schedule

PICTURES = Path(__file__).parents[1] / 'docs' / 'pictures'


def partitioned(name: str) -> Any:
  """Returns the partitioned model of a registered experiment, without allocating arrays."""
  return partition_job(resolve(name).build())


def leaf(tree: Any, *path: str) -> Any:
  """Returns the leaf at a path in a tree of dicts."""
  for key in path:
    tree = tree[key]
  return tree


def list_of(shape: Sequence[int]) -> str:
  """Formats a shape as in the docs: [2, 30, 90]."""
  return f'[{", ".join(str(dim) for dim in shape)}]'


def names_of(entries: Sequence[Any]) -> str:
  """Formats split dims or a PartitionSpec as in the docs: (layers, embed, mlp)."""
  words = ['-' if entry is None else entry if isinstance(entry, str) else '+'.join(entry) for entry in entries]
  return f'({", ".join(words)})'


def experiment_to_step() -> str:
  """Draws the way from an experiment to a compiled step, with the values of lm.StdlibTiny."""
  override = 'task.learner.clip_global_norm=0.5'
  resolved = resolve('lm.StdlibTiny', ['seq_len=64', override])
  job = resolved.build()
  model = partition_job(job)
  experiment: Any = job.experiment
  axes = ' x '.join(f'{name} {size}' for name, size in model.mesh.shape.items())
  spec = job.train_input.element_spec()['ids']
  stages = [
    (
      'Experiment class',
      'lm.StdlibTiny',
      'a Python class: fields, and methods that return configs',
      'experiments/lm.py',
    ),
    (
      'Experiment',
      f'seq_len={experiment.seq_len}, num_layers={experiment.num_layers}, '
      f'ici_mesh_shape={experiment.ici_mesh_shape}, ...',
      '--set seq_len=64 changes a field before any method runs',
      'spmd_tasks/experiment.py',
    ),
    (
      'Fiddle configs',
      f'{type(job.task).__name__}(model={type(job.task.model).__name__}(...), loss=..., learner=...), '
      f'{type(job.train_input).__name__}(...)',
      f'--set {override} changes what task() and train_input() returned',
      'spmd_tasks/config/',
    ),
    (
      'Job',
      f'task, train_input, eval_inputs {list(job.eval_inputs)}',
      'built: plain frozen objects from here on, without Fiddle',
      'spmd_tasks/experiment.py',
    ),
    (
      'PartitionedModel',
      f'{model.total_num_params:,} parameters on mesh {axes}; ids {list_of(spec.shape)} {spec.dtype}',
      'partition_spmd_model(task, mesh, input_spec): shapes and shardings only; nothing is allocated',
      'spmd_tasks/runtime/partition.py',
    ),
    (
      'Compiled train step',
      '(padded state, batch) -> (padded state, metrics)',
      'slice the padding off, run the pure step, pad again: one XLA program for all devices',
      'spmd_tasks/runtime/task.py',
    ),
  ]
  height, gap, top = 76, 26, 20
  drawing = svg.Drawing(860, top + len(stages) * (height + gap) - gap + 20, "An experiment's way to a compiled step")
  for i, (noun, value, note, file) in enumerate(stages):
    y = top + i * (height + gap)
    drawing.rect(20, y, 820, height, fill=svg.FILLS[0] if i == len(stages) - 1 else svg.PALE)
    drawing.text(34, y + 23, noun, size=16, bold=True)
    drawing.text(826, y + 23, file, size=12, color=svg.FAINT, anchor='end', mono=True)
    drawing.text(34, y + 44, value, size=13, mono=True)
    drawing.text(34, y + 64, note, size=13, color=svg.FAINT)
    if i:
      drawing.arrow((60, y - gap), (60, y - 1))
  return drawing.svg()


def split_dims_to_bytes() -> str:
  """Draws a weight of synthetic.Uneven on 8 devices, from split dims over its PartitionSpec to bytes per device."""
  model = partitioned('synthetic.Uneven')
  path = ('stack', 'layers', 'ffn', 'up', 'kernel')
  weight = leaf(model.weight_specs, *path)
  spec = leaf(model.state_specs.weights, *path)
  stored = leaf(model.padded_state.weights, *path)
  shard = stored.sharding.shard_shape(stored.shape)
  rules = dict(reversed(model.axis_rules))
  data, mdl = model.mesh.shape['data'], model.mesh.shape['mdl']
  num_bytes = math.prod(shard) * stored.dtype.itemsize

  drawing = svg.Drawing(860, 560, 'A weight from split dims to bytes per device')
  drawing.text(20, 32, '/'.join(path), size=16, bold=True, mono=True)
  drawing.text(20, 54, f'synthetic.Uneven on mesh data {data} x mdl {mdl}', size=13, color=svg.FAINT)
  lines = [
    ('1. The layer declares', f'shape {list_of(weight.shape)}, split dims {names_of(weight.split_dims)}'),
    ('2. The axis rules say', ', '.join(f'{name} -> {rules[name] or "-"}' for name in weight.split_dims)),
    ('3. PartitionSpec', names_of(spec)),
    ('4. Padded shape', f'{list_of(stored.shape)}: each dim rounded up to a multiple of its parts'),
    ('5. On each device', f'{list_of(shard)} {stored.dtype} = {num_bytes:,} bytes'),
  ]
  for i, (label, text) in enumerate(lines):
    drawing.text(20, 88 + 26 * i, label, size=14, bold=True)
    drawing.text(210, 88 + 26 * i, text, size=14, mono=True)

  scale_x, scale_y, left, top = 7.2, 7.2, 110, 282
  embed, mlp = stored.shape[1:]
  for i in range(data):
    for j in range(mdl):
      x, y = left + j * shard[2] * scale_x, top + i * shard[1] * scale_y
      drawing.rect(x, y, shard[2] * scale_x, shard[1] * scale_y, fill=svg.FILLS[i * mdl + j], radius=0)
      middle = x + shard[2] * scale_x / 2
      drawing.text(middle, y + 50, f'data {i}, mdl {j}', size=13, anchor='middle')
      drawing.text(middle, y + 70, f'{shard[1]} x {shard[2]}', size=13, anchor='middle', mono=True)
  true_mlp = weight.shape[2]
  drawing.rect(left + true_mlp * scale_x, top, (mlp - true_mlp) * scale_x, embed * scale_y, fill=svg.PADDING, radius=0)
  right = left + mlp * scale_x
  drawing.line([(left, top - 12), (right, top - 12)])
  label = f'mlp: {true_mlp} true, stored as {mlp}, {mdl} parts'
  drawing.text((left + right) / 2, top - 20, label, size=13, anchor='middle')
  drawing.line([(left - 12, top), (left - 12, top + embed * scale_y)])
  middle = top + embed * scale_y / 2
  for row, text in enumerate((f'embed: {embed}', f'{data} parts')):
    drawing.text(left - 20, middle - 2 + 18 * row, text, size=13, anchor='end')
  bottom = top + embed * scale_y
  drawing.rect(left, bottom + 20, 16, 16, fill=svg.PADDING, radius=0)
  drawing.text(
    left + 24,
    bottom + 33,
    f'padding: zeros, written anew by every step. Dim 0, layers ({weight.shape[0]}), is whole on every device.',
    size=13,
  )
  return drawing.svg()


def three_shapes() -> str:
  """Draws true, padded and canonical shapes of weights: uneven dims, uneven stages, circular stages."""
  rows = [
    ('synthetic.Uneven', 'An uneven dim', ('ffn', 'up', 'kernel')),
    ('pipeline.OneForwardOneBackwardTiny', 'Layers that the stages do not divide', ('ffn', 'up', 'kernel')),
    ('pipeline.CircularTiny', 'Circular stages: repeats x layers', ('ffn', 'up', 'kernel')),
  ]
  columns = [
    ('True', 'what model, loss and optimizer see', svg.FILLS[2]),
    ('Padded', 'what the devices hold between steps', svg.FILLS[0]),
    ('Canonical', 'what a checkpoint holds', svg.FILLS[5]),
  ]
  width, left, top, row_height = 212, 20, 92, 148
  drawing = svg.Drawing(860, top + row_height * len(rows) - 10, 'True, padded and canonical shapes')
  gap = (820 - 3 * width) / 2
  for j, (name, note, _) in enumerate(columns):
    x = left + j * (width + gap)
    drawing.text(x + width / 2, 34, name, size=17, anchor='middle', bold=True)
    drawing.text(x + width / 2, 55, note, size=13, anchor='middle', color=svg.FAINT)
  for i, (experiment, title, path) in enumerate(rows):
    model = partitioned(experiment)
    y = top + i * row_height
    axes = ' x '.join(f'{name} {size}' for name, size in model.mesh.shape.items() if size > 1)
    drawing.text(left, y, title, size=14, bold=True)
    drawing.text(left, y + 19, f'{experiment}, {"/".join(path)}, mesh {axes}', size=12, color=svg.FAINT, mono=True)
    where = ('stack', 'layers', *path)
    shown = [
      (leaf(model.abstract_state.weights, *where), None),
      *((leaf(tree.weights, *where), tree) for tree in (model.padded_state, model.canonical_state)),
    ]
    for j, (array, tree) in enumerate(shown):
      x = left + j * (width + gap)
      drawing.rect(x, y + 30, width, 66, fill=columns[j][2])
      drawing.text(x + width / 2, y + 57, list_of(array.shape), size=16, anchor='middle', mono=True)
      below = 'whole arrays, no sharding'
      if tree is not None:
        below = f'split {names_of([*array.sharding.spec, *[None] * (len(array.shape) - len(array.sharding.spec))])}'
      drawing.text(x + width / 2, y + 80, below, size=12, anchor='middle', color=svg.FAINT)
    for j, (there, back) in enumerate((('pad', 'unpad'), ('to_canonical', 'from_canonical'))):
      x = left + width + j * (width + gap)
      drawing.arrow((x + 4, y + 55), (x + gap - 4, y + 55))
      drawing.arrow((x + gap - 4, y + 73), (x + 4, y + 73))
      drawing.text(x + gap / 2, y + 49, there, size=11, anchor='middle', color=svg.FAINT)
      drawing.text(x + gap / 2, y + 86, back, size=11, anchor='middle', color=svg.FAINT)
  return drawing.svg()


def pipeline_ticks() -> str:
  """Draws the microbatch of each stage in each tick, for the three schedules."""
  stages, microbatches = 4, 8
  gpipe = Schedule(num_stages=stages, num_microbatches=microbatches)
  circular = Schedule(num_stages=stages, num_microbatches=microbatches, num_repeats=2)
  cell, left = 38, 110
  drawing = svg.Drawing(left + cell * circular.num_ticks + 20, 690, "A pipeline's ticks per schedule")

  def square(x: float, y: float, width: float, microbatch: int, text: str, size: int = 14):
    drawing.rect(x, y, width, cell - 6, fill=svg.FILLS[microbatch % len(svg.FILLS)], radius=2)
    drawing.text(x + width / 2, y + 21, text, size=size, anchor='middle')

  def head(y: float, title: str, note: str, num_ticks: int):
    drawing.text(20, y, title, size=16, bold=True)
    drawing.text(20, y + 20, note, size=13, color=svg.FAINT)
    drawing.text(20, y + 44, 'tick', size=12, color=svg.FAINT)
    for tick in range(num_ticks):
      drawing.text(left + tick * cell + (cell - 4) / 2, y + 44, str(tick), size=12, color=svg.FAINT, anchor='middle')

  def forward_grid(y: float, schedule: Schedule, cell_width: float):
    for stage in range(stages):
      top = y + 52 + stage * cell
      drawing.text(20, top + 21, f'stage {stage}', size=13)
      for tick in range(schedule.num_ticks):
        microbatch, repeat, is_work = schedule.work(stage, tick)
        x = left + tick * cell
        if is_work:
          square(x, top, cell_width, microbatch, f'{microbatch}{chr(39) * repeat}')
        else:
          drawing.rect(x, top, cell_width, cell - 6, fill='white', line=svg.PADDING, radius=2)

  y = 30
  note = (
    f'{stages} stages, {microbatches} microbatches: forward takes {gpipe.num_ticks} ticks; '
    f'{gpipe.bubble_fraction:.0%} of them are bubbles. Backward runs the same in reverse.'
  )
  head(y, 'gpipe', note, gpipe.num_ticks)
  forward_grid(y, gpipe, cell - 4)
  y += 225
  note = (
    f'2 repeats: a tick has half the layers, so that {circular.bubble_fraction:.0%} are bubbles. '
    "3' is microbatch 3 on its second way round."
  )
  head(y, 'circular', note, circular.num_ticks)
  forward_grid(y, circular, cell - 4)
  y += 225
  note = (
    "The backward pass: F computes a microbatch again from its stage's input, B goes backward. "
    "The forward pass is gpipe's."
  )
  head(y, 'one_forward_one_backward', note, gpipe.num_ticks)
  for stage in range(stages):
    top = y + 52 + stage * cell
    drawing.text(20, top + 21, f'stage {stage}', size=13)
    for tick in range(gpipe.num_ticks):
      x = left + tick * cell
      drawing.rect(x, top, cell - 4, cell - 6, fill='white', line=svg.PADDING, radius=2)
      microbatch, _, is_work = gpipe.work(stages - 1 - stage, tick)
      for half, name in enumerate('FB' if is_work else ''):
        square(x + half * (cell - 4) / 2, top, (cell - 4) / 2, microbatch, f'{name}{microbatch}', size=11)
  return drawing.svg()


PICTURES_BY_NAME: dict[str, Callable[[], str]] = {
  'experiment_to_step': experiment_to_step,
  'split_dims_to_bytes': split_dims_to_bytes,
  'three_shapes': three_shapes,
  'pipeline_ticks': pipeline_ticks,
  'request_life': request_life,
}


def main() -> None:
  """Writes all pictures."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('directory', nargs='?', type=Path, default=PICTURES)
  args = parser.parse_args()
  args.directory.mkdir(parents=True, exist_ok=True)
  use_fake_devices(8)
  for name, draw in PICTURES_BY_NAME.items():
    (args.directory / f'{name}.svg').write_text(draw(), encoding='utf-8')


if __name__ == '__main__':
  main()
