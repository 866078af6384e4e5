"""The claims about a trained state: it is evaluated, restored on another mesh, and trained in lower precision.

bfloat16 has 8 significant bits, so a number's rounding error is up to 2^-8 of it. The distance of the float32 loss and
gradient for weights that are rounded once is measured. The model rounds every weight once and every activation too, so
its distance may be several times larger, up to ROUNDED_VALUES times. A distance of 0 means that nothing was computed in
bfloat16. Products in int8 and fp8 are compared in the same way, with the rounding errors of their dtypes.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import tempfile
from typing import Any

from clu import metrics as clu_metrics
import jax
import numpy as np

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.errors import UserError
from spmd_tasks.layers.quantized_products import rules_of
from spmd_tasks.verification._agreement import (
  Difference,
  closest_to_allowed,
  compare,
  compare_step,
  max_difference,
  perturb_weights,
  spread,
)
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken_verdict, held_verdict, skipped_case
from spmd_tasks.verification._layout_claims import other_mesh
from spmd_tasks.verification._runner import Leaves, Runner, StepResult, leaves_of
from spmd_tasks.verification._settings import Setting, draw_batches, with_quantization

_SAVED_AFTER = 2  # steps


def eval_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case that an evaluation gives the same metrics on the experiment's mesh and on one device."""
  own = Setting(mesh=bench.own_mesh)
  setting = own if own.num_devices > 1 else Setting(mesh=other_mesh(bench))
  if setting.num_devices == 1:
    yield skipped_case('eval', 'evaluation', 'there is one device')
    return
  yield Case(
    claim='eval',
    subject=str(setting),
    settings=(Setting(), setting),
    decide=functools.partial(_compare_evaluations, setting=setting),
  )


def _compare_evaluations(bench: Bench, setting: Setting) -> Verdict:
  expected, runner = bench.trajectory(Setting()), bench.runner(setting)
  step = bench.num_steps - 1
  state, epsilon = expected.state(step), expected.runner.epsilon
  rng = np.random.default_rng((bench.seed, 30))
  states = [state, *(perturb_weights(state, epsilon, rng) for _ in range(3))]
  sources = dict(expected.runner.job.eval_inputs) or {'train': expected.runner.job.train_input}
  all_differences: list[Difference] = []
  for name, source in sources.items():
    batch = draw_batches(source, 2, bench.seed)[-1]
    reference, *samples = _evaluate(expected.runner, states, batch)
    (metrics,) = _evaluate(runner, [state], batch)
    too_large, differences, _ = compare(reference, metrics, spread(reference, samples), epsilon, step)
    if too_large:
      worst = dataclasses.replace(too_large[0], leaf=f'{name}: {too_large[0].leaf}')
      return broken_verdict(bench, 'eval', setting, worst)
    all_differences += differences
  return held_verdict(closest_to_allowed(all_differences), 1)


def _evaluate(runner: Runner, states: list[Any], batch: Mapping[str, np.ndarray]) -> list[Leaves]:
  """Evaluates one batch with each of the canonical states."""
  spec = {
    name: jax.ShapeDtypeStruct(values.shape, jax.dtypes.canonicalize_dtype(values.dtype))
    for name, values in batch.items()
  }
  eval_step = runner.model.eval_step(spec)
  results = []
  for state in states:
    placed = runner.place(state)
    averages = jax.device_get(
      eval_step.with_variables(placed.variables, eval_step.place(batch), np.asarray(placed.step))
    )
    averages.pop('outputs', None)
    results.append({name: _mean(average) for name, average in averages.items()})
  return results


def _mean(average: clu_metrics.Average) -> np.ndarray:
  return np.asarray(average.total, np.float64) / (float(average.count) or 1.0)


def checkpoint_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case that training resumes on another mesh from a checkpoint of the experiment's mesh."""
  saved, restored = Setting(mesh=bench.own_mesh), Setting(mesh=other_mesh(bench))
  if saved.num_devices == restored.num_devices == 1:
    yield skipped_case('checkpoint', 'saved and restored', 'there is one device')
    return
  yield Case(
    claim='checkpoint',
    subject=f'saved on {saved}, restored on {restored}',
    settings=(Setting(), saved, restored),
    decide=functools.partial(_move_checkpoint, saved=saved, restored=restored),
  )


def _move_checkpoint(bench: Bench, saved: Setting, restored: Setting) -> Verdict:
  expected = bench.trajectory(Setting())
  source, target = bench.runner(saved), bench.runner(restored)
  before = expected.state(_SAVED_AFTER)
  with tempfile.TemporaryDirectory(prefix='spmd_tasks_verify_') as directory:
    checkpointer = Checkpointer(directory)
    checkpointer.save(_SAVED_AFTER, source.model.to_canonical(source.place(before)), input_state={})
    checkpointer.close()
    checkpoint = Checkpointer(directory, read_only=True).restore(target.model.canonical_state)
    assert checkpoint is not None
    padded = target.model.from_canonical(checkpoint.state)
  state, nonzero_padding = target.to_numpy(padded)
  leaves = leaves_of(before)
  differences = [Difference(step=_SAVED_AFTER, leaf=f'padding of {name}') for name in nonzero_padding]
  differences += [
    Difference(step=_SAVED_AFTER, leaf=name, difference=max_difference(value, leaves[name]))
    for name, value in leaves_of(state).items()
    if not np.array_equal(value, leaves[name], equal_nan=value.dtype.kind == 'f')
  ]
  if differences:
    return broken_verdict(bench, 'checkpoint', restored, differences[0])
  _, result = target.step_from(padded, expected.batches[_SAVED_AFTER])
  worst, step_differences = compare_step(expected, _SAVED_AFTER, result)
  if worst is not None:
    return broken_verdict(bench, 'checkpoint', restored, worst)
  verdict = held_verdict(closest_to_allowed(step_differences), 1)
  return dataclasses.replace(verdict, detail=f'every bit of {len(leaves)} leaves; then {verdict.detail}')


