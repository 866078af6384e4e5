"""Servers that are signalled, killed, or find their checkpoints damaged; servers of two processes that lose one.

A server that is started again gives the same answers.
"""

import contextlib
import random
import shutil
import signal
import time

import httpx

from spmd_tasks import exit_codes
from tests.fault_campaign import damage, judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.clients import BODY, COMPLETIONS, HEADERS, KEY, LONG, SIZES, Server, url_of
from tests.fault_campaign.judge import check
from tests.fault_campaign.processes import Pair, attacked, check_ends, listening_ports
from tests.fault_campaign.scene import Scene


def stream(url: str) -> contextlib.AbstractContextManager[httpx.Response]:
  """A long answer of the server, while it comes."""
  return httpx.stream('POST', url + COMPLETIONS, json=LONG, headers=HEADERS, timeout=60)


@kind('serving/SIGTERM while it streams', share=2)
def sigterm_while_streaming(scene: Scene) -> str:
  """Running requests end or are told so, the exit code is 0."""
  server = Server(scene)
  delay, again = scene.rng.uniform(0, 0.5), scene.rng.random() < 0.5
  scene.where = f'after {delay:.2f} s' + (', twice' if again else '')
  with stream(server.url) as response:
    lines = response.iter_lines()
    first = next(lines)
    time.sleep(delay)
    server.process.send(signal.SIGTERM)
    if again:
      time.sleep(0.05)
      server.process.send(signal.SIGTERM)
    rest = [line for line in [first, *lines] if line]
  check(rest[-1] == 'data: [DONE]', f'the stream ended with {rest[-1][:80]!r}')
  ended = scene.finish(server.process)
  check(ended.returncode == exit_codes.OK, f'exit code {ended.returncode}: {judge.last_line(ended.stderr)}')
  judge.check_no_traceback(ended.stderr)
  return 'drained, exit code 0'


@kind('serving/a signal while it loads', share=2)
def signal_while_loading(scene: Scene) -> str:
  scene.job = 'Text'
  scene.begun(20, 20)
  signum = scene.rng.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT))
  delay = scene.rng.uniform(0, 3)
  scene.where = f'{signum.name} after {delay:.2f} s'
  process = scene.start(*scene.command('serve'), *SIZES, '--port', 0, '--drain_s', 1)
  scene.send_after(process, signum, delay)
  ended = scene.finish(process)
  judge.check_no_traceback(ended.stderr)
  check(ended.returncode in judge.CODES_AFTER[signum], f'exit code {ended.returncode} after {signum.name}')
  return f'exit code {ended.returncode}'


@kind('serving/a damaged checkpoint', share=2)
def damaged_checkpoint(scene: Scene) -> str:
  """At the start it is skipped or refused; at a publish the server keeps what it serves."""
  server = Server(scene)
  path = scene.rng.choice(damage.files_of(scene, 20))
  name = scene.rng.choice(('one bit', 'emptied', 'deleted', 'garbage', 'truncated'))
  damage.DAMAGES[name](path, scene.rng)
  scene.where = f'{name}: {path.relative_to(scene.checkpoints)}'
  before = sorted(each.name for each in scene.checkpoints.iterdir())
  response = server.post({'step': 20}, '/admin/publish')
  check(response.status_code == 409, f'publish of the damaged step is answered {response.status_code}')
  check(server.complete() == server.answer, 'after a refused publish the answers are others')
  response = server.post({'step': 15}, '/admin/publish')
  check(
    response.status_code == 200, f'publish of a whole step is answered {response.status_code}: {response.text[:80]}'
  )
  check(sorted(each.name for each in scene.checkpoints.iterdir()) == before, 'the server has renamed something')
  judge.check_no_traceback(server.process.stderr)
  server.stop()
  return 'refused with 409; a whole step was published'


