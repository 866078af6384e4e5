"""Neighbours: what the supervisors of a job tell each other, who is alive, and which hosts train together in a round.

    <job_log_dir>/supervisors/host_<id>.json       where each supervisor answers
    <job_log_dir>/supervisors/round_000003.json    the hosts of round 3, in the order of their process ids

A supervisor answers every connection with one line, its Status. It asks each other one twice a second. One that refuses
the connection twice, or is silent for several seconds, is dead, until it answers again.

The file of a round appears whole and is never replaced, so of several supervisors that propose one, one succeeds, and
supervisors that do not reach one another cannot both train.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import socketserver
import threading
import time
from typing import Any

from absl import logging
from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.files import glob_below, is_remote, read_text, write_durably

RUNNING = -1000  # in place of an exit code

_ASK_S, _ANSWER_LIMIT_S, _LOOK_S = 0.5, 3.0, 2.0
_MAX_FAILURES = 2  # in a row, of one that is alive
_FORGOTTEN_AFTER_S = 300.0
_RANKS = ('SLURM_PROCID', 'JOB_COMPLETION_INDEX', 'OMPI_COMM_WORLD_RANK')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
  """What a supervisor tells of itself.

  Attributes:
    id: of the supervisor, new at each start.
    host: its name, for messages.
    order: sorts new hosts: the launcher's rank, the host's name.
    round: the round that the supervisor is in, or waits for.
    phase: 'ready' for the round, 'running' in it, 'ended', or 'left' for good.
    code: the exit code of its process, once 'ended'; negative for a signal.
    coordinator: the address at which its process would listen as process 0.
  """

  id: str
  host: str
  order: tuple[int, str]
  round: int = 0
  phase: str = 'ready'
  code: int | None = None
  coordinator: str = ''


class Neighbours:
  """Knows this supervisor's status and those of the others; answers and asks while it is open."""

  def __init__(self, directory: epath.Path, address: str):
    rank = next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, '').isdigit()), 0)
    host = socket.gethostname()
    self.own = Status(id=secrets.token_hex(6), host=host, order=(rank, host))
    self._address = address
    self._directory = directory
    self._path = directory / f'host_{self.own.id}.json'
    self._heard: dict[str, tuple[Status | None, int]] = {}  # the last status, and failures since
    self._lock = threading.Lock()
    self._closed = threading.Event()
    self._port: socket.socket | None = None

  def __enter__(self) -> 'Neighbours':
    neighbours = self

    class Answer(socketserver.BaseRequestHandler):
      def handle(self):
        self.request.sendall(json.dumps(dataclasses.asdict(neighbours.own)).encode() + b'\n')

    self._server = _Server((self._address, 0), Answer)
    threading.Thread(target=self._server.serve_forever, name='answers', daemon=True).start()
    self._place = json.dumps({'address': self._server.server_address[:2]})
    write_durably(self._path, self._place)
    self._look()
    threading.Thread(target=self._keep_looking, name='neighbours', daemon=True).start()
    return self

  def __exit__(self, *exc_info):
    self.tell(phase='left')
    self._closed.set()
    if self._port is not None:
      self._port.close()
    with contextlib.suppress(OSError):
      self._path.unlink(missing_ok=True)

  def tell(self, **changes: Any) -> None:
    """Changes this supervisor's status."""
    self.own = dataclasses.replace(self.own, **changes)

  def ready_for(self, number: int) -> None:
    """Tells that this supervisor is ready for a round, and where its process would listen."""
    if self._port is not None:
      self._port.close()
    # Held, so that nobody else gets it; the process may listen there, as its sockets say SO_REUSEPORT too.
    self._port = socket.socket(socket.AF_INET6 if ':' in self._address else socket.AF_INET)
    self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    self._port.bind((self._address, 0))
    host = f'[{self._address}]' if ':' in self._address else self._address
    self.tell(round=number, phase='ready', code=None, coordinator=f'{host}:{self._port.getsockname()[1]}')

  def alive(self) -> Mapping[str, Status]:
    """The supervisors that are alive and have not left, this one included."""
    others = {id: status for id, (status, failures) in list(self._heard.items()) if status and failures < _MAX_FAILURES}
    others = {id: status for id, status in others.items() if status.phase != 'left'}
    return {**others, self.own.id: self.own}

  def code_of(self, id: str, number: int) -> int | None:
    """The exit code of a supervisor's process in a round; RUNNING before its end, None if the supervisor is dead."""
    status, failures = (self.own, 0) if id == self.own.id else self._heard.get(id, (None, _MAX_FAILURES))
    if status is not None and status.round > number:
      return exit_codes.FAILED  # it goes on
    if status is not None and status.round == number and status.phase in ('ended', 'left'):
      return status.code
    return None if status is None or failures >= _MAX_FAILURES else RUNNING

  def have_finished(self) -> bool:
    """Whether one has left because the job is done."""
    told = [status for status, _ in list(self._heard.values()) if status is not None]
    return any((status.phase, status.code) == ('left', exit_codes.OK) for status in told)

  def num_come(self, number: int) -> int:
    """How many hosts have been ready for a round, with those that died since; one that came again counts once."""
    told = [self.own, *(status for status, _ in list(self._heard.values()) if status is not None)]
    return len({each.order for each in told if (each.round, each.phase) == (number, 'ready')})

  def have_met(self, ids: Iterable[str]) -> bool:
    """Whether one of these supervisors has ever answered."""
    return any(self._heard.get(id, (None, 0))[0] is not None for id in ids)

  def is_settled(self, ids: Iterable[str] | None = None) -> bool:
    """Whether each of these supervisors, or each registered one, has answered, or is dead."""
    told = [self._heard.get(id, (None, _MAX_FAILURES)) for id in (list(self._heard) if ids is None else ids)]
    return all(status is not None or failures >= _MAX_FAILURES for status, failures in told)

  def meet(self, ids: Iterable[str]) -> None:
    """Waits until each of these supervisors has answered, or is dead; some may have come since the last look."""
    for id in ids:
      self._begin_to_ask(id)
    while not self.is_settled(ids):
      time.sleep(0.05)

  def name(self, id: str) -> str:
    """The name of a supervisor's host, as far as it is known."""
    status = self.own if id == self.own.id else self._heard.get(id, (None, 0))[0]
    return id if status is None else status.host

  def _look(self) -> None:
    """Begins to ask the supervisors that have come since."""
    if not self._path.exists():  # somebody took this one for dead
      write_durably(self._path, self._place)
    for path in glob_below(self._directory, 'host_*.json'):
      self._begin_to_ask(path.name.removeprefix('host_').removesuffix('.json'))

  def _begin_to_ask(self, id: str) -> None:
    with self._lock:
      if id == self.own.id or id in self._heard:
        return
      self._heard[id] = (None, 0)
    path = self._directory / f'host_{id}.json'
    threading.Thread(target=self._ask_often, args=(id, path), name=f'asks {id}', daemon=True).start()

  def _keep_looking(self) -> None:
    while not self._closed.wait(5 * _LOOK_S if is_remote(self._directory) else _LOOK_S):
      try:
        self._look()
      except Exception as error:  # the job goes on without: nobody can come meanwhile
        logging.warning('%s cannot be read: %s', self._directory, error)

  def _ask_often(self, id: str, path: epath.Path) -> None:
    """Asks one supervisor until it has left, or has been dead for long."""
    answered, address = time.monotonic(), None
    while not self._closed.is_set() and time.monotonic() - answered < _FORGOTTEN_AFTER_S:
      status, failures = self._heard[id]
      try:
        address = address or tuple(json.loads(read_text(path))['address'])
        status, failures, answered = _ask(address, id), 0, time.monotonic()
      except (OSError, ValueError, KeyError, TypeError):
        failures += 1
      self._heard[id] = (status, failures)
      if status is not None and status.phase == 'left':
        return
      self._closed.wait(_ASK_S if failures <= 2 * _MAX_FAILURES else 10 * _ASK_S)
    if not self._closed.is_set():
      with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
      self._heard.pop(id)


