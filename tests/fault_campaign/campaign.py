"""Runs a campaign: injects faults, judges the outcomes, and prints one JSON line per fault and a summary.

    scripts/fault_campaign --faults 500 --seed 1 --jobs 2 --out faults.jsonl
    scripts/fault_campaign --seed 1 --only 17 --keep /tmp/fault_17        # one of them again, its directory kept

A line has `number`, `seed`, `kind`, `job`, `where` (what was drawn), `codes` (exit codes), `verdict`, `seconds`, `why`.
Verdicts: GOOD, the promise was held; BAD, it was not; HANG, a deadline passed; SKIPPED, this machine cannot make the
fault; ERROR, the campaign itself failed. The exit code is 0 if there is no BAD, HANG or ERROR, otherwise 1.
"""

import argparse
import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
import contextlib
import json
import os
from pathlib import Path
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

from spmd_tasks import exit_codes
from tests import forked, xla_settings
from tests.fault_campaign import experiments, judge
from tests.fault_campaign.catalogue import kind_of, kinds, rng_of
from tests.fault_campaign.judge import BrokenPromiseError, Reference
from tests.fault_campaign.processes import Pair
from tests.fault_campaign.scene import DEADLINE_S, HangError, Scene, SkippedError

VERDICTS = ('GOOD', 'BAD', 'HANG', 'SKIPPED', 'ERROR')


class Campaign:
  """Runs faults, and creates what they share on first use: fork servers, undisturbed jobs, a server."""

  def __init__(self, path: Path, seed: int, *, only_plain: bool = False):
    """`only_plain` uses the cheapest job (one device, synthetic tokens) for faults that do not need another one."""
    self._only_plain = only_plain
    self._path = path
    self._seed = seed
    self._closers = contextlib.ExitStack()
    self._references: dict[str, Reference] = {}
    self._locks: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)
    self._server: Any = None
    self._server_scene: Scene | None = None
    self._num_servers = 0
    if not forked.is_running():
      self._closers.enter_context(forked.running_server(self._directory('server')))

  def __enter__(self) -> 'Campaign':
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self._end_server()
    self._closers.close()

  def _directory(self, name: str) -> Path:
    (self._path / name).mkdir(parents=True)
    return self._path / name

  def reference(self, job: str) -> Reference:
    """Returns the undisturbed run of a job, which runs on first use."""
    with self._locks[job]:
      if job not in self._references:
        self._references[job] = self._run_undisturbed(job)
      return self._references[job]

  @contextlib.contextmanager
  def server(self, make: Callable[[Scene], Any]) -> Iterator[Any]:
    """Yields the server that all faults of clients share; starts a new one after a fault that broke it."""
    with self._locks['server']:
      try:
        if self._server is None:
          self._num_servers += 1
          self._server_scene = Scene(self._path / 'shared' / f'server_{self._num_servers}', random.Random(0), self)
          self._server = make(self._server_scene)
        yield self._server
      except BaseException:
        self._end_server()
        raise

  def _end_server(self) -> None:
    if self._server_scene is not None:
      self._server_scene.close()
    self._server = self._server_scene = None

  def _run_undisturbed(self, job: str) -> Reference:
    path = self._path / 'shared' / job
    shutil.rmtree(path, ignore_errors=True)
    scene = Scene(path, random.Random(0), self)
    scene.job = job
    if job in experiments.PAIRS:
      return self._run_undisturbed_pair(scene)
    recorded = scene.path / 'operations.jsonl'
    flags = ['--set', 'checkpoint_max_to_keep=100']
    process = scene.start(*scene.command(), *flags, name='undisturbed', recorded=str(recorded))
    ended = process.finish(3 * DEADLINE_S)
    assert ended.returncode == exit_codes.OK, ended.stderr
    # Programs come from the cache of compiled ones from now on.
    compiling = json.loads((scene.job_log_dir / 'startup.json').read_text()).get('compile', 0.0)
    seconds = time.time() - process.entered.stat().st_mtime - compiling
    operations = [tuple(json.loads(line)) for line in recorded.read_text().splitlines()]
    scene.close()
    return judge.read_reference(scene.job_log_dir, operations, seconds)

  def _run_undisturbed_pair(self, scene: Scene) -> Reference:
    began = time.monotonic()
    ended = Pair(scene, '--set', 'checkpoint_max_to_keep=100').finish(3 * DEADLINE_S)
    assert not any(result.returncode for result in ended), [result.stderr for result in ended]
    scene.close()
    return judge.read_reference(scene.job_log_dir, [], time.monotonic() - began)

  def run_fault(self, number: int, keep: Path | None = None) -> dict[str, Any]:
    """Injects one fault and returns its line."""
    drawn = kind_of(self._seed, number)
    path = keep or self._path / f'fault_{number}'
    scene = Scene(path, rng_of(self._seed, number), self, only_plain=self._only_plain)
    began = time.monotonic()
    try:
      verdict, why = 'GOOD', drawn.inject(scene)
    except BrokenPromiseError as error:
      verdict, why = 'BAD', str(error)
    except HangError as error:
      verdict, why = 'HANG', str(error)
    except SkippedError as error:
      verdict, why = 'SKIPPED', str(error)
    except Exception as error:
      place = traceback.extract_tb(error.__traceback__)[-1]
      verdict = 'ERROR'
      why = f'{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})'[:500]
    finally:
      scene.close()
    if keep is None:
      shutil.rmtree(path, ignore_errors=True)
    return {
      'number': number,
      'seed': self._seed,
      'kind': drawn.name,
      'job': scene.job,
      'where': scene.where,
      'codes': scene.codes,
      'verdict': verdict,
      'seconds': round(time.monotonic() - began, 2),
      'why': why,
    }

  def run(self, numbers: Iterable[int], *, num_lanes: int = 1, keep: Path | None = None) -> Iterable[dict[str, Any]]:
    """Yields the lines in the order of the faults' numbers."""
    with ThreadPoolExecutor(num_lanes) as lanes:
      yield from lanes.map(lambda number: self.run_fault(number, keep), numbers)


