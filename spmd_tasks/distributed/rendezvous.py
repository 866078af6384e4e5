"""Connects the processes of a job: a rendezvous, then jax.distributed. For jobs of several processes only.

JAX answers a port in use, an id given twice or a stranger at the address by aborting, with stacks of C++. So processes
that flags number meet at process 0's address before jax.distributed starts there, and each such case gets a sentence. A
process says in one line of JSON who it is; process 0 greets it, and once all have come, or one has a problem, tells it
so. Nothing secret is said, and what is heard only ends the job.
"""

from collections.abc import Mapping
import contextlib
import glob
import importlib.util
import json
import queue
import re
import socket
import threading
import time
from typing import IO, Any

from absl import logging
import jax

from spmd_tasks.errors import UserError
from spmd_tasks.xla_flags import add_xla_flags

_PROTOCOL = 'spmd_tasks rendezvous 2'
_LINE_LIMIT_S = 5.0
_RETRY_S = 0.2
_PORT_LIMIT_S = 5.0  # a job that is started again may come before the last one has freed its port,
_STRANGER_LIMIT_S = 10.0  # or be answered by it
_PROBLEM_LIMIT_S = 10.0  # for the others to come and hear that this process does not

explicit_coordinator: str | None = None  # the address that `connect` was given
_has_met = False


def check_explicit(settings: Any) -> None:
  """Raises a UserError unless DistributedSettings have all three fields, each in its range."""
  given = {name: getattr(settings, name) for name in ('coordinator_address', 'num_processes', 'process_id')}
  missing = [name for name, value in given.items() if value is None]
  if missing:
    present = ', '.join(f'{name}={value}' for name, value in given.items() if value is not None)
    raise UserError(
      f'{present} given without {" and ".join(missing)}: give all of coordinator_address, num_processes and '
      'process_id, or none of them to let the launcher (Slurm, Open MPI, Kubernetes, TPU) decide.'
    )
  for name in ('coordinator_address', 'coordinator_bind_address'):
    if (address := getattr(settings, name)) is None:
      continue
    # A bare IPv6 address has colons of its own; gRPC does not take it.
    found = re.fullmatch(r'(?:\[[^]]+\]|[^:]+):(\d{1,5})', address, re.ASCII)
    if not found or not 0 < int(found[1]) < 65536:
      raise UserError(f'{name}={address!r} must be host:port of process 0, such as 10.0.0.1:1234 or [fd00::1]:1234.')
  if settings.num_processes < 1:
    raise UserError(f'num_processes={settings.num_processes} must be at least 1: the number of processes started.')
  if not 0 <= settings.process_id < settings.num_processes:
    raise UserError(
      f'process_id={settings.process_id} must lie in [0, {settings.num_processes}) for num_processes='
      f'{settings.num_processes}: number the processes from 0.'
    )


def connect(settings: Any, cluster: str, environ: Mapping[str, str]) -> None:
  """Starts jax.distributed with DistributedSettings, and JAX's name of the launcher; 'deactivate': flags say it all.

  Raises:
    UserError: a package is missing, or the processes do not find each other (`meet`).
    RuntimeError: JAX is already in use, or the processes of a launcher did not find each other in time.
  """
  global explicit_coordinator, _has_met
  connection = {'cluster_detection_method': cluster, 'coordinator_bind_address': settings.coordinator_bind_address}
  if settings.is_explicit:
    explicit_coordinator = settings.coordinator_address
    connection |= {
      'coordinator_address': settings.coordinator_address,
      'num_processes': settings.num_processes,
      'process_id': settings.process_id,
      'coordinator_bind_address': settings.coordinator_bind_address or settings.coordinator_address,
      'local_device_ids': settings.local_device_ids,
    }
  else:
    if cluster == 'k8s' and importlib.util.find_spec('kubernetes') is None:
      raise UserError(
        'an indexed Kubernetes Job was detected, but not the `kubernetes` package, by which JAX finds the other pods: '
        'install `jax[k8s]`, give all of coordinator_address, num_processes and process_id, or pass '
        '--cluster none if these pods are independent jobs.'
      )
    connection['local_device_ids'] = settings.local_device_ids or _all_gpus_of_a_lone_task(environ)
  add_xla_flags(f'--xla_cpu_collective_timeout_seconds={settings.collective_timeout_s}')  # gloo's waits, on CPUs
  logging.info('waiting for the other processes for at most %d s: %s', settings.initialization_timeout_s, connection)
  if settings.is_explicit:
    _has_met = True
    meet(settings)
  try:
    jax.distributed.initialize(
      heartbeat_timeout_seconds=settings.heartbeat_timeout_s,
      shutdown_timeout_seconds=settings.shutdown_timeout_s,
      initialization_timeout=settings.initialization_timeout_s,
      **connection,
    )
  except (ValueError, LookupError, OSError) as error:  # the last: a TPU VM's metadata server that is not there
    reason = f'{type(error).__name__}: {error!s:.200}'
    raise UserError(
      f'the variables of the launcher {cluster} cannot be read ({reason}): give coordinator_address, num_processes '
      'and process_id, or pass --cluster none if this process is alone.'
    ) from error


