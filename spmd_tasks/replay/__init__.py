"""Makes past steps of a job again, bit for bit, and finds devices that compute wrongly.

    spmd-tasks --mode replay --job_log_dir runs/tiny --step 137 --out step137.json
    spmd-tasks --mode replay --job_log_dir runs/tiny --from 120 --to 160

Read `mode.py` first: what a replay reports. `rerun.py` has the hook with which the training program itself goes on from
an earlier checkpoint; `statistics.py` looks into one step, layer by layer; `rows.py` names the rows of a batch;
`fingerprints.py` makes two numbers of any array. `device_check.py` has the hook CheckDevices, and reads alone.
"""

from etils import epy

from spmd_tasks.wings import ACCEPT_CONFIG_CHANGES, Flag, Mode, Wing

with epy.lazy_api_imports(globals()):
  from spmd_tasks.replay.device_check import CheckDevices, CorruptionError

__all__ = ['WING', 'CheckDevices', 'CorruptionError']


WING = Wing(
  name='replay',
  modes=(
    Mode(
      name='replay',
      help='makes past steps of a job again, bit for bit, and looks into them',
      run='spmd_tasks.replay.mode:run',
      check='spmd_tasks.replay.flags:check',
      needs_directory=True,
      answers_on_stdout=True,
      flags=(
        Flag(name='step', type=int, metavar='N', help='the step to make again'),
        Flag(name='from', type=int, metavar='A', help='the first of several steps, which are compared with the record'),
        Flag(name='to', type=int, metavar='B', help='the last of them'),
        Flag(name='against', metavar='DIR', help='compare with the record of another job; default: the same'),
        Flag(name='metric', metavar='NAME', help='compare this metric alone; default: all of the step'),
        Flag(name='tolerance', type=float, metavar='X', help='relative difference that is none; default: 0, every bit'),
        Flag(name='out', metavar='PATH', help='a JSON file for all that was found'),
        ACCEPT_CONFIG_CHANGES,
      ),
    ),
  ),
)
