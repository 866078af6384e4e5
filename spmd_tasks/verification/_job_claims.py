"""The claim about a whole job: it is run as --mode train runs it, stopped half-way, started again, and evaluates.

Each batch of the input is trained on once and in order, the losses are those of steps by hand from the job's first
state, and its last evaluation is the weighted mean over all examples by hand, of the averaged weights where
`eval_with_ema` asks for them. The eval set has rows of different lengths, and ends with rows of weight 0, as they fill
up the last batch of a set. The directory of the job is a temporary one; hooks of the experiment are left out.
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
  compare,
  compare_losses,
  distance,
  nearest,
  perturb,
  spread,
)
from spmd_tasks.verification._by_hand import ByHand, why_not_by_hand
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken, held, skipped
from spmd_tasks.verification._runner import with_gradients
from spmd_tasks.verification._settings import Batch, OtherBatches, Setting, build_job, draw_batches

_NUM_STEPS, _STOPPED_AFTER = 4, 2
_BY_HAND = Setting(by_hand=True)


def job_cases(bench: Bench) -> Iterator[Case]:
  """Yields the case of a job of 4 steps in two parts, on one device."""
  job, subject = bench.source.base, f'{_NUM_STEPS} steps in two parts'
  reason = why_not_by_hand(job.task)
  if getattr(job.train_input, 'kind', '') == 'rollouts':
    reason = 'its batches are sampled by the model'
  if without_references(job.train_input) is not job.train_input:
    reason = "its batches need the reference's log-probabilities"
  if reason:
    yield skipped('job', subject, reason)
    return
  yield Case(claim='job', subject=f'{subject}, and an evaluation', decide=_compare_job)


class _Recorder(TrainHook):
  """Keeps what a job makes, in numpy."""

  def __init__(self) -> None:
    self.read: list[Batch] = []
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
    self.read.append({name: np.array(rows) for name, rows in run.model.input_layout.true_rows(batch).items()})

  def after_step(self, run: TrainRun, outcome: Any) -> None:
    self.losses.append(float(outcome.metrics['loss']))

  def after_loop(self, run: TrainRun) -> None:
    self.last = jax.device_get(run.model.to_canonical(run.state))

  def finish(self, run: TrainRun) -> None:
    self.evals = run.evals.metrics


@dataclasses.dataclass(frozen=True)
class _EvalSet(OtherBatches):
  """The first two batches of an input: the second one is ragged, and half of its rows fill up."""

  seed: int

  def batches(self) -> Iterator[Batch]:
    first, second = draw_batches(self.whole, 2, self.seed)
    if 'weights' in second and len(second['weights']) > 1:
      for values in second.values():
        if values.ndim:
          values[-(len(values) // 2) :] = 0
    yield from (first, second)


def _compare_job(bench: Bench) -> Verdict:
  job = build_job(bench.source, Setting(overrides=('trackers=()',)))
  inputs = dict(job.eval_inputs) or {'train': job.train_input}
  sets = {name: _EvalSet(each, bench.seed) for name, each in inputs.items()}
  job = dataclasses.replace(job, eval_inputs=sets)
  made = _run_in_two_parts(bench, job)
  with contextlib.closing(make_training_iterator(job)) as iterator:
    batches = [dict(batch) for batch in itertools.islice(iterator, _NUM_STEPS)]
  compared = _of_data(made, batches)
  by_hand: Any = bench.runner(_BY_HAND)
  assert made.first is not None
  zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), by_hand.gradient_shapes)
  first = made.first.replace(learner=with_gradients(made.first.learner, zeros))
  expected = Trajectory(by_hand, first, batches, bench.seed)
  notes: dict[str, dict[str, None]] = {}
  if not any(each.difference > each.allowed for each in compared):
    compared += compare_losses(made.losses, expected, notes, 'loss of the job')
    compared += [
      Difference(step=_NUM_STEPS, leaf=name, difference=distance(getattr(made.last, name), np.asarray(want)))
      for name, want in (('step', first.step + _NUM_STEPS), ('rng', first.rng))
    ]
    for name, each in sets.items():
      compared += _of_evaluation(bench, by_hand, made, name, list(each.batches()))
  lines = tuple(f'not compared: {kind} {", ".join(items)}' for kind, items in notes.items())
  wrong = [each for each in compared if not each.difference <= each.allowed]
  if wrong:
    return broken(bench, 'job', Setting(), wrong[0], notes=lines)
  return held(nearest(compared), _NUM_STEPS, lines)


def _run_in_two_parts(bench: Bench, job: Job) -> _Recorder:
  """Trains in a temporary directory, in two jobs of which the second one goes on."""
  recorder = _Recorder()
  mesh = job.experiment.mesh_spec().build(jax.devices()[:1])
  with tempfile.TemporaryDirectory(prefix='spmd_tasks_verify_') as directory:
    for num_steps in (_STOPPED_AFTER, _NUM_STEPS):
      # The learning rate stays that of the whole job, for the task is.
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
      if code == exit_codes.PREEMPTED:  # the job took the signal that ends this mode
        signal.raise_signal(signal.SIGTERM)
      if code == exit_codes.INTERRUPTED:
        signal.raise_signal(signal.SIGINT)
      if code != exit_codes.OK:
        raise JobError(f'the job ended with exit code {code}.')
  return recorder


def _of_data(made: _Recorder, batches: list[Batch]) -> list[Difference]:
  """Compares the batches that a job trained on with those of its input."""
  if len(made.read) != len(batches):
    return [Difference(step=min(len(made.read), len(batches)) + 1, leaf=f'{len(made.read)} batches were read')]
  return [
    Difference(step=step, leaf=f'batch/{name}', difference=distance(mine[name], values))
    for step, (mine, batch) in enumerate(zip(made.read, batches), 1)
    for name, values in batch.items()
  ]


def _of_evaluation(bench: Bench, by_hand: ByHand, made: _Recorder, name: str, batches: list[Batch]) -> list[Difference]:
  """Compares the metrics of an eval set after the last step with those by hand."""
  rng = np.random.default_rng((bench.seed, 60))
  variables = by_hand.evaluation_variables(made.last)
  alone = by_hand.evaluate(variables, batches)
  samples = [by_hand.evaluate(perturb(variables, by_hand.epsilon, rng), batches) for _ in range(3)]
  alone.pop('loss_by_source', None)  # which is told by the names of the sources
  other = {metric: np.asarray(values) for metric, values in made.evals[name].items()}
  _, every, _ = compare(alone, other, spread(alone, samples), by_hand.epsilon, _NUM_STEPS)
  return [dataclasses.replace(each, leaf=f'eval {name}: {each.leaf}') for each in every]
