"""Faults of object stores (emulated gs:// and s3://) with a job's directory in them.

All requests go through a proxy (store_proxy.py). The judge reads what the store holds, copied to a disk as it is: a
checkpoint without a manifest is none. Jobs that are not killed run in one process, one after the other.
"""

from collections.abc import Callable
import functools
import json
import logging
import os
from pathlib import Path
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from spmd_tasks import exit_codes
from tests import binary
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.experiments import MAX_TO_KEEP, NUM_STEPS
from tests.fault_campaign.judge import Reference, check
from tests.fault_campaign.scene import DEADLINE_S, Ended, HangError, Scene, Started, child_environment
from tests.fault_campaign.store_proxy import Fault, StoreProxy, is_listing

FLAGS = ['--exp', 'tests.fault_campaign.store_jobs.Plain', '--mode', 'train', '--num_fake_devices', '1']
_PART = re.compile(r'(.+)\.\d{20}_\d{6}')
_one_at_a_time = threading.Lock()


class Emulators:
  """Both stores with their proxies, and the process that runs jobs, shared by all faults of this process."""

  def __init__(self) -> None:
    from moto.server import ThreadedMotoServer

    from tests.gcs_emulator import GcsEmulator, environment

    logging.getLogger('werkzeug').setLevel(logging.ERROR)  # a line for each request
    self.gcs = GcsEmulator().__enter__()
    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    s3 = 'http://{}:{}'.format(*moto.get_host_and_port())
    self.proxies = {'gs': StoreProxy(self.gcs.url), 's3': StoreProxy(s3)}
    self.environment = {
      **environment(self.proxies['gs'].url),
      'AWS_ENDPOINT_URL': self.proxies['s3'].url,
      **{'AWS_ACCESS_KEY_ID': 'a', 'AWS_SECRET_ACCESS_KEY': 'b', 'AWS_REGION': 'us-east-1'},
    }
    self._jobs: Any = None
    self._reference: Reference | None = None
    from moto.s3.models import s3_backends

    self._s3 = s3_backends['123456789012']['global']
    if 'bucket' not in self._s3.buckets:  # moto's servers of a process have the same ones
      self._s3.create_bucket('bucket', 'us-east-1')

  def objects(self, scheme: str, prefix: str) -> dict[str, bytes]:
    """Returns the objects below a prefix, by their relative names."""
    if scheme == 'gs':
      objects = {name: data for name, (_, data, _) in dict(self.gcs.buckets['bucket']).items()}
    else:
      objects = {key.name: key.value for key in list(self._s3.buckets['bucket'].keys.values())}
    return {name.removeprefix(prefix): data for name, data in objects.items() if name.startswith(prefix)}

  def forget(self, scheme: str, prefix: str) -> None:
    if scheme == 'gs':
      for name in self.objects(scheme, prefix):
        self.gcs.buckets['bucket'].pop(prefix + name, None)

  def reference(self, directory: Path) -> Reference:
    """Returns the undisturbed run of the same job on a disk, which runs on first use."""
    if self._reference is None:
      flags = ['--job_log_dir', str(directory / 'job'), '--set', 'checkpoint_max_to_keep=100']
      directory.mkdir()
      assert self.run_job([*FLAGS, *flags], directory / 'err', 3 * DEADLINE_S) == exit_codes.OK
      self._reference = judge.read_reference(directory / 'job', [], 0.0)
    return self._reference

  def run_job(self, flags: list[str], stderr: Path, limit_s: float) -> int:
    """Runs a job in the process of jobs, which is restarted after a hang."""
    if self._jobs is None or self._jobs.poll() is not None:
      environment = {**child_environment(), **self.environment}
      command = [sys.executable, '-m', 'tests.fault_campaign.store_jobs']
      streams: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
      self._jobs = subprocess.Popen(command, cwd=binary.REPOSITORY, env=environment, **streams)
    timer = threading.Timer(limit_s, self._jobs.kill)
    timer.start()
    try:
      print(json.dumps([flags, str(stderr)]), file=self._jobs.stdin, flush=True)
      answer = self._jobs.stdout.readline()
    finally:
      timer.cancel()
    if not answer:
      raise HangError(f'the job did not end within {limit_s:g} s: {judge.last_line(stderr.read_text())}')
    return int(answer)


@functools.cache
def emulators() -> Emulators:
  return Emulators()


# How many requests an undisturbed job makes, about; a fault at a later one does not happen.
NUM_REQUESTS = {'gs': 400, 's3': 300}


