"""A stand-in for the compiler, for lm.Dense1B on data 8 x mdl 4.

It plans by a formula of mesh, microbatches, remat policy, dtype and batch.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

from spmd_tasks.config import resolve as resolve_config
from spmd_tasks.config import to_json
from spmd_tasks.errors import UserError

GIB = 2.0**30
# By remat policy: the activations that are kept on the device.
KEPT = {
  'none': 3.0, 'dots': 2.0, 'dots_no_batch': 1.0, 'attention_and_ffn': 0.95, 'attention': 0.9, 'full': 0.3,
  'attention_offloaded': 0.2,
}  # fmt: skip
# By remat policy: the work, with that of recomputing or fetching the others.
WORK = {
  'none': 1.0, 'dots': 1.05, 'dots_no_batch': 1.1, 'attention_and_ffn': 1.15, 'attention': 1.2, 'full': 1.33,
  'attention_offloaded': 1.35,
}  # fmt: skip


class Formula:
  """Plans an experiment; `tried` are the overrides that were planned.

  Args:
    name: of the experiment.
    hbm: GiB of a device.
    activations: GiB of all devices together, as the experiment is.
    state: the same of weights, gradients and optimizer state.
    refused: an override that is impossible.
  """

  def __init__(self, name='lm.Dense1B', *, hbm=15.75, activations=1700.0, state=14.0, refused='-'):
    self.name, self.hbm, self.activations, self.state, self.refused = name, hbm, activations, state, refused
    self.tried: list[tuple[str, ...]] = []

  def resolve(self, overrides: Sequence[str]):
    if any(self.refused in override for override in overrides):
      raise UserError(f'{self.refused} is impossible.')
    job, values = _resolved(self.name)
    changes = dict(override.split('=') for override in overrides)
    values = values | {path: type(values[path])(text) for path, text in changes.items() if path not in _SHAPES}
    shapes = {path: tuple(map(int, text.split(','))) for path, text in changes.items() if path in _SHAPES}
    experiment = dataclasses.replace(job.experiment, batch_size=values['batch_size'], **shapes)
    return dataclasses.replace(job, experiment=experiment), values

  def plan_with(self, overrides: Sequence[str]) -> dict[str, Any]:
    job, values = self.resolve(overrides)
    self.tried.append(tuple(overrides))
    sizes = job.experiment.mesh_spec().build_abstract().shape
    microbatches, policy = values['task.learner.num_microbatches'], values['remat_policy']
    rows = values['batch_size'] / 512
    moment = 0.5 if values['task.learner.optimizer.momentum_dtype'] == 'bfloat16' else 1.0
    state = self.state * (3 + moment) / 4 / (sizes['data'] * sizes['mdl'])
    activations = self.activations / math.prod(sizes.values()) * rows * KEPT[policy] / microbatches
    gathering = 0.02 * sizes['data'] * microbatches / sizes['mdl']
    seconds = rows * (WORK[policy] + 0.05 * (sizes['mdl'] - 1)) + gathering
    peak = (state + activations) * GIB
    fits = peak <= self.hbm * GIB
    return {
      'fits': fits,
      'peak_bytes': peak,
      'hbm_bytes': self.hbm * GIB,
      'argument_bytes': state * GIB,
      'predicted_step_s': seconds if fits else None,
    }


_SHAPES = ('ici_mesh_shape', 'dcn_mesh_shape')


@functools.cache
def _resolved(name: str):
  changes = ['ici_mesh_shape=1,8,4', 'remat_policy=dots_no_batch'] if name == 'lm.Dense1B' else []
  resolved = resolve_config(name, changes)
  return resolved.build(), to_json(resolved)['config']
