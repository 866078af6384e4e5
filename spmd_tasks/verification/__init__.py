"""Verifies an experiment: one device, any mesh, pipelines, microbatches and so on give the same numbers.

    source = Source(flags=('--exp', 'lm.UnevenTiny'), resolve=resolve)      # resolve(overrides) -> (job, values)
    bench = Bench(source, num_devices=8)
    for case in CLAIMS['mesh'].cases(bench):
      print(case.subject, case.decide(bench).status)

Read `mode.py` first, with the table of the claims, and `_cases.py`, how one case is decided. `_runner.py` has the train
step that also gives its gradients; `_agreement.py` compares its steps with a reference's and says how large a
difference may be. `_by_hand.py` is a reference that shares no code with the train step, by `_formulas.py`.
`_settings.py` draws meshes, makes an experiment tiny, cuts batches and makes rows differ. The files `*_claims.py` have
the cases.
"""

from spmd_tasks.extensions import Extension, Flag, Mode
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals(), 'EXTENSION'):
  from spmd_tasks.verification._cases import Bench
  from spmd_tasks.verification._settings import Setting, Source

EXTENSION = Extension(
  name='verification',
  modes=(
    Mode(
      name='verify',
      help='checks that an experiment gives the same numbers however it is run',
      run='spmd_tasks.verification.mode:run',
      prints_result=True,
      flags=(
        Flag(name='claims', metavar='A,B', help='only these claims; default: all'),
        Flag(name='cases', type=int, metavar='N', help='N random meshes more; default: 0'),
      ),
    ),
  ),
)
