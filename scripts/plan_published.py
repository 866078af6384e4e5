"""Predicts published step times and says how far they are from the measured ones.

    scripts/plan_published [FILE] [--only NAME] [--docs]

FILE is like scripts/published.json, the default. A table goes to stderr; the last line on stdout is one JSON object:
`rows`, each with name, predicted_s, measured_s, ratio and fits (null where the model is not known), and the errors of
`dense` models and of `experts`. `--docs` also writes the results of docs/benchmarks/plans_tpu.md, for
scripts/render_benchmarks.py.
"""

import argparse
import datetime
import json
from pathlib import Path
import sys

from published import compare_rows, errors_of

from spmd_tasks.errors import UserError
from spmd_tasks.planning.chips import CHIPS

ROWS = Path(__file__).with_name('published.json')
RESULTS = Path(__file__).parents[1] / 'docs' / 'benchmarks' / 'results'


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('file', type=Path, nargs='?', default=ROWS)
  parser.add_argument('--only', metavar='NAME', help='of one row')
  parser.add_argument('--docs', action='store_true')
  flags = parser.parse_args()
  try:
    content = json.loads(flags.file.read_text(encoding='utf-8'))
    rows = content.get('rows') if isinstance(content, dict) else None
    if not isinstance(rows, list):
      raise UserError(f'{flags.file} has no list of rows: write {{"rows": [...]}}.')
    if flags.only:
      names = [str(row['name']) for row in rows if isinstance(row, dict) and 'name' in row]
      rows = [row for row in rows if isinstance(row, dict) and row.get('name') == flags.only]
      if not rows:
        raise UserError(f'--only {flags.only!r} is no row of {flags.file}: choose from {", ".join(names)}.')
    report = compare_rows(rows)
  except (UserError, OSError, ValueError) as error:
    print(f'plan_published: {error}', file=sys.stderr)
    return 2
  for row in sorted(report['rows'], key=lambda row: -abs((row['ratio'] or 1) - 1)):
    if row['predicted_s'] is not None:
      parts = ', '.join(f'{name} {seconds:.3g}' for name, seconds in row['seconds'].items())
      print(f'{row["ratio"] or 0:6.2f}  {row["predicted_s"]:8.2f} s  {row["name"]:40}  {parts}', file=sys.stderr)
  if flags.docs:
    known = [row for row in report['rows'] if row['ratio'] is not None]
    for name, table in (('published', _rows_table(known)), ('published_errors', _errors_table(known))):
      text = json.dumps(_HEAD | {'date': datetime.date.today().isoformat(), **table}, indent=1)
      (RESULTS / f'{name}.json').write_text(text + '\n', encoding='utf-8')
  print(json.dumps(report))
  return 0


_HEAD = {
  'date': '',
  'hardware': 'predicted from recipes, not compiled, not run',
  'versions': 'measured by the authors whom published.json names',
  'command': 'scripts/plan_published --docs',
}


def _rows_table(rows: list[dict]) -> dict:
  """Returns the table of all rows, worst first."""
  return {
    'columns': ['row', 'rates', 'predicted', 'measured', 'ratio', 'MFU', 'MFU, measured', 'on fitted', 'on assumed'],
    'rows': [
      [
        row['name'],
        'kept' if row['kept'] else 'fitted',
        f'{row["predicted_s"]:.2f} s',
        f'{row["measured_s"]:.2f} s',
        f'{row["ratio"]:.2f}',
        f'{row["mfu"]:.1%}',
        f'{row["measured_mfu"]:.1%}',
        f'{row["share"].get("fitted", 0):.0%}',
        f'{row["share"].get("assumed", 0):.0%}',
      ]
      for row in sorted(rows, key=lambda row: -abs(row['ratio'] - 1))
    ],
  }


def _errors_table(rows: list[dict]) -> dict:
  """Returns the table of errors, of rows that were kept apart from rows to which rates were fitted."""
  table = []
  for kept, kind, platforms in (
    *((True, kind, platforms) for kind in ('dense', 'experts') for platforms in ('TPUs and GPUs', 'TPUs')),
    *((False, kind, 'TPUs') for kind in ('dense', 'experts')),
  ):
    errors = errors_of(
      [
        row
        for row in rows
        if (row['kept'], row['kind']) == (kept, kind) and f'{CHIPS[row["chip"]].platform.upper()}s' in platforms
      ]
    )
    if errors['num_rows']:
      figures = f'{errors["median_error"]:.1%}', f'{errors["worst_error"]:.0%}', errors['worst_row']
      table.append(['kept' if kept else 'fitted', kind, platforms, errors['num_rows'], *figures])
  return {'columns': ['rates', 'models', 'chips', 'rows', 'median error', 'worst error', 'of'], 'rows': table}


if __name__ == '__main__':
  sys.exit(main())
