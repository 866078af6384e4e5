"""Writes the tables of docs/benchmarks from the results beside them.

    .venv/bin/python scripts/render_benchmarks.py

A page has a block for each table:

    <!-- results: train_step -->
    (the table of docs/benchmarks/results/train_step.json and a line of when, where and how it was measured)
    <!-- end -->

A result has `date`, `hardware`, `versions` and `command`, and `columns` and `rows`. A result with `plans` has the names
of experiments instead; their memory and step are those of tests/golden/plans. `scripts/update_golden` calls this.
"""

import json
from pathlib import Path
import re
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / 'docs' / 'benchmarks'
PLANS = ROOT / 'tests' / 'golden' / 'plans'
BLOCK = re.compile(r'(<!-- results: (\w+) -->\n).*?(<!-- end -->)', flags=re.DOTALL)


def table(columns: list[str], rows: list[list[Any]]) -> str:
  """Returns a Markdown table, with columns of numbers aligned to the right."""

  def is_number(column: int) -> bool:
    cells = [str(row[column]) for row in rows if row[column] != '']
    return all(re.match(r'[*<-]*\d', cell) for cell in cells) and column > 0

  rule = ['---:' if is_number(column) else '---' for column in range(len(columns))]
  lines = [columns, rule, *rows]
  return '\n'.join(f'| {" | ".join(map(str, line))} |'.replace('|  |', '| |') for line in lines)


def plan_rows(plans: dict[str, dict[str, Any]]) -> list[list[Any]]:
  """Returns a row per experiment: its step, then the memory and time of its golden plan."""
  rows = []
  for name, facts in plans.items():
    plan = json.loads((PLANS / f'{name}.json').read_text(encoding='utf-8'))
    memory, limit, seconds = plan['peak_bytes'], plan['hbm_bytes'], plan['predicted_step_s']
    row = [
      f'`{name}`',
      plan['target'],
      facts['tokens'],
      f'{memory / 1e9:.1f} GB',
      f'{memory / limit:.0%}',
      f'{seconds:.2f} s',
    ]
    rows.append(row + [facts[key] for key in facts if key != 'tokens'])
  return rows


def render(name: str) -> str:
  """Returns the table of one result and the line below it."""
  result = json.loads((PAGES / 'results' / f'{name}.json').read_text(encoding='utf-8'))
  rows = plan_rows(result['plans']) if 'plans' in result else result['rows']
  return (
    f'{table(result["columns"], rows)}\n\n'
    f'{result["date"]}, {result["hardware"]}; {result["versions"]}; `{result["command"]}`.\n'
  )


def rendered(page: str) -> str:
  """Returns a page with its tables updated from the results."""
  return BLOCK.sub(lambda block: f'{block[1]}{render(block[2])}{block[3]}', page)


if __name__ == '__main__':
  for path in sorted(PAGES.glob('*.md')):
    path.write_text(rendered(path.read_text(encoding='utf-8')), encoding='utf-8')
