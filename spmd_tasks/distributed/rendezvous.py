"""Connects the processes of a job: a rendezvous, then jax.distributed. For jobs of several processes only.

JAX aborts with C++ stacks if the coordinator's port is in use, two processes have one id, or another program listens at
the address. So if flags number the processes, they first meet at process 0's address, and each such mistake becomes a
UserError. Each process sends its id in one line of JSON and process 0 acknowledges it. Once all have connected, or one
reports a problem, process 0 tells the others. Messages hold no secrets, and a message can only end the job.
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
# A restarted job may find that the previous job has not freed its port yet, or still answers there.
_PORT_LIMIT_S = 5.0
_STRANGER_LIMIT_S = 10.0
_PROBLEM_LIMIT_S = 10.0  # for the other processes to connect and receive the problem of this one

_has_met = False


def check_explicit(settings: Any) -> None:
  """Raises a UserError unless DistributedSettings have all three fields, each in its range."""
  fields = {name: getattr(settings, name) for name in ('coordinator_address', 'num_processes', 'process_id')}
  missing = [name for name, value in fields.items() if value is None]
  if missing:
    present = ', '.join(f'{name}={value}' for name, value in fields.items() if value is not None)
    raise UserError(
      f'{present} given without {" and ".join(missing)}: give all of coordinator_address, num_processes and '
      'process_id, or none of them to let the launcher (Slurm, Open MPI, Kubernetes, TPU) decide.'
    )
  for name in ('coordinator_address', 'coordinator_bind_address'):
    if (address := getattr(settings, name)) is None:
      continue
    # gRPC refuses an IPv6 address without brackets.
    match = re.fullmatch(r'(?:\[[^]]+\]|[^:]+):(\d{1,5})', address, re.ASCII)
    if not match or not 0 < int(match[1]) < 65536:
      raise UserError(f'{name}={address!r} must be host:port of process 0, such as 10.0.0.1:1234 or [fd00::1]:1234.')

  if not 0 <= settings.process_id < settings.num_processes:
    raise UserError(
      f'process_id={settings.process_id} must be in [0, num_processes={settings.num_processes}): number the processes '
      'from 0.'
    )


def connect(settings: Any, cluster: str, environ: Mapping[str, str]) -> None:
  """Starts jax.distributed.

  Args:
    settings: DistributedSettings.
    cluster: JAX's name of the launcher; 'deactivate' if the settings name the coordinator.
    environ: the environment variables.

  Raises:
    UserError: a package is missing, or the processes do not find each other (`meet`).
    RuntimeError: JAX is already in use, or the processes of a launcher did not find each other in time.
  """
  global _has_met
  connection = {'cluster_detection_method': cluster, 'coordinator_bind_address': settings.coordinator_bind_address}
  if settings.is_explicit:
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
        'this is a pod of an indexed Kubernetes Job, but the package `kubernetes`, with which JAX finds the others, is '
        'not installed: install `jax[k8s]`, give all of coordinator_address, num_processes and process_id, or pass '
        '--cluster none if the pods are independent jobs.'
      )
    connection['local_device_ids'] = settings.local_device_ids or _gpus_of_a_single_task(environ)
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
  except (ValueError, LookupError, OSError) as error:  # OSError: a TPU VM without a metadata server
    reason = f'{type(error).__name__}: {error!s:.200}'
    raise UserError(
      f'JAX cannot read the variables of the launcher {cluster} ({reason}): give coordinator_address, num_processes '
      'and process_id, or pass --cluster none if this is the only process.'
    ) from error


def report_absence(settings: Any, problem: str) -> None:
  """Tells the waiting processes why this one does not connect; does nothing if a launcher started them."""
  if settings.is_explicit and settings.num_processes != 1 and not _has_met:
    with contextlib.suppress(UserError):  # nobody waits
      meet(settings, problem)


def _gpus_of_a_single_task(environ: Mapping[str, str]) -> tuple[int, ...] | None:
  """Returns all visible GPUs if this is the only task of its node, which JAX would restrict to GPU 0; else None.

  The visible GPUs are those in CUDA_VISIBLE_DEVICES, or all GPUs of the node without that variable. On None, JAX gives
  each task the GPU of its local rank.
  """
  # Slurm writes `1(x4)` for one task on each of four nodes, `2,1` for two tasks and one.
  tasks_per_node = environ.get('SLURM_STEP_TASKS_PER_NODE', environ.get('OMPI_COMM_WORLD_LOCAL_SIZE', ''))
  is_alone = bool(tasks_per_node) and all(part.partition('(')[0] == '1' for part in tasks_per_node.split(','))
  visible = environ.get('CUDA_VISIBLE_DEVICES')
  gpus = glob.glob('/dev/nvidia[0-9]*') if visible is None else [gpu for gpu in visible.split(',') if gpu]
  return tuple(range(len(gpus))) if is_alone and gpus else None


def meet(settings: Any, problem: str | None = None) -> None:
  """Returns once all processes have connected, or once the others know the `problem` of this process.

  Raises a UserError: process 0 cannot listen, two processes have one id, the numbers of processes differ, a process has
  a problem or is late, or another program answers at the address; raised on every process.
  """
  address, limit_s = settings.coordinator_address, settings.initialization_timeout_s
  limit_s = limit_s if problem is None else min(limit_s, _PROBLEM_LIMIT_S)
  hello = {'process': settings.process_id, 'of': settings.num_processes, 'problem': problem}
  if settings.process_id > 0:
    return _meet_primary(address, hello, limit_s)
  try:
    listener = _listen(settings.coordinator_bind_address or address)
  except UserError:
    with contextlib.suppress(OSError, ValueError):
      _ask(address, hello, _LINE_LIMIT_S)  # tells another process 0 that its id is taken twice
    raise
  with listener:
    return _meet_others(listener, hello, limit_s)


def _listen(address: str) -> socket.socket:
  host, port = _split(address)
  end = time.monotonic() + _PORT_LIMIT_S
  while True:
    try:
      family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
      return socket.create_server(resolved[:2], family=family, backlog=1024)
    except OSError as error:
      if time.monotonic() > end or isinstance(error, socket.gaierror):
        raise UserError(
          f'process 0 cannot listen at {address}: {error.strerror}. Give a free port of its machine as '
          '--coordinator_address, and --coordinator_bind_address if the other processes reach it at another address.'
        ) from error
    time.sleep(_RETRY_S)


def _meet_others(listener: socket.socket, own: dict[str, Any], limit_s: float) -> None:
  """Runs on process 0: accepts the others until all have connected or there is a problem, and tells them."""
  end, num_others = time.monotonic() + limit_s, own['of'] - 1
  problem = own['problem'] and f'process 0: {own["problem"]}'
  hosts = {0: 'this machine'}  # by process, of the connected ones
  with contextlib.ExitStack() as stack:
    connected: list[socket.socket] = []
    received: queue.SimpleQueue[tuple[socket.socket, str, dict[str, Any]]] = queue.SimpleQueue()
    while len(hosts) <= num_others and (own['problem'] or not problem):
      if time.monotonic() > end:
        missing = next(index for index in range(own['of']) if index not in hosts)
        late = f'process {missing} of {own["of"]} did not connect within {limit_s:g} s'
        problem = problem or f'{late}: see its log, and start all with the same --coordinator_address.'
        break
      listener.settimeout(_RETRY_S if received.empty() else 0.001)
      with contextlib.suppress(TimeoutError):
        sock, (host, *_) = listener.accept()
        stack.callback(sock.close)
        # In its own thread, because another program may send nothing.
        threading.Thread(target=_receive, args=(sock, host, received), daemon=True).start()
      try:
        sock, host, hello = received.get_nowait()
        index, of, other_problem = int(hello['process']), int(hello['of']), hello['problem']
        _send(sock, {})
      except queue.Empty:
        continue
      except (OSError, ValueError, KeyError, TypeError) as error:
        logging.warning('%s connected, but is no process of a job (%s).', host, error)
        continue
      connected.append(sock)
      if of != own['of']:
        problem = problem or f'process {index} has --num_processes {of}, but process 0 has {own["of"]}.'
      elif index in hosts:
        twice = f'two processes have --process_id {index}, on {hosts[index]} and on {host}'
        problem = problem or f'{twice}: number them from 0 to {num_others}.'
      elif other_problem is not None:
        problem = problem or f'process {index}: {other_problem}'
      hosts[index] = host
    for sock in connected:
      with contextlib.suppress(OSError):
        _send(sock, {'problem': problem})
  if problem and not own['problem']:
    raise UserError(problem)


def _receive(sock: socket.socket, host: str, received: queue.SimpleQueue) -> None:
  """Puts the message of a process into `received`; logs anything else."""
  try:
    sock.settimeout(_LINE_LIMIT_S)
    with sock.makefile('rb') as lines:
      received.put((sock, host, _read(lines)))
  except (OSError, ValueError) as error:
    logging.warning('%s connected, but is no process of a job (%s).', host, error)


def _meet_primary(address: str, hello: dict[str, Any], limit_s: float) -> None:
  """Runs on every other process: connects until process 0 answers."""
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
        f'process 0 of this job does not wait for process {hello["process"]} at {address} ({reason}): correct '
        '--coordinator_address, or --process_id if another process has the same.'
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
  """Sends `hello` to process 0; returns the problem that it reports, if any.

  Raises:
    OSError: nothing listens there.
    ValueError: another program does.
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
  """Reads one message. Raises a ValueError for anything else, an OSError if nothing arrives."""
  line = lines.readline(10_000)
  with contextlib.suppress(ValueError):
    message = json.loads(line)
    if isinstance(message, dict) and message.get('job') == _PROTOCOL:
      return message
  raise ValueError(_describe(line))


def _describe(line: bytes) -> str:
  """Describes a program that does not answer as process 0 does."""
  if not line:
    return 'the connection was closed'
  if line[3:9] == b'\4\0\0\0\0\0':  # the first frame of HTTP/2, and so of JAX's service
    return 'a gRPC service answers, such as of a job whose processes have all connected'
  text = line[:60].decode(errors='replace').strip()
  return f'it sends {text!r}' if text.isprintable() and '\ufffd' not in text else 'it sends no text'
