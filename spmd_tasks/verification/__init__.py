"""Verifies that an experiment gives the same numbers on one device, on any mesh, in pipelines, with microbatches, etc.

    source = Source(flags=('--exp', 'lm.UnevenTiny'), resolve=resolve)      # resolve(overrides) -> (job, values)
    bench = Bench(source, num_devices=8)
    for case in CLAIMS['mesh'].cases(bench):
      print(case.subject, case.decide(bench).status)

Start with `mode.py`, which has the table of claims, and `_cases.py`, which decides one case. `_runner.py` has a train
step that also returns gradients; `_agreement.py` compares its steps with a reference and defines how large a difference
may be. `_formula_runner.py` is a reference that shares no code with the train step; it uses `_formulas.py`.
`_settings.py` samples meshes, shrinks an experiment, and changes batches. The cases are in the files `*_claims.py`.
"""

from spmd_tasks.extensions import Extension, Flag, Mode
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.verification._cases import Bench
  from spmd_tasks.verification._settings import Setting, Source

EXTENSION = Extension(
  name='verification',
  prepare_job='spmd_tasks.verification._wrong_kernels:refuse_wrong_kernels',
  modes=(
    Mode(
      name='verify',
      help='checks that an experiment gives the same numbers however it is run',
      run='spmd_tasks.verification.mode:run',
      prints_result=True,
      flags=(
        Flag(name='claims', metavar='A,B', help='only these claims; default: all'),
        Flag(name='cases', type=int, metavar='N', help='N random meshes more; default: 0'),
        Flag(name='widths', metavar='A,B', help='of the claim coordinates; default: the shrunk width, x 2, x 4, x 8'),
      ),
    ),
  ),
)
