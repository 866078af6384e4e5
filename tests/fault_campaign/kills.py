"""SIGKILL, SIGTERM and SIGINT: at random instants, at any file operation, and at chosen places of the code."""

import signal

from spmd_tasks import exit_codes
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.experiments import EVAL_INTERVAL, NUM_STEPS, SAVE_INTERVAL
from tests.fault_campaign.injected import Point
from tests.fault_campaign.judge import check
from tests.fault_campaign.scene import Ended, Scene, matching

JOBS = ('Plain', 'Plain', 'Plain', 'Padded', 'Experts', 'Pipelined', 'Text', 'Json')
CHANGES = ('write', 'rename', 'remove', 'rmdir', 'mkdir', 'truncate')

# Name -> the function, and whether the kill is in it ('in'), before it or after it.
PLACES = {
  'while the weights are drawn': ('spmd_tasks.runtime.partition:PartitionedModel.init', 'in'),
  'before the restore': ('spmd_tasks.checkpoints:Checkpointer.restore', 'before'),
  'after the restore': ('spmd_tasks.checkpoints:Checkpointer.restore', 'after'),
  'before a save': ('spmd_tasks.checkpoints:Checkpointer.save', 'before'),
  'in mid-save': ('spmd_tasks.checkpoints:Checkpointer.save', 'in'),
  'between save and manifest': ('spmd_tasks.checkpoints.checkpoint_directory:write_manifest', 'before'),
  'between manifest and rename': ('spmd_tasks.checkpoints.checkpoint_directory:write_manifest', 'after'),
  'before old checkpoints are pruned': (
    'spmd_tasks.checkpoints.checkpoint_directory:CheckpointDirectory.delete_old',
    'before',
  ),
  'while old checkpoints are pruned': (
    'spmd_tasks.checkpoints.checkpoint_directory:CheckpointDirectory.delete_old',
    'in',
  ),
  'before a metrics line': ('spmd_tasks.runtime.metrics:JsonlWriter.write', 'before'),
  'after a metrics line': ('spmd_tasks.runtime.metrics:JsonlWriter.write', 'after'),
  'in an eval': ('spmd_tasks.programs.eval:Evaluator._evaluate_set', 'in'),
  'between eval and its record': ('spmd_tasks.programs.eval:Evaluator.record', 'before'),
  'after the last wait for checkpoints': ('spmd_tasks.checkpoints:Checkpointer.wait', 'after'),
}


def signal_at_place(scene: Scene, place: str, signum: int, *, count: int = 0, longest_delay_s: float = 0.02) -> Point:
  """A signal at one of PLACES; in a function, it comes so many seconds after the call at the latest."""
  call, when = PLACES[place]
  delay_s = scene.rng.uniform(0.0005, longest_delay_s) if when == 'in' else 0.0
  return Point(call=call, after=when == 'after', count=count, action='signal', value=signum, delay_s=delay_s)


def killed(scene: Scene, ended: Ended) -> bool:
  """Whether the kill came before the job's end; a job that was faster must be as undisturbed."""
  if ended.returncode == -signal.SIGKILL:
    return True
  check(ended.returncode == exit_codes.OK, f'ended with {ended.returncode} before it was killed')
  scene.check_as_undisturbed()
  return False


def go_on(scene: Scene) -> str:
  """The restart after a kill, and what it did."""
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


@kind('kill/in mid-line of metrics', share=2)
def kill_in_mid_line(scene: Scene) -> str:
  """What a kill in a write leaves: a part of the last line, of the job's metrics or of an eval's."""
  last_seen = scene.rng.randrange(6, NUM_STEPS + 1)
  name, saved = 'metrics.jsonl', last_seen - 1  # a step's line is written before its checkpoint
  if scene.rng.random() < 0.5:
    last_seen = scene.rng.choice((EVAL_INTERVAL, NUM_STEPS))
    name, saved = 'eval/valid/metrics.jsonl', last_seen
  scene.begun(saved // SAVE_INTERVAL * SAVE_INTERVAL, last_seen)
  path = scene.job_log_dir / name
  content = path.read_bytes()
  last = content[:-1].rfind(b'\n') + 1
  cut = scene.rng.randrange(last + 1, len(content))
  path.write_bytes(content[:cut])
  scene.where = f'{path.relative_to(scene.job_log_dir)} ends {len(content) - cut} bytes early'
  scene.resume()
  return 'went on, bit for bit'


@kind('kill/again and again', share=1)
def kill_again_and_again(scene: Scene) -> str:
  """Kills every start soon after its first step, until the job has come to its end all the same."""
  scene.choose_job(('Plain', 'Text'))
  num_kills = 0
  while num_kills < 12:
    process = scene.start()
    before = scene.num_steps()
    wanted = before + scene.rng.randrange(4, 9)
    scene.wait_until(process, lambda: scene.num_steps() >= wanted)  # noqa: B023
    process.send(signal.SIGKILL)
    if not killed(scene, scene.finish(process)):
      break
    num_kills += 1
  else:
    check(False, f'{num_kills} kills, and the job is at step {scene.steps()[-1]} still')
  scene.where = f'{num_kills} kills'
  return 'came to its end, bit for bit'


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
