"""Processes, here threads, that meet before jax.distributed starts: each mistake is a sentence on every process."""

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


def answers(address, calls, limit_s=1.0) -> list[str]:
  """What each process, given by (its id, the number of processes, its problem), is told; '' where all is well."""

  def call(process):
    try:
      index, number, problem = process
      found = {'coordinator_address': address, 'initialization_timeout_s': limit_s}
      meet(DistributedSettings(process_id=index, num_processes=number, **found), problem)
    except UserError as error:
      return str(error)
    return ''

  with ThreadPoolExecutor(len(calls)) as pool:
    return list(pool.map(call, calls))


@pytest.mark.parametrize(
  'calls, told',
  [
    ([(0, 3, None), (1, 3, None), (1, 3, None)], ['two processes have --process_id 1, on 127.0.0.1 and'] * 3),
    ([(0, 2, None), (1, 3, None)], ['process 1 has --num_processes 3, and process 0 has 2'] * 2),
    ([(0, 2, None), (1, 2, 'no such path')], ['process 1: no such path', '']),
    ([(0, 3, None), (1, 3, None)], ['process 2 of 3 did not come within 1 s'] * 2),
    ([(1, 2, None)], ['process 0 does not answer at 127.0.0.1']),
    ([(0, 2, None), (0, 2, None)], ['two processes have --process_id 0|cannot listen'] * 2),
  ],
)
def test_all_come_or_all_are_told_why_not(address, calls, told):
  said = answers(address, calls)
  for each, expected in zip(said, told, strict=True):
    assert (not each) if not expected else any(part in each for part in expected.split('|')), said


# The first bytes of JAX's coordination service, once the processes of a job have come.
GRPC = b'\0\0\x18\4\0\0\0\0\0\0\4\0?\xff\xff\0\5\0?\xff\xff\0\6\0\0@\0\xfe\3\0\0\0\1'


@pytest.mark.parametrize(
  'reply, described',
  [
    (b'HTTP/1.1 400 Bad Request\r\n\r\n', "(it says 'HTTP/1.1 400 Bad Request'): correct"),
    (GRPC, '(it is a gRPC service, such as that of a job whose processes have all come already): correct'),
    (b'\x1b[2J\n', '(it sends what is no text): correct'),
    (b'\xff\xfe\n', '(it sends what is no text): correct'),
    (None, ': correct'),
  ],
)
def test_a_stranger_at_the_address_is_no_process_0(reply, described):
  with socket.create_server(('127.0.0.1', 0)) as stranger:

    def answer():
      with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        while True:
          sock, _ = stranger.accept()
          stack.callback(sock.close)
          if reply is not None:  # else it stays silent
            sock.sendall(reply)
            sock.shutdown(socket.SHUT_WR)  # closing resets the connection if the question has not been read

    threading.Thread(target=answer, daemon=True).start()
    address = f'127.0.0.1:{stranger.getsockname()[1]}'
    refused, [asked] = answers(address, [(0, 2, None)]), answers(address, [(1, 2, None)])
    assert 'process 0 cannot listen at 127.0.0.1' in refused[0]
    assert 'is not process 0 of this job waiting for process 1' in asked
    assert described in asked
    assert 'or --process_id if another process has this one too' in asked
    stranger.shutdown(socket.SHUT_RDWR)


def test_a_stranger_that_calls_is_left_alone(address):
  def call():
    host, _, port = address.rpartition(':')
    for said in (b'GET / HTTP/1.1\r\n\r\n', b'{"job": 1}\n', b'\0' * 100):
      with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as sock:
        sock.sendall(said)

  threading.Timer(0.1, call).start()
  with ThreadPoolExecutor(2) as pool:
    first = pool.submit(answers, address, [(0, 2, None)], 5.0)
    threading.Event().wait(0.3)
    assert answers(address, [(1, 2, None)], 5.0) + first.result() == ['', '']
