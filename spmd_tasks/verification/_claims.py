"""The claims: for each its name, what it says, and the cases that an experiment has; and the report of these cases.

The report has a line for each case, a table with a line for each claim, and one line of JSON.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json

from spmd_tasks.verification._cases import Bench, Case, Verdict
from spmd_tasks.verification._decode_claim import decode_cases
from spmd_tasks.verification._layout_claims import (
  mesh_cases,
  microbatch_cases,
  pipeline_cases,
  remat_cases,
  row_cases,
  scan_cases,
)
from spmd_tasks.verification._restart_claim import restart_cases
from spmd_tasks.verification._run_claims import checkpoint_cases, eval_cases, precision_cases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """A sentence about numbers, and a function (bench, how many random cases more) that yields its cases."""

  sentence: str
  cases: Callable[[Bench, int], Iterator[Case]]


CLAIMS: Mapping[str, Claim] = {
  'mesh': Claim(sentence='every mesh gives the numbers of one device, padded or not', cases=mesh_cases),
  'pipeline': Claim(sentence='a pipeline of any schedule gives those of layers in sequence', cases=pipeline_cases),
  'microbatches': Claim(sentence='microbatches of the learner give those of the full batch', cases=microbatch_cases),
  'rows': Claim(sentence='rows that the mesh does not divide: the numbers of one device', cases=row_cases),
  'remat': Claim(sentence='rematerialisation changes no number', cases=remat_cases),
  'scan': Claim(sentence='layers in a loop and unrolled give the same', cases=scan_cases),
  'eval': Claim(sentence='evaluation gives the same on every mesh', cases=eval_cases),
  'decode': Claim(sentence='decoding with a cache gives what a full forward pass does', cases=decode_cases),
  'bfloat16': Claim(sentence='bfloat16 is as near float32 as its roundings let expect', cases=precision_cases),
  'checkpoint': Claim(sentence='saved, restored on another mesh and trained on: the same', cases=checkpoint_cases),
  'restart': Claim(sentence='killed and started again: every bit of an undisturbed run', cases=restart_cases),
}


def format_case(case: Case, verdict: Verdict) -> str:
  """Returns the line of one case, with its notes below."""
  lines = [f'{verdict.status:15}{case.claim:14}{case.subject}: {verdict.detail}']
  return '\n'.join(lines + [f'{"":15}{"":14}{note}' for note in verdict.notes])


def format_table(decided: Sequence[tuple[Case, Verdict]]) -> str:
  """Returns a line per claim: how many of its cases held and broke, and what it says."""
  rows = []
  for name, claim in CLAIMS.items():
    counts = [
      sum(case.claim == name and verdict.status == status for case, verdict in decided)
      for status in ('held', 'BROKEN', 'not applicable')
    ]
    if any(counts):
      verdict = 'BROKEN' if counts[1] else 'held' if counts[0] else 'n.a.'
      rows.append(f'{name:14}{verdict:8}{counts[0]:5}{counts[1]:8}{counts[2]:6}   {claim.sentence}')
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
