"""The supervisor of one host: agrees on rounds with the others, and runs the host's training process in each of them.

    spmd-tasks --mode train ... --supervise 2:4

Its own process holds no device and imports no JAX. It ends with the exit code of the job, see `_verdict`.
"""

import argparse
from collections.abc import Mapping, Sequence
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.files import (
  absolute_path,
  glob_below,
  is_remote,
  make_directory,
  read_text,
  storage_errors,
  write_durably,
)
from spmd_tasks.operations import SUPERVISED
from spmd_tasks.operations.neighbours import (
  RUNNING,
  Neighbours,
  Status,
  choose_hosts,
  newest_round,
  propose_round,
  read_round,
)
from spmd_tasks.wings import call

_DEAD_LIMIT_S, _ENDED_LIMIT_S = 1.5, 25.0  # how long a process may go on without one that is dead, or has ended
_ALONE_S = 15.0  # how long all hosts that trained have been dead before spares go on without them
_KILL_LIMIT_S = 30.0  # for a killed process to end; one that waits for a driver does not
_GATHER_LIMIT_S = 45.0  # for all processes of a round to end
_STAYS_S = 15.0  # how long a spare has been there, and a round has made steps, before the round ends for it
_MAX_FAILURES = 3  # in a row, of hosts that are all alive, without a new checkpoint
_LINGER_S = 1.5  # so that each other supervisor has heard how this one ended
_DONE_FILE = 'done.json'
_FAULTS = 'device_faults'  # of programs/job_directory.py, which imports JAX
_OWN_FLAGS = ('--supervise', '--supervisor_address')
_PR_SET_PDEATHSIG = 1


def supervise(flags: argparse.Namespace) -> int | None:
  """Runs the supervisor where --supervise asks for it; None in a supervised training process."""
  if flags.supervise is None:
    settings = json.loads(os.environ[SUPERVISED])
    _end_with_parent(settings['parent'])
    call('spmd_tasks.operations.standby:wait_for_round', flags, settings['modules_file'])
    return None
  limits = _limits(flags.supervise)
  if flags.mode != 'train' or not flags.job_log_dir:
    raise UserError('--supervise keeps a training job going: give --mode train and its --job_log_dir, too.')
  if flags.coordinator_address or flags.num_processes or flags.process_id is not None:
    raise UserError(
      '--supervise numbers the processes itself: leave out --coordinator_address, --num_processes and --process_id.'
    )
  directory = absolute_path(flags.job_log_dir) / 'supervisors'
  address = flags.supervisor_address or _own_address()
  try:
    socket.create_server((address, 0), family=socket.AF_INET6 if ':' in address else socket.AF_INET).close()
  except OSError as error:
    raise UserError(f'--supervisor_address {address} is no address of this host: {error}.') from error
  with storage_errors(directory):
    make_directory(directory)
    neighbours = Neighbours(directory, address)
    if (record := _own_record(directory, neighbours.own)) is not None:
      path, found = record
      _say(f'this host is left out, because {found}: replace the device, then delete {path} or restart the machine.')
      return exit_codes.CORRUPTED
    with neighbours, tempfile.TemporaryDirectory() as local:
      code = _Supervisor(directory, neighbours, limits, flags.initialization_timeout_s, local).run()
      neighbours.tell(phase='left')
      time.sleep(_LINGER_S)
      return code