def report_absence(settings: Any, problem: str) -> None:
  """Tells the processes that wait for this one that it does not come, and why; does nothing where a launcher knows."""
  if settings.is_explicit and settings.num_processes != 1 and not _has_met:
    with contextlib.suppress(UserError):  # nobody waits
      meet(settings, problem)


def _all_gpus_of_a_lone_task(environ: Mapping[str, str]) -> tuple[int, ...] | None:
  """All visible GPUs if this task is the only one of its node; JAX would use GPU 0 alone and leave the others idle.

  Those are the GPUs in CUDA_VISIBLE_DEVICES; without that variable, all of the node, as nothing hides one. Returns None
  if the number of tasks is unknown; JAX then gives each task the GPU of its local number.
  """
  # Slurm writes `1(x4)` for one task on each of four nodes, `2,1` for two and one.
  tasks_per_node = environ.get('SLURM_STEP_TASKS_PER_NODE', environ.get('OMPI_COMM_WORLD_LOCAL_SIZE', ''))
  is_alone = bool(tasks_per_node) and all(part.partition('(')[0] == '1' for part in tasks_per_node.split(','))
  visible = environ.get('CUDA_VISIBLE_DEVICES')
  gpus = glob.glob('/dev/nvidia[0-9]*') if visible is None else [gpu for gpu in visible.split(',') if gpu]
  return tuple(range(len(gpus))) if is_alone and gpus else None


def meet(settings: Any, problem: str | None = None) -> None:
  """Returns once all processes have come; with a `problem` of this process, once the others know it.

  Raises a UserError: on every process: process 0 cannot listen, an id is given twice, the numbers of processes differ,
  a process has a problem or is late, something else answers at the address.
  """
  address, limit_s = settings.coordinator_address, settings.initialization_timeout_s
  limit_s = limit_s if problem is None else min(limit_s, _PROBLEM_LIMIT_S)
  hello = {'process': settings.process_id, 'of': settings.num_processes, 'problem': problem}
  if settings.process_id > 0:
    return _answer(address, hello, limit_s)
  try:
    listener = _listen(settings.coordinator_bind_address or address)
  except UserError:
    with contextlib.suppress(OSError, ValueError):
      _ask(address, hello, _LINE_LIMIT_S)  # another process 0, which refuses it
    raise
  with listener:
    return _call(listener, hello, limit_s)


def _listen(address: str) -> socket.socket:
  host, port = _split(address)
  end = time.monotonic() + _PORT_LIMIT_S
  while True:
    try:
      family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
      return socket.create_server(found[:2], family=family, backlog=1024)
    except OSError as error:
      if time.monotonic() > end or isinstance(error, socket.gaierror):
        raise UserError(
          f'process 0 cannot listen at {address}: {error.strerror}. --coordinator_address must be a free port of its '
          'machine; --coordinator_bind_address is for a machine that the others know by another address.'
        ) from error
    time.sleep(_RETRY_S)


