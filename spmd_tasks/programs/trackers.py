"""Sends a job's metrics to Weights & Biases and to MLflow; the hook Track (hooks.py) calls it.

    spmd-tasks --exp lm.StdlibTiny --mode train --job_log_dir runs/tiny --set trackers=wandb,mlflow

Both are configured by their own environment variables: WANDB_MODE=offline, WANDB_PROJECT, MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME. A resumed job continues the same run, whose id is in <job_log_dir>/trackers.json.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent import futures
import os
import secrets
import tempfile
import time
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.runtime.media import Image, Media, Table

_PROJECT = 'spmd_tasks'
_MAX_PARAM_CHARS, _MAX_PARAMS = 500, 100  # MLflow's, of a value and of a call


class WandbRun:
  """A run of Weights & Biases: the one with this id, or a new one; `config` is the job's, by path."""

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
    if step >= self._run.step:  # a repeated step has the same metrics, and the service refuses earlier steps
      self._run.log(dict(metrics), step=step)

  def log_media(self, step: int, name: str, media: Media) -> None:
    import wandb

    if isinstance(media, Image):
      value: Any = wandb.Image(media.pixels)
    elif isinstance(media, Table):
      rows = [[row.get(column) for column in media.columns] for row in media.rows]
      value = wandb.Table(columns=list[Any](media.columns), data=rows)
    else:
      value = wandb.Histogram(media.values.tolist())
    if step >= self._run.step:
      self._run.log({name: value}, step=step)

  def close(self, *, is_complete: bool) -> None:
    self._run.finish(exit_code=0 if is_complete else 1)


class MlflowRun:
  """A run of MLflow."""

  def __init__(self, name: str, config: Mapping[str, Any], directory: str, id: str | None):
    import mlflow

    del directory
    self._client = mlflow.MlflowClient()
    # MLflow's own background thread now and then loses a metric when it is flushed.
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

  def log_media(self, step: int, name: str, media: Media) -> None:
    with tempfile.TemporaryDirectory() as directory:
      path = os.path.join(directory, f'step_{step:08d}.{media.suffix}')
      with open(path, 'wb') as file:
        file.write(media.encode())
      self._client.log_artifact(self.id, path, f'media/{name}')

  def close(self, *, is_complete: bool) -> None:
    self._thread.shutdown()
    for sent in self._sent:
      sent.result()
    self._client.set_terminated(self.id, 'FINISHED' if is_complete else 'KILLED')


TRACKERS: Mapping[str, Any] = {'wandb': WandbRun, 'mlflow': MlflowRun}


def tracker_classes(names: Sequence[str]) -> dict[str, Any]:
  """Returns the class of each service by name; 'tensorboard' is not one: its event files are beside metrics.jsonl.

  Raises a UserError: a service is unknown or not installed.
  """
  services = [name for name in names if name != 'tensorboard']
  for name in services:
    if name not in TRACKERS:
      known = ', '.join(('tensorboard', *TRACKERS))
      raise UserError(f'trackers = {tuple(names)} has {name!r}: the known ones are {known}.')
    require(name, name, wants=f'trackers = {tuple(names)}')
  return {name: TRACKERS[name] for name in services}
