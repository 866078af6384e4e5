"""Jobs that train on rewards, some of which always fail, are killed, signalled, or lose a reward process."""

import contextlib
import os
from pathlib import Path
import signal

from spmd_tasks import exit_codes
from tests.fault_campaign import judge, reward_functions
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.judge import check
from tests.fault_campaign.kills import end_at_random_instant, go_on, killed
from tests.fault_campaign.scene import Scene, Started

JOBS = ('Rewarded', 'RewardedAhead')  # synchronous with two minibatches; one step off the policy


@kind('rewards/kill at a random instant', share=3)
def kill_at_a_random_instant(scene: Scene) -> str:
  scene.choose_job(JOBS)
  process = scene.start()
  scene.send_at_random_instant(process, signal.SIGKILL)
  return go_on(scene) if killed(scene, scene.finish(process)) else 'ended before the kill'


@kind('rewards/SIGTERM or SIGINT at a random instant', share=1)
def signal_at_a_random_instant(scene: Scene) -> str:
  scene.choose_job(JOBS)
  return end_at_random_instant(scene)


@kind('rewards/a function gives NaN, hangs or dies', share=2)
def function_fails(scene: Scene) -> str:
  """However a function fails, it costs the same completions as raising in the undisturbed run."""
  scene.choose_job(JOBS)
  failure = scene.rng.choice(('gives_nan', 'hangs', 'dies'))
  scene.where = failure
  check(any(line['reward_failures'] for line in scene.reference.metrics.values()), 'no call failed')
  flags = ('--set', f'reward={reward_functions.__name__}:{failure}', '--set', 'reward_timeout_s=3')
  ended = scene.run(*scene.command(), *flags)
  check(ended.returncode == exit_codes.OK, f'exit code {ended.returncode}: {judge.sentence_of(ended)}')
  scene.check_as_undisturbed()
  return 'the run went on, bit for bit'


@kind('rewards/a process of the rewards is killed', share=1)
def worker_is_killed(scene: Scene) -> str:
  """The call of the killed process is repeated."""
  scene.choose_job(JOBS)
  process, num_killed = scene.start(), 0
  for _ in range(scene.rng.randrange(1, 4)):
    wanted = scene.num_steps() + scene.rng.randrange(1, 5)
    scene.wait_until(process, lambda wanted=wanted: scene.num_steps() >= wanted)
    for pid in workers_of(process):
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        num_killed += 1
  scene.where = f'{num_killed} of them'
  ended = scene.finish(process)
  check(ended.returncode == exit_codes.OK, f'exit code {ended.returncode}: {judge.sentence_of(ended)}')
  scene.check_as_undisturbed()
  return 'the run went on, bit for bit'


def workers_of(process: Started) -> list[int]:
  """Returns the processes that call reward functions, without the resource tracker."""
  try:
    children = Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
    return [int(pid) for pid in children if b'spawn_main' in Path(f'/proc/{pid}/cmdline').read_bytes()]
  except FileNotFoundError:
    return []
