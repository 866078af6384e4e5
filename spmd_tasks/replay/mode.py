"""--mode replay: runs past steps again and compares them with the record of the job.

`--step N` inspects one step: it compares the metrics with metrics.jsonl, and the state with the checkpoint of step N if
there is one, and shows the rows of the batch and statistics by layer. `--from A --to B` compares several steps, and
stops at the first that differs from the record.

There is no second training loop: the training program runs from an earlier checkpoint, in a temporary directory. Hooks
that save, evaluate, log and sample are left out; hooks that make batches (rollouts, references) stay.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import tempfile
from typing import Any

from etils import epath
import jax
import numpy as np

from spmd_tasks import exit_codes, extensions
from spmd_tasks.activity import set_activity
from spmd_tasks.command import Command, OpenJob
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import gather, primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path, storage_errors, write_durably
from spmd_tasks.inputs.base import source_names
from spmd_tasks.programs import train
from spmd_tasks.programs.hooks import CompareInputs, CountGoodput, FirstState, TrainHook, TrainRun
from spmd_tasks.programs.job_directory import CheckpointRecord
from spmd_tasks.programs.restore import LOOK_LIMIT_S, saved_state
from spmd_tasks.programs.training_loop import Outcome, TrainingDivergedError, is_spike
from spmd_tasks.replay.rows import describe_rows
from spmd_tasks.replay.statistics import (
  LayerStatistics,
  Statistics,
  activation_statistics,
  format_table,
  gradient_model,
  gradient_state,
)
from spmd_tasks.runtime import Task
from spmd_tasks.runtime.metrics import METRICS_FILE, Metric, Metrics, finish_metrics, read_jsonl
from spmd_tasks.runtime.origin import saved_part
from spmd_tasks.sharding.weights import leaves_by_name

Digests = Mapping[str, str]  # leaf -> 64 hexadecimal digits


def tree_digests(tree: Any, limit_s: int) -> dict[str, str]:
  """Returns the SHA-256 of each leaf of a tree of arrays, by name. Digests are equal for equal bits and shardings.

  A collective call: each process hashes its own shards, and waits at most `limit_s` for the others.
  """
  own = {name: _shards_digest(leaf) for name, leaf in leaves_by_name(tree).items()}
  all_digests = gather(own, 'digests', limit_s=limit_s)
  combined = {name: ''.join(digests[name] for digests in all_digests) for name in own}
  return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in combined.items()}


def _shards_digest(x: jax.Array) -> str:
  digest = hashlib.sha256()
  data = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  for shard in data.addressable_shards:
    if shard.replica_id == 0:
      digest.update(np.ascontiguousarray(shard.data).tobytes())
  return digest.hexdigest()


def _digest(digests: Digests) -> str:
  """Returns a digest of all leaves, 16 hexadecimal digits."""
  text = '\n'.join(f'{name} {digests[name]}' for name in sorted(digests))
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class ReplayHook(TrainHook):
  """Restores the last checkpoint before `first`, observes steps `first` to `last`, and ends the run.

  Subclasses override `on_batch`, which is called before a step, and `on_step`, which is called after it.

  Attributes:
    checkpoint: the step of the checkpoint that the run started from; 0 if it initialized the weights.
    digests: step -> (replayed, saved) digests of the state, for the steps of which `reference` has a checkpoint.
  """

  def __init__(
    self, *, directory: epath.Path, reference: epath.Path, first: int, last: int, compares_states: bool = True
  ):
    self._directory, self._reference = directory, reference
    self._first, self._last, self._compares_states = first, last, compares_states
    self._saved: dict[int, Digests] = {}
    self._position: Any = None
    self.checkpoint = 0
    self.digests: dict[int, tuple[Digests, Digests]] = {}

  def prepare(self, run: TrainRun) -> None:
    if self._last > run.experiment.num_train_steps:
      raise UserError(
        f'step {self._last} must be at most num_train_steps of the job, {run.experiment.num_train_steps}.'
      )
    self._part = saved_part(run.model, run.experiment.origin())

  def restore(self, run: TrainRun, newest_checkpoint: int) -> FirstState | None:
    with _open_checkpoints(self._reference) as reference:
      for step in _checkpoint_steps(reference) if self._compares_states else ():
        if self._first <= step <= self._last:
          restored = reference.restore(self._part(run.model.canonical_state), step)
          self._saved[step] = tree_digests(restored.state, run.limit_s)
          del restored
    with _open_checkpoints(self._directory) as checkpoints:
      earlier = [step for step in _checkpoint_steps(checkpoints) if step < self._first]
      if not earlier:
        return None  # the run starts like the job
      saved = saved_state(run.model, checkpoints, run.job, max(earlier))
    assert saved is not None
    state, self.checkpoint, self._position = saved
    origin = f'the checkpoint of step {self.checkpoint}'
    return FirstState(step=self.checkpoint, state=state, input_state=self._position, origin=origin)

  def needs_state(self, step: int) -> bool:
    return step == self._first - 1 or step >= self._last or step in self._saved

  def before_step(self, run: TrainRun, batch: dict[str, jax.Array]) -> None:
    if self._first <= run.step + 1 <= self._last:
      self.on_batch(run, batch, self._position)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._position = run.loop.outcome_input_state
    if not self._first <= outcome.step <= self._last:
      return
    if outcome.step in self._saved:
      state = run.model.to_canonical(run.state, self._part)
      self.digests[outcome.step] = tree_digests(state, run.limit_s), self._saved[outcome.step]
    if not self.on_step(run, outcome, step_metrics(run, outcome)) or outcome.step == self._last:
      run.end_early('the replay is complete')

  def after_skipped_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._position = run.loop.outcome_input_state

  def on_batch(self, run: TrainRun, batch: dict[str, jax.Array], position: Any) -> None:
    """Called before a step with its placed batch, and the position of this process's input before it or None."""

  def on_step(self, run: TrainRun, outcome: Outcome, metrics: Metrics) -> bool:
    """Called after a step; returns whether to continue."""
    raise NotImplementedError