ROUNDING = 2.0**-8
ROUNDED_VALUES = 8.0
_NUM_SAMPLES = 3


def precision_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case that the experiment with every `dtype` of its model set to bfloat16 is close to float32."""
  values = bench.source.values
  own = ['dtype'] if values.get('dtype') == 'float32' else []  # the experiment's field sets the dtype of all layers
  paths = own or [path for path in bench.source.paths_ending('dtype') if values[path] == 'float32']
  if not paths:
    yield skipped_case('bfloat16', 'bfloat16', 'no part of the model has a field dtype that is float32')
    return
  setting = Setting(overrides=tuple(f'{path}=bfloat16' for path in paths))
  yield Case(
    claim='bfloat16',
    subject=f'{paths[0]}=bfloat16' + (f' and {len(paths) - 1} more' if len(paths) > 1 else ''),
    settings=(Setting(), setting),
    decide=functools.partial(_compare_precisions, 'bfloat16', setting, ROUNDING),
  )


# The rounding error of int8 is up to 1/254 of the channel's largest entry, which is about three times a typical entry.
_ROUNDINGS = {'int8': 2.0**-6, 'float8_e4m3fn': 2.0**-4, 'float8_e5m2': 2.0**-3}


def quantization_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case that the experiment with its int8 or fp8 products is close to the one without."""
  quantization = bench.source.quantization
  products = [product for product in rules_of(quantization or {}).values() if product]
  if not products:
    yield skipped_case('quantization', 'int8 and fp8', 'the experiment has no task.quantization')
    return
  setting = Setting(change=functools.partial(with_quantization, quantization))
  rounding = max(_ROUNDINGS[dtype] for p in products for dtype in (p.dtype, p.gradient_dtype) if dtype)
  yield Case(
    claim='quantization',
    subject=f'task.quantization={quantization}',
    settings=(Setting(), setting),
    decide=functools.partial(_compare_precisions, 'quantization', setting, rounding),
  )


def _compare_precisions(claim: str, setting: Setting, rounding: float, bench: Bench) -> Verdict:
  exact, rounded = bench.trajectory(Setting()), bench.runner(setting)
  rng = np.random.default_rng((bench.seed, 50))
  differences: list[Difference] = []
  for step in range(bench.num_steps):
    state, batch, expected = exact.state(step), exact.batches[step], exact.result(step)
    samples = [exact.runner.step(perturb_weights(state, rounding, rng), batch) for _ in range(_NUM_SAMPLES)]
    spreads = [_distances(expected, sample) for sample in samples]
    for leaf, difference in _distances(expected, rounded.step(state, batch)).items():
      allowed = ROUNDED_VALUES * max(spread[leaf] for spread in spreads)
      differences.append(Difference(step=step + 1, leaf=leaf, difference=difference, allowed=allowed))
  differences += _compare_curves(bench, setting, rounding)
  if not any(d.difference for d in differences):
    kind = 'bfloat16' if claim == 'bfloat16' else 'int8 or fp8'
    raise UserError(f'the loss and the gradient equal float32 bit for bit, so nothing is computed in {kind}.')
  too_large = [d for d in differences if not d.difference <= d.allowed]
  if too_large:
    return broken_verdict(bench, claim, setting, too_large[0])
  return held_verdict(closest_to_allowed(differences), bench.num_steps)


def _distances(expected: StepResult, other: StepResult) -> dict[str, float]:
  """Returns the distances of two results: of the losses, and of the gradients as vectors."""
  names = [name for name in expected.forward if name.startswith('gradients/')]
  squares = sum(float(np.sum(np.square(expected.forward[name] - other.forward[name]))) for name in names)
  return {'loss': abs(float(expected.forward['loss'] - other.forward['loss'])), 'gradient': squares**0.5}


def _compare_curves(bench: Bench, setting: Setting, rounding: float) -> list[Difference]:
  """Compares the losses of uninterrupted training, in which weights drift apart."""
  exact = bench.trajectory(Setting())
  rng = np.random.default_rng((bench.seed, 51))
  start, batches = exact.state(0), exact.batches
  samples = [exact.runner.losses(perturb_weights(start, rounding, rng), batches) for _ in range(_NUM_SAMPLES)]
  # Rounding errors accumulate over steps.
  spreads = np.maximum.accumulate(np.max(np.abs(np.array(samples) - exact.losses), axis=0))
  differences = np.abs(bench.runner(setting).losses(start, batches) - exact.losses)
  leaf, allowed = 'loss of uninterrupted training', ROUNDED_VALUES * spreads
  return [
    Difference(step=step, leaf=leaf, difference=float(d), allowed=float(a))
    for step, (d, a) in enumerate(zip(differences, allowed), 1)
  ]
