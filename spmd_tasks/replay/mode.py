"""--mode replay: makes past steps again and compares them with what the job recorded.

`--step N` looks into one step: its metrics against metrics.jsonl, its state against the checkpoint of step N where
there is one, its rows, and statistics by layer. `--from A --to B` walks and stops at the first step that departs.

There is no second training loop: the training program runs from an earlier checkpoint, in a directory of its own. Hooks
that save, evaluate, log and sample are left out; those that give batches (rollouts, references) stay.
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
from spmd_tasks.programs.job_directory import SavedSteps
from spmd_tasks.programs.restore import LOOK_LIMIT_S, saved_state
from spmd_tasks.programs.training_loop import Outcome, TrainingDivergedError
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
from spmd_tasks.runtime.metric_files import read_jsonl
from spmd_tasks.runtime.metrics import METRICS_FILE, Metric, Metrics, finish_metrics
from spmd_tasks.runtime.origin import saved_part
from spmd_tasks.sharding.weights import leaves_by_name

Digests = Mapping[str, str]  # leaf -> 64 hexadecimal digits


def tree_digests(tree: Any, limit_s: int) -> dict[str, str]:
  """Returns the SHA-256 of every leaf of a tree of arrays, by name. Equal only for equal bits and equal shardings.

  A collective call: each process hashes its own shards, and waits for the others for at most `limit_s`.
  """
  own = {name: _shards_digest(leaf) for name, leaf in leaves_by_name(tree).items()}
  every = gather(own, 'digests', limit_s=limit_s)
  return {name: hashlib.sha256(''.join(each[name] for each in every).encode()).hexdigest() for name in own}


def _shards_digest(x: jax.Array) -> str:
  digest = hashlib.sha256()
  data = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  for shard in data.addressable_shards:
    if shard.replica_id == 0:
      digest.update(np.ascontiguousarray(shard.data).tobytes())
  return digest.hexdigest()


def _digest(digests: Digests) -> str:
  """Returns 16 hexadecimal digits for all leaves."""
  text = '\n'.join(f'{name} {digests[name]}' for name in sorted(digests))
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class Watch(TrainHook):
  """Restores the nearest checkpoint before `first`, sees steps `first` to `last`, and ends the run.

  A subclass says what is looked at: `look` before a step, with its batch, and `see` after it.

  Attributes:
    checkpoint: the step of the checkpoint that the run went on from; 0: newly made weights.
    digests: of the states at steps of which `reference` has a checkpoint: step -> (replayed, saved).
  """

  def __init__(self, *, directory: epath.Path, reference: epath.Path, first: int, last: int):
    self._directory, self._reference = directory, reference
    self._first, self._last = first, last
    self._saved: dict[int, Digests] = {}
    self._position: Any = None
    self.checkpoint = 0
    self.digests: dict[int, tuple[Digests, Digests]] = {}

  def prepare(self, run: TrainRun) -> None:
    if self._last > run.experiment.num_train_steps:
      raise UserError(f'step {self._last} is behind the last of the job, {run.experiment.num_train_steps}.')
    self._part = saved_part(run.model, run.experiment.origin())

  def restore(self, run: TrainRun, newest_checkpoint: int) -> FirstState | None:
    with _checkpoints(self._reference) as reference:
      wanted = [step for step in _steps(reference) if self._first <= step <= self._last]
      for step in wanted:
        restored = reference.restore(self._part(run.model.canonical_state), step)
        self._saved[step] = tree_digests(restored.state, run.limit_s)
        del restored
    with _checkpoints(self._directory) as own:
      earlier = [step for step in _steps(own) if step < self._first]
      if not earlier:
        return None  # the run begins as the job did
      saved = saved_state(run.model, own, run.job, max(earlier))
    assert saved is not None
    state, self.checkpoint, self._position = saved
    origin = f'the checkpoint of step {self.checkpoint}'
    return FirstState(step=self.checkpoint, state=state, input_state=self._position, origin=origin)

  def needs_state(self, step: int) -> bool:
    return step == self._first - 1 or step >= self._last or step in self._saved

  def before_step(self, run: TrainRun, batch: dict[str, jax.Array]) -> None:
    if self._first <= run.step + 1 <= self._last:
      self.look(run, batch, self._position)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._position = run.loop.outcome_input_state
    if not self._first <= outcome.step <= self._last:
      return
    if outcome.step in self._saved:
      state = run.model.to_canonical(run.state, self._part)
      self.digests[outcome.step] = tree_digests(state, run.limit_s), self._saved[outcome.step]
    if not self.see(run, outcome, step_metrics(run, outcome)) or outcome.step == self._last:
      run.end_early('all steps that were asked for are made again')

  def after_skipped_step(self, run: TrainRun, outcome: Outcome) -> None:
    self._position = run.loop.outcome_input_state

  def look(self, run: TrainRun, batch: dict[str, jax.Array], position: Any) -> None:
    """Looks at the placed batch of a step, before which this process's input was at `position`; None: at its begin."""

  def see(self, run: TrainRun, outcome: Outcome, metrics: Metrics) -> bool:
    """Takes a step that was made; returns whether to go on."""
    raise NotImplementedError


