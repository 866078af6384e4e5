"""Links over loopback: messages arrive whole and in order, other programs are refused, stopped processes noticed."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import os
import socket
import time

import pytest

from spmd_tasks.serving.links import LinkError, admit, join, listen

SECRET = bytes(range(32))


@contextlib.contextmanager
def linked(**settings):
  """The two ends of a link of processes 0 and 1."""
  with listen('127.0.0.1') as listener, ThreadPoolExecutor() as pool:
    joined = pool.submit(join, listener.getsockname(), SECRET, 1, **settings)
    (near,), far = admit(listener, SECRET, 1, **settings), joined.result(10)
  with contextlib.closing(near), contextlib.closing(far):
    yield near, far


def test_messages_of_any_length_arrive_whole_and_in_order_both_ways():
  messages = [b'a', bytes(range(256)), b'\n' * 70_000, os.urandom(3_000_000), b'end']
  with linked() as (near, far), ThreadPoolExecutor(1) as pool:
    assert (near.process_index, far.process_index) == (1, 0)
    for sender, receiver in ((near, far), (far, near)):
      sent = pool.submit(lambda sender=sender: [sender.send(message) for message in messages])
      assert [receiver.receive() for _ in messages] == messages
      sent.result(5)


def test_a_closed_link_ends_the_iteration_and_refuses_messages():
  with linked() as (near, far):
    far.send(b'last')
    far.close()
    assert list(near) == [b'last']
    with pytest.raises(OSError, match=r'.'):
      far.send(b'more')


def test_a_message_that_is_cut_off_is_an_error():
  with linked() as (near, far):
    far._sock.sendall((1000).to_bytes(4, 'big') + b'not a thousand bytes')
    far.close()
    with pytest.raises(LinkError, match='message 0 was cut off'):
      near.receive()


def test_other_programs_are_refused_and_delay_no_process(caplog):
  with listen('127.0.0.1') as listener, ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
    address = listener.getsockname()
    admitted = pool.submit(admit, listener, SECRET, 2)
    for greeting in (os.urandom(68), b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n' * 3, b'\xff' * 68):
      stranger = stack.enter_context(socket.create_connection(address, timeout=5))
      stranger.sendall(greeting)
    for number in range(100):
      stranger = stack.enter_context(socket.create_connection(address, timeout=5))
      stranger.sendall(bytes(number % 68))
    with pytest.raises(RuntimeError, match='process 1 cannot connect to process 0'):
      join(address, b'another secret', 1)
    started = time.monotonic()
    joined = [pool.submit(join, address, SECRET, index) for index in (2, 1)]
    assert [link.process_index for link in admitted.result(10)] == [1, 2]
    assert time.monotonic() - started < 10
    for link in (*admitted.result(), *(link.result() for link in joined)):
      link.close()
  assert 'another program' in caplog.text
  assert len(caplog.records) < 20  # not one per connection


def test_an_idle_process_is_kept_and_a_stopped_process_is_noticed():
  with linked(silence_limit_s=0.5) as (near, far), ThreadPoolExecutor(1) as pool:
    received = pool.submit(near.receive)
    time.sleep(1.2)
    far.send(b'after a while')
    assert received.result(5) == b'after a while'
    with far._send_lock, pytest.raises(LinkError, match=r'has sent nothing for 0\.5 s'):  # as if stopped
      near.receive()
