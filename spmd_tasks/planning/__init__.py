"""Plans: the memory and time that a run needs on accelerators that are not there.

    target = parse_target('v5p:4x4x2')
    plan = make_plan(job, target)                   # plan.json: compiles the very step that training runs
    plan = make_plan(job, target, compiles=False)   # the same keys in seconds, from the traced step alone
    print(format_plan(plan))                        # memory, weights, collectives, time
    plan_compiled(compiled, target)                 # of any program that was compiled for target.devices()

`--mode plan` (mode.py) is the command. The compilers are the real ones: libtpu's for TPUs, XLA's for NVIDIA GPUs.

Read chips.py with chips.toml (published figures) and rates.toml (the share of them that programs reach); targets.py
(what `v5p:4x4x2` means, and compile-only devices); plan.py (a step is compiled, or refused for its memory; why a weight
is replicated or padded); report.py with plan_page.html. Time has one model: traced_step.py walks the step's jaxpr and
lists what one device does, networks.py knows the links of mesh axes, and roofline.py divides work by rates. estimate.py
takes memory from the traced step too, in a second, so that search.py can look for faster settings. A compiled program
is read by hlo.py (XLA's text as typed operations) and program.py (how often each runs); from it
collectives.py and memory.py.
"""

import argparse
import os

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import Extension, Flag, Mode
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.planning.plan import make_plan, plan_compiled
  from spmd_tasks.planning.report import format_plan, plan_page
  from spmd_tasks.planning.targets import parse_target


def _check_flags(flags: argparse.Namespace) -> None:
  if flags.num_fake_devices is not None:
    raise UserError(
      f'--num_fake_devices is for running; --mode plan compiles only: give --target cpu:{flags.num_fake_devices}.'
    )
  if flags.plan_out and os.path.isfile(flags.plan_out):
    raise UserError(f'--plan_out {flags.plan_out} is a file: name a directory.')


EXTENSION = Extension(
  name='planning',
  modes=(
    Mode(
      name='plan',
      help='says what a run needs and costs on accelerators that are not here',
      run='spmd_tasks.planning.mode:run',
      prints_result=True,
      check=_check_flags,
      flags=(
        Flag(
          name='target',
          metavar='CHIPS',
          help="v5p:4x4x2, v6e:16x16, '2x v5p:8x8x4' (slices), h200:8, h100:8x4 (nodes), cpu:N; default: the "
          "experiment's",
        ),
        Flag(name='plan_out', metavar='DIR', help='also write the plan as plan.json and plan.html'),
        Flag(
          name='no_compile',
          is_switch=True,
          help="estimate memory and time from the traced train step, in seconds; default where the target's compiler "
          'is not installed',
        ),
        Flag(
          name='search',
          is_switch=True,
          help='also plan other meshes, remat policies and microbatches, without compiling them: the fastest that fit',
        ),
        Flag(name='plan_steps', metavar='A,B', help='of train, eval, prefill, decode; default: train'),
      ),
    ),
  ),
)
