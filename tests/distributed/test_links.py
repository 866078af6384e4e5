"""Links against hostile peers on loopback: only what the other process sent is received, in its order, once."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import os
import socket
import time

import pytest

from spmd_tasks.distributed.links import LinkError, admit, join, listen_for_processes

SECRET = bytes(range(32))


def receive_exactly(sock, count):
  data = b''
  while len(data) < count:
    more = sock.recv(count - len(data))
    assert more, f'the connection ended after {data!r}'
    data += more
  return data


class Linked:
  """Two linked processes; with `tapped`, all bytes pass a third one, which may change them after the greetings.

  Attributes:
    near, far: the links of processes 0 and 3.
    to_near, to_far: the raw connections of the one in the middle.
  """

  def __init__(self, *, tapped: bool = False, silence_limit_s: float | None = None):
    with listen_for_processes('127.0.0.1') as listener, contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
      admitted = pool.submit(admit, listener, SECRET, 0, [3], silence_limit_s=silence_limit_s)
      address = listener.getsockname()
      if tapped:
        tap = stack.enter_context(listen_for_processes('127.0.0.1'))
        joined = pool.submit(join, *tap.getsockname(), SECRET, (0, 3))
        self.to_far, _ = tap.accept()
        self.to_near = socket.create_connection(address, timeout=5)
        self.to_far.settimeout(5)
        self.to_far.sendall(receive_exactly(self.to_near, 32))
        self.to_near.sendall(receive_exactly(self.to_far, 68))
        self.to_far.sendall(receive_exactly(self.to_near, 32))
      else:
        joined = pool.submit(join, *address, SECRET, (0, 3), silence_limit_s=silence_limit_s)
      (self.near,), self.far = admitted.result(10), joined.result(10)

  def close(self):
    for each in (self.near, self.far, *((self.to_near, self.to_far) if hasattr(self, 'to_near') else ())):
      each.close()


@pytest.fixture
def linked():
  with contextlib.closing(Linked()) as linked:
    yield linked


def test_messages_of_any_length_come_whole_and_in_order_both_ways(linked):
  messages = [b'a', bytes(range(256)), b'\n' * 70_000, os.urandom(3_000_000), b'end']
  assert (linked.near.process_index, linked.far.process_index) == (3, 0)
  for sender, receiver in ((linked.near, linked.far), (linked.far, linked.near)):
    with ThreadPoolExecutor(1) as pool:
      sent = pool.submit(lambda sender=sender: [sender.send(message) for message in messages])
      assert [receiver.receive() for _ in messages] == messages
      sent.result(5)


def test_an_end_is_an_end(linked):
  linked.far.send(b'last')
  linked.far.close()
  assert list(linked.near) == [b'last']
  with pytest.raises(OSError, match=r'.'):
    linked.far.send(b'more')


# --- one in the middle ---


def flipped(frame, position):
  return frame[:position] + bytes([frame[position] ^ 1]) + frame[position + 1 :]


NOT_AUTHENTIC = 'forged, changed, repeated or reordered'
# From the frames of b'zero', b'one', b'two', a frame of the other direction, and one of another connection: what the
# one in the middle delivers, how many messages are received of it, and why the link ends.
ATTACKS = {
  'a flipped bit': (lambda f, back, old: f[0] + flipped(f[1], 37), 1, NOT_AUTHENTIC),
  'a smaller length': (lambda f, back, old: flipped(f[1], 3) + bytes(8), 0, NOT_AUTHENTIC),
  'a replay': (lambda f, back, old: f[0] + f[0], 1, NOT_AUTHENTIC),
  'a reflection': (lambda f, back, old: back, 0, NOT_AUTHENTIC),
  'one of another connection': (lambda f, back, old: old, 0, NOT_AUTHENTIC),
  'a huge length': (lambda f, back, old: f[0] + b'\x7f' * 4 + bytes(100), 1, 'broke off at message 1'),
}


@pytest.fixture(scope='module')
def frame_of_another_connection():
  with contextlib.closing(Linked(tapped=True)) as linked:
    linked.far.send(b'zero')
    return receive_exactly(linked.to_far, 40)


@pytest.mark.parametrize('attack', ATTACKS)
def test_what_one_in_the_middle_changes_ends_the_link(attack, frame_of_another_connection, caplog):
  deliver, num_received, reason = ATTACKS[attack]
  with contextlib.closing(Linked(tapped=True)) as linked:
    frames = []
    for message in (b'zero', b'one', b'two'):
      linked.far.send(message)
      frames.append(receive_exactly(linked.to_far, 4 + 32 + len(message)))
    linked.near.send(b'zero')
    back = receive_exactly(linked.to_near, 40)
    linked.to_near.sendall(deliver(frames, back, frame_of_another_connection))
    linked.to_near.shutdown(socket.SHUT_WR)
    received = []
    with pytest.raises(LinkError, match=reason):
      received.extend(linked.near)
    assert received == [b'zero', b'one', b'two'][:num_received]
    with contextlib.suppress(ConnectionResetError):
      assert linked.to_near.recv(1) == b''  # closed, not left to be tried again
    with pytest.raises(OSError, match=r'.'):
      linked.near.send(b'more')
  (line,) = caplog.messages
  assert line.startswith('closed the link to process 3: it ')
  assert reason in line


# --- strangers ---


def test_strangers_are_not_admitted_and_keep_nobody_out(caplog):
  with listen_for_processes('127.0.0.1') as listener, ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
    address = listener.getsockname()
    admitted = pool.submit(admit, listener, SECRET, 0, [1, 2])
    for greeting in (
      os.urandom(68),
      b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n' * 3,
      bytes(3) + b'\x01' + bytes(64),
      b'\xff' * 68,
    ):
      stranger = stack.enter_context(socket.create_connection(address, timeout=5))
      receive_exactly(stranger, 32)
      stranger.sendall(greeting)
      with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b''
    for number in range(400):
      stranger = stack.enter_context(socket.create_connection(address, timeout=5))
      stranger.sendall(bytes(number % 68))
    with pytest.raises(RuntimeError, match='did not admit process 7'):
      join(*address, SECRET, (0, 7))
    started = time.monotonic()
    links = [pool.submit(join, *address, SECRET, (0, index)) for index in (2, 1)]
    assert [each.process_index for each in admitted.result(5)] == [1, 2]
    assert time.monotonic() - started < 5
    for each in (*admitted.result(), *(link.result() for link in links)):
      each.close()
  assert 'does not know the secret of this job' in caplog.text
  assert len(caplog.records) < 20  # not a line for each


def test_a_greeting_that_was_overheard_is_of_no_use_on_another_connection():
  with listen_for_processes('127.0.0.1') as tap, ThreadPoolExecutor() as pool:
    joined = pool.submit(join, *tap.getsockname(), SECRET, (0, 1))
    overheard, _ = tap.accept()
    overheard.sendall(bytes(32))
    greeting = receive_exactly(overheard, 68)
    overheard.sendall(bytes(32))  # not the tag of one who knows the secret
    with pytest.raises(RuntimeError, match='is not process 0 of this job: it does not know the secret'):
      joined.result(5)
    overheard.close()
    with listen_for_processes('127.0.0.1') as listener:
      admitted = pool.submit(admit, listener, SECRET, 0, [1])
      with socket.create_connection(listener.getsockname(), timeout=5) as stranger:
        receive_exactly(stranger, 32)
        stranger.sendall(greeting)
        with contextlib.suppress(ConnectionResetError):
          assert stranger.recv(1) == b''
      own = join(*listener.getsockname(), SECRET, (0, 1))
      for link in (own, *admitted.result(5)):
        link.close()


# --- silence ---


def test_an_idle_process_is_alive_and_a_stopped_one_is_noticed():
  with contextlib.closing(Linked(silence_limit_s=0.5)) as linked, ThreadPoolExecutor(1) as pool:
    received = pool.submit(linked.near.receive)
    time.sleep(1.2)
    linked.far.send(b'after a while')
    assert received.result(5) == b'after a while'
    with linked.far._send_lock, pytest.raises(LinkError, match=r'has sent nothing for 0\.5 s'):  # as if stopped
      linked.near.receive()