def step_metrics(run: TrainRun, outcome: Outcome) -> Metrics:
  """Waits for a step, and returns the metrics that the step computed, in the form of metrics.jsonl."""
  metrics = finish_metrics(jax.device_get(outcome.metrics), source_names(run.job.train_input))
  metrics.pop('skipped', None)
  return metrics


def rerun(opened: OpenJob, hook: ReplayHook) -> str | None:
  """Runs the training program with a ReplayHook; returns why the job diverged, or None."""
  batch_hooks = [hook for hook in opened.job.experiment.hooks() if type(hook).batches is not TrainHook.batches]
  with tempfile.TemporaryDirectory(prefix='spmd_tasks_replay_') as directory:
    try:
      train.train(
        opened.job,
        epath.Path(directory),
        emergency=opened.emergency,
        begun=opened.begun,
        config_json=json.dumps(opened.config) + '\n',
        hooks=(CountGoodput(), CompareInputs(), *extensions.train_hooks(opened.job), *batch_hooks, hook),
      )
    except TrainingDivergedError as error:
      return str(error)
  return None


def _open_checkpoints(directory: epath.Path) -> Any:
  return contextlib.closing(CheckpointRecord(directory).open_checkpoints(read_only=True))


def _checkpoint_steps(checkpointer: Any) -> list[int]:
  return primary_decides(checkpointer.all_steps, 'replay_steps', limit_s=LOOK_LIMIT_S)


_ROUNDING = 1e-5  # relative difference of a metric between meshes, a few steps after a checkpoint
_SHOWN_PLACES = 10  # of values that are not finite
_KINDS = ('weights', 'gradients', 'activations', 'updates')  # the statistics of an attempt