def _call(listener: socket.socket, own: dict[str, Any], limit_s: float) -> None:
  """Process 0: greets the others until all have come, or one has a problem, of which it tells all of them."""
  end, num_others = time.monotonic() + limit_s, own['of'] - 1
  problem = own['problem'] and f'process 0: {own["problem"]}'
  came = {0: 'this machine'}
  with contextlib.ExitStack() as stack:
    guests: list[socket.socket] = []
    heard: queue.SimpleQueue[tuple[socket.socket, str, dict[str, Any]]] = queue.SimpleQueue()
    while len(came) <= num_others and (own['problem'] or not problem):
      if time.monotonic() > end:
        missing = next(index for index in range(own['of']) if index not in came)
        late = f'process {missing} of {own["of"]} did not come within {limit_s:g} s'
        problem = problem or f'{late}: see its log, and start all with the same --coordinator_address.'
        break
      listener.settimeout(_RETRY_S if heard.empty() else 0.001)
      with contextlib.suppress(TimeoutError):
        sock, (host, *_) = listener.accept()
        stack.callback(sock.close)
        # In a thread of its own, because a stranger may stay silent.
        threading.Thread(target=_hear, args=(sock, host, heard), daemon=True).start()
      try:
        sock, host, hello = heard.get_nowait()
        index, of, said = int(hello['process']), int(hello['of']), hello['problem']
        _send(sock, {})
      except queue.Empty:
        continue
      except (OSError, ValueError, KeyError, TypeError) as error:
        logging.warning('%s connected, and is no process of a job (%s).', host, error)
        continue
      guests.append(sock)
      if of != own['of']:
        problem = problem or f'process {index} has --num_processes {of}, and process 0 has {own["of"]}.'
      elif index in came:
        twice = f'two processes have --process_id {index}, on {came[index]} and on {host}'
        problem = problem or f'{twice}: number them from 0 to {num_others}.'
      elif said is not None:
        problem = problem or f'process {index}: {said}'
      came[index] = host
    for sock in guests:
      with contextlib.suppress(OSError):
        _send(sock, {'problem': problem})
  if problem and not own['problem']:
    raise UserError(problem)


def _hear(sock: socket.socket, host: str, heard: queue.SimpleQueue) -> None:
  """Puts what a process says into `heard`; a stranger is logged."""
  try:
    sock.settimeout(_LINE_LIMIT_S)
    with sock.makefile('rb') as lines:
      heard.put((sock, host, _read(lines)))
  except (OSError, ValueError) as error:
    logging.warning('%s connected, and is no process of a job (%s).', host, error)


def _answer(address: str, hello: dict[str, Any], limit_s: float) -> None:
  """Any other process: asks until process 0 answers."""
  began = time.monotonic()
  while True:
    try:
      problem = _ask(address, hello, max(0.0, began + limit_s - time.monotonic()) + _LINE_LIMIT_S)
      break
    except (OSError, ValueError) as error:
      reason = error
    passed = time.monotonic() - began
    if isinstance(reason, ValueError) and passed > min(limit_s, _STRANGER_LIMIT_S):
      raise UserError(
        f'what answers at {address} is not process 0 of this job waiting for process {hello["process"]} ({reason}): '
        'correct --coordinator_address, or --process_id if another process has this one too.'
      )
    if passed > limit_s:
      raise UserError(
        f'process 0 does not answer at {address} within {limit_s:g} s ({reason}): start it, or correct '
        '--coordinator_address.'
      )
    time.sleep(_RETRY_S)
  if problem is not None and hello['problem'] is None:
    raise UserError(problem)


def _ask(address: str, hello: dict[str, Any], limit_s: float) -> str | None:
  """Says who this process is; returns the problem that process 0 tells, if any.

  Raises:
    OSError: nobody answers.
    ValueError: somebody else does.
  """
  with socket.create_connection(_split(address), timeout=_LINE_LIMIT_S) as sock, sock.makefile('rb') as lines:
    try:
      _send(sock, hello)
      _read(lines)
      sock.settimeout(limit_s)
      return _read(lines)['problem']
    except OSError as error:
      raise ValueError(str(error)) from error


def _split(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(':')
  return host.strip('[]'), int(port)


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
  sock.sendall(json.dumps({'job': _PROTOCOL, **message}).encode() + b'\n')


def _read(lines: IO[bytes]) -> dict[str, Any]:
  """Reads one message. Raises ValueError for anything else, OSError where none comes."""
  line = lines.readline(10_000)
  with contextlib.suppress(ValueError):
    message = json.loads(line)
    if isinstance(message, dict) and message.get('job') == _PROTOCOL:
      return message
  raise ValueError(_describe(line))


def _describe(line: bytes) -> str:
  """Says what somebody is who does not speak as a process of a job does."""
  if not line:
    return 'it closes the connection'
  if line[3:9] == b'\4\0\0\0\0\0':  # the frame with which HTTP/2 begins, and so JAX's service once all have come
    return 'it is a gRPC service, such as that of a job whose processes have all come already'
  text = line[:60].decode(errors='replace').strip()
  return f'it says {text!r}' if text.isprintable() and '\ufffd' not in text else 'it sends what is no text'
