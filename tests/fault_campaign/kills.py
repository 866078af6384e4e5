"""SIGKILL, SIGTERM and SIGINT at random instants, at any file operation, and at chosen places in the code."""

import signal

from spmd_tasks import exit_codes
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.experiments import NUM_STEPS, SAVE_INTERVAL
from tests.fault_campaign.injected import Point
from tests.fault_campaign.judge import check
from tests.fault_campaign.scene import Ended, Scene, matching

JOBS = ('Plain', 'Plain', 'Plain', 'Padded', 'Experts', 'Pipelined', 'Text', 'Json', 'Mixed')
CHANGES = ('write', 'rename', 'remove', 'rmdir', 'mkdir', 'truncate')

_CHECKPOINTER, _DIRECTORY = 'spmd_tasks.checkpoints:Checkpointer', 'spmd_tasks.checkpoints.checkpoint_directory'
# Name -> the function, and whether the kill is in it ('in'), before it or after it.
PLACES = {
  'while the weights are drawn': ('spmd_tasks.runtime.partition:PartitionedModel.init', 'in'),
  'before the restore': (f'{_CHECKPOINTER}.restore', 'before'),
  'after the restore': (f'{_CHECKPOINTER}.restore', 'after'),
  'before a save': (f'{_CHECKPOINTER}.save', 'before'),
  'in mid-save': (f'{_CHECKPOINTER}.save', 'in'),
  'between save and manifest': (f'{_DIRECTORY}:write_manifest', 'before'),
  'between manifest and rename': (f'{_DIRECTORY}:write_manifest', 'after'),
  'before old checkpoints are pruned': (f'{_DIRECTORY}:CheckpointDirectory.delete_old', 'before'),
  'while old checkpoints are pruned': (f'{_DIRECTORY}:CheckpointDirectory.delete_old', 'in'),
  'before a metrics line': ('spmd_tasks.runtime.metrics:JsonlWriter.write', 'before'),
  'after a metrics line': ('spmd_tasks.runtime.metrics:JsonlWriter.write', 'after'),
  'in an eval': ('spmd_tasks.programs.evaluator:Evaluator._evaluate_set', 'in'),
  'between eval and its record': ('spmd_tasks.programs.evaluator:Evaluator.record', 'before'),
  'after the last wait for checkpoints': (f'{_CHECKPOINTER}.wait', 'after'),
}


def signal_at_place(scene: Scene, place: str, signum: int, *, count: int = 0, longest_delay_s: float = 0.02) -> Point:
  """Returns a signal at one of PLACES; in a function, it comes at most so many seconds after the call."""
  call, when = PLACES[place]
  delay_s = scene.rng.uniform(0.0005, longest_delay_s) if when == 'in' else 0.0
  return Point(call=call, after=when == 'after', count=count, action='signal', value=signum, delay_s=delay_s)


def killed(scene: Scene, ended: Ended) -> bool:
  """Returns whether the kill came before the job's end; otherwise the job must be as undisturbed."""
  if ended.returncode == -signal.SIGKILL:
    return True
  check(ended.returncode == exit_codes.OK, f'ended with {ended.returncode} before it was killed')
  scene.check_as_undisturbed()
  return False


def go_on(scene: Scene) -> str:
  """Restarts after a kill; returns what happened."""
  seen = scene.steps()[-1:] or [0]
  scene.resume()
  return f'killed after step {seen[0]}; went on, bit for bit'


@kind('kill/at a random instant', share=5)
def kill_at_a_random_instant(scene: Scene) -> str:
  scene.choose_job(JOBS)
  num_kills = scene.rng.choice((1, 1, 2, 3))
  for _ in range(num_kills):
    process = scene.start()
    scene.send_at_random_instant(process, signal.SIGKILL)
    if not killed(scene, scene.finish(process)):
      return 'ended before the kill'
  return f'{num_kills} kills; ' + go_on(scene)


@kind('kill/at a file operation', share=6)
def kill_at_a_file_operation(scene: Scene) -> str:
  scene.choose_job(JOBS)
  operations = scene.reference.operations
  count = scene.rng.randrange(matching(operations, CHANGES, '^job/'))
  scene.where = f'operation {count} of those that change files'
  point = Point(operations=CHANGES, path='^job/', count=count, action='signal', value=signal.SIGKILL)
  if not killed(scene, scene.run(points=[point])):
    return 'fewer operations than in the undisturbed run'
  return go_on(scene)


@kind('kill/at a place of the code', share=8)
def kill_at_a_place(scene: Scene) -> str:
  scene.choose_job(JOBS)
  name = scene.rng.choice(sorted(PLACES))
  count = 0
  if 'metrics' in name:
    count = scene.rng.randrange(NUM_STEPS)
  elif 'drawn' not in name and 'restore' not in name:
    count = scene.rng.randrange(2)
  scene.where = f'{name}, occurrence {count}'
  longest_delay_s = 0.3 if 'drawn' in name else 0.02
  point = signal_at_place(scene, name, signal.SIGKILL, count=count, longest_delay_s=longest_delay_s)
  if not killed(scene, scene.run(points=[point])):
    return 'the place was passed too rarely'
  return go_on(scene)


def check_end(scene: Scene, ended: Ended, *signums: int) -> str:
  """Checks that the job finished, or ended by one of these signals without a traceback and then resumes."""
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


@kind('signal/SIGTERM or SIGINT at a random instant', share=9)
def signal_at_a_random_instant(scene: Scene) -> str:
  scene.choose_job(JOBS)
  return end_at_random_instant(scene)


def end_at_random_instant(scene: Scene) -> str:
  signum = scene.rng.choice((signal.SIGTERM, signal.SIGINT))
  scene.where = f'{signum.name}: '
  process = scene.start()
  scene.send_at_random_instant(process, signum)
  return check_end(scene, scene.finish(process), signum)


@kind('signal/SIGTERM at a place of the code', share=4)
def sigterm_at_a_place(scene: Scene) -> str:
  scene.choose_job(JOBS)
  scene.where = scene.rng.choice(sorted(PLACES))
  point = signal_at_place(scene, scene.where, signal.SIGTERM)
  return check_end(scene, scene.run(points=[point]), signal.SIGTERM)


@kind('signal/several of them', share=5)
def several_signals(scene: Scene) -> str:
  scene.choose_job(JOBS)
  signums = scene.rng.choices((signal.SIGTERM, signal.SIGTERM, signal.SIGINT), k=scene.rng.randrange(2, 5))
  process = scene.start()
  scene.send_at_random_instant(process, signums[0])
  for signum in signums[1:]:
    pause = scene.rng.choice((0.0, 0.01, 0.1, 0.3))
    scene.where += f'{signum.name} {pause} s later; '
    scene.pause(process, pause)
    process.send(signum)
  return check_end(scene, scene.finish(process), *signums)


@kind('signal/SIGTERM while a fresh process imports', share=1)
def sigterm_in_imports(scene: Scene) -> str:
  """Signals a new interpreter, from the package's first line on."""
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
  """Signals that end a process or that it ignores; the same command then resumes."""
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