def step_metrics(run: TrainRun, outcome: Outcome) -> Metrics:
  """Returns the metrics of a step itself as metrics.jsonl has them. Waits for the step."""
  metrics = finish_metrics(jax.device_get(outcome.metrics), source_names(run.job.train_input))
  metrics.pop('skipped', None)
  return metrics


def rerun(opened: OpenJob, watch: Watch) -> str | None:
  """Runs the training program with `watch`; returns why the job could not go on, or None."""
  own = [hook for hook in opened.job.experiment.hooks() if type(hook).batches is not TrainHook.batches]
  with tempfile.TemporaryDirectory(prefix='spmd_tasks_replay_') as directory:
    try:
      train.train(
        opened.job,
        epath.Path(directory),
        emergency=opened.emergency,
        begun=opened.begun,
        config_json=json.dumps(opened.config) + '\n',
        hooks=(CountGoodput(), CompareInputs(), *extensions.train_hooks(opened.job), *own, watch),
      )
    except TrainingDivergedError as error:
      return str(error)
  return None


def _checkpoints(directory: epath.Path) -> Any:
  return contextlib.closing(SavedSteps(directory).open_checkpoints(read_only=True))


def _steps(checkpointer: Any) -> list[int]:
  return primary_decides(checkpointer.all_steps, 'replay_steps', limit_s=LOOK_LIMIT_S)


_KINDS = ('weights', 'gradients', 'activations', 'updates')  # of an attempt


def run(command: Command) -> int:
  """Runs --mode replay; returns OK, or FAILED where a step departs from the record."""
  flags = command.flags
  with dataclasses.replace(command, mode='train').open_job() as opened:  # a replay needs all that training needs
    first, last = (flags.step, flags.step) if flags.step is not None else (getattr(flags, 'from'), flags.to)
    reference = opened.directory if flags.against is None else absolute_path(flags.against)
    try:
      recorded = read_jsonl(reference)
    except OSError as error:
      raise UserError(
        f'{reference} has no metrics.jsonl that can be read ({error}): name the directory of a job.'
      ) from error
    if flags.metric is not None and not any(flags.metric in line for line in recorded.values()):
      names = sorted({name for line in recorded.values() for name in line})
      raise UserError(
        f'--metric {flags.metric!r} is no metric of the steps in {reference / METRICS_FILE}: it has {", ".join(names)}.'
      )
    settings = {'directory': opened.directory, 'reference': reference, 'first': first, 'last': last}
    compare = functools.partial(differences, metric=flags.metric, tolerance=flags.tolerance or 0.0)
    report = (_look_into if flags.step is not None else _walk)(opened, settings, recorded, compare)
    if flags.out is not None and is_primary():
      path = absolute_path(flags.out)
      with storage_errors(path):
        write_durably(path, json.dumps(_plain(report), indent=1) + '\n')
  return exit_codes.FAILED if report['departs'] else exit_codes.OK


