"""SIGTERM and SIGINT, once or several times, at random instants, the first ones included."""

import signal

from spmd_tasks import exit_codes
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.experiments import SAVE_INTERVAL
from tests.fault_campaign.judge import check
from tests.fault_campaign.kills import JOBS, PLACES, signal_at_place
from tests.fault_campaign.scene import Ended, Scene


def check_end(scene: Scene, ended: Ended, *signums: int) -> str:
  """The job was done, or one of these signals ended it without a traceback, and the same command goes on from there."""
  codes = {code for signum in signums for code in judge.CODES_AFTER[signum]}
  judge.check_no_traceback(ended.stderr)
  check(ended.returncode in codes, f'exit code {ended.returncode}, expected {codes}: {judge.last_line(ended.stderr)}')
  if ended.returncode == exit_codes.OK:
    scene.check_as_undisturbed()
    return 'the job had come to its end'
  seen = scene.steps()
  preempted = ended.returncode == exit_codes.PREEMPTED
  if preempted and seen:
    saved = judge.complete_steps(scene.job_log_dir)
    check(saved and saved[-1] >= seen[-1], f'exit code 42 after step {seen[-1]}, but the checkpoints are {saved}')
  # A restored job has nothing to do again; one that was interrupted may have an interval.
  scene.resume(max_lost=0 if preempted else SAVE_INTERVAL)
  return f'exit code {ended.returncode} after step {(seen or [0])[-1]}; went on, bit for bit'


@kind('signal/SIGTERM at a random instant', share=5)
def sigterm_at_a_random_instant(scene: Scene) -> str:
  scene.choose_job(JOBS)
  process = scene.start()
  scene.send_at_random_instant(process, signal.SIGTERM)
  return check_end(scene, scene.finish(process), signal.SIGTERM)


@kind('signal/SIGTERM at a place of the code', share=4)
def sigterm_at_a_place(scene: Scene) -> str:
  scene.choose_job(JOBS)
  scene.where = scene.rng.choice(sorted(PLACES))
  point = signal_at_place(scene, scene.where, signal.SIGTERM)
  return check_end(scene, scene.run(points=[point]), signal.SIGTERM)


@kind('signal/SIGTERM twice or more', share=3)
def sigterm_twice(scene: Scene) -> str:
  scene.choose_job(JOBS)
  process = scene.start()
  scene.send_at_random_instant(process, signal.SIGTERM)
  for _ in range(scene.rng.randrange(1, 4)):
    pause = scene.rng.choice((0.0, 0.01, 0.1, 0.3))
    scene.where += f'again {pause} s later; '
    scene.pause(process, pause)
    process.send(signal.SIGTERM)
  return check_end(scene, scene.finish(process), signal.SIGTERM)


@kind('signal/SIGINT at a random instant', share=4)
def sigint_at_a_random_instant(scene: Scene) -> str:
  scene.choose_job(JOBS)
  process = scene.start()
  scene.send_at_random_instant(process, signal.SIGINT)
  return check_end(scene, scene.finish(process), signal.SIGINT)


@kind('signal/SIGINT twice, or after SIGTERM', share=2)
def sigint_twice(scene: Scene) -> str:
  scene.choose_job(JOBS)
  first = scene.rng.choice((signal.SIGINT, signal.SIGTERM))
  pause = scene.rng.choice((0.0, 0.02, 0.2))
  scene.where = f'{first.name}, SIGINT {pause} s later: '
  process = scene.start()
  scene.send_at_random_instant(process, first)
  scene.pause(process, pause)
  process.send(signal.SIGINT)
  return check_end(scene, scene.finish(process), first, signal.SIGINT)


@kind('signal/SIGTERM while a fresh process imports', share=1)
def sigterm_in_imports(scene: Scene) -> str:
  """A new interpreter, from the first instant of the package's code on."""
  delay = scene.rng.uniform(0, 6)
  scene.where = f'{delay:.3f} s'
  process = scene.start(fresh=True)
  scene.send_after(process, signal.SIGTERM, delay)
  return check_end(scene, scene.finish(process), signal.SIGTERM)


@kind('signal/SIGSTOP and SIGCONT', share=1)
def stop_and_continue(scene: Scene) -> str:
  scene.choose_job(JOBS)
  pause = scene.rng.uniform(0.05, 1.0)
  scene.where = f'for {pause:.2f} s: '
  process = scene.start()
  scene.send_at_random_instant(process, signal.SIGSTOP)
  scene.pause(process, pause)
  process.send(signal.SIGCONT)
  ended = scene.finish(process)
  check(ended.returncode == exit_codes.OK, f'exit code {ended.returncode}: {judge.last_line(ended.stderr)}')
  scene.check_as_undisturbed()
  return 'went on, bit for bit'


@kind('signal/SIGHUP, SIGPIPE, SIGUSR1', share=1)
def other_signals(scene: Scene) -> str:
  """Signals that end a process or that it ignores: either way the same command goes on."""
  signum = scene.rng.choice((signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGQUIT, signal.SIGABRT))
  scene.where = f'{signum.name}: '
  process = scene.start()
  scene.send_at_random_instant(process, signum)
  ended = scene.finish(process)
  # A training job takes SIGHUP as SIGTERM; before its first step, SIGHUP ends any process.
  wanted = (exit_codes.OK, -signum, *([exit_codes.PREEMPTED] if signum == signal.SIGHUP else []))
  check(ended.returncode in wanted, f'exit code {ended.returncode} after {signum.name}')
  if ended.returncode == exit_codes.OK:
    scene.check_as_undisturbed()
    return 'went on, bit for bit'
  scene.resume()
  return f'ended by {signum.name}; the restart went on, bit for bit'
