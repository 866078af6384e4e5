"""Track: the hook that also gives a job's metrics to Weights & Biases and to MLflow.

    spmd-tasks --exp lm.StdlibTiny --mode train --job_log_dir runs/tiny --set trackers=wandb,mlflow

Both are configured by their own environment variables: WANDB_MODE=offline, WANDB_PROJECT, MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME. A job that goes on continues the same run, whose id is in <job_log_dir>/trackers.json. A service
that fails ends no job: metrics.jsonl has everything.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent import futures
import contextlib
import json
import os
import secrets
import tempfile
import time
from typing import Any

from spmd_tasks.distributed import is_primary
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.files import is_remote, read_text, write_durably
from spmd_tasks.programs.hooks import TrainHook, TrainRun
from spmd_tasks.programs.training_loop import Outcome

RUNS_FILE = 'trackers.json'
_PROJECT = 'spmd_tasks'
_MAX_PARAM_CHARS, _MAX_PARAMS = 500, 100  # MLflow's, of a value and of a call


class WandbRun:
  """A run of Weights & Biases, of this id or a new one; `config` is the job's by path."""

  def __init__(self, name: str, config: Mapping[str, Any], directory: str, id: str | None):
    import wandb

    self.id = id or secrets.token_hex(4)
    project = os.environ.get('WANDB_PROJECT', _PROJECT)
    self._run = wandb.init(
      id=self.id,
      name=name,
      project=project,
      config=dict(config),
      dir=directory,
      resume='allow',
      settings=wandb.Settings(console='off'),  # it would take stdout and stderr
    )

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    if step >= self._run.step:  # a step that is made again has the same metrics, and the service takes none back
      self._run.log(dict(metrics), step=step)

  def close(self, *, is_complete: bool) -> None:
    self._run.finish(exit_code=0 if is_complete else 1)


class MlflowRun:
  """A run of MLflow."""

  def __init__(self, name: str, config: Mapping[str, Any], directory: str, id: str | None):
    import mlflow

    del directory
    self._client = mlflow.MlflowClient()
    # MLflow's own way of sending in the background loses a metric now and then when it is flushed.
    self._thread, self._sent = futures.ThreadPoolExecutor(1), deque[futures.Future[Any]]()
    if id is None:
      experiment = mlflow.set_experiment(os.environ.get('MLFLOW_EXPERIMENT_NAME', _PROJECT))
      self.id = self._client.create_run(experiment.experiment_id, run_name=name).info.run_id
      params = [mlflow.entities.Param(path, str(value)[:_MAX_PARAM_CHARS]) for path, value in config.items()]
      for first in range(0, len(params), _MAX_PARAMS):
        self._client.log_batch(self.id, params=params[first : first + _MAX_PARAMS])
    else:
      self.id = id
      self._client.update_run(id, status='RUNNING')

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    from mlflow.entities import Metric

    while self._sent and self._sent[0].done():
      self._sent.popleft().result()  # raises what went wrong
    now = round(1000 * time.time())
    entities = [Metric(name, value, now, step) for name, value in metrics.items()]
    self._sent.append(self._thread.submit(self._client.log_batch, self.id, metrics=entities))

  def close(self, *, is_complete: bool) -> None:
    self._thread.shutdown()
    for sent in self._sent:
      sent.result()
    self._client.set_terminated(self.id, 'FINISHED' if is_complete else 'KILLED')


TRACKERS: Mapping[str, Any] = {'wandb': WandbRun, 'mlflow': MlflowRun}


class Track(TrainHook):
  """Gives metrics to the services of `experiment.trackers`; those of a step when the next one is done."""

  _logged_step = _eval_step = -1
  _is_complete = False

  def prepare(self, run: TrainRun) -> None:
    """Raises a UserError for a tracker that is not known or not installed."""
    self._services = [name for name in run.experiment.trackers if name != 'tensorboard']
    for name in self._services:
      if name not in TRACKERS:
        known = ', '.join(('tensorboard', *TRACKERS))
        raise UserError(f'trackers = {run.experiment.trackers} has {name!r}: the known ones are {known}.')
      require(name, name, wants=f'trackers = {run.experiment.trackers}')

  def start(self, run: TrainRun) -> None:
    self._trackers: dict[str, Any] = {}
    if not is_primary():
      return
    self._eval_step = run.first_step
    path = run.job_log_dir / RUNS_FILE
    ids = json.loads(read_text(path)) if path.exists() else {}
    config = json.loads(read_text(run.job_log_dir / 'config.json'))['config']
    directory = tempfile.mkdtemp(prefix='spmd_tasks_') if is_remote(run.job_log_dir) else str(run.job_log_dir)
    for name in self._services:
      with self._kept_apart(run, name):
        tracker = self._trackers[name] = TRACKERS[name](run.job.name, config, directory, ids.get(name))
        ids[name] = tracker.id
    write_durably(path, json.dumps(ids) + '\n')
    run.stack.callback(self._close, run)

  def after_step(self, run: TrainRun, outcome: Outcome) -> None:
    del outcome
    self._report(run)

  def finish(self, run: TrainRun) -> None:
    self._is_complete = True

  def _report(self, run: TrainRun) -> None:
    if run.logged.step > self._logged_step:
      self._logged_step = run.logged.step
      self._log(run, run.logged.step, run.logged.metrics)
    if run.evals.step > self._eval_step:
      self._eval_step = run.evals.step
      for name, metrics in run.evals.metrics.items():
        self._log(run, run.evals.step, {f'eval/{name}/{metric}': value for metric, value in metrics.items()})

  def _log(self, run: TrainRun, step: int, metrics: Mapping[str, Any]) -> None:
    numbers = {name: float(value) for name, value in metrics.items() if not isinstance(value, list)}
    for name in list(self._trackers):
      with self._kept_apart(run, name):
        self._trackers[name].log(step, numbers)

  def _close(self, run: TrainRun) -> None:
    self._report(run)  # the evals at the end
    for name in list(self._trackers):
      with self._kept_apart(run, name):
        self._trackers[name].close(is_complete=self._is_complete)

  @contextlib.contextmanager
  def _kept_apart(self, run: TrainRun, name: str) -> Iterator[None]:
    """Gives up a service that fails, with a message: the job goes on."""
    try:
      yield
    except Exception as error:
      self._trackers.pop(name, None)
      run.message(f'{name} gets no metrics from here on, metrics.jsonl has them all: {type(error).__name__}: {error}')
