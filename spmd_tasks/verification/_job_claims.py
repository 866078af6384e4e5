"""The claim about a whole job, which runs as --mode train does, stops half-way, resumes, and evaluates.

The job trains on each batch of the input once and in order. Its losses agree with the formulas from the job's first
state, and its last evaluation agrees with the weighted mean over all examples, of averaged weights if `eval_with_ema`
is set. The eval set has rows of different lengths, and ends with rows of weight 0, like the last batch of any set. The
job directory is temporary, and the experiment's hooks do not run.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import io
import itertools
import json
import signal
import tempfile
import time
from typing import Any

from etils import epath
import jax
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.distributed import EmergencyExit
from spmd_tasks.errors import JobError
from spmd_tasks.experiment import Job, make_training_iterator
from spmd_tasks.programs import train
from spmd_tasks.programs.hooks import Evaluate, SaveCheckpoints, TrainHook, TrainRun
from spmd_tasks.runtime import TrainState
from spmd_tasks.tuning.preferences import without_references
from spmd_tasks.verification._agreement import (
  Difference,
  Trajectory,
  closest_to_allowed,
  compare,
  compare_losses,
  max_difference,
  perturb,
  spread,
)
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken_verdict, held_verdict, skipped_case
from spmd_tasks.verification._formula_runner import FormulaRunner, no_formula_reason
from spmd_tasks.verification._runner import with_gradients
from spmd_tasks.verification._settings import Batch, DerivedInput, Setting, build_job, draw_batches

_NUM_STEPS, _STOPPED_AFTER = 4, 2
_REFERENCE = Setting(by_formulas=True)


def job_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case of a job of 4 steps in two parts, on one device."""
  job, subject = bench.source.base, f'{_NUM_STEPS} steps in two parts'
  reason = no_formula_reason(job.task)
  if getattr(job.train_input, 'kind', '') == 'rollouts':
    reason = 'its batches are sampled by the model'
  if without_references(job.train_input) is not job.train_input:
    reason = "its batches need the reference's log-probabilities"
  if reason:
    yield skipped_case('job', subject, reason)
    return
  yield Case(claim='job', subject=f'{subject}, and an evaluation', decide=_compare_job)


class _Recorder(TrainHook):
  """Records the batches, losses, states and metrics of a job, in numpy."""

  def __init__(self) -> None:
    self.read_batches: list[Batch] = []
    self.losses: list[float] = []
    self.first: TrainState | None = None
    self.last: Any = None
    self.evals: Mapping[str, Any] = {}

  def start(self, run: TrainRun) -> None:
    if self.first is None:
      self.first = jax.device_get(run.model.to_canonical(run.state))

  def needs_state(self, step: int) -> bool:
    return True

  def before_step(self, run: TrainRun, batch: Mapping[str, jax.Array]) -> None:
    self.read_batches.append({name: np.array(rows) for name, rows in run.model.input_layout.true_rows(batch).items()})

  def after_step(self, run: TrainRun, outcome: Any) -> None:
    self.losses.append(float(outcome.metrics['loss']))

  def after_loop(self, run: TrainRun) -> None:
    self.last = jax.device_get(run.model.to_canonical(run.state))

  def finish(self, run: TrainRun) -> None:
    self.evals = run.evals.metrics


