"""Runs the tests of the installed Praxis with our shims, and compares with the list of those that passed.

    scripts/praxis_tests                       # all 76 files, each in a process of its own; hours on a busy machine
    scripts/praxis_tests schedules optimizers  # the files whose path contains one of the words
    scripts/praxis_tests --write schedules     # and writes what passed of these files to tests/data/praxis_tests.txt

It exits with 1 if a test fails that passed when the list was written. This module is also the plugin of pytest by which
each file gets the shims.
"""

import argparse
from collections.abc import Iterator, Sequence
import importlib.metadata
import importlib.util
import multiprocessing
import os
from pathlib import Path
import sys
import tempfile
from xml.etree import ElementTree

from absl import flags
import pytest

from spmd_tasks.bridges.pax import _shims  # importing it applies the shims, before a test imports Praxis

KEPT = Path(__file__).parents[2] / 'data' / 'praxis_tests.txt'
SECONDS_PER_FILE = 3600


def pytest_configure() -> None:
  """Lets absl's tests make their temporary directories; called by pytest."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['praxis_tests'])
  sys.path.append(os.environ['PRAXIS_TESTS_BESIDE'])  # last: it holds a NumPy too
  for name in ('lingvo.core.layers', 'lingvo.core.base_input_generator'):  # tests compare with the real ones
    _shims._STAND_INS.pop(name, None)


def run_file(file: Path, root: Path) -> Iterator[tuple[str, str]]:
  """Runs one file of tests in a forked process; yields the name of each test and why it failed, '' if it passed."""
  name = str(file.relative_to(root))
  with tempfile.TemporaryDirectory(prefix='praxis_tests_') as directory:
    report = Path(directory, 'report.xml')
    flags_of_pytest = ['-q', '-p', __spec__.name, '-p', 'no:cacheprovider', '-p', 'no:xdist', '-c', os.devnull]
    flags_of_pytest += ['--rootdir', str(root), '--import-mode', 'importlib', '--junitxml', str(report), str(file)]
    process = multiprocessing.get_context('fork').Process(target=_run_pytest, args=(flags_of_pytest,))
    process.start()
    process.join(SECONDS_PER_FILE)
    process.kill()
    process.join()
    if not report.exists():
      yield name, 'the process died or took too long'
      return
    cases = list(ElementTree.parse(report).iter('testcase'))
  for case in cases:
    problem = next((part for part in case if part.tag in ('failure', 'error', 'skipped')), None)
    why = '' if problem is None else _reason(problem)
    suite = str(case.get('classname')).rpartition('.')[2]
    yield f'{name}::{suite}::{case.get("name")}' if case.get('name') else name, why


def _write(file: str, passing: Sequence[str]) -> None:
  """Replaces what the list says of one file."""
  lines = KEPT.read_text().splitlines()[1:] if KEPT.exists() else []
  lines = sorted({*(line for line in lines if not line.startswith(f'{file}::')), *passing})
  versions = ', '.join(f'{name} {importlib.metadata.version(name)}' for name in ('praxis', 'jax', 'flax', 'lingvo'))
  num_files = len({line.partition('::')[0] for line in lines})
  header = f'# {len(lines)} tests of {num_files} files pass: {versions}. Written by scripts/praxis_tests --write.'
  KEPT.write_text('\n'.join([header, *lines]) + '\n')


def _run_pytest(arguments: list[str]) -> None:
  for stream in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
  pytest.main(arguments)


def _reason(problem: ElementTree.Element) -> str:
  """Returns the line of pytest's report that says why a test did not pass."""
  errors = [line[1:] for line in (problem.text or '').splitlines() if line.startswith('E ')]
  return (errors or [problem.get('message') or problem.tag])[-1].strip().splitlines()[0][:160]


def main(arguments: Sequence[str]) -> int:
  """Runs the files that are asked for, prints what changed, and returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('words', nargs='*', help='parts of the paths of files')
  parser.add_argument('--write', action='store_true', help='write what passed of these files to the list')
  options = parser.parse_args(arguments)
  import praxis.layers  # noqa: F401  once, before the forks

  spec = importlib.util.find_spec('praxis')
  assert spec is not None
  assert spec.origin is not None
  root = Path(spec.origin).parents[1]
  files = sorted(
    file
    for file in (root / 'praxis').rglob('*_test.py')
    if not options.words or any(word in str(file.relative_to(root)) for word in options.words)
  )
  kept = set(KEPT.read_text().splitlines()) if KEPT.exists() else set()
  results: dict[str, str] = {}
  for file in files:
    found = dict(run_file(file, root))
    results |= found
    passed = sum(not why for why in found.values())
    print(f'{file.relative_to(root)}: {passed} of {len(found)} pass', flush=True)
    if options.write:
      _write(str(file.relative_to(root)), [name for name, why in found.items() if not why])
    for name, why in found.items():
      if why:
        print(f'  {"NOW FAILS" if name in kept else "fails"}: {name}: {why}', flush=True)
  passing = sorted(name for name, why in results.items() if not why)
  print(f'{len(passing)} of {len(results)} pass; {len([name for name in passing if name not in kept])} of them anew')
  return int(any(why and name in kept for name, why in results.items()))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
