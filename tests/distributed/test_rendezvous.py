"""Processes (here threads) that meet before jax.distributed starts: every process reports every mistake."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import socket
import threading

import pytest

from spmd_tasks.distributed import DistributedSettings, rendezvous
from spmd_tasks.distributed.rendezvous import meet
from spmd_tasks.errors import UserError


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
  for name in ('_LINE_LIMIT_S', '_PORT_LIMIT_S', '_STRANGER_LIMIT_S', '_PROBLEM_LIMIT_S'):
    monkeypatch.setattr(rendezvous, name, 0.5)
  monkeypatch.setattr(rendezvous, '_RETRY_S', 0.02)


@pytest.fixture
def address():
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  return f'127.0.0.1:{port}'


def errors_of(address, processes, limit_s=1.0) -> list[str]:
  """The UserError of each process (its id, the number of processes, its problem); '' if there is none."""

  def error_of(process):
    try:
      index, number, problem = process
      settings = {'coordinator_address': address, 'initialization_timeout_s': limit_s}
      meet(DistributedSettings(process_id=index, num_processes=number, **settings), problem)
    except UserError as error:
      return str(error)
    return ''

  with ThreadPoolExecutor(len(processes)) as pool:
    return list(pool.map(error_of, processes))


@pytest.mark.parametrize(
  'processes, expected',
  [
    ([(0, 3, None), (1, 3, None), (1, 3, None)], ['two processes have --process_id 1, on 127.0.0.1 and'] * 3),
    ([(0, 2, None), (1, 3, None)], ['process 1 has --num_processes 3, but process 0 has 2'] * 2),
    ([(0, 2, None), (1, 2, 'no such path')], ['process 1: no such path', '']),
    ([(0, 3, None), (1, 3, None)], ['process 2 of 3 did not connect within 1 s'] * 2),
    ([(1, 2, None)], ['process 0 does not answer at 127.0.0.1']),
    ([(0, 2, None), (0, 2, None)], ['two processes have --process_id 0|cannot listen'] * 2),
  ],
)
def test_all_processes_connect_or_all_report_the_problem(address, processes, expected):
  errors = errors_of(address, processes)
  for error, parts in zip(errors, expected, strict=True):
    assert any(part in error for part in parts.split('|')) if parts else not error, errors


# The first bytes of JAX's coordination service, once the processes of a job have connected.
GRPC = b'\0\0\x18\4\0\0\0\0\0\0\4\0?\xff\xff\0\5\0?\xff\xff\0\6\0\0@\0\xfe\3\0\0\0\1'


@pytest.mark.parametrize(
  'reply, described',
  [
    (b'HTTP/1.1 400 Bad Request\r\n\r\n', "sends 'HTTP/1.1 400 Bad Request'"),
    (GRPC, 'a gRPC service'),
    (b'\x1b[2J\n', 'sends no text'),
    (b'\xff\xfe\n', 'sends no text'),
    (None, ''),
  ],
)
def test_another_program_at_the_address_is_described(reply, described):
  with socket.create_server(('127.0.0.1', 0)) as stranger:

    def answer():
      with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        while True:
          sock, _ = stranger.accept()
          stack.callback(sock.close)
          if reply is not None:
            sock.sendall(reply)
            sock.shutdown(socket.SHUT_WR)  # closing would reset the connection before the message is read

    threading.Thread(target=answer, daemon=True).start()
    address = f'127.0.0.1:{stranger.getsockname()[1]}'
    [error_of_0], [error_of_1] = errors_of(address, [(0, 2, None)]), errors_of(address, [(1, 2, None)])
    assert 'process 0 cannot listen at 127.0.0.1' in error_of_0
    assert 'does not wait for process 1' in error_of_1
    assert described in error_of_1
    assert 'correct --coordinator_address, or --process_id' in error_of_1
    stranger.shutdown(socket.SHUT_RDWR)


def test_messages_of_other_programs_are_ignored(address):
  def send_garbage():
    host, _, port = address.rpartition(':')
    for message in (b'GET / HTTP/1.1\r\n\r\n', b'{"job": 1}\n', b'\0' * 100):
      with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as sock:
        sock.sendall(message)

  threading.Timer(0.1, send_garbage).start()
  with ThreadPoolExecutor(2) as pool:
    first = pool.submit(errors_of, address, [(0, 2, None)], 5.0)
    threading.Event().wait(0.3)
    assert errors_of(address, [(1, 2, None)], 5.0) + first.result() == ['', '']
