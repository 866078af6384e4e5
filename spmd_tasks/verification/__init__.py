"""Verifies an experiment: one device, any mesh, pipelines, microbatches, restarts and so on give the same numbers.

    source = Source(flags=('--exp', 'lm.UnevenTiny'), resolve=resolve)      # resolve(overrides) -> (job, values)
    bench = Bench(source, num_devices=8)
    for claim in CLAIMS.values():
      for case in claim.cases(bench, 0):
        print(format_case(case, case.decide(bench)))

Read `_claims.py` first, the table of what is claimed, and `_cases.py`, how one case is decided. `_bench.py` compiles
settings and compares steps with a reference's; `_settings.py` has the train step that also gives its gradients;
`_noise.py` says how large a difference may be. `_layouts.py` draws meshes, `_shrink.py` makes an experiment tiny,
`_batches.py` makes batches uneven, and `_report.py` prints.
"""

from spmd_tasks.verification._bench import Agreement, Bench
from spmd_tasks.verification._cases import Agree, Case, Check, NotApplicable, Verdict
from spmd_tasks.verification._claims import CLAIMS, Claim
from spmd_tasks.verification._layouts import all_meshes, draw_meshes, scaled_mesh
from spmd_tasks.verification._noise import Difference
from spmd_tasks.verification._report import format_case, format_table, summary
from spmd_tasks.verification._settings import Runner, Setting, Source, StepResult
from spmd_tasks.verification._shrink import Shrunk, shrink

__all__ = [
  'CLAIMS',
  'Agree',
  'Agreement',
  'Bench',
  'Case',
  'Check',
  'Claim',
  'Difference',
  'NotApplicable',
  'Runner',
  'Setting',
  'Shrunk',
  'Source',
  'StepResult',
  'Verdict',
  'all_meshes',
  'draw_meshes',
  'format_case',
  'format_table',
  'scaled_mesh',
  'shrink',
  'summary',
]