class _Server(socketserver.ThreadingTCPServer):
  daemon_threads, request_queue_size = True, 128

  def __init__(self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]):
    self.address_family = socket.AF_INET6 if ':' in address[0] else socket.AF_INET
    super().__init__(address, handler)

  def handle_error(self, request, client_address):
    """Says nothing: a supervisor that asked has gone."""


def _ask(address: tuple[str, int], id: str) -> Status:
  """Returns what a supervisor tells. Raises OSError where nobody answers, ValueError where somebody else does."""
  with socket.create_connection(address, timeout=_ANSWER_LIMIT_S) as sock, sock.makefile('rb') as lines:
    told = json.loads(lines.readline(10_000))
  status = Status(**{**told, 'order': tuple(told['order'])})
  if status.id != id:
    raise ValueError(f'{address} answers as {status.id}')
  return status


def newest_round(directory: epath.Path) -> int:
  """The number of the newest round; 0 if there is none."""
  numbers = [re.fullmatch(r'round_(\d+)\.json', path.name) for path in glob_below(directory, 'round_*.json')]
  return max((int(number[1]) for number in numbers if number), default=0)


def read_round(directory: epath.Path, number: int) -> dict[str, Any] | None:
  """The hosts and the coordinator of a round; None if it has not been agreed on."""
  try:
    return json.loads(read_text(directory / f'round_{number:06}.json'))
  except FileNotFoundError:
    return None


def propose_round(directory: epath.Path, number: int, hosts: Sequence[str], coordinator: str) -> None:
  """Makes a round of these hosts, unless another one has been agreed on."""
  token = secrets.token_hex(8)
  data = json.dumps({'hosts': list(hosts), 'coordinator': coordinator, 'token': token}).encode()
  path = directory / f'round_{number:06}.json'
  if is_remote(path):
    from spmd_tasks.stores import create

    create(path, data)
    return
  partial = directory / f'.{token}.partial'
  partial.write_bytes(data)
  try:
    os.link(partial, path)  # fails if the path is there
  except FileExistsError:
    pass
  finally:
    partial.unlink()


def choose_hosts(
  ready: Mapping[str, Sequence[Any]], previous: Sequence[str], sizes: Collection[int], limits: tuple[int, int]
) -> list[str]:
  """Returns the hosts of the next round in the order of their process ids; [] if too few are ready.

  Hosts of the previous round keep their order, so that copies in memory stay where they are looked for.

  Args:
    ready: the hosts that can train, with a sort key for those that are new.
    previous: the hosts of the previous round.
    sizes: the numbers of hosts that the job fits; empty: not known yet, all do.
    limits: the smallest and the largest number of hosts.
  """
  stayed = [host for host in previous if host in ready]
  order = stayed + sorted(set(ready) - set(stayed), key=lambda host: (*ready[host], host))
  fitting = [size for size in range(limits[0], min(limits[1], len(order)) + 1) if not sizes or size in sizes]
  return order[: max(fitting)] if fitting else []