class StoreJob:
  """The job of a scene, in its own directory of one of the stores."""

  def __init__(self, scene: Scene):
    self.scene, self.stores = scene, emulators()
    _one_at_a_time.acquire()
    scene.at_end(_one_at_a_time.release)
    self.scheme = scene.rng.choice(('gs', 's3'))
    self.proxy = self.stores.proxies[self.scheme]
    self._prefix = f'{scene.path.name}_{time.time_ns()}/'
    scene.at_end(self.stores.forget, self.scheme, self._prefix)
    scene.at_end(self.proxy.begin)
    scene.where = f'{self.scheme}: '
    self._num_runs = 0
    self.flags = [*FLAGS, '--job_log_dir', f'{self.scheme}://bucket/{self._prefix.rstrip("/")}']
    self.reference = self.stores.reference(scene.path.parent / 'stores')

  def start(self) -> Started:
    """Starts the job in a new process."""
    return self.scene.start_injected(self.flags, env=self.stores.environment)

  def start_with_signal(
    self,
    count: int,
    signum: int,
    *,
    is_done: bool = False,
    others: Callable[[int, str], Fault | None] = lambda number, request: None,
  ) -> Started:
    """Starts the job, and sends a signal at request `count`, before or after the store has handled it."""
    started: list[Started] = []
    act = lambda: os.kill(started[0].pid, signum)
    fault = Fault(after=act) if is_done else Fault(before=act)
    self.proxy.begin(lambda number, request: fault if number == count else others(number, request))
    started.append(self.start())
    return started[0]

  def run(self) -> Ended:
    """Runs the job to its end in the process of jobs."""
    self._num_runs += 1
    stderr, began = self.scene.path / f'job_{self._num_runs}.err', time.monotonic()
    code = self.stores.run_job(self.flags, stderr, DEADLINE_S)
    self.scene.codes.append(code)
    return Ended(returncode=code, stdout='', stderr=stderr.read_text(), seconds=time.monotonic() - began)

  def read(self) -> None:
    """Copies the store's objects to the scene's job_log_dir; checks every visible checkpoint."""
    shutil.rmtree(self.scene.job_log_dir, ignore_errors=True)
    objects = self.objects()
    whole = {name.rpartition('/')[0] for name in objects if name.endswith('/manifest.json')}
    for name in sorted(objects):
      if name.startswith('checkpoints/') and '/'.join(name.split('/')[:2]) not in whole:
        continue
      grown = _PART.fullmatch(name)
      path = self.scene.job_log_dir / (grown[1] if grown else name)
      path.parent.mkdir(parents=True, exist_ok=True)
      with path.open('ab') as file:
        file.write(objects[name])
    judge.check_digests(self.scene.job_log_dir, self.reference)

  def objects(self) -> dict[str, bytes]:
    return self.stores.objects(self.scheme, self._prefix)

  def check_as_undisturbed(self) -> None:
    """Checks that the job has succeeded with the undisturbed numbers, without leftovers, and released its lock."""
    self.read()
    judge.compare_with_reference(self.scene.job_log_dir, self.reference)
    objects = self.objects()
    names = {name.split('/')[1] for name in objects if name.startswith('checkpoints/checkpoint_')}
    whole = {f'checkpoint_{step:08d}' for step in judge.complete_steps(self.scene.job_log_dir)}
    check(names == whole, f'left behind: {sorted(names - whole)}')
    check(len(names) <= MAX_TO_KEEP + 1, f'{len(names)} checkpoints are kept: {sorted(names)}')
    for name in sorted(whole):
      manifest = json.loads(objects[f'checkpoints/{name}/manifest.json'])['body']
      listed = {entry[0] if isinstance(entry, list) else entry['path'] for entry in manifest['files']}
      present = {
        path.removeprefix(f'checkpoints/{name}/') for path in objects if path.startswith(f'checkpoints/{name}/')
      }
      check(present - {'manifest.json'} == listed, f'{name} has other objects than its manifest: {present ^ listed}')
    check(json.loads(objects[self.locks()[-1]]).get('released'), 'the lock was not released')

  def locks(self) -> list[str]:
    return sorted(name for name in self.objects() if name.startswith('job.lock.'))

  def finish(self, ended: Ended) -> None:
    """Checks that the job has succeeded."""
    check(ended.returncode == exit_codes.OK, f'ended with {ended.returncode}: {judge.sentence_of(ended)}')
    judge.check_no_traceback(ended.stderr)
    self.check_as_undisturbed()

  def resume(self) -> None:
    """Checks that the same command succeeds on an undisturbed store, repeating at most one interval."""
    self.proxy.begin()
    self.read()
    before, checkpoints = self.scene.steps(), judge.complete_steps(self.scene.job_log_dir)
    newest = (checkpoints or [0])[-1]
    missing = set(range(1, newest + 1)) - set(before)
    check(not missing, f'checkpoint {newest} is there, and the rows {sorted(missing)} are not')
    self.finish(self.run())
    again = self.scene.steps()[len(before) :]
    check(again == list(range(newest + 1, NUM_STEPS + 1)), f'from checkpoint {newest}, the steps {again} were run')

  def endure(self, fault: Callable[[int, str], Fault | None]) -> str:
    """With `fault` on every request, the job succeeds, or refuses and resumes without faults."""
    self.proxy.begin(fault)
    ended, met = self.run(), f'{self.proxy.num_faults} requests met it'
    if ended.returncode == exit_codes.OK:
      self.finish(ended)
      return f'{met}; went on, bit for bit, in {ended.seconds:.1f} s'
    judge.check_refusal(ended)
    self.resume()
    return f'{met}; ended with {ended.returncode} ({judge.sentence_of(ended)}); then went on, bit for bit'

  def chosen(self, fault: Fault, count: int) -> Callable[[int, str], Fault | None]:
    """Injects `fault` at so many requests of a job."""
    numbers = set(self.scene.rng.sample(range(NUM_REQUESTS[self.scheme]), count))
    self.scene.where += f'{count} requests'
    return lambda number, request: fault if number in numbers else None