def run(command: Command) -> int:
  """Runs --mode replay; returns OK, or FAILED if a step differs from the record."""
  flags = command.flags
  with dataclasses.replace(command, mode='train').open_job() as opened:  # with the checks of training
    first, last = (flags.step, flags.step) if flags.step is not None else (getattr(flags, 'from'), flags.to)
    reference = opened.directory if flags.against is None else absolute_path(flags.against)
    try:
      recorded = read_jsonl(reference)
    except OSError as error:
      raise UserError(
        f'metrics.jsonl of {reference} cannot be read ({error}): set --against to the directory of a job.'
      ) from error
    if flags.metric is not None and not any(flags.metric in line for line in recorded.values()):
      names = sorted({name for line in recorded.values() for name in line})
      raise UserError(f'--metric {flags.metric!r} is not in {reference / METRICS_FILE}: use one of {", ".join(names)}.')
    tolerance = flags.tolerance or 0.0
    settings = {'directory': opened.directory, 'reference': reference, 'first': first, 'last': last}
    settings['compares_states'] = not tolerance  # metrics within a tolerance come from states with other bits
    compare = functools.partial(differences, metric=flags.metric, tolerance=tolerance)
    agreement = _agreement(flags.metric, tolerance)
    inspect = _inspect_step if flags.step is not None else _compare_steps
    report = inspect(opened, settings, recorded, compare, agreement)
    if flags.out is not None and is_primary():
      path = absolute_path(flags.out)
      with storage_errors(path):
        write_durably(path, json.dumps(_json_value(report), indent=1) + '\n')
  return exit_codes.FAILED if report['departs'] else exit_codes.OK


class InspectStep(ReplayHook):
  """Collects the rows and statistics of each attempt at one step; skipped batches are attempts, too."""

  def __init__(self, **settings: Any):
    super().__init__(**settings)
    self.attempts: list[dict[str, Any]] = []
    self.metrics: Metrics = {}

  def prepare(self, run: TrainRun) -> None:
    super().prepare(run)
    self._statistics = LayerStatistics(run.model)
    self._task: Task | None = None
    with contextlib.suppress(UserError):  # a task of another framework has neither gradients nor activations
      self._task = run.job.task.as_task('--step')
    if self._task is not None:
      self._gradients = gradient_model(self._task, run.model, run.experiment)
    self._hook_makes_batches = any(type(hook).batches is not TrainHook.batches for hook in run.hooks)

  def on_batch(self, run: TrainRun, batch: dict[str, jax.Array], position: Any) -> None:
    with run.timed('replay', 'compilation'):
      rows: list[Any] = []
      if not self._hook_makes_batches:
        all_rows = gather(describe_rows(run.job, position), 'rows', limit_s=run.limit_s)
        rows = [row for own_rows in all_rows for row in own_rows]
      self._before = gradient_state(run.state)
      weights = self._statistics(run.state)
      attempt: dict[str, Any] = {'skipped': None, 'loss': None, 'rows': rows, 'weights': weights}
      if self._task is not None:
        gradients, metrics = self._gradients.train_step(gradient_state(run.state), batch)
        attempt['loss'] = float(metrics['loss'])
        attempt['gradients'] = self._statistics(gradients)
        attempt['activations'] = activation_statistics(self._task, run.model, run.state, batch)
      self.attempts.append(attempt)

  def on_step(self, run: TrainRun, outcome: Outcome, metrics: Metrics) -> bool:
    self.metrics = metrics
    with run.timed('replay', 'compilation'):
      updates = self._statistics(run.state, self._before)
      self.attempts[-1] |= {'loss': metrics['loss'], 'updates': updates}
    return False

  def after_skipped_step(self, run: TrainRun, outcome: Outcome) -> None:
    super().after_skipped_step(run, outcome)
    if outcome.step == self._first - 1:
      loss, norm = (float(outcome.metrics[name]) for name in ('loss', 'grad_norm'))
      reason = 'is above learner.spike_threshold' if is_spike(outcome.metrics) else 'is not finite'
      self.attempts[-1]['skipped'] = f'loss {loss} or gradient norm {norm} {reason}'