class _Supervisor:
  """One host's life in a job."""

  def __init__(
    self, directory: epath.Path, neighbours: Neighbours, limits: tuple[int, int], patience_s: float, local: str
  ):
    self._directory, self._neighbours, self._limits, self._patience_s = directory, neighbours, limits, patience_s
    self._sizes_file, self._modules_file = os.path.join(local, 'sizes.json'), os.path.join(local, 'modules.json')
    self._standby: subprocess.Popen[bytes] | None = None  # the process of the next round
    self._sizes: tuple[int, ...] = ()  # the numbers of hosts that the job fits; empty: not known
    self._period_s = 1.0 if is_remote(directory) else 0.2
    self._signal: signal.Signals | None = None
    self._num_signals = 0
    self._num_failures = 0

  def run(self) -> int:
    """Takes part in rounds until the job is done or this host leaves; returns the exit code."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
      if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
        signal.signal(signum, self._on_signal)
    try:
      return self._run()
    finally:
      if self._standby is not None:
        self._standby.kill()
        self._standby.communicate()

  def _run(self) -> int:
    number = newest_round(self._directory) + 1
    self._standby = self._new_process()
    while (number := self._agree(number)) > 0:
      agreed = self._read_round(number)
      assert agreed is not None
      checkpoint = self._newest_checkpoint()
      codes = self._run_round(number, agreed)
      own_code = codes[self._neighbours.own.id]
      lost = [self._neighbours.name(id) for id, code in codes.items() if code is None]
      _say(f'round {number} has ended here with {_code_name(own_code)}' + f'; lost: {", ".join(lost)}' * bool(lost))
      if self._newest_checkpoint() != checkpoint:
        self._num_failures = 0
      if not lost and not {exit_codes.PREEMPTED, exit_codes.CORRUPTED} & {*codes.values()}:
        self._num_failures += 1
      code = self._verdict(codes)
      if code == exit_codes.OK:
        write_durably(self._directory / _DONE_FILE, self._done())
      if code is not None:
        return code
      number += 1
    if number < 0:
      _say('the job is done.')
      return exit_codes.OK
    return exit_codes.INTERRUPTED if self._signal == signal.SIGINT else exit_codes.PREEMPTED

  def _agree(self, number: int) -> int:
    """Waits for a round that this host is in, from `number` on; returns its number, 0 to leave, -1 if all is done."""
    neighbours = self._neighbours
    neighbours.ready_for(number)
    began, said = time.monotonic(), ''
    while self._signal is None:
      if (agreed := self._read_round(number)) is not None:
        if neighbours.own.id in agreed['hosts']:
          neighbours.meet(agreed['hosts'])
          return number
        number, began = number + 1, time.monotonic()
        neighbours.ready_for(number)
        continue
      alive = neighbours.alive()
      previous = (self._read_round(number - 1) or {'hosts': []})['hosts']
      ready = {id: each.order for id, each in alive.items() if (each.round, each.phase) == (number, 'ready')}
      survivors = [id for id in previous if id in alive]
      if not survivors and neighbours.have_finished():
        return -1
      # Spares know that those who trained are dead, and not out of their reach, by the lock that these held.
      are_left = not survivors and time.monotonic() - began > _ALONE_S and neighbours.have_met(previous)
      are_left = are_left and not is_remote(self._directory) and not self._is_locked()
      passed, num_come = time.monotonic() - began, max(len(ready), neighbours.num_come(number))
      message = ''
      if len(ready) < len(alive):
        is_spare = neighbours.own.id not in previous and any(each.round < number for each in alive.values())
        message = 'a spare, while the others train' if is_spare else ''
        began = time.monotonic()
      elif not survivors and passed > self._patience_s and self._is_locked():
        message = 'a process of a host that this one does not reach has the job.lock'
      elif neighbours.is_settled() and (
        survivors or are_left or num_come >= self._limits[1] or passed > self._patience_s
      ):
        hosts = choose_hosts(ready, previous, self._sizes, self._limits)
        if hosts and (are_left or neighbours.own.id == min(survivors or ready)):
          propose_round(self._directory, number, hosts, alive[hosts[0]].coordinator)
          continue
        if not hosts:
          message = f'{len(ready)} hosts are there, but the job needs {self._needed()}'
          if passed > self._patience_s:
            if self._is_done():
              return -1
            raise JobError(
              f'{message}, and no other has come within {self._patience_s:g} s: start the same command on more hosts.'
            )
      elif not survivors:
        message = f'{len(ready)} of {self._limits[1]} hosts are there'
      if message and message != said:
        _say(f'waiting for round {number}: {message}.')
        said = message
      time.sleep(self._period_s if passed < 5 else 5 * self._period_s)
    return 0

  def _is_locked(self) -> bool:
    """Whether a process has the job's lock; a store has none."""
    path = self._directory.parent / 'job.lock'  # of programs/job_directory.py, which imports JAX
    if not is_remote(path):
      with contextlib.suppress(FileNotFoundError), open(path, 'r+') as file:
        try:
          fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
          return isinstance(error, BlockingIOError)
    return False

  def _needed(self) -> str:
    sizes = [size for size in self._sizes if self._limits[0] <= size <= self._limits[1]]
    return ' or '.join(map(str, sizes)) or f'at least {self._limits[0]}'

  def _run_round(self, number: int, agreed: Mapping[str, Any]) -> dict[str, int | None]:
    """Runs the training process; returns the exit code on each host of the round, None where that host is dead."""
    hosts: list[str] = agreed['hosts']
    neighbours = self._neighbours
    own = neighbours.own.id
    neighbours.tell(phase='running')
    index = hosts.index(own)
    _say(f'round {number}: process {index} of {len(hosts)}')
    process = self._start(agreed['coordinator'], len(hosts), index)
    began = time.monotonic()
    gone_since = spare_since = killed = None
    is_told, num_told, looked = False, 0, began
    while process.poll() is None:
      time.sleep(0.2)
      alive, now = neighbours.alive(), time.monotonic()
      others = [alive.get(id) for id in hosts if id != own]
      is_alone = any(each is None or each.round > number or each.phase == 'ended' for each in others)
      gone_since = (gone_since or now) if is_alone else None  # one that answers again is not gone
      was_killed = any(each is None or (each.code or 0) < 0 for each in others)  # so that it has said nothing
      is_over = gone_since is not None and now - gone_since > (_DEAD_LIMIT_S if was_killed else _ENDED_LIMIT_S)
      if self._standby is None and os.path.exists(self._modules_file):  # the first step is made
        self._standby = self._new_process()
      if now - looked > 10 * self._period_s:
        looked, is_over = now, is_over or self._is_agreed(number + 1)
      if is_over:
        process.kill()
        killed = killed or now
      if killed is not None and now - killed > _KILL_LIMIT_S:
        raise JobError(
          f'process {process.pid} was killed {_KILL_LIMIT_S:g} s ago and does not end, so this host leaves the '
          'job: look for a device or a file system that hangs.'
        )
      spares = {id: each.order for id, each in alive.items() if (each.round, each.phase) == (number + 1, 'ready')}
      hosts_with_spares = choose_hosts(spares | {id: (0, '') for id in hosts}, hosts, self._known_sizes(), self._limits)
      is_larger = own == hosts[0] and gone_since is None and len(hosts_with_spares) > len(hosts)
      is_larger = is_larger and self._standby is not None  # a round is not ended before its first step
      spare_since = (spare_since or now) if is_larger else None
      if self._signal is not None and self._num_signals > num_told:  # Ctrl-C a second time ends it at once
        process.send_signal(self._signal)
        is_told, num_told = True, self._num_signals
      elif spare_since is not None and not is_told and now - spare_since > _STAYS_S:
        _say(f'round {number} ends for a larger one: {len(hosts_with_spares)} hosts are there')
        process.send_signal(signal.SIGTERM)  # all processes save after the same step
        is_told = True
    self._sizes = self._known_sizes()
    neighbours.tell(phase='ended', code=process.returncode)
    ended = time.monotonic()
    while True:
      codes = {id: neighbours.code_of(id, number) for id in hosts}
      running = [id for id, code in codes.items() if code == RUNNING]
      if not running or time.monotonic() - ended > _GATHER_LIMIT_S:
        return {**codes, **dict.fromkeys(running)}
      time.sleep(0.1)

  def _read_round(self, number: int) -> dict[str, Any] | None:
    """As `rounds.read_round`; an OSError, such as a stale handle of NFS, is raised only if it stays."""
    began = time.monotonic()
    while True:
      try:
        return read_round(self._directory, number)
      except OSError:
        if self._signal is not None or time.monotonic() - began > self._patience_s:
          raise
        time.sleep(5 * self._period_s)

  def _is_agreed(self, number: int) -> bool:
    """Whether others, who have taken this host for dead, have agreed on a round without it."""
    with contextlib.suppress(OSError, ValueError):
      return read_round(self._directory, number) is not None
    return False

  def _start(self, coordinator: str, num_processes: int, index: int) -> subprocess.Popen[bytes]:
    """Has the training process begin that waits for its round, or a new one."""
    process, self._standby = self._standby, None
    told: dict[str, Any] = {'coordinator': coordinator, 'num_processes': num_processes, 'process_id': index}
    line = json.dumps(told | {'round': self._neighbours.own.round}).encode() + b'\n'
    if process is None or process.poll() is not None:
      process = self._new_process()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # its end is seen
      process.stdin.write(line)
    with contextlib.suppress(FileNotFoundError):
      os.unlink(self._modules_file)
    return process

  def _new_process(self) -> subprocess.Popen[bytes]:
    """Starts a training process by the supervisor's own command line; it waits for its round (standby.py)."""
    settings: dict[str, Any] = dict(zip(('min_hosts', 'max_hosts'), self._limits))
    settings |= {'sizes_file': self._sizes_file, 'modules_file': self._modules_file, 'parent': os.getpid()}
    command = [sys.executable, *_without_own_flags(sys.orig_argv[1:])]
    env = {**os.environ, SUPERVISED: json.dumps(settings)}
    # In a session of its own, so that Ctrl-C reaches it through the supervisor alone.
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True)

  def _verdict(self, codes: Mapping[str, int | None]) -> int | None:
    """Returns the exit code with which this host leaves the job, or None if it goes on with another round."""
    own_code = codes[self._neighbours.own.id]
    assert own_code is not None
    if exit_codes.OK in codes.values():  # all have made the last step together, and the last checkpoint is whole
      return exit_codes.OK
    if self._signal is not None:
      return own_code if own_code > 0 else exit_codes.PREEMPTED
    if exit_codes.CORRUPTED in codes.values():
      return self._leave_out(list(codes))
    if exit_codes.USAGE in codes.values() and {*codes.values()} <= {exit_codes.USAGE, exit_codes.PEER_FAILED}:
      sizes = self._sizes or range(self._limits[0], self._limits[1] + 1)
      self._sizes = tuple(size for size in sizes if size != len(codes))
      if len(codes) == self._limits[1] or not any(self._limits[0] <= size <= len(codes) for size in self._sizes):
        return exit_codes.USAGE
    if self._num_failures >= _MAX_FAILURES:
      _say(
        f'{self._num_failures} rounds in a row have failed without a new checkpoint, and no host was lost: see above.'
      )
      return own_code if own_code > 0 else exit_codes.FAILED
    return None

  def _leave_out(self, hosts: list[str]) -> int | None:
    """As `_verdict`, of a round in which a device has computed wrongly: the job goes on without its host."""
    own, found = self._neighbours.own, dict[str, str]()
    for path in glob_below(self._directory.parent, f'{_FAULTS}/round_{own.round:06}_*.json'):
      fault = json.loads(read_text(path))
      found |= {hosts[index]: fault['found'] for index in fault['processes']}
    others = {id: each.order for id, each in self._neighbours.alive().items() if id not in found}
    if not found or not choose_hosts(others, hosts, self._sizes, self._limits):
      return exit_codes.CORRUPTED
    if own.id in found:
      path = self._directory / f'left_out_{own.id}.json'
      write_durably(path, json.dumps(_place_of(own) | {'found': found[own.id]}, indent=1))
      _say(f'this host is left out, as {path} says, and the others go on: {found[own.id]}')
      return exit_codes.CORRUPTED
    names = ', '.join(f'{self._neighbours.name(id)} (process {hosts.index(id)})' for id in found)
    _say(f'the job goes on without {names}: {"; ".join({*found.values()})}')
    return None

  def _known_sizes(self) -> tuple[int, ...]:
    """The numbers of hosts that the job fits, once the training process has found out; empty before."""
    with contextlib.suppress(OSError, ValueError), open(self._sizes_file) as file:
      return tuple(json.load(file))
    return self._sizes

  def _newest_checkpoint(self) -> str:
    with contextlib.suppress(OSError):
      return read_text(self._directory.parent / 'newest_checkpoint.json')
    return ''

  def _done(self) -> str:
    """What is written when the job is done, for hosts that come later and are too few to look for themselves."""
    return json.dumps([_without_own_flags(sys.orig_argv[1:]), self._newest_checkpoint()])

  def _is_done(self) -> bool:
    with contextlib.suppress(OSError):
      return read_text(self._directory / _DONE_FILE) == self._done()
    return False

  def _on_signal(self, signum: int, frame: Any) -> None:
    self._signal = self._signal or signal.Signals(signum)
    self._num_signals += 1


