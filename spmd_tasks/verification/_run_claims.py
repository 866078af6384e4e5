"""The claims about a trained state: evaluated, saved and restored on another mesh, and computed in fewer bits.

bfloat16 keeps 8 bits of a number, so it rounds by up to 2^-8 of it. What one such rounding of every weight does to the
float32 loss and gradient is measured. The model rounds every weight once, and every value between its layers too, so
several times that distance is expected, and no more than ROUNDED_VALUES times. No distance at all would mean that
nothing was computed in bfloat16. Products in int8 and fp8 are compared in the same way, by the rounding of their types.
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
from spmd_tasks.verification._agreement import Difference, compare, compare_step, distance, moved, nearest, spread
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken, held, skipped
from spmd_tasks.verification._layout_claims import other_mesh
from spmd_tasks.verification._runner import Leaves, Runner, StepResult, leaves_of
from spmd_tasks.verification._settings import Setting, draw_batches, with_quantization

_SAVED_AFTER = 2  # steps


def eval_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case that an evaluation gives the same metrics on the experiment's mesh and on one device."""
  own = Setting(mesh=bench.own_mesh)
  setting = own if own.num_devices > 1 else Setting(mesh=other_mesh(bench))
  if setting.num_devices == 1:
    yield skipped('eval', 'evaluation', 'there is one device')
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
  states = [state, *(moved(state, epsilon, rng) for _ in range(3))]
  sources = dict(expected.runner.job.eval_inputs) or {'train': expected.runner.job.train_input}
  compared: list[Difference] = []
  for name, source in sources.items():
    batch = draw_batches(source, 2, bench.seed)[-1]
    alone, *samples = _evaluate(expected.runner, states, batch)
    (other,) = _evaluate(runner, [state], batch)
    wrong, every, _ = compare(alone, other, spread(alone, samples), epsilon, step)
    if wrong:
      return broken(bench, 'eval', setting, dataclasses.replace(wrong[0], leaf=f'{name}: {wrong[0].leaf}'))
    compared += every
  return held(nearest(compared), 1)


def _evaluate(runner: Runner, states: list[Any], batch: Mapping[str, np.ndarray]) -> list[Leaves]:
  """Evaluates one batch with each of the canonical states."""
  spec = {name: jax.ShapeDtypeStruct(values.shape, values.dtype) for name, values in batch.items()}
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
  """Yields the case that a checkpoint of the experiment's mesh goes on, on another mesh, as if nothing had happened."""
  saved, restored = Setting(mesh=bench.own_mesh), Setting(mesh=other_mesh(bench))
  if saved.num_devices == restored.num_devices == 1:
    yield skipped('checkpoint', 'saved and restored', 'there is one device')
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
    found = Checkpointer(directory, read_only=True).restore(target.model.canonical_state)
    assert found is not None
    live = target.model.from_canonical(found.state)
  state, nonzero_padding = target.to_numpy(live)
  want = leaves_of(before)
  others = [Difference(step=_SAVED_AFTER, leaf=f'padding of {name}') for name in nonzero_padding]
  others += [
    Difference(step=_SAVED_AFTER, leaf=name, difference=distance(value, want[name]))
    for name, value in leaves_of(state).items()
    if not np.array_equal(value, want[name], equal_nan=value.dtype.kind == 'f')
  ]
  if others:
    return broken(bench, 'checkpoint', restored, others[0])
  wrong, every = compare_step(expected, _SAVED_AFTER, target.step_from(live, expected.batches[_SAVED_AFTER])[1])
  if wrong is not None:
    return broken(bench, 'checkpoint', restored, wrong)
  verdict = held(nearest(every), 1)
  return dataclasses.replace(verdict, detail=f'every bit of {len(want)} leaves; then {verdict.detail}')


ROUNDING = 2.0**-8
ROUNDED_VALUES = 8.0
_NUM_SAMPLES = 3