def _inspect_step(
  opened: OpenJob, settings: dict[str, Any], recorded: Mapping[int, Metrics], compare: Any, agreement: str
) -> dict[str, Any]:
  """Replays one step; prints and returns the report."""
  hook, step = InspectStep(**settings), settings['first']
  stopped = rerun(opened, hook)
  set_activity(None)
  report = {'step': step, 'checkpoint': hook.checkpoint, 'stopped': stopped, 'metrics': hook.metrics}
  report |= _comparison(hook, step, hook.metrics, recorded, compare) | {'attempts': hook.attempts}
  for number, attempt in enumerate(hook.attempts, 1):
    kinds: dict[str, Statistics] = {kind: attempt[kind] for kind in _KINDS if attempt.get(kind)}
    skipped = '' if attempt['skipped'] is None else f' (attempt {number}, skipped: {attempt["skipped"]})'
    _print(f'step {step}{skipped}, from {_origin(hook)}')
    for row in attempt['rows']:
      _print(format_row(row))
    if not_finite := format_not_finite(attempt['rows']):
      _print(not_finite)
    _print(format_table(kinds))
    if 'gradients' not in attempt:
      _print(f'gradients and activations are not available for a {type(opened.job.task).__name__}')
  if stopped is not None:
    _print(f'the job does not reach step {step}: {stopped}')
  _print(_describe(report, step, agreement))
  return report


class CompareSteps(ReplayHook):
  """Compares each step with the record, and stops at the first step that differs."""

  def __init__(self, recorded: Mapping[int, Metrics], compare: Any, **settings: Any):
    super().__init__(**settings)
    self._recorded, self._compare = recorded, compare
    self.steps: list[dict[str, Any]] = []

  def on_step(self, run: TrainRun, outcome: Outcome, metrics: Metrics) -> bool:
    comparison = _comparison(self, outcome.step, metrics, self._recorded, self._compare)
    self.steps.append({'step': outcome.step, 'metrics': metrics} | comparison)
    return not comparison['departs']


def _compare_steps(
  opened: OpenJob, settings: dict[str, Any], recorded: Mapping[int, Metrics], compare: Any, agreement: str
) -> dict[str, Any]:
  """Replays several steps; prints and returns the report."""
  hook = CompareSteps(recorded, compare, **settings)
  stopped = rerun(opened, hook)
  set_activity(None)
  first = next((step for step in hook.steps if step['departs']), None)
  report = {'from': settings['first'], 'to': settings['last'], 'checkpoint': hook.checkpoint, 'stopped': stopped}
  report |= {'steps': hook.steps, 'departs': first is not None or stopped is not None}
  report |= {'first_departure': None if first is None else first['step']}
  if first is not None:
    _print(_describe(first, first['step'], agreement))
    _print(f'step {first["step"]} is the first that differs; inspect it with --step {first["step"]}')
  elif stopped is not None:
    _print(f'the job cannot continue: {stopped}')
  else:
    num_recorded = sum(step['is_recorded'] for step in hook.steps)
    states = f', and so does the state at the checkpoints of steps {sorted(hook.digests)}' * bool(hook.digests)
    _print(
      f'steps {settings["first"]} to {settings["last"]}, from {_origin(hook)}: {agreement} in '
      f'{num_recorded} recorded steps{states}'
    )
  return report


def differences(
  own: Metrics, recorded: Metrics, *, metric: str | None = None, tolerance: float = 0.0
) -> dict[str, tuple[Metric | None, Metric | None]]:
  """Returns the metrics of a step that differ from the record: name -> (replayed, recorded).

  Metrics of the run, such as rates and goodput, are not compared. With `metric` only this metric is compared;
  `tolerance` is the relative difference that is allowed.

  Raises a UserError if the step does not compute `metric`.
  """
  if metric is not None and metric not in own:
    raise UserError(f'--metric {metric!r} is not computed by the step: use one of {", ".join(sorted(own))}.')
  names = own if metric is None else (metric,)
  return {
    name: (own[name], recorded.get(name)) for name in names if not _agree(own[name], recorded.get(name), tolerance)
  }


def _agree(own: Metric, other: Metric | None, tolerance: float) -> bool:
  if other is None:
    return False
  mine, its = (value if isinstance(value, list) else [value] for value in (own, other))
  return len(mine) == len(its) and all(
    a == b or (math.isnan(a) and math.isnan(b)) or (tolerance > 0 and math.isclose(a, b, rel_tol=tolerance))
    for a, b in zip(mine, its, strict=True)
  )


def _agreement(metric: str | None, tolerance: float) -> str:
  """Returns words for a step that does not differ: what was compared, and how closely."""
  subject = 'the metrics' if metric is None else f'the metric {metric}'
  if tolerance:
    return f'{subject} agree{"s" * (metric is not None)} within a relative difference of {tolerance:g}'
  return f'every bit of {subject} agrees'