def summary_table(lines: Sequence[dict[str, Any]]) -> str:
  """Returns a Markdown table of verdicts and seconds by kind, and their sums."""
  by_kind: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
  for line in lines:
    by_kind[line['kind']].append(line)
  used = [verdict for verdict in VERDICTS if verdict in ('GOOD', 'BAD', 'HANG') or _count(lines, verdict)]
  rows = [['fault', 'number', *used, 'seconds each']]
  rows.append(['---', *['---:'] * (len(used) + 2)])
  for name, own in [*sorted(by_kind.items()), ('all', list(lines))]:
    seconds = sum(line['seconds'] for line in own) / max(len(own), 1)
    rows.append([name, str(len(own)), *[str(_count(own, verdict)) for verdict in used], f'{seconds:.1f}'])
  return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows)


def _count(lines: Iterable[dict[str, Any]], verdict: str) -> int:
  return sum(line['verdict'] == verdict for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description='Injects faults into jobs and judges what comes of them.')
  parser.add_argument('--faults', type=int, default=50, metavar='N', help='how many')
  parser.add_argument('--seed', type=int, default=0, metavar='S', help='which faults, where and when')
  parser.add_argument('--first', type=int, default=0, metavar='NUMBER', help='the first fault; the others follow it')
  parser.add_argument('--only', type=int, metavar='NUMBER', help='this fault alone')
  parser.add_argument('--kinds', default='', metavar='TEXT,TEXT', help='only kinds whose name begins with one of these')
  parser.add_argument('--plain', action='store_true', help='on one device with synthetic tokens, wherever that will do')
  parser.add_argument('--jobs', type=int, default=1, metavar='N', help='faults at a time')
  parser.add_argument('--keep', type=Path, metavar='DIR', help='with --only: the fault happens here, and stays')
  parser.add_argument('--out', type=Path, metavar='FILE', help='the lines go here too')
  parser.add_argument('--list', action='store_true', help='the kinds, and which share of the faults is theirs')
  args = parser.parse_args(argv)
  if args.list:
    for entry in kinds():
      print(f'{entry.share:3}  {entry.name}')
    return 0
  if args.keep is not None and args.only is None:
    parser.error('--keep goes with --only')
  wanted = tuple(text for text in args.kinds.split(',') if text)
  numbers: list[int] = []
  if args.only is not None:
    numbers = [args.only]
  else:
    if wanted and not any(entry.name.startswith(wanted) for entry in kinds()):
      parser.error(f'no kind begins with {args.kinds}: --list shows them')
    number = args.first
    while len(numbers) < args.faults:
      if not wanted or kind_of(args.seed, number).name.startswith(wanted):
        numbers.append(number)
      number += 1
  began, lines = time.monotonic(), []
  path = tempfile.TemporaryDirectory(prefix='fault_campaign_')
  os.environ.update({**xla_settings.ENVIRONMENT, **os.environ, 'XDG_CONFIG_HOME': f'{path.name}/configuration'})
  with (
    path,
    contextlib.nullcontext() if args.out is None else args.out.open('a') as out,
    Campaign(Path(path.name), args.seed, only_plain=args.plain) as campaign,
  ):
    for line in campaign.run(numbers, num_lanes=args.jobs, keep=args.keep):
      lines.append(line)
      print(json.dumps(line), flush=True)
      if out is not None:
        out.write(json.dumps(line) + '\n')
        out.flush()
  print(summary_table(lines), file=sys.stderr)
  counts = {verdict: _count(lines, verdict) for verdict in VERDICTS}
  bad = [line['number'] for line in lines if line['verdict'] in ('BAD', 'HANG', 'ERROR')]
  total = {'faults': len(lines), 'seed': args.seed, **counts, 'not_good': bad}
  print(json.dumps(total | {'seconds': round(time.monotonic() - began, 1), 'cores': os.cpu_count()}))
  return 1 if bad else 0


if __name__ == '__main__':
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
  sys.exit(main())