def precision_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case that the experiment with every `dtype` of its model set to bfloat16 is near."""
  values = bench.source.values
  own = ['dtype'] if values.get('dtype') == 'float32' else []  # the experiment's field sets those of all parts
  paths = own or [path for path in bench.source.paths_ending('dtype') if values[path] == 'float32']
  if not paths:
    reason = 'no part of the model has a field dtype that is float32'
    yield skipped('bfloat16', 'bfloat16', reason)
    return
  setting = Setting(overrides=tuple(f'{path}=bfloat16' for path in paths))
  yield Case(
    claim='bfloat16',
    subject=f'{paths[0]}=bfloat16' + (f' and {len(paths) - 1} more' if len(paths) > 1 else ''),
    settings=(Setting(), setting),
    decide=functools.partial(_compare_precisions, 'bfloat16', setting, ROUNDING),
  )


# A number of int8 is off by half of a 127th of its channel's largest, which is some three times a usual one.
_ROUNDINGS = {'int8': 2.0**-6, 'float8_e4m3fn': 2.0**-4, 'float8_e5m2': 2.0**-3}


def quantization_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case that the experiment with its products in int8 or fp8 is near the one without."""
  quantization = bench.source.quantization
  used = [how for how in rules_of(quantization or {}).values() if how]
  if not used:
    yield skipped('quantization', 'int8 and fp8', 'the experiment has no task.quantization')
    return
  setting = Setting(change=functools.partial(with_quantization, quantization))
  rounding = max(_ROUNDINGS[dtype] for how in used for dtype in (how.dtype, how.gradient_dtype) if dtype)
  yield Case(
    claim='quantization',
    subject=f'task.quantization={quantization}',
    settings=(Setting(), setting),
    decide=functools.partial(_compare_precisions, 'quantization', setting, rounding),
  )


def _compare_precisions(claim: str, setting: Setting, rounding: float, bench: Bench) -> Verdict:
  exact, rounded = bench.trajectory(Setting()), bench.runner(setting)
  rng = np.random.default_rng((bench.seed, 50))
  compared: list[Difference] = []
  for step in range(bench.num_steps):
    state, batch, expected = exact.state(step), exact.batches[step], exact.result(step)
    samples = [exact.runner.step(moved(state, rounding, rng), batch) for _ in range(_NUM_SAMPLES)]
    found = _distances(expected, rounded.step(state, batch))
    spreads = [_distances(expected, sample) for sample in samples]
    for leaf, difference in found.items():
      allowed = ROUNDED_VALUES * max(spread[leaf] for spread in spreads)
      compared.append(Difference(step=step + 1, leaf=leaf, difference=difference, allowed=allowed))
  compared += _of_curves(bench, setting, rounding)
  if not any(each.difference for each in compared):
    kind = 'bfloat16' if claim == 'bfloat16' else 'int8 or fp8'
    raise UserError(f'the loss and the gradient are those of float32, bit for bit: nothing is computed in {kind}.')
  wrong = [each for each in compared if not each.difference <= each.allowed]
  if wrong:
    return broken(bench, claim, setting, wrong[0])
  return held(nearest(compared), bench.num_steps)


def _distances(expected: StepResult, other: StepResult) -> dict[str, float]:
  """Returns how far the loss and the gradient, taken as one vector, are from float32's."""
  names = [name for name in expected.forward if name.startswith('gradients/')]
  squares = sum(float(np.sum(np.square(expected.forward[name] - other.forward[name]))) for name in names)
  return {'loss': abs(float(expected.forward['loss'] - other.forward['loss'])), 'gradient': squares**0.5}


def _of_curves(bench: Bench, setting: Setting, rounding: float) -> list[Difference]:
  """Compares the losses of training without a stop, while the weights drift apart."""
  exact = bench.trajectory(Setting())
  rng = np.random.default_rng((bench.seed, 51))
  start, batches = exact.state(0), exact.batches
  samples = [exact.runner.losses(moved(start, rounding, rng), batches) for _ in range(_NUM_SAMPLES)]
  # Each step adds its own roundings to those of the steps before.
  spreads = np.maximum.accumulate(np.max(np.abs(np.array(samples) - exact.losses), axis=0))
  differences = np.abs(bench.runner(setting).losses(start, batches) - exact.losses)
  leaf, allowed = 'loss of training without a stop', ROUNDED_VALUES * spreads
  return [
    Difference(step=step, leaf=leaf, difference=float(d), allowed=float(a))
    for step, (d, a) in enumerate(zip(differences, allowed), 1)
  ]