def _limits(text: str) -> tuple[int, int]:
  smallest, _, largest = text.partition(':')
  if not (smallest.isdecimal() and largest.isdecimal() and 1 <= int(smallest) <= int(largest)):
    raise UserError(f'--supervise {text!r} must be MIN:MAX, two numbers of hosts, such as 3:4.')
  return int(smallest), int(largest)


def _place_of(own: Status) -> dict[str, Any]:
  """What tells a host from others, and from itself after its machine was started again or replaced."""
  boot = ''
  with contextlib.suppress(OSError), open('/proc/sys/kernel/random/boot_id') as file:
    boot = file.read().strip()
  return {'host': own.host, 'rank': own.order[0], 'boot': boot}


def _own_record(directory: epath.Path, own: Status) -> tuple[epath.Path, str] | None:
  """The record by which this host was left out, and why; None if it was not."""
  for path in glob_below(directory, 'left_out_*.json'):
    record = json.loads(read_text(path))
    if _place_of(own).items() <= record.items():
      return path, record['found']
  return None


def _without_own_flags(words: Sequence[str]) -> list[str]:
  kept, skips = [], False
  for word in words:
    if not skips and word.partition('=')[0] not in _OWN_FLAGS:
      kept.append(word)
    skips = not skips and word in _OWN_FLAGS
  return kept


def _own_address() -> str:
  """The address by which this host reaches others; nothing is sent."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
    probe.connect(('192.0.2.1', 9))  # an address for documentation, which the default route leads to
    return probe.getsockname()[0]
  return '127.0.0.1'


def _end_with_parent(parent: int) -> None:
  """Has Linux kill this process with its supervisor: it must not train on with hosts that have gone on without it."""
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:
    os._exit(exit_codes.FAILED)


def _code_name(code: int | None) -> str:
  if code is not None and code < 0:
    return f'signal {-code}'
  return f'code {code} ({exit_codes.NAMES.get(code, "?")})' if code is not None else 'nothing'


def _say(text: str) -> None:
  now = time.strftime('%H:%M:%S')
  print(f'{now} spmd-tasks: supervisor of {socket.gethostname()}: {text}', file=sys.stderr, flush=True)
