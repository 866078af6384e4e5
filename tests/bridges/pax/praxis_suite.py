"""Runs the tests of the installed Praxis with our shims, and compares with the list of those that passed.

    scripts/praxis_tests                       # all 76 files, each in a process of its own
    scripts/praxis_tests schedules optimizers  # the files whose path contains one of the words
    scripts/praxis_tests --write schedules     # and writes what passed of these files to tests/data/praxis_tests.txt
    scripts/praxis_tests --write --go_on       # the tests that an earlier run has no result of
    scripts/praxis_tests --summary             # runs nothing: what the results so far say, failures by their reason

The processes are forked from one that has imported Praxis, TensorFlow and Lingvo, and XLA compiles quickly in them. A
test that fails then is run once more with XLA's defaults on four devices, and this counts. If it fails again, it runs
with the random numbers of JAX before 0.5, only to tell whether it fails by these. The result of every test is written
to .cache/praxis_tests.jsonl as it is known, so that a file that is killed at its limit keeps what it has.

It exits with 1 if a test fails that passed when the list was written. This module is also the plugin of pytest by which
each file reports.
"""

import argparse
import collections
from collections.abc import Iterable, Sequence
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
from pathlib import Path
import re
import sys
import time

from absl import flags
import jax
import pytest

from spmd_tasks.bridges.pax import _stand_ins  # importing it applies the shims, before a test imports Praxis
from spmd_tasks.distributed.fake_devices import compile_quickly

KEPT = Path(__file__).parents[2] / 'data' / 'praxis_tests.txt'
RESULTS = Path(__file__).parents[3] / '.cache' / 'praxis_tests.jsonl'
_PASS = 'PRAXIS_TESTS_PASS'  # a variable of the forked processes: which of the passes they belong to
_QUICK, _DEFAULTS, _OLD_RANDOM = 'quick', 'defaults', 'old random numbers'
# Each compiled program takes about ten memory maps, of which Linux allows a process 65,530.
_MAX_MAPS = 30_000
_UNFINISHED = 'the file was killed at its limit'


def pytest_configure() -> None:
  """Lets absl's tests make their temporary directories; called by pytest."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['praxis_tests'])
  if 'enable_asserts' in flags.FLAGS:
    flags.FLAGS.enable_asserts = False  # Lingvo's checks of shapes are native operations, which cannot be loaded
  if 'test_tmpdir' in flags.FLAGS:
    Path(flags.FLAGS.test_tmpdir).mkdir(parents=True, exist_ok=True)  # as absl's own runner does


def pytest_collection_finish(session: pytest.Session) -> None:
  """Reports every test as unfinished; called by pytest."""
  _report((item.nodeid, _UNFINISHED) for item in session.items)


def pytest_collectreport(report: pytest.CollectReport) -> None:
  """Reports a file that cannot be imported; called by pytest."""
  if report.failed:
    _report([(report.nodeid, _reason(report))])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
  """Reports how a test ended; called by pytest after each of its phases."""
  why = '' if report.passed else _reason(report)
  if os.environ[_PASS] == _OLD_RANDOM:
    if report.passed and report.when == 'call':
      _report([(report.nodeid, 'passes with jax_threefry_partitionable=False, the random numbers of JAX before 0.5')])
  elif report.when == 'call' or why:
    _report([(report.nodeid, why)])


def pytest_runtest_teardown() -> None:
  """Frees compiled programs before there are too many; called by pytest."""
  if len(Path('/proc/self/maps').read_bytes().splitlines()) > _MAX_MAPS:
    jax.clear_caches()


def _report(results: Iterable[tuple[str, str]]) -> None:
  with RESULTS.open('a') as file:
    for nodeid, why in results:
      file.write(json.dumps({'test': nodeid, 'why': why, 'pass': os.environ.get(_PASS, '')}) + '\n')


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
  """Returns the line of pytest's report that says why a test did not pass."""
  if report.skipped:
    return f'skipped: {report.longrepr[2]}' if isinstance(report.longrepr, tuple) else 'skipped'
  lines = str(report.longrepr).splitlines()
  errors = [line[1:].strip() for line in lines if line.startswith('E ')]
  named = [line for line in errors if re.match(r'[\w.]+(Error|Exception)\b', line)]
  return (named or errors or lines or ['?'])[-1][:240]


def run_file(name: str, root: Path, limit_s: float) -> None:
  """Runs what is not finished of a file of tests, quickly compiled, then those that failed with XLA's defaults.

  A test in which the process dies counts as failed, and the tests after it run in another process.
  """
  end = time.monotonic() + limit_s
  tests = _unfinished(name) or [name]
  while tests and time.monotonic() < end:
    died = _run(tests, root, end - time.monotonic(), _QUICK)
    tests = _unfinished(name)
    if died and tests:
      _report([(tests.pop(0), 'the process died')])
  for name_of_pass in (_DEFAULTS, _OLD_RANDOM):
    results = read_results(RESULTS)
    failed = [test for test, why in results.items() if _file_of(test) == name and _is_failure(test, why)]
    if failed:
      _run(failed, root, limit_s, name_of_pass)


def _unfinished(name: str) -> list[str]:
  """Returns the tests of a file that were begun, or should have been, and have no result."""
  return [test for test, why in read_results(RESULTS).items() if _file_of(test) == name and why == _UNFINISHED]


def _is_failure(test: str, why: str) -> bool:
  return '::' in test and bool(why) and not why.startswith('skipped') and why != _UNFINISHED