def _comparison(
  hook: ReplayHook, step: int, metrics: Metrics, recorded: Mapping[int, Metrics], compare: Any
) -> dict[str, Any]:
  """Compares a step with its line of the record and with its checkpoint."""
  line = recorded.get(step)
  different = {} if line is None or not metrics else compare(metrics, line)
  is_missing = line is not None and not metrics  # the replay did not reach a step of the job
  comparison: dict[str, Any] = {'is_recorded': line is not None, 'differences': different}
  comparison['departs'] = bool(different) or is_missing
  if (digests := hook.digests.get(step)) is not None:
    replayed, saved = digests
    leaves = sorted(name for name in replayed.keys() | saved.keys() if replayed.get(name) != saved.get(name))
    comparison |= {'digest': _digest(replayed), 'saved_digest': _digest(saved), 'different_leaves': leaves}
    comparison['departs'] = comparison['departs'] or bool(leaves)
  return comparison


def _describe(comparison: dict[str, Any], step: int, agreement: str) -> str:
  """Returns lines that tell how a step compares with the record."""
  metrics, leaves = comparison['metrics'], comparison.get('different_leaves')
  if not metrics:
    return f'step {step} was not reached' + ', but the record has it' * comparison['is_recorded']
  if not comparison['is_recorded']:
    lines = [f'step {step}: the metrics are not compared, because metrics.jsonl does not have this step']
  elif comparison['differences']:
    lines = [f'step {step} differs from the record:']
    differences = comparison['differences'].items()
    lines += [f'  {name}: replayed {replayed}, recorded {recorded}' for name, (replayed, recorded) in differences]
    if all(_agree(replayed, recorded, _ROUNDING) for replayed, recorded in comparison['differences'].values()):
      lines.append(
        f'  These differences have the size of rounding, as between two meshes: give --ici_mesh_shape the mesh that '
        f'trained step {step}, or allow them by --tolerance {_ROUNDING:g}'
      )
  else:
    values = ', '.join(f'{name} {metrics[name]}' for name in ('loss', 'grad_norm') if name in metrics)
    lines = [f'step {step}: {agreement} with the record ({values})']
  if leaves:
    lines.append(
      f'step {step}: the state ({comparison["digest"]}) differs from the checkpoint ({comparison["saved_digest"]}) in '
      f'{len(leaves)} arrays, such as {", ".join(leaves[:5])}'
    )
  elif leaves is not None:
    lines.append(f'step {step}: every bit of the state agrees with the checkpoint, digest {comparison["digest"]}')
  return '\n'.join(lines)


def _origin(hook: ReplayHook) -> str:
  return f'the checkpoint of step {hook.checkpoint}' if hook.checkpoint else 'the beginning'


def format_row(row: dict[str, Any]) -> str:
  """Returns a line that describes a row of a batch."""
  documents: Sequence[int] = row.get('tokens_per_document', ())
  parts = [f'row {row["row"]}']
  parts += [row['source']] if 'source' in row else []
  parts += [f'{len(documents)} document(s) of {"+".join(map(str, documents))} tokens'] if documents else []
  parts += row['from']
  return '  '.join(parts) + (f'  {row["begins"]!r}' if isinstance(row.get('begins'), str) else '')


def format_not_finite(rows: Sequence[dict[str, Any]]) -> str:
  """Returns a line that names the arrays and rows of a batch with values that are not finite; '' if all are finite."""
  places = [f'{name!r} in row {row["row"]} ({count})' for row in rows for name, count in row['not_finite'].items()]
  others = f' and {len(places) - _SHOWN_PLACES} others' * (len(places) > _SHOWN_PLACES)
  return f'values that are not finite: {", ".join(places[:_SHOWN_PLACES])}{others}' if places else ''


def _print(text: str) -> None:
  if is_primary():
    print(text, flush=True)


def _json_value(value: Any) -> Any:
  """Replaces NaN and infinities by text, as in metrics.jsonl."""
  if isinstance(value, dict):
    return {name: _json_value(item) for name, item in value.items()}
  if isinstance(value, list | tuple):
    return [_json_value(item) for item in value]
  return str(value) if isinstance(value, float) and not math.isfinite(value) else value
