"""Measures what each test file, test and fixture costs: CPU seconds, user and system, with the processes they start.

Every run writes them to `.pytest_cache/costs.json`, dearest first; `scripts/test --costs` also prints the dearest. A
test's seconds contain the fixtures that it is the first to ask for. A process that tests/fork_server.py forks counts
for the test and the fixture that started it (`OWNER_VARIABLE`), any other process once somebody waited for it.

`python -m tests.costs`, after a run of all tests, records its seconds of each file in `costs.json` beside this module,
by which `scripts/test --fast` selects files, and of the dearest twenty in docs/benchmarks.
"""

import collections
import contextlib
import json
import os
from pathlib import Path
import time

import pytest

from tests import forked

NUM_PRINTED = 20
ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix('.json')  # file -> CPU seconds in the last run that was recorded
_LAST_RUN = Path('.pytest_cache') / 'costs.json'
_TABLE = ROOT / 'docs' / 'benchmarks' / 'results' / 'dearest_tests.json'


def cpu_seconds() -> float:
  """Returns the CPU seconds of this process and of the children that it waited for."""
  return sum(os.times()[:4])


class Costs:
  """A pytest plugin, in the one process of a run or in each worker and the process that starts them."""

  def __init__(self, config: pytest.Config):
    self._config = config
    self._seconds = {kind: collections.Counter() for kind in ('files', 'tests', 'fixtures')}
    self._test = ''

  def pytest_collection_finish(self) -> None:
    self._seconds['tests']['imports and collection'] += cpu_seconds()

  @pytest.hookimpl(wrapper=True, tryfirst=True)
  def pytest_runtest_protocol(self, item: pytest.Item):
    self._test = item.nodeid
    with self._measured('tests', self._test, owner=self._test):
      return (yield)

  @pytest.hookimpl(wrapper=True)
  def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef):
    name = f'{fixturedef.baseid}::{fixturedef.argname}'
    with self._measured('fixtures', name, owner=f'{self._test}\t{name}'):
      return (yield)

  @contextlib.contextmanager
  def _measured(self, kind: str, name: str, *, owner: str):
    outer, before = os.environ.get(forked.OWNER_VARIABLE, ''), cpu_seconds()
    os.environ[forked.OWNER_VARIABLE] = owner
    try:
      yield
    finally:
      os.environ[forked.OWNER_VARIABLE] = outer
      self._seconds[kind][name] += cpu_seconds() - before

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node) -> None:
    for kind, seconds in getattr(node, 'workeroutput', {}).get('costs', {}).items():
      self._seconds[kind].update(seconds)

  @pytest.hookimpl(tryfirst=True)
  def pytest_sessionfinish(self) -> None:
    """Sends a worker's seconds to the process that started it, which adds the forked processes and writes all."""
    if hasattr(self._config, 'workerinput'):
      self._config.workeroutput['costs'] = {kind: dict(seconds) for kind, seconds in self._seconds.items()}
      return
    for path in forked.cost_files():
      for line in path.read_text().splitlines():
        seconds, *owners = line.split('\t')
        for kind, owner in zip(('tests', 'fixtures'), owners):
          self._seconds[kind][owner or 'unknown'] += float(seconds)
    for test, amount in self._seconds['tests'].items():
      self._seconds['files'][test.partition('::')[0]] += amount
    if not self._config.option.collectonly:
      path = self._config.rootpath / _LAST_RUN
      path.parent.mkdir(exist_ok=True)
      rounded = {
        kind: {name: round(amount, 2) for name, amount in seconds.most_common()}
        for kind, seconds in self._seconds.items()
      }
      path.write_text(json.dumps(rounded, indent=1))

  def pytest_terminal_summary(self, terminalreporter) -> None:
    if not self._config.getoption('--costs'):
      return
    for kind, seconds in self._seconds.items():
      terminalreporter.section(f'CPU seconds of {kind}, {seconds.total():.0f} in all')
      for name, amount in seconds.most_common(NUM_PRINTED):
        terminalreporter.write_line(f'{amount:8.1f}  {name}')


def recorded() -> dict[str, float]:
  """Returns the CPU seconds of each test file when they were recorded; new files are not in it."""
  return json.loads(RECORD.read_text(encoding='utf-8'))


def record() -> None:
  """Records the last run's seconds of each file."""
  seconds = json.loads((ROOT / _LAST_RUN).read_text(encoding='utf-8'))['files']
  files = {name: amount for name, amount in seconds.items() if name.startswith('tests/')}
  RECORD.write_text(json.dumps(dict(sorted(files.items())), indent=1) + '\n', encoding='utf-8')
  dearest = sorted(files, key=lambda name: -files[name])[:NUM_PRINTED]
  table = json.loads(_TABLE.read_text(encoding='utf-8')) | {
    'date': time.strftime('%Y-%m-%d'),
    'rows': [[f'`{name}`', f'{files[name]:.0f}'] for name in dearest],
  }
  table['rows'].append([f'all {len(files)} files', f'{sum(files.values()):,.0f}'])
  _TABLE.write_text(json.dumps(table, indent=1) + '\n', encoding='utf-8')


if __name__ == '__main__':
  record()
