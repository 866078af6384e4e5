#!/usr/bin/env python
"""Reads streams of completions from plain sockets, at low cost, and records when each event arrives.

bench_serve.py runs this in its own process. A client library would use more CPU than the server, and so slow it down on
a machine with two cores.

The input is one JSON object. `address`: of the server. `bodies`: requests, all sent at once. `extra`: null, or a body
that is sent repeatedly meanwhile, until the queue is full and while it is full. The output is another object. `times`:
when each stream's events arrived, in seconds since the start. `refused`: the seconds until each 429.
`cpu_seconds`: CPU time of this process.
"""

import json
import selectors
import socket
import sys
import threading
import time
from typing import Any

PAUSE_S = 0.01  # between two extra requests
EVENT, DONE = b'data: {', b'[DONE]'  # DONE must be the shorter one

Address = tuple[str, int]


def post(address: Address, body: dict[str, Any]) -> socket.socket:
  """Sends a request for a stream on a connection of its own, and returns the connection."""
  data = json.dumps(body | {'stream': True}).encode()
  sock = socket.create_connection(address)
  head = 'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
  sock.sendall(f'{head}Content-Length: {len(data)}\r\n\r\n'.encode() + data)
  return sock


def read_streams(socks: list[socket.socket], began: float) -> list[list[float]]:
  """Returns when each stream's events arrived, in seconds after `began`; events of one read share their time."""
  times: list[list[float]] = [[] for _ in socks]
  ends = [b''] * len(socks)  # the last bytes read, in which an event may begin
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
  """Returns how many seconds each answer of status 429 took."""
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
  settings = json.load(sys.stdin)
  host, port = settings['address']
  is_over, refused = threading.Event(), []
  cpu, began = time.process_time(), time.perf_counter()
  socks = [post((host, port), body) for body in settings['bodies']]
  if settings['extra']:
    thread = threading.Thread(target=lambda: refused.extend(time_refusals((host, port), settings['extra'], is_over)))
    thread.start()
  times = read_streams(socks, began)
  is_over.set()
  if settings['extra']:
    thread.join()
  print(json.dumps({'times': times, 'refused': refused, 'cpu_seconds': time.process_time() - cpu}))


if __name__ == '__main__':
  main()
