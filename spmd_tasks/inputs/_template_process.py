"""Renders chat templates in a process of their own, whose time and memory are limited.

    texts = render_in_process(source, [(variables, None)])     # [(text, spans)]; a UserError if there is none

The process runs _template_sandbox.py. It starts with the first template and renders the next ones too; one that has
reached a limit is replaced. Threads that render at the same time have a process each.
"""

import atexit
from collections.abc import Mapping, Sequence
import contextlib
import datetime
import importlib.util
import json
import os
from pathlib import Path
import pickle
import signal
import subprocess
import sys
import threading
from typing import Any

from spmd_tasks.errors import UserError

_LIMIT_S = 5  # of CPU time, for one text
_MEMORY_MIB = 512
_START_LIMIT_S = 60.0
_WALL_LIMIT_S = 30.0  # for one text, also where the process gets no CPU time
_PROGRAM = Path(__file__).with_name('_template_sandbox.py')
_VARIABLES = ('TZ', 'LD_LIBRARY_PATH', 'DYLD_LIBRARY_PATH')  # no others, which may be secrets
_HEADER_BYTES = 8  # the size of the request that follows

Spans = list[tuple[int, int]]
Job = tuple[Mapping[str, Any], datetime.datetime | None]


def render_in_process(source: str, jobs: Sequence[Job] = ()) -> list[tuple[str, Spans | None]]:
  """Renders a template once for each job, as _template_sandbox.answer does; without jobs it is compiled only.

  Raises a UserError: a text cannot be had, or no process can be started.
  """
  try:
    request = pickle.dumps((source, [(dict(variables), now) for variables, now in jobs]))
  except Exception as error:  # of objects that cannot be sent, or that are nested too deeply
    raise _refusal('failed', None, f'{error}') from error
  idle = _idle.setdefault(os.getpid(), [])  # a forked process does not share those of its parent
  try:
    while not (process := idle.pop()).is_alive:
      process.end()
  except IndexError:  # not asked before: other threads take from the list too
    process = _Process()
  try:
    reply = process.ask(request, _WALL_LIMIT_S * max(1, len(jobs)))
  except BaseException:
    process.end()
    raise
  if isinstance(reply, list):
    idle.append(process)
    return [(text, None if spans is None else [(start, end) for start, end in spans]) for text, spans in reply]
  if reply['kind'] == 'limit':
    process.end()
  else:
    idle.append(process)
  raise _refusal(**reply)


def _refusal(kind: str, line: int | None, sentence: str) -> UserError:
  """The error of a template that cannot be rendered; the arguments are what _template_sandbox.answer says."""
  where, said = '' if line is None else f' in line {line}', sentence.rstrip('.')
  return UserError(
    {
      'syntax': f'the chat template is not valid Jinja{where}: {said}.',
      'refused': f'the chat template refuses the messages: {sentence}',
      'failed': f'the chat template fails{where} for these messages: {said}.',
      'limit': f'the chat template is stopped{where}: {said}: use a simpler template, or shorter messages.',
    }[kind]
  )


class _Process:
  """A process that answers one request after another."""

  def __init__(self) -> None:
    found = [importlib.util.find_spec(name) for name in ('jinja2', 'markupsafe')]
    folders = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin)
    command = [sys.executable, '-I', '-S', str(_PROGRAM), f'{_LIMIT_S}', f'{_MEMORY_MIB}', *folders]
    environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    try:
      self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment)
    except OSError as error:
      raise UserError(f'the process that renders chat templates cannot be started: {error}.') from error
    if self.ask(b'', _START_LIMIT_S) != []:
      self.end()
      raise UserError(f'the process that renders chat templates does not start: {" ".join(command)}')

  @property
  def is_alive(self) -> bool:
    return self._process.poll() is None

  def ask(self, request: bytes, limit_s: float) -> Any:
    """The answer to a request; one of the kind 'limit' if the process takes too long, or has ended."""
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    late = threading.Event()

    def end_late() -> None:
      late.set()
      self._process.kill()

    timer = threading.Timer(limit_s, end_late)
    timer.daemon = True
    timer.start()
    try:
      if request:
        self._process.stdin.write(len(request).to_bytes(_HEADER_BYTES) + request)
        self._process.stdin.flush()
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = b''
    finally:
      timer.cancel()
    if line.endswith(b'\n'):
      return json.loads(line.decode('utf-8', 'surrogatepass'))
    code = self._process.wait()
    sentence = f'its process ended by {signal.Signals(-code).name if code < 0 else f"exit code {code}"}'
    if late.is_set():
      sentence = f'it takes more than {limit_s:g} s'
    elif -code == signal.SIGXCPU:
      sentence = f'it takes more than {_LIMIT_S} s'
    return {'kind': 'limit', 'line': None, 'sentence': sentence}

  def end(self) -> None:
    self._process.kill()
    with contextlib.suppress(OSError):  # what could not be written to it
      self._process.communicate()


_idle: dict[int, list[_Process]] = {}  # by the process that started them


@atexit.register
def _end_all() -> None:
  for process in _idle.pop(os.getpid(), []):
    process.end()
