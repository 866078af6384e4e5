"""Lists the settings of an experiment that change its memory: remat policy, microbatches, mesh, optimizer dtype, batch.

A *lever* is one such setting with the values that need less memory than the present one, the weakest first. Only the
settings that an experiment has are listed; nothing is compiled here.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from spmd_tasks.experiment import Job
from spmd_tasks.layers import REMAT_POLICIES
from spmd_tasks.sharding import AxisRules

Overrides = tuple[str, ...]
MICROBATCHES = 'task.learner.num_microbatches'
_OFFLOADED = 'attention_offloaded'
_MOMENTUM = 'task.learner.optimizer.momentum_dtype'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lever:
  """One setting and its values.

  Attributes:
    name: for people.
    options: the overrides of each value, from the weakest change to the strongest.
    factors: by which each option divides the activations; empty where that is not known.
    note: what the change costs.
    changes_numbers: whether the run learns something else.
  """

  name: str
  options: tuple[Overrides, ...]
  factors: tuple[int, ...] = ()
  note: str = ''
  changes_numbers: bool = False


def levers(job: Job, values: Mapping[str, Any], *, can_offload: bool = False) -> list[Lever]:
  """Returns the levers of an experiment, the cheapest first; the last two change what is learned.

  Args:
    job: the built experiment.
    values: the value of every field by its path, as config.json has it.
    can_offload: whether the compiler knows a memory of the host beside the device's: those for TPU and GPU do.
  """
  found = [
    _remat(values, can_offload),
    _pipeline(values),
    _microbatches(job, values),
    _mesh(job),
    _momentum(values),
    _batch(job, values),
  ]
  return [lever for lever in found if lever is not None and lever.options]


def remat_paths(values: Mapping[str, Any]) -> list[str]:
  """The fields that set the remat policy: the experiment's own, or else those of the model's stacks."""
  if isinstance(values.get('remat_policy'), str):
    return ['remat_policy']
  return [path for path in values if path.startswith('task.model.') and path.endswith('.remat_policy')]


def remat_order(can_offload: bool) -> list[str]:
  """The remat policies that differ in the device's memory, from most to least of it.

  Args:
    can_offload: see `levers`. Without it, `attention_offloaded` is `attention` and left out.
  """
  return [policy for policy in REMAT_POLICIES if can_offload or policy != _OFFLOADED]


def remat_place(policy: str, order: Sequence[str]) -> int:
  """The index of a policy in `remat_order`."""
  return order.index(policy if policy in order else 'attention')


def remat_overrides(values: Mapping[str, Any], policy: str) -> Overrides:
  """The overrides that set a remat policy everywhere."""
  return tuple(f'{path}={policy}' for path in remat_paths(values))


def batch_axes(rules: AxisRules) -> tuple[str, ...]:
  """The mesh axes over which the axis rules split a batch."""
  return _axes_of(rules, 'batch')


def mesh_override(shape: Sequence[int]) -> str:
  """The override of a mesh's ICI shape."""
  return f'ici_mesh_shape={",".join(map(str, shape))}'


def rows_per_microbatch(job: Job, num_microbatches: int, sizes: Mapping[str, int] | None = None) -> float:
  """Returns the rows of a microbatch for each part of the batch; below 1 some devices hold padding alone.

  Args:
    job: the built experiment; one without a `batch_size` counts as having rows enough.
    num_microbatches: of the learner.
    sizes: axis -> size; None: of the experiment's mesh.
  """
  experiment = job.experiment
  if sizes is None:
    dcn = experiment.dcn_mesh_shape or (1,) * len(experiment.ici_mesh_shape)
    sizes = {name: max(i, 1) * d for name, i, d in zip(experiment.mesh_axis_names, experiment.ici_mesh_shape, dcn)}
  batch = getattr(experiment, 'batch_size', None)
  parts = math.prod(sizes.get(axis, 1) for axis in batch_axes(experiment.axis_rules))
  return batch / num_microbatches / parts if batch else math.inf