class LookInto(Watch):
  """Looks into each attempt at one step: rows and statistics; a batch that was skipped is an attempt too."""

  def __init__(self, **settings: Any):
    super().__init__(**settings)
    self.attempts: list[dict[str, Any]] = []
    self.metrics: Metrics = {}

  def prepare(self, run: TrainRun) -> None:
    super().prepare(run)
    self._statistics = LayerStatistics(run.model)
    self._task: Task | None = None
    with contextlib.suppress(UserError):  # a task of another framework gives neither gradients nor activations
      self._task = run.job.task.as_task('--step')
    if self._task is not None:
      self._gradients = gradient_model(self._task, run.model, run.experiment)
    self._own_batches = any(type(hook).batches is not TrainHook.batches for hook in run.hooks)

  def look(self, run: TrainRun, batch: dict[str, jax.Array], position: Any) -> None:
    with run.timed('replay', 'compilation'):
      rows: list[Any] = []
      if not self._own_batches:
        rows = [row for each in gather(describe_rows(run.job, position), 'rows', limit_s=run.limit_s) for row in each]
      self._before = gradient_state(run.state)
      # Skipped until it counts.
      attempt: dict[str, Any] = {'skipped': True, 'loss': None, 'rows': rows, 'weights': self._statistics(run.state)}
      if self._task is not None:
        gradients, metrics = self._gradients.train_step(gradient_state(run.state), batch)
        attempt['loss'] = float(metrics['loss'])
        attempt['gradients'] = self._statistics(gradients)
        attempt['activations'] = activation_statistics(self._task, run.model, run.state, batch)
      self.attempts.append(attempt)

  def see(self, run: TrainRun, outcome: Outcome, metrics: Metrics) -> bool:
    self.metrics = metrics
    with run.timed('replay', 'compilation'):
      updates = self._statistics(run.state, self._before)
      self.attempts[-1] |= {'skipped': False, 'loss': metrics['loss'], 'updates': updates}
    return False


def _look_into(
  opened: OpenJob, settings: dict[str, Any], recorded: Mapping[int, Metrics], compare: Any
) -> dict[str, Any]:
  """Makes one step again; prints and returns what was found."""
  watch, step = LookInto(**settings), settings['first']
  stopped = rerun(opened, watch)
  set_activity(None)
  report = {'step': step, 'checkpoint': watch.checkpoint, 'stopped': stopped, 'metrics': watch.metrics}
  report |= _compared(watch, step, watch.metrics, recorded, compare) | {'attempts': watch.attempts}
  for number, attempt in enumerate(watch.attempts, 1):
    kinds: dict[str, Statistics] = {kind: attempt[kind] for kind in _KINDS if attempt.get(kind)}
    skipped = f' (attempt {number}: not finite, loss {attempt["loss"]}, so it changed nothing)' * attempt['skipped']
    _show(f'step {step}{skipped}, from {_origin(watch)}')
    for row in attempt['rows']:
      _show(format_row(row))
    _show(format_table(kinds))
    if 'gradients' not in attempt:
      _show(f'gradients and activations are left out: a {type(opened.job.task).__name__} keeps them to itself')
  if stopped is not None:
    _show(f'the job cannot make step {step}: {stopped}')
  _show(_verdict(report, step))
  return report


class Walk(Watch):
  """Compares each step with the record, and ends at the first one that departs."""

  def __init__(self, recorded: Mapping[int, Metrics], compare: Any, **settings: Any):
    super().__init__(**settings)
    self._recorded, self._compare = recorded, compare
    self.compared: list[dict[str, Any]] = []

  def see(self, run: TrainRun, outcome: Outcome, metrics: Metrics) -> bool:
    found = _compared(self, outcome.step, metrics, self._recorded, self._compare)
    self.compared.append({'step': outcome.step, 'metrics': metrics} | found)
    return not found['departs']


def _walk(opened: OpenJob, settings: dict[str, Any], recorded: Mapping[int, Metrics], compare: Any) -> dict[str, Any]:
  """Makes several steps again; prints and returns what was found."""
  walk = Walk(recorded, compare, **settings)
  stopped = rerun(opened, walk)
  set_activity(None)
  departed = next((each for each in walk.compared if each['departs']), None)
  report = {'from': settings['first'], 'to': settings['last'], 'checkpoint': walk.checkpoint, 'stopped': stopped}
  report |= {'steps': walk.compared, 'departs': departed is not None or stopped is not None}
  report |= {'first_departure': None if departed is None else departed['step']}
  with_record = [each['step'] for each in walk.compared if each['is_recorded']]
  if departed is not None:
    _show(_verdict(departed, departed['step']))
    _show(f'step {departed["step"]} is the first that departs; look into it with --step {departed["step"]}')
  elif stopped is not None:
    _show(f'the job cannot go on: {stopped}')
  else:
    states = f'; the states of the checkpoints of {sorted(walk.digests)} too' * bool(walk.digests)
    _show(
      f'steps {settings["first"]} to {settings["last"]}, from {_origin(walk)}: the {len(with_record)} steps that are '
      f'recorded are the same{states}'
    )
  return report


