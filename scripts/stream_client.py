#!/usr/bin/env python
"""A client that costs little: it reads streams of completions from bare sockets and notes when each event came.

bench_serve.py runs it as a process of its own. A client library takes more of a core than the server does, and on a
machine with two cores that would be measured as the server's. Its input is one JSON object: `address`, `bodies` of the
requests, which are all sent at once, and `extra`, a body that is sent again and again meanwhile, until the queue is
full and then for as long as it is; null: none. Its output is another: `times`, seconds after the start of each stream's
events; `refused`, seconds that each 429 took; `cpu_seconds`, its own.
"""

import json
import selectors
import socket
import sys
import threading
import time
from typing import Any

PAUSE_S = 0.01  # between two extra requests
EVENT, DONE = b'data: {', b'[DONE]'  # the second is the shorter one

Address = tuple[str, int]


def post(address: Address, body: dict[str, Any]) -> socket.socket:
  """Sends a request for a stream; the connection is for its answer only."""
  data = json.dumps(body | {'stream': True}).encode()
  sock = socket.create_connection(address)
  head = 'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
  sock.sendall(f'{head}Content-Length: {len(data)}\r\n\r\n'.encode() + data)
  return sock


def read_streams(socks: list[socket.socket], began: float) -> list[list[float]]:
  """Seconds after `began` of each stream's events, as far as they are told apart by when they came."""
  times: list[list[float]] = [[] for _ in socks]
  ends = [b''] * len(socks)  # of what was read, in which an event may have begun
  with selectors.DefaultSelector() as selector:
    for number, sock in enumerate(socks):
      selector.register(sock, selectors.EVENT_READ, number)
    while selector.get_map():
      for key, _ in selector.select():
        number, data = key.data, socks[key.data].recv(1 << 16)
        now = time.perf_counter() - began
        assert data, 'a stream was cut'
        assert ends[number] or data.startswith(b'HTTP/1.1 200'), data
        data = ends[number] + data
        times[number] += [now] * data.count(EVENT)
        if DONE in data:
          selector.unregister(socks[number])
        ends[number] = data[1 - len(EVENT) :]
  return times


def time_refusals(address: Address, body: dict[str, Any], is_over: threading.Event) -> list[float]:
  """Seconds until each answer of status 429 was there."""
  seconds, waiting = [], []
  while not is_over.is_set():
    began = time.perf_counter()
    waiting.append(post(address, body))
    is_refused = waiting[-1].recv(1 << 16).startswith(b'HTTP/1.1 429')
    if is_refused:
      seconds.append(time.perf_counter() - began)
      waiting.pop().close()
    elif seconds:
      break  # the queue has moved on
    is_over.wait(PAUSE_S)
  for sock in waiting:
    sock.close()
  return seconds


def main() -> None:
  given = json.load(sys.stdin)
  host, port = given['address']
  is_over, refused = threading.Event(), []
  cpu, began = time.process_time(), time.perf_counter()
  socks = [post((host, port), body) for body in given['bodies']]
  if given['extra']:
    thread = threading.Thread(target=lambda: refused.extend(time_refusals((host, port), given['extra'], is_over)))
    thread.start()
  times = read_streams(socks, began)
  is_over.set()
  if given['extra']:
    thread.join()
  print(json.dumps({'times': times, 'refused': refused, 'cpu_seconds': time.process_time() - cpu}))


if __name__ == '__main__':
  main()
