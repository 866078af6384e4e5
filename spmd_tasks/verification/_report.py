"""The report: a line per case as it is decided, the table at the end, and the last line as JSON."""

from collections.abc import Sequence
import json

from spmd_tasks.verification._cases import Case, Verdict


def format_case(case: Case, verdict: Verdict) -> str:
  """Returns the line of one case, with its notes below."""
  lines = [f'{verdict.status:15}{case.claim:14}{case.subject}: {verdict.detail}']
  return '\n'.join(lines + [f'{"":15}{"":14}{note}' for note in verdict.notes])


def format_table(decided: Sequence[tuple[Case, Verdict]], sentences: dict[str, str]) -> str:
  """Returns a line per claim: how many of its cases held and broke, and what it says."""
  rows = []
  for claim, sentence in sentences.items():
    counts = [
      sum(case.claim == claim and verdict.status == status for case, verdict in decided)
      for status in ('held', 'BROKEN', 'not applicable')
    ]
    if any(counts):
      verdict = 'BROKEN' if counts[1] else 'held' if counts[0] else 'n.a.'
      rows.append(f'{claim:14}{verdict:8}{counts[0]:5}{counts[1]:8}{counts[2]:6}   {sentence}')
  return '\n'.join([f'{"claim":14}{"verdict":8}{"held":>5}{"broken":>8}{"n.a.":>6}', *rows])


def summary(decided: Sequence[tuple[Case, Verdict]]) -> str:
  """Returns the JSON of the last line: `claims`, `held`, `broken`, `not_applicable` (counts) and `failures`."""
  counts = {
    name: sum(verdict.status == status for _, verdict in decided)
    for name, status in (('held', 'held'), ('broken', 'BROKEN'), ('not_applicable', 'not applicable'))
  }
  failures = [
    {'claim': case.claim, 'case': case.subject} | verdict.failure
    for case, verdict in decided
    if verdict.status == 'BROKEN'
  ]
  return json.dumps({'claims': counts['held'] + counts['broken']} | counts | {'failures': failures})