@kind('store/kill at a request', share=10)
def kill_at_a_request(scene: Scene) -> str:
  job, num_kills = StoreJob(scene), scene.rng.choice((1, 1, 1, 2))
  for _ in range(num_kills):
    count, is_done = scene.rng.randrange(NUM_REQUESTS[job.scheme]), scene.rng.random() < 0.5
    scene.where += f'{"after" if is_done else "before"} request {count}; '
    ended = scene.finish(job.start_with_signal(count, signal.SIGKILL, is_done=is_done))
    if ended.returncode == exit_codes.OK:
      job.finish(ended)
      return 'ended before the kill'
    check(ended.returncode == -signal.SIGKILL, f'ended with {ended.returncode}: {judge.sentence_of(ended)}')
  job.resume()
  return f'{num_kills} kills; went on, bit for bit'


@kind('store/429 and 5xx', share=8)
def busy(scene: Scene) -> str:
  job = StoreJob(scene)
  status, wait = scene.rng.choice((429, 429, 500, 502, 503, 503, 504)), scene.rng.choice((None, None, 1))
  scene.where += f'{status}, Retry-After {wait}, '
  return job.endure(job.chosen(Fault(status=status, retry_after_s=wait), scene.rng.randrange(1, 6)))


@kind('store/connections refused, cut or without an answer', share=8)
def broken_connections(scene: Scene) -> str:
  job = StoreJob(scene)
  faults = {'refused': Fault(status=0), 'lost answers': Fault(keep=0.0), 'cut answers': Fault(keep=scene.rng.random())}
  name = scene.rng.choice(sorted(faults))
  scene.where += f'{name}, '
  return job.endure(job.chosen(faults[name], scene.rng.randrange(1, 6)))


@kind('store/slow answers', share=2)
def slow(scene: Scene) -> str:
  job = StoreJob(scene)
  return job.endure(job.chosen(Fault(slow_s=scene.rng.uniform(0.1, 1.5)), scene.rng.randrange(1, 12)))


@kind('store/listings in small pages', share=2)
def small_pages(scene: Scene) -> str:
  """Some connections are also cut in the middle of a response."""
  job, page = StoreJob(scene), scene.rng.choice((2, 3))
  cut = set(scene.rng.sample(range(NUM_REQUESTS[job.scheme]), scene.rng.choice((0, 20))))
  scene.where += f'of {page}; {len(cut)} requests are cut, if they are listings'

  def fault(number: int, request: str) -> Fault | None:
    return Fault(page=page, keep=0.5 if number in cut else None) if is_listing(request) else None

  return job.endure(fault)