def differences(
  own: Metrics, recorded: Metrics, *, metric: str | None = None, tolerance: float = 0.0
) -> dict[str, tuple[Metric | None, Metric | None]]:
  """Returns the metrics of a step that differ from the recorded ones: name -> (replayed, recorded).

  Others of the record (rates, goodput) are of the run, and not compared. With `metric` this one is compared alone;
  `tolerance` is a relative difference that counts as none.

  Raises a UserError: the step has no such metric.
  """
  if metric is not None and metric not in own:
    raise UserError(f'--metric {metric!r} is no metric of the step: it has {", ".join(sorted(own))}.')
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


def _compared(
  watch: Watch, step: int, metrics: Metrics, recorded: Mapping[int, Metrics], compare: Any
) -> dict[str, Any]:
  """Compares a step with its line of the record and with its checkpoint."""
  line = recorded.get(step)
  different = {} if line is None or not metrics else compare(metrics, line)
  is_missing = line is not None and not metrics  # the job made it, and the replay could not
  found: dict[str, Any] = {'is_recorded': line is not None, 'differences': different}
  found['departs'] = bool(different) or is_missing
  if (both := watch.digests.get(step)) is not None:
    own, saved = both
    leaves = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
    found |= {'digest': _digest(own), 'saved_digest': _digest(saved), 'different_leaves': leaves}
    found['departs'] = found['departs'] or bool(leaves)
  return found


def _verdict(found: dict[str, Any], step: int) -> str:
  """Says how a step compares with the record."""
  if not found['metrics']:
    return f'step {step} was not made' + ', but the record has it' * found['is_recorded']
  if not found['is_recorded']:
    lines = [f'step {step}: no line of metrics.jsonl is of this step, so its metrics are compared with nothing']
  elif found['differences']:
    lines = [f'step {step} departs from the record:']
    lines += [f'  {name}: replayed {own}, recorded {its}' for name, (own, its) in found['differences'].items()]
  else:
    some = ', '.join(f'{name} {found["metrics"][name]}' for name in ('loss', 'grad_norm') if name in found['metrics'])
    lines = [f'step {step}: every bit of the metrics is as recorded ({some})']
  if 'digest' in found and found['different_leaves']:
    some = ', '.join(found['different_leaves'][:5])
    lines.append(
      f'step {step}: the state ({found["digest"]}) is not that of its checkpoint ({found["saved_digest"]}): '
      f'{len(found["different_leaves"])} arrays differ, such as {some}'
    )
  elif 'digest' in found:
    lines.append(f'step {step}: every bit of the state is that of its checkpoint, digest {found["digest"]}')
  return '\n'.join(lines)


def _origin(watch: Watch) -> str:
  return f'the checkpoint of step {watch.checkpoint}' if watch.checkpoint else 'the beginning'


def format_row(row: dict[str, Any]) -> str:
  """Returns the line of one row of a batch."""
  documents: Sequence[int] = row.get('tokens_per_document', ())
  parts = [f'row {row["row"]}']
  parts += [row['source']] if 'source' in row else []
  parts += [f'{len(documents)} document(s) of {"+".join(map(str, documents))} tokens'] if documents else []
  parts += row['from']
  return '  '.join(parts) + (f'  {row["begins"]!r}' if isinstance(row.get('begins'), str) else '')


def _show(text: str) -> None:
  if is_primary():
    print(text, flush=True)


def _plain(value: Any) -> Any:
  """JSON without NaN and infinities, which are written as in metrics.jsonl."""
  if isinstance(value, dict):
    return {name: _plain(each) for name, each in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(each) for each in value]
  return str(value) if isinstance(value, float) and not math.isfinite(value) else value
