"""The claims about the train step itself, which find errors that all layouts have in common.

`step`: steps on one device agree with the formulas (_formula_runner.py), and a non-finite step changes nothing.

`dropout`: each layer, microbatch and row has its own mask. The masks of Linen's Dropout are recorded in a forward pass
that drops half of all values, so that any two masks differ. That the learner's microbatches and the steps have
different random numbers follows from `step` and `microbatches`.

Shapes: B rows.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.sharding.axis_rules import stage_axis
from spmd_tasks.verification._agreement import Difference
from spmd_tasks.verification._cases import (
  Bench,
  Case,
  Verdict,
  agreement_case,
  broken_verdict,
  held_verdict,
  skipped_case,
)
from spmd_tasks.verification._formula_runner import no_formula_reason
from spmd_tasks.verification._runner import Runner, leaves_of
from spmd_tasks.verification._settings import Setting


def step_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case that steps agree with the formulas, and the case of a non-finite step."""
  if reason := no_formula_reason(bench.source.base.task):
    yield skipped_case('step', 'the formulas', reason)
    return
  yield agreement_case('step', Setting(), Setting(by_formulas=True), subject='the formulas, one device')
  yield Case(claim='step', subject='weights that are NaN', settings=(Setting(),), decide=_compare_skipped_step)


def _compare_skipped_step(bench: Bench) -> Verdict:
  """Compares a step with a non-finite loss, which must change only the counts of skipped steps."""
  step = bench.num_steps - 1
  expected = bench.trajectory(Setting())
  state = expected.state(step)

  def fill_with_nan(x):
    return np.full_like(x, np.nan) if np.issubdtype(x.dtype, np.floating) else x

  state = state.replace(weights=jax.tree.map(fill_with_nan, state.weights))
  result = expected.runner.step(state, expected.batches[step])
  if np.isfinite(result.forward['loss']):
    raise UserError('the loss does not depend on the weights.')
  learner = state.learner.replace(
    opt_state=state.learner.opt_state['optimizer'],
    num_skipped=state.learner.num_skipped + 1,
    num_skipped_in_a_row=state.learner.num_skipped_in_a_row + 1,
  )
  leaves = leaves_of({'weights': state.weights, 'learner': learner, 'step': state.step, 'rng': state.rng})
  leaves['skipped'] = np.array(1, np.float32)
  for name, value in leaves.items():
    if not np.array_equal(value, result.updated[name], equal_nan=value.dtype.kind == 'f'):
      difference = float(np.nanmax(np.abs(np.float64(value) - np.float64(result.updated[name])), initial=0.0))
      return broken_verdict(bench, 'step', Setting(), Difference(step=step + 1, leaf=name, difference=difference))
  verdict = held_verdict(Difference(step=step + 1, leaf='the state', difference=0.0), 1)
  return dataclasses.replace(verdict, detail=f'1 step; every bit of {len(leaves)} leaves')


_MIN_BITS = 32  # size of a row's mask at which two rows are hardly ever equal by chance
Mask = tuple[str, bool, np.ndarray]  # path of its module, whether each row has its own mask, bool [B, ...]


def dropout_cases(bench: Bench) -> Iterator[Case]:
  """Yields a case on one device and, if the model has a pipeline, one on its stages."""
  source = bench.source
  paths = [path for path in source.paths_ending('dropout_rate') if source.values[path]]
  if not paths:
    yield skipped_case('dropout', 'masks', 'no part of the model has a dropout_rate other than 0')
    return
  overrides = tuple(f'{path}=0.5' for path in paths)
  experiment, settings = source.base.experiment, [Setting(overrides=overrides)]
  axis = stage_axis(experiment.mesh_axis_names, experiment.axis_rules)
  pipelines = source.paths_of(PipelinedStack)
  if axis and pipelines and bench.num_devices > 1:
    own = dict(bench.own_mesh)[axis]
    count = int(source.values[f'{pipelines[0]}.num_microbatches'])
    num_stages = own if own > 1 else 2
    if count % num_stages == 0:
      settings.append(Setting(mesh=((axis, num_stages),), overrides=overrides))
  for setting in settings:
    yield Case(claim='dropout', subject=f'masks, {setting}', decide=functools.partial(_compare_masks, setting=setting))