def _remat(values: Mapping[str, Any], can_offload: bool) -> Lever | None:
  paths = remat_paths(values)
  if not paths or any(values[path] not in REMAT_POLICIES for path in paths):
    return None
  order = remat_order(can_offload)
  present = max(remat_place(values[path], order) for path in paths)
  options = tuple(remat_overrides(values, policy) for policy in order[present + 1 :])
  note = 'keeps less on the device for the backward pass: more is computed again, or fetched from the host'
  return Lever(name='remat policy', options=options, note=note)


def _pipeline(values: Mapping[str, Any]) -> Lever | None:
  """More microbatches, which are smaller; at last the schedule that keeps few of them."""
  present, batch, schedule = (values.get(name) for name in ('num_microbatches', 'batch_size', 'schedule'))
  if not isinstance(present, int) or not isinstance(batch, int) or not isinstance(schedule, str):
    return None
  counts = [count for count in (present * 2, present * 4) if batch % count == 0]
  options: list[Overrides] = [(f'num_microbatches={count}',) for count in counts]
  if schedule != 'one_forward_one_backward':
    strongest = 'schedule=one_forward_one_backward', *(('num_repeats=1',) if values.get('num_repeats', 1) != 1 else ())
    options.append(strongest)
  return Lever(
    name='pipeline', options=tuple(options), note='smaller microbatches, or fewer of them kept in a pipeline'
  )


def _microbatches(job: Job, values: Mapping[str, Any]) -> Lever | None:
  present = values.get(MICROBATCHES)
  batch = values.get('batch_size')
  if not isinstance(present, int) or not isinstance(batch, int):
    return None
  counts = []
  count = present * 2
  while batch % count == 0 and rows_per_microbatch(job, count) >= 1:
    counts.append(count)
    count *= 2
  return Lever(
    name='microbatches',
    options=tuple((f'{MICROBATCHES}={count}',) for count in counts),
    factors=tuple(count // present for count in counts),
    note='gradients are accumulated; weights are gathered once per microbatch',
  )


def _mesh(job: Job) -> Lever | None:
  """Moves devices from the batch axes to the axis that splits the wide dims, a factor of 2 at a time."""
  experiment = job.experiment
  names, shape = experiment.mesh_axis_names, list(experiment.ici_mesh_shape)
  wide = next((axis for axis in _axes_of(experiment.axis_rules, 'mlp') if axis in names), None)
  if wide is None or -1 in shape:
    return None
  options: list[Overrides] = []
  while len(options) < 2:
    donors = [names.index(axis) for axis in batch_axes(experiment.axis_rules) if axis in names and axis != wide]
    donor = max(donors, key=lambda at: shape[at], default=None)
    if donor is None or shape[donor] % 2:
      break
    shape[donor] //= 2
    shape[names.index(wide)] *= 2
    options.append((mesh_override(shape),))
  return Lever(name='mesh', options=tuple(options), note=f'more traffic over {wide}')


def _momentum(values: Mapping[str, Any]) -> Lever | None:
  if values.get(_MOMENTUM) != 'float32':
    return None
  note = "changes the numbers: Adam's first moment is rounded to 8 bits of mantissa"
  return Lever(name='optimizer dtype', options=((f'{_MOMENTUM}=bfloat16',),), note=note, changes_numbers=True)


def _batch(job: Job, values: Mapping[str, Any]) -> Lever | None:
  batch = values.get('batch_size')
  if not isinstance(batch, int):
    return None
  factors = [
    factor for factor in (2, 4, 8, 16, 32, 64) if batch % factor == 0 and rows_per_microbatch(job, factor) >= 1
  ]
  return Lever(
    name='batch',
    options=tuple((f'batch_size={batch // factor}',) for factor in factors),
    factors=tuple(factors),
    note='changes what is learned: a smaller batch',
    changes_numbers=True,
  )


def _axes_of(rules: AxisRules, name: str) -> tuple[str, ...]:
  """The mesh axes of the first axis rule of a logical name."""
  axes = next((axes for rule, axes in rules if rule == name), None)
  if isinstance(axes, str):
    return (axes,)
  return () if axes is None or isinstance(axes, int) else tuple(axes)
