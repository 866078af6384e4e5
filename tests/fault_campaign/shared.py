"""What the faults of a campaign share: undisturbed runs and one server, each made when it is first asked for."""

from collections.abc import Callable, Iterator
import contextlib
import json
from pathlib import Path
import random
import shutil
import threading
import time
from typing import Any

from spmd_tasks import exit_codes
from tests.fault_campaign import experiments, judge
from tests.fault_campaign.judge import Reference
from tests.fault_campaign.processes import Pair
from tests.fault_campaign.scene import DEADLINE_S, Scene


class Shared:
  """The runs and the server, for all lanes of a campaign."""

  def __init__(self, path: Path, tensorflow_server: Callable[[], str]):
    self._path = path
    self._references: dict[str, Reference] = {}
    self._locks: dict[str, threading.Lock] = {}
    self._make_tensorflow_server = tensorflow_server
    self._server_lock = threading.Lock()
    self._server: Any = None
    self._server_scene: Scene | None = None
    self._num_servers = 0

  @property
  def tensorflow_server(self) -> str:
    return self._make_tensorflow_server()

  def reference(self, job: str) -> Reference:
    with self._locks.setdefault(job, threading.Lock()):
      if job not in self._references:
        self._references[job] = self._run_undisturbed(job)
      return self._references[job]

  @contextlib.contextmanager
  def server(self, make: Callable[[Scene], Any]) -> Iterator[Any]:
    """Yields the server that all faults of clients share; after a fault that it did not bear it is another one."""
    with self._server_lock:
      try:
        if self._server is None:
          self._num_servers += 1
          self._server_scene = Scene(self._path / f'server_{self._num_servers}', random.Random(0), self)
          self._server = make(self._server_scene)
        yield self._server
      except BaseException:
        self.close()
        raise

  def close(self) -> None:
    """Ends the server."""
    if self._server_scene is not None:
      self._server_scene.close()
    self._server = self._server_scene = None

  def _run_undisturbed(self, job: str) -> Reference:
    shutil.rmtree(self._path / job, ignore_errors=True)
    scene = Scene(self._path / job, random.Random(0), self)
    scene.job = job
    if job in experiments.PAIRS:
      return self._run_undisturbed_pair(scene)
    recorded = scene.path / 'operations.jsonl'
    flags = ['--set', 'checkpoint_max_to_keep=100']
    process = scene.start(*scene.command(), *flags, name='undisturbed', recorded=str(recorded))
    ended = process.finish(3 * DEADLINE_S)
    assert ended.returncode == exit_codes.OK, ended.stderr
    # Programs come from the cache of compiled ones from now on.
    compiling = json.loads((scene.job_log_dir / 'startup.json').read_text()).get('compile', 0.0)
    seconds = time.time() - process.entered.stat().st_mtime - compiling
    operations = [tuple(json.loads(line)) for line in recorded.read_text().splitlines()]
    scene.close()
    return judge.read_reference(scene.job_log_dir, operations, seconds)

  def _run_undisturbed_pair(self, scene: Scene) -> Reference:
    began = time.monotonic()
    ended = Pair(scene, '--set', 'checkpoint_max_to_keep=100').finish(3 * DEADLINE_S)
    assert not any(each.returncode for each in ended), [each.stderr for each in ended]
    scene.close()
    return judge.read_reference(scene.job_log_dir, [], time.monotonic() - began)
