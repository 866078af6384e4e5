"""Plants faults in a copy of the package, one at a time, and says which of them the tests catch.

`mutants.json` lists the faults. Each has a name, the files that it may be in (a glob), the text that is found there
exactly once, the text that replaces it, and the tests that should catch it. A fault is

    caught    the tests pass without it and fail with it
    missed    the tests pass with it
    lost      its text is not in the files or is there more than once, or its tests are gone: mend the list
    broken    the tests do not pass without it, or do not run

The exit code is 1 unless all are caught. The last line is a JSON object.
"""

import argparse
from collections.abc import Sequence
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = Path(__file__).parents[1]
MUTANTS = json.loads((ROOT / 'tests' / 'mutants.json').read_text(encoding='utf-8'))
LIMIT_S = 1200  # of one run of pytest; one that takes longer counts as a failure
PASSED, FAILED = 0, 1  # exit codes of pytest


def place_of(mutant: dict[str, str], root: Path) -> Path | None:
  """Returns the file that has the mutant's text, or None if the mutant is lost."""
  found = [
    (path, path.read_text(encoding='utf-8').count(mutant['find'])) for path in sorted(root.glob(mutant['files']))
  ]
  places = [path for path, count in found for _ in range(count)]
  has_tests = all((root / test).exists() for test in mutant['tests'].split())
  return places[0] if has_tests and len(places) == 1 else None


def copy_of_repository(directory: Path) -> Path:
  """Copies the files that git tracks, and links the environment and the cache of compiled programs."""
  root = directory / 'copy'
  for name in subprocess.check_output(['git', 'ls-files', '-z'], cwd=ROOT, text=True).split('\0'):
    if name and (ROOT / name).is_file():
      (root / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
  for name in ('.venv', '.pytest_cache'):
    if (ROOT / name).exists():
      (root / name).symlink_to((ROOT / name).resolve())
  return root


def run_tests(tests: str, root: Path) -> int:
  """Returns pytest's exit code for these tests of the copy."""
  command = [sys.executable, '-m', 'pytest', '-x', '-q', '-n', '0', *tests.split()]
  environment = os.environ | {'PYTHONPATH': str(root)}
  try:
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=LIMIT_S, check=False)
  except subprocess.TimeoutExpired:
    return FAILED
  return done.returncode


def judge(mutant: dict[str, str], root: Path, pass_without: dict[str, bool]) -> str:
  """Returns what became of one mutant; `pass_without` remembers which tests pass without any."""
  place, tests = place_of(mutant, root), mutant['tests']
  if place is None:
    return 'lost'
  if tests not in pass_without:
    pass_without[tests] = run_tests(tests, root) == PASSED
  if not pass_without[tests]:
    return 'broken'
  original = place.read_text(encoding='utf-8')
  place.write_text(original.replace(mutant['find'], mutant['replace']), encoding='utf-8')
  try:
    code = run_tests(tests, root)
  finally:
    place.write_text(original, encoding='utf-8')
  return {PASSED: 'missed', FAILED: 'caught'}.get(code, 'broken')


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog='scripts/mutants')
  parser.add_argument('--only', default='', help='those whose name has this in it')
  parser.add_argument('--check', action='store_true', help='only look for the texts')
  args = parser.parse_args(argv)
  chosen = [mutant for mutant in MUTANTS if args.only in mutant['name']]
  counts = dict.fromkeys(('caught', 'missed', 'lost', 'broken'), 0)
  if args.check:
    lost = [mutant['name'] for mutant in chosen if place_of(mutant, ROOT) is None]
    print(*(f'lost    {name}' for name in lost), f'{len(chosen) - len(lost)} of {len(chosen)} apply', sep='\n')
    return 1 if lost else 0
  pass_without: dict[str, bool] = {}
  with tempfile.TemporaryDirectory(prefix='mutants_') as directory:
    root = copy_of_repository(Path(directory))
    for mutant in chosen:
      start = time.monotonic()
      outcome = judge(mutant, root, pass_without)
      counts[outcome] += 1
      print(f'{outcome:7} {mutant["name"]} ({time.monotonic() - start:.0f} s)', flush=True)
  print(json.dumps(counts))
  return 0 if counts['caught'] == len(chosen) else 1


if __name__ == '__main__':
  sys.exit(main())