@dataclasses.dataclass(frozen=True)
class _EvalSet(DerivedInput):
  """The first two batches of an input; the second has rows of different lengths, and half of them have weight 0."""

  seed: int

  def batches(self) -> Iterator[Batch]:
    first, second = draw_batches(self.source, 2, self.seed)
    if 'weights' in second and len(second['weights']) > 1:
      for values in second.values():
        if values.ndim:
          values[-(len(values) // 2) :] = 0
    yield from (first, second)


def _compare_job(bench: Bench) -> Verdict:
  job = build_job(bench.source, Setting(overrides=('trackers=()',)))
  inputs = dict(job.eval_inputs) or {'train': job.train_input}
  sets = {name: _EvalSet(eval_input, bench.seed) for name, eval_input in inputs.items()}
  job = dataclasses.replace(job, eval_inputs=sets)
  recorder = _run_in_two_parts(bench, job)
  with contextlib.closing(make_training_iterator(job)) as iterator:
    batches = [dict(batch) for batch in itertools.islice(iterator, _NUM_STEPS)]
  differences = _compare_batches(recorder, batches)
  runner: Any = bench.runner(_REFERENCE)
  assert recorder.first is not None
  zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), runner.gradient_shapes)
  first = recorder.first.replace(learner=with_gradients(recorder.first.learner, zeros))
  reference = Trajectory(runner, first, batches, bench.seed)
  notes: dict[str, dict[str, None]] = {}
  if not any(d.difference > d.allowed for d in differences):
    differences += compare_losses(recorder.losses, reference, notes, 'loss of the job')
    differences += [
      Difference(
        step=_NUM_STEPS, leaf=name, difference=max_difference(getattr(recorder.last, name), np.asarray(expected))
      )
      for name, expected in (('step', first.step + _NUM_STEPS), ('rng', first.rng))
    ]
    for name, eval_set in sets.items():
      differences += _compare_evaluation(bench, runner, recorder, name, list(eval_set.batches()))
  lines = tuple(f'not compared: {kind} {", ".join(items)}' for kind, items in notes.items())
  too_large = [d for d in differences if not d.difference <= d.allowed]
  if too_large:
    return broken_verdict(bench, 'job', Setting(), too_large[0], notes=lines)
  return held_verdict(closest_to_allowed(differences), _NUM_STEPS, lines)


def _run_in_two_parts(bench: Bench, job: Job) -> _Recorder:
  """Trains in a temporary directory; a second job resumes the first one."""
  recorder = _Recorder()
  mesh = job.experiment.mesh_spec().build(jax.devices()[:1])
  with tempfile.TemporaryDirectory(prefix='spmd_tasks_verify_') as directory:
    for num_steps in (_STOPPED_AFTER, _NUM_STEPS):
      # The task, and so the learning rate schedule, is the whole job's.
      overrides = ('trackers=()', f'num_train_steps={num_steps}')
      part = dataclasses.replace(job, experiment=build_job(bench.source, Setting(overrides=overrides)).experiment)
      with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = train.train(
          part,
          epath.Path(directory),
          emergency=EmergencyExit(),
          begun=time.time(),
          config_json=json.dumps({'experiment': job.name}),
          hooks=[SaveCheckpoints(), Evaluate(), recorder],
          mesh=mesh,
        )
      if code == exit_codes.PREEMPTED:  # the job handled a signal that was to end this mode
        signal.raise_signal(signal.SIGTERM)
      if code == exit_codes.INTERRUPTED:
        signal.raise_signal(signal.SIGINT)
      if code != exit_codes.OK:
        raise JobError(f'the job ended with exit code {code}.')
  return recorder


def _compare_batches(recorder: _Recorder, batches: list[Batch]) -> list[Difference]:
  """Compares the batches that a job trained on with the batches of its input."""
  count = len(recorder.read_batches)
  if count != len(batches):
    return [Difference(step=min(count, len(batches)) + 1, leaf=f'{count} batches were read')]
  return [
    Difference(
      step=step, leaf=f'batch/{name}', difference=max_difference(recorded[name], values.astype(recorded[name].dtype))
    )
    for step, (recorded, batch) in enumerate(zip(recorder.read_batches, batches), 1)
    for name, values in batch.items()
  ]


def _compare_evaluation(
  bench: Bench, runner: FormulaRunner, recorder: _Recorder, name: str, batches: list[Batch]
) -> list[Difference]:
  """Compares the metrics of an eval set after the last step with the formulas."""
  rng = np.random.default_rng((bench.seed, 60))
  variables = runner.evaluation_variables(recorder.last)
  expected = runner.evaluate(variables, batches)
  samples = [runner.evaluate(perturb(variables, runner.epsilon, rng), batches) for _ in range(3)]
  expected.pop('loss_by_source', None)  # the job reports it by the names of the sources
  metrics = {metric: np.asarray(values) for metric, values in recorder.evals[name].items()}
  _, differences, _ = compare(expected, metrics, spread(expected, samples), runner.epsilon, _NUM_STEPS)
  return [dataclasses.replace(d, leaf=f'eval {name}: {d.leaf}') for d in differences]