@kind('store/a bad network', share=4)
def bad_network(scene: Scene) -> str:
  """Each request has a random fault with a small probability."""
  job, rng, share = StoreJob(scene), scene.rng, scene.rng.uniform(0.005, 0.02)
  scene.where += f'{share:.2%} of the requests'
  faults = (Fault(status=503), Fault(status=429), Fault(status=0), Fault(keep=0.0), Fault(keep=0.5), Fault(slow_s=0.5))
  return job.endure(lambda number, request: rng.choice(faults) if rng.random() < share else None)


@kind('store/no answer from some request on', share=1)
def outage(scene: Scene) -> str:
  """Every request fails for some seconds."""
  job, seconds = StoreJob(scene), scene.rng.uniform(0.5, 4)
  first, began = scene.rng.randrange(NUM_REQUESTS[job.scheme]), list[float]()
  status = scene.rng.choice((0, 503))
  scene.where += f'status {status} for {seconds:.1f} s from request {first}'

  def fault(number: int, request: str) -> Fault | None:
    if number < first or (began and time.monotonic() > began[0] + seconds):
      return None
    began.append(time.monotonic())
    return Fault(status=status)

  return job.endure(fault)


@kind('store/a bad network, and a kill', share=3)
def bad_network_and_kill(scene: Scene) -> str:
  job, rng = StoreJob(scene), scene.rng
  count = rng.randrange(NUM_REQUESTS[job.scheme])
  scene.where += f'killed at request {count}'
  faults = (Fault(status=503), Fault(status=429), Fault(keep=0.0), Fault(keep=0.5))

  def others(number: int, request: str) -> Fault | None:
    return rng.choice(faults) if rng.random() < 0.01 else None

  ended = scene.finish(job.start_with_signal(count, signal.SIGKILL, others=others))
  if ended.returncode == exit_codes.OK:
    job.finish(ended)
    return 'ended before the kill'
  if ended.returncode != -signal.SIGKILL:
    judge.check_refusal(ended)
  job.resume()
  return f'ended with {ended.returncode}; went on, bit for bit'


@kind('store/two jobs at once', share=3)
def two_jobs(scene: Scene) -> str:
  """Two jobs start at once, or one while the other runs: one gets the lock, the other refuses."""
  job = StoreJob(scene)
  later = scene.rng.choice((0.0, 0.0, 0.0, scene.rng.uniform(0, 4)))
  slow_s = scene.rng.choice((0.0, 0.3))
  scene.where += f'{later:.2f} s later, claims take {slow_s} s'
  job.proxy.begin(lambda number, request: Fault(slow_s=slow_s) if slow_s and 'job.lock' in request else None)
  first = job.start()
  scene.pause(first, later)
  ended = [scene.finish(result) for result in (first, job.start())]
  codes = [result.returncode for result in ended]
  for result in ended:
    if result.returncode != exit_codes.OK:
      judge.check_refusal(result, (exit_codes.USAGE,))
      check('in use by another running job' in result.stderr, judge.sentence_of(result))
  if exit_codes.OK in codes:
    job.check_as_undisturbed()
  else:
    job.resume()
  return f'exit codes {codes}; as undisturbed'


@kind('store/a holder that was stopped', share=2)
def stopped_holder(scene: Scene) -> str:
  """Another job takes over after a missing heartbeat; the first one, when continued, publishes nothing."""
  job = StoreJob(scene)
  count = scene.rng.randrange(NUM_REQUESTS[job.scheme])
  later = scene.rng.uniform(0, 1.5)
  scene.where += f'at request {count}, goes on {later:.2f} s after the next claim'
  first = job.start_with_signal(count, signal.SIGSTOP)
  scene.wait_until(first, lambda: len(job.proxy.requests) > count)
  if not first.is_running():
    job.finish(scene.finish(first))
    return 'ended before the stop'
  job.proxy.begin()
  claims, is_over = job.locks(), threading.Event()

  def go_on() -> None:
    while job.locks() == claims and not is_over.wait(0.02):
      pass
    is_over.wait(later)
    first.send(signal.SIGCONT)

  thread = threading.Thread(target=go_on)
  thread.start()
  second = job.run()
  is_over.set()
  thread.join()
  ended = scene.finish(first)
  if second.returncode == exit_codes.OK and ended.returncode == exit_codes.OK:
    job.check_as_undisturbed()
    return 'one after the other; as undisturbed'
  for result in (second, ended):
    if result.returncode != exit_codes.OK:
      judge.check_refusal(result)
  if second.returncode == exit_codes.OK:
    job.check_as_undisturbed()
  else:
    job.resume()
  return f'exit codes {ended.returncode} and {second.returncode} ({judge.sentence_of(ended)}); as undisturbed'