def _compare_masks(bench: Bench, setting: Setting) -> Verdict:
  runner = Runner(bench.source, setting)
  state = bench.trajectory(Setting()).state(0)
  batch = bench.trajectory(Setting()).batches[0]
  masks = [_record_masks(runner, state, batch, np.array([bench.seed, number], np.uint32)) for number in range(2)]
  if not masks[0]:
    raise UserError("the model does not call Linen's Dropout with a mask.")
  if sentence := _find_equal_masks([*masks[0], *masks[1]]):
    first = Difference(step=1, leaf=sentence, difference=0.0, allowed=0.0)
    verdict = broken_verdict(bench, 'dropout', setting, first)
    return dataclasses.replace(verdict, detail=sentence)
  count = len(masks[0])
  verdict = held_verdict(Difference(step=1, leaf='masks', difference=0.0), 1)
  return dataclasses.replace(
    verdict, detail=f'{count} masks, with dropout_rate=0.5; no two of them or of their rows are equal'
  )


def _record_masks(runner: Runner, state: Any, batch: Any, key: np.ndarray) -> list[Mask]:
  """Returns the masks of a training forward pass, without those of a pipeline's bubbles."""
  masks: list[Mask] = []

  def add(path: str, has_rows: bool, mask: np.ndarray, is_work: np.ndarray) -> None:
    if is_work:
      masks.append((path, has_rows, np.array(mask)))

  def record(next_method: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if not isinstance(module, nn.Dropout) or context.method_name != '__call__' or not module.rate:
      return next_method(*args, **kwargs)
    x, *others = args
    scale = next_method(jnp.ones_like(x), *others, **kwargs)  # 0, or 1 / (1 - rate)
    broadcast_dims = {dim % x.ndim for dim in module.broadcast_dims}
    mask = scale[tuple(slice(1) if dim in broadcast_dims else slice(None) for dim in range(x.ndim))] != 0
    is_work = jnp.asarray(current_layer_scope().part.is_work)
    _call_on_host(functools.partial(add, '/'.join(module.path), 0 not in broadcast_dims), mask, is_work)
    return x * scale

  def forward(variables: Any, batch: Any, key: jax.Array) -> jax.Array:
    rng = jax.random.wrap_key_data(key, impl='threefry2x32')
    with nn.intercept_methods(record):
      return runner.model.task.training_loss(variables, batch, rng)

  spec = {name: jax.ShapeDtypeStruct(values.shape, values.dtype) for name, values in batch.items()}
  step = runner.model.batch_step('dropout', spec, forward, jax.ShapeDtypeStruct(key.shape, key.dtype))
  jax.block_until_ready(step(runner.place(state).variables, step.place(batch), key))
  jax.effects_barrier()
  return masks


def _call_on_host(function: Any, *values: jax.Array) -> None:
  """Calls a function with values of a compiled program, even inside a pipeline's shard_map over stages only."""
  mesh = jax.sharding.get_abstract_mesh()
  others = set(mesh.axis_names) - set(mesh.manual_axes)
  if not mesh.manual_axes or not others:
    jax.debug.callback(function, *values)
    return

  def call(*values: jax.Array) -> tuple[jax.Array, ...]:
    jax.debug.callback(function, *values)
    return values

  specs = (PartitionSpec(),) * len(values)
  jax.shard_map(call, in_specs=specs, out_specs=specs, axis_names=others, check_vma=False)(*values)


def _find_equal_masks(masks: Sequence[Mask]) -> str | None:
  """Returns a sentence about two equal masks, or equal rows of a mask; None if all differ."""
  seen: dict[Any, str] = {}
  for path, has_rows, mask in masks:
    is_trivial = mask.all() or not mask.any()
    if is_trivial or mask.size < _MIN_BITS:
      continue
    key = (mask.shape, mask.tobytes())
    if key in seen:
      return f'the mask of {path} equals the mask of {seen[key]}'
    seen[key] = path
    if has_rows and mask.ndim > 1 and mask[0].size >= _MIN_BITS:
      rows = {row.tobytes() for row in mask}
      if len(rows) < len(mask):
        return f'rows of the mask of {path} are equal'
  return None