@kind('serving/killed and started again', share=1)
def killed(scene: Scene) -> str:
  server = Server(scene)
  with contextlib.suppress(httpx.TransportError), stream(server.url) as response:
    for number, _ in enumerate(response.iter_lines()):
      if number == 3:
        server.process.send(signal.SIGKILL)
  check(server.scene.finish(server.process).returncode == -signal.SIGKILL, 'it was not killed')
  answer = server.answer
  shutil.rmtree(scene.job_log_dir)
  again = Server(scene, '--port', server.port)
  check(again.answer == answer, 'the same request has another answer after the restart')
  again.stop()
  return 'the same answer after the restart'


# --- a server of two processes ---


class PairServer:
  """A server of two processes of the job `PairText`."""

  def __init__(self, scene: Scene):
    scene.job = 'PairText'
    scene.begun(20, 20)
    key = scene.path / 'key'
    key.write_text(KEY)
    self.pair = Pair(scene, *SIZES, '--port', 0, '--drain_s', 5, '--api_key_file', key, mode='serve')
    self.scene = scene

  @property
  def url(self) -> str:
    """Where it serves; waits until it does."""
    return url_of(self.scene, self.pair.ranks[0])

  def complete(self) -> str:
    response = httpx.post(self.url + COMPLETIONS, json=BODY, headers=HEADERS, timeout=60)
    check(response.status_code == 200, f'a good request is answered {response.status_code}')
    return response.json()['choices'][0]['text']


@kind('processes/a server loses one', share=3)
def server_loses_one(scene: Scene) -> str:
  """Streams end with an error, both processes end in seconds; a new server gives the same answer."""
  server = PairServer(scene)
  answer = server.complete()
  rank = scene.rng.choice((0, 1, 1))
  signum = scene.rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV))
  delay = scene.rng.uniform(0, 0.3)
  scene.where = f'{signum.name} to process {rank}'
  rest: list[str] = []
  with contextlib.suppress(httpx.TransportError), stream(server.url) as response:
    lines = response.iter_lines()
    rest = [next(lines)]
    time.sleep(delay)
    server.pair.ranks[rank].send(signum)
    rest += [line for line in lines if line]
  ended = server.pair.finish()
  codes = [each.returncode for each in ended]
  if signum == signal.SIGTERM:
    check(codes == [exit_codes.OK] * 2, f'exit codes {codes} after SIGTERM')
    check(rest[-1] == 'data: [DONE]', f'the stream ended with {rest[-1][:80]!r}')
  else:
    check_ends(ended, signalled={rank: signum})
    if rank == 1 and rest:
      told = 'error' in ''.join(rest[-3:]) or any('finish_reason": "' in line for line in rest)
      check(told, f'the stream ended with {rest[-1][:80]!r}')
  shutil.rmtree(scene.job_log_dir)
  again = PairServer(scene)
  check(again.complete() == answer, 'the same request has another answer after the restart')
  for each in again.pair.ranks:
    each.send(signal.SIGTERM)
  codes_again = [each.returncode for each in again.pair.finish()]
  check(codes_again == [exit_codes.OK] * 2, f'after SIGTERM the servers ended with {codes_again}')
  return f'exit codes {codes}; the same answer after the restart'


@kind("processes/strangers at a server's link", share=2)
def strangers_at_link(scene: Scene) -> str:
  """From the start on, garbage on every port but HTTP's: the server comes up, answers and ends well, or ends loudly."""
  server = PairServer(scene)
  pids = [rank.pid for rank in server.pair.ranks]
  with attacked(lambda: set().union(*map(listening_ports, pids)), random.Random(scene.rng.random())) as ports:
    started = scene.wait_until(server.pair.ranks[0], lambda: 'Serving ' in server.pair.ranks[0].stdout)
    if started:
      first = server.complete()
  scene.where = f'{len(ports)} ports'
  if not started:
    codes = check_ends(server.pair.finish(), signalled={})
    return f'exit codes {codes}, said so: {judge.sentence_of(server.pair.ranks[0])}'
  check(server.complete() == first, 'the same request has another answer after the attack')
  for rank in server.pair.ranks:
    rank.send(signal.SIGTERM)
  codes = [each.returncode for each in server.pair.finish()]
  check(codes == [exit_codes.OK] * 2, f'after SIGTERM the servers ended with {codes}')
  return 'the same answer; ended well'
