"""Verifies an experiment: one device, any mesh, pipelines, microbatches, restarts and so on give the same numbers.

    source = Source(flags=('--exp', 'lm.UnevenTiny'), resolve=resolve)      # resolve(overrides) -> (job, values)
    bench = Bench(source, num_devices=8, directory='verify')
    for case in CLAIMS['mesh'].cases(bench, 0):
      print(format_case(case, case.decide(bench)))

Read `_claims.py` first, the table of what is claimed, and `_cases.py`, how one case is decided. `_bench.py` compiles
settings and keeps them; `_runner.py` has the train step that also gives its gradients; `_agreement.py` compares its
steps with a reference's (`_trajectory.py`), and `_noise.py` says how large a difference may be. `_layouts.py` draws
meshes, `_shrink.py` makes an experiment tiny, `_batches.py` cuts batches and makes rows differ, and `_promises.py` says
what may differ by the documentation. The files `*_claim.py` and `*_claims.py` have the cases.
"""

from etils import epy

from spmd_tasks.wings import Flag, Mode, Wing

with epy.lazy_api_imports(globals()):
  from spmd_tasks.verification._agreement import Agreement, agree
  from spmd_tasks.verification._batches import draw_batches
  from spmd_tasks.verification._bench import Bench
  from spmd_tasks.verification._cases import Case, Verdict
  from spmd_tasks.verification._claims import CLAIMS, Claim, format_case, format_table, summary
  from spmd_tasks.verification._layouts import all_meshes, draw_meshes, scaled_mesh
  from spmd_tasks.verification._noise import Difference
  from spmd_tasks.verification._runner import Runner, StepResult
  from spmd_tasks.verification._settings import Setting, Source, build_job
  from spmd_tasks.verification._shrink import Shrunk, shrink
  from spmd_tasks.verification._trajectory import Trajectory

__all__ = [
  'CLAIMS',
  'WING',
  'Agreement',
  'Bench',
  'Case',
  'Claim',
  'Difference',
  'Runner',
  'Setting',
  'Shrunk',
  'Source',
  'StepResult',
  'Trajectory',
  'Verdict',
  'agree',
  'all_meshes',
  'build_job',
  'draw_batches',
  'draw_meshes',
  'format_case',
  'format_table',
  'scaled_mesh',
  'shrink',
  'summary',
]

WING = Wing(
  name='verification',
  modes=(
    Mode(
      name='verify',
      help='checks that an experiment gives the same numbers however it is run',
      run='spmd_tasks.verification.mode:run',
      flags=(
        Flag(name='claims', metavar='A,B', help='only these claims; default: all'),
        Flag(name='cases', type=int, metavar='N', help='N random meshes more; default: 0'),
      ),
    ),
  ),
)
