"""Random layouts of an experiment on 2 to 8 fake devices, over one or two slices: meshes, axis rules, pipelines, remat.

layout = draw_layout(random.Random(8), settings)        # fields of random_experiments.RandomExperiment
mesh_of(layout)                                         # (('replica', 1), ('stage', 2), ('data', 3), ('mdl', 1))
"""

from collections.abc import Mapping
import math
import random
from typing import Any

from spmd_tasks.sharding import (
  DEFAULT_AXIS_RULES,
  DataExpertModelMesh,
  DataModelMesh,
  HiddenShardingMesh,
  context_axis_rules,
  stage_axis_rules,
)

Settings = dict[str, Any]
MAX_DEVICES = 8


def draw_layout(rng: random.Random, settings: Settings) -> Settings:
  """Draws a layout of the experiment on 2 to 8 devices, over one or two slices."""
  is_moe = settings['ffn_kind'] not in ('plain', 'gated')
  layout: Settings = {
    'remat_policy': rng.choice(['none', 'none', 'full', 'dots', 'dots_no_batch']),
    'scan': rng.random() < 0.8,
  }
  if is_moe:
    layout['dispatch'] = rng.choice(['ring', 'padded_all_to_all'])
  num_devices = rng.choice([2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 8])
  stages = _draw_stages(rng, settings, num_devices, layout) if rng.random() < 0.45 else 1
  rest = num_devices // stages
  kind = rng.choice(['dense', 'expert', 'apart', 'two_data', 'hidden'] if is_moe else ['dense'])
  names, sizes = ['replica', 'data', 'mdl'], None
  if kind == 'apart':
    names = ['replica', 'data', 'expert', 'mdl']
  elif kind == 'expert' or (kind == 'two_data' and not _fits(_two_data, rest, settings)):
    kind, names = 'expert', ['replica', 'data', 'expert', 'mdl']
  elif kind == 'two_data':
    sizes = list(_two_data(rest, settings).ici_mesh_shape)
  elif kind == 'hidden':
    names = ['replica', 'data', 'expert', 'mdl']
    if _fits(_hidden, rest, settings):
      sizes = list(_hidden(rest, settings).ici_mesh_shape)
    else:
      kind = 'expert'
  if sizes is None:
    if rng.random() < 0.3:
      names.insert(2, 'context')
    sizes = _factorise(rng, rest, len(names))
    num_parts = sizes[2] if 'context' in names else 1
    layout['ring_attention'] = num_parts > 1 and rng.random() < 0.5
    # Dropout, jitter and capacities depend on the order of tokens.
    is_ordered = settings['dropout'] or settings.get('jitter') or settings['ffn_kind'] in ('capacity', 'expert_choice')
    fits = num_parts > 1 and not is_ordered and settings['causal'] and settings['seq_len'] % (2 * num_parts) == 0
    layout['balances_tokens'] = fits and rng.random() < 0.5
  if stages > 1:
    names.insert(1, 'stage')
    sizes.insert(1, stages)
  dcn = [1] * len(sizes)
  if rng.random() < 0.25:
    axis = rng.choice([i for i, size in enumerate(sizes) if size > 1] or [0])
    factor = rng.choice([f for f in (2, 3) if sizes[axis] % f == 0] or [1])
    sizes[axis], dcn[axis] = sizes[axis] // factor, factor
  layout |= {'rules': kind, 'mesh_axis_names': tuple(names), 'ici_mesh_shape': tuple(sizes)}
  return layout | ({'dcn_mesh_shape': tuple(dcn)} if max(dcn) > 1 else {})


def _draw_stages(rng: random.Random, settings: Settings, num_devices: int, layout: Settings) -> int:
  """Draws the number of stages, 1 if none fits, and sets the pipeline's schedule in the layout."""
  rows = settings['batch_size'] // settings['grad_microbatches']
  candidates = [
    (stages, microbatches)
    for stages in (2, 3, 4, 5, 8)
    if num_devices % stages == 0
    for microbatches in range(stages, rows + 1, stages)
    if rows % microbatches == 0
  ]
  if not candidates:
    return 1
  stages, microbatches = rng.choice(candidates)
  layers = settings['num_layers']
  schedule = rng.choice(['gpipe', 'circular', 'one_forward_one_backward'])
  repeats = 1
  if schedule == 'circular':
    repeats = rng.choice([r for r in (1, 2, 3, 4) if layers % r == 0])
  layout |= {'schedule': schedule, 'num_microbatches': microbatches, 'num_repeats': repeats}
  return stages


def _factorise(rng: random.Random, number: int, num_factors: int) -> list[int]:
  """Returns random factors whose product is `number`."""
  factors = [1] * num_factors
  for prime in (2, 2, 2, 3, 5, 7):
    if number % prime == 0:
      number //= prime
      # `replica` is the least interesting axis.
      factors[rng.choice([*range(num_factors), *range(1, num_factors)])] *= prime
  return factors


def _two_data(num_devices: int, settings: Mapping[str, Any]) -> Any:
  return DataModelMesh(num_devices=num_devices, num_experts=settings['num_experts']).axes()


def _hidden(num_devices: int, settings: Mapping[str, Any]) -> Any:
  experts, hidden = settings['num_experts'], settings['hidden_dims']
  return HiddenShardingMesh(num_devices=num_devices, num_experts=experts, hidden_dim=hidden).axes()


def _fits(axes: Any, num_devices: int, settings: Mapping[str, Any]) -> bool:
  try:
    axes(num_devices, settings)
  except ValueError:
    return False
  return True


def rules_of(layout: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
  """The axis rules of the layout's kind; they depend on its sizes."""
  num_devices = math.prod(size for axis, size in mesh_of(layout) if axis != 'stage')
  kind = layout['rules']
  if kind == 'dense':
    rules = DEFAULT_AXIS_RULES
  elif kind == 'apart':  # experts have their own axis, which does not split the batch
    rules = tuple(rule for rule in DEFAULT_AXIS_RULES if rule[0] != 'expert')
  elif kind == 'expert':
    # The rules do not depend on the sizes.
    rules = DataExpertModelMesh(num_devices=num_devices, num_expert_partitions=1).axes().axis_rules
  else:
    rules = (_two_data if kind == 'two_data' else _hidden)(num_devices, settings).axis_rules
  if 'context' in layout['mesh_axis_names']:
    rules = context_axis_rules(rules)
  return stage_axis_rules(rules) if 'stage' in layout['mesh_axis_names'] else rules


def reference_of(layout: Mapping[str, Any], settings: Mapping[str, Any]) -> Settings:
  """The reference layout with which a layout must agree; {} is one device.

  In a pipeline, masks of dropout and jitter depend on microbatches and stages (see PipelinedStack). With these the
  reference is the same pipeline without other axes.
  """
  if 'stage' not in layout['mesh_axis_names'] or not (settings['dropout'] or settings.get('jitter')):
    return {}
  stages = dict(mesh_of(layout))['stage']
  sizes = tuple(stages if name == 'stage' else 1 for name in layout['mesh_axis_names'])
  return {**layout, 'ici_mesh_shape': sizes, 'dcn_mesh_shape': None, 'ring_attention': False}


def mesh_of(layout: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
  """The (axis, size) pairs of a layout, over all slices."""
  ici = layout['ici_mesh_shape']
  dcn = layout.get('dcn_mesh_shape') or (1,) * len(ici)
  return tuple((name, i * d) for name, i, d in zip(layout['mesh_axis_names'], ici, dcn))
