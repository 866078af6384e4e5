"""The claims about what is made of a trained state: evaluated, saved, restored on another mesh and trained on."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import tempfile
from typing import Any

from clu import metrics as clu_metrics
import jax
import numpy as np

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.verification._agreement import compare_step, nearest
from spmd_tasks.verification._batches import draw_batches
from spmd_tasks.verification._bench import Bench
from spmd_tasks.verification._cases import Case, Verdict, broken, held, not_applicable
from spmd_tasks.verification._mesh_claims import other_mesh
from spmd_tasks.verification._noise import Difference, compare, distance, moved, spread
from spmd_tasks.verification._runner import Leaves, Runner, leaves_of
from spmd_tasks.verification._settings import Setting

_SAVED_AFTER = 2  # steps


def eval_cases(bench: Bench, num_more: int) -> Iterator[Case]:
  """Yields the case that an evaluation gives the same metrics on the experiment's mesh and on one device."""
  del num_more
  own = Setting(mesh=bench.own_mesh)
  setting = own if own.num_devices > 1 else Setting(mesh=other_mesh(bench))
  if setting.num_devices == 1:
    yield not_applicable('eval', 'evaluation', 'there is one device')
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
    averages = jax.device_get(eval_step(placed.variables, eval_step.place(batch), np.asarray(placed.step)))
    results.append({name: _mean(average) for name, average in averages.items()})
  return results


def _mean(average: clu_metrics.Average) -> np.ndarray:
  return np.asarray(average.total, np.float64) / (float(average.count) or 1.0)


def checkpoint_cases(bench: Bench, num_more: int) -> Iterator[Case]:
  """Yields the case that a checkpoint of the experiment's mesh goes on, on another mesh, as if nothing had happened."""
  del num_more
  saved, restored = Setting(mesh=bench.own_mesh), Setting(mesh=other_mesh(bench))
  if saved.num_devices == restored.num_devices == 1:
    yield not_applicable('checkpoint', 'saved and restored', 'there is one device')
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
  if nonzero_padding:
    return broken(bench, 'checkpoint', restored, _of_checkpoint(f'padding of {nonzero_padding[0]}', float('inf')))
  want = leaves_of(before)
  for name, value in leaves_of(state).items():
    if not np.array_equal(value, want[name], equal_nan=value.dtype.kind == 'f'):
      return broken(bench, 'checkpoint', restored, _of_checkpoint(name, distance(value, want[name])))
  wrong, every = compare_step(expected, _SAVED_AFTER, target.step_from(live, expected.batches[_SAVED_AFTER])[1])
  if wrong is not None:
    return broken(bench, 'checkpoint', restored, wrong)
  verdict = held(nearest(every), 1)
  return dataclasses.replace(verdict, detail=f'every bit of {len(want)} leaves; then {verdict.detail}')


def _of_checkpoint(leaf: str, difference: float) -> Difference:
  return Difference(step=_SAVED_AFTER, leaf=leaf, difference=difference, allowed=0.0)