def _run(tests: Sequence[str], root: Path, limit_s: float, name_of_pass: str) -> bool:
  """Runs tests by pytest in a forked process, which is killed at the limit; returns whether it died by itself."""
  arguments = ['-q', '-p', __spec__.name, '-p', 'no:cacheprovider', '-p', 'no:xdist', '-c', os.devnull]
  arguments += ['--rootdir', str(root), '--import-mode', 'importlib', *(str(root / test) for test in tests)]
  process = multiprocessing.get_context('fork').Process(target=_run_pytest, args=(arguments, name_of_pass))
  process.start()
  process.join(limit_s)
  died = process.exitcode not in (None, 0)
  process.kill()
  process.join()
  return died


def _run_pytest(arguments: list[str], name_of_pass: str) -> None:
  os.environ[_PASS] = name_of_pass
  if name_of_pass == _QUICK:
    compile_quickly()
  else:
    jax.config.update('jax_num_cpu_devices', 4)
  if name_of_pass == _OLD_RANDOM:
    jax.config.update('jax_threefry_partitionable', False)
  for stream in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
  pytest.main(arguments)
  os._exit(0)  # without waiting for threads of TensorFlow


def read_results(path: Path) -> dict[str, str]:
  """Returns the name of each test and why it did not pass, '' if it passed; the last line of a test counts.

  A test that is unfinished in a later pass keeps its result of the first.
  """
  results: dict[str, str] = {}
  for line in path.read_text().splitlines() if path.exists() else ():
    entry = json.loads(line)
    if entry['why'] == _UNFINISHED and entry['pass'] != _QUICK:
      continue
    results[entry['test']] = entry['why']
  return results


def _file_of(test: str) -> str:
  return test.partition('::')[0]


def _write(files: set[str], results: dict[str, str]) -> None:
  """Replaces what the list says of some files."""
  lines = KEPT.read_text().splitlines()[1:] if KEPT.exists() else []
  passing = {test for test, why in results.items() if not why and _file_of(test) in files}
  lines = sorted({*(line for line in lines if _file_of(line) not in files), *passing})
  versions = ', '.join(f'{name} {importlib.metadata.version(name)}' for name in ('praxis', 'jax', 'flax', 'lingvo'))
  num_files = len({_file_of(line) for line in lines})
  header = f'# {len(lines)} tests of {num_files} files pass: {versions}. Written by scripts/praxis_tests --write.'
  KEPT.write_text('\n'.join([header, *lines]) + '\n')


def _summarize(results: dict[str, str]) -> str:
  """Returns how many tests passed, and how many did not for each reason; reasons that differ in numbers are one."""
  by_reason = collections.defaultdict(list)
  for test, why in results.items():
    if why:
      by_reason[re.sub(r'0x[0-9a-f]+|\d+(\.\d+)?', 'N', why)].append(test)
  num_failing = sum(map(len, by_reason.values()))
  lines = [f'{len(results) - num_failing} of {len(results)} pass, of {len(set(map(_file_of, results)))} files']
  for reason, tests in sorted(by_reason.items(), key=lambda item: -len(item[1])):
    files = sorted({Path(_file_of(test)).stem for test in tests})
    lines.append(f'{len(tests):5} {reason}   ({", ".join(files)})')
  return '\n'.join(lines)


def _import_what_tests_import() -> None:
  """Imports once, before the forks, what most files import: 20 s for each of them."""
  sys.path.append(os.environ['PRAXIS_TESTS_BESIDE'])  # last: it holds a NumPy too
  for name in ('lingvo.core.layers', 'lingvo.core.base_input_generator', *_stand_ins.NEED_SENTENCEPIECE):
    _stand_ins.LINGVO_STAND_INS.pop(name, None)  # tests compare with the real ones
  for name in ('praxis.layers', 'praxis.test_utils', 'praxis.layers.quantization', 'lingvo.core.layers'):
    try:
      importlib.import_module(name)
    except ImportError as error:
      print(f'{name} cannot be imported: {error}', flush=True)


def main(arguments: Sequence[str]) -> int:
  """Runs the files that are asked for, prints what changed, and returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('words', nargs='*', help='parts of the paths of files')
  parser.add_argument('--write', action='store_true', help='write what passed of these files to the list')
  parser.add_argument('--go_on', action='store_true', help='leave out the tests that .cache/praxis_tests.jsonl has')
  parser.add_argument('--summary', action='store_true', help='run nothing; show the results so far')
  parser.add_argument('--limit_s', type=float, default=3600, help='seconds for a file')
  options = parser.parse_args(arguments)
  if options.summary:
    print(_summarize(read_results(RESULTS)))
    return 0
  spec = importlib.util.find_spec('praxis')
  assert spec is not None
  assert spec.origin is not None
  root = Path(spec.origin).parents[1]
  # The smallest first: an interrupted run has finished more of them.
  paths = sorted((root / 'praxis').rglob('*_test.py'), key=lambda path: path.stat().st_size)
  names = [str(path.relative_to(root)) for path in paths]
  names = [name for name in names if not options.words or any(word in name for word in options.words)]
  RESULTS.parent.mkdir(exist_ok=True)
  if options.go_on:
    done = set(map(_file_of, read_results(RESULTS)))
    names = [name for name in names if name not in done] + [name for name in names if _unfinished(name)]
  else:
    RESULTS.unlink(missing_ok=True)
  _import_what_tests_import()
  kept = set(KEPT.read_text().splitlines()) if KEPT.exists() else set()
  for name in names:
    run_file(name, root, options.limit_s)
    results = read_results(RESULTS)
    found = {test: why for test, why in results.items() if _file_of(test) == name}
    if options.write:
      _write({name}, results)
    print(f'{name}: {sum(not why for why in found.values())} of {len(found)} pass', flush=True)
    for test, why in found.items():
      if why:
        print(f'  {"NOW FAILS" if test in kept else "fails"}: {test}: {why}', flush=True)
  results = read_results(RESULTS)
  print(_summarize(results))
  return int(any(why and test in kept for test, why in results.items()))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
