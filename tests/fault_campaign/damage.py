"""Damage of a job's files between two runs: bits, truncations, whole files, in checkpoints and elsewhere."""

from collections.abc import Callable
import hashlib
import json
from pathlib import Path
import random
import shutil

from spmd_tasks import exit_codes
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.experiments import SAVE_INTERVAL
from tests.fault_campaign.judge import check
from tests.fault_campaign.scene import Scene

JOBS = ('Plain', 'Plain', 'Padded', 'Experts', 'Pipelined', 'Text')
# Refusals are for the user to mend: they come before anything has started.
REFUSED = (exit_codes.USAGE,)


def flip_bit(path: Path, rng: random.Random) -> None:
  data = bytearray(path.read_bytes())
  data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  path.write_bytes(data)


def shorten(path: Path, rng: random.Random) -> None:
  data = path.read_bytes()
  path.write_bytes(data[: rng.randrange(len(data))])


def lengthen(path: Path, rng: random.Random) -> None:
  with path.open('ab') as file:
    file.write(rng.randbytes(rng.randrange(1, 200)))


def zero_page(path: Path, rng: random.Random) -> None:
  """Zeroes a page, as if it was never written before a power failure."""
  data = bytearray(path.read_bytes())
  start = rng.randrange(len(data))
  end = min(len(data), start + 4096)
  data[start:end] = bytes(end - start)
  path.write_bytes(data)


def fill_with_garbage(path: Path, rng: random.Random) -> None:
  path.write_bytes(rng.randbytes(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
  'one bit': flip_bit,
  'truncated': shorten,
  'emptied': lambda path, _: path.write_bytes(b''),
  'longer': lengthen,
  'a page of zeros': zero_page,
  'garbage': fill_with_garbage,
  'deleted': lambda path, _: path.unlink(),
}


def begin(scene: Scene) -> int:
  """Prepares a killed job with two checkpoints; returns the step of the newer one."""
  saved = scene.rng.choice((10, 15, 20))
  scene.begun(saved, min(20, saved + scene.rng.randrange(SAVE_INTERVAL)))
  return saved


def files_of(scene: Scene, step: int) -> list[Path]:
  directory = scene.checkpoints / f'checkpoint_{step:08d}'
  return sorted(path for path in directory.rglob('*') if path.is_file() and path.stat().st_size)


def changed(path: Path, damage: Callable[[], object]) -> bool:
  before = path.read_bytes()
  damage()
  return not path.exists() or path.read_bytes() != before


def go_on_without_the_newest(scene: Scene, step: int, *, is_damaged: bool = True) -> str:
  """Checks that a restart sets the damaged newest checkpoint aside and resumes from the previous one."""
  seen = scene.steps()[-1]
  ended = scene.run()
  check(ended.returncode == exit_codes.OK, f'the restart ended with {ended.returncode}: {judge.sentence_of(ended)}')
  judge.check_no_traceback(ended.stderr)
  aside = [path.name for path in scene.checkpoints.iterdir() if '.damaged-' in path.name]
  check(bool(aside) == is_damaged, f'set aside: {aside}')
  if is_damaged:
    check(f'resuming after step {step - SAVE_INTERVAL}' in ended.stderr, 'it did not go on from the one before')
    check(f'checkpoint_{step:08d} is damaged' in ended.stderr, 'the log does not say which checkpoint is damaged')
  scene.check_as_undisturbed()
  return f'{aside[0] if aside else "nothing"} set aside; went on after {seen}, bit for bit'


@kind('damage/a file of the newest checkpoint', share=6)
def damage_newest(scene: Scene) -> str:
  scene.choose_job(JOBS)
  step = begin(scene)
  # Kinds of files rather than files, of which most are arrays.
  by_kind: dict[str, list[Path]] = {}
  for path in files_of(scene, step):
    by_kind.setdefault(path.relative_to(scene.checkpoints).parts[1], []).append(path)
  path = scene.rng.choice(by_kind[scene.rng.choice(sorted(by_kind))])
  name = scene.rng.choice(sorted(DAMAGES))
  scene.where = f'{name}: {path.relative_to(scene.checkpoints)}'
  is_damaged = changed(path, lambda: DAMAGES[name](path, scene.rng))
  return go_on_without_the_newest(scene, step, is_damaged=is_damaged)


@kind('damage/a directory of the newest checkpoint', share=3)
def damage_directory(scene: Scene) -> str:
  step = begin(scene)
  newest = scene.checkpoints / f'checkpoint_{step:08d}'
  older = scene.checkpoints / f'checkpoint_{step - SAVE_INTERVAL:08d}'
  what = scene.rng.choice(('emptied', 'older in its place', 'no state', 'no input', 'state of the older one', 'half'))
  scene.where = what
  parts = {'no state': 'state', 'no input': 'input', 'state of the older one': 'state'}
  if what == 'half':
    files = files_of(scene, step)
    for path in scene.rng.sample(files, max(1, len(files) // 2)):
      path.unlink()
  else:
    part = parts.get(what, '.')
    shutil.rmtree(newest / part)
    if 'older' in what:
      shutil.copytree(older / part, newest / part)
    elif part == '.':
      newest.mkdir()
  return go_on_without_the_newest(scene, step)


@kind('damage/all checkpoints', share=2)
def damage_all(scene: Scene) -> str:
  """No checkpoint is intact: the job must refuse, twice, and resume once one is repaired."""
  step = begin(scene)
  restore = scene.backup(scene.checkpoints)
  for damaged in (step, step - SAVE_INTERVAL):
    path = scene.rng.choice(files_of(scene, damaged))
    DAMAGES[scene.rng.choice(('one bit', 'emptied', 'deleted', 'garbage'))](path, scene.rng)
  scene.where = f'steps {step - SAVE_INTERVAL} and {step}'
  for _ in range(2):
    ended = scene.run()
    check(ended.returncode != exit_codes.OK, 'it started again from the beginning')
    judge.check_refusal(ended, REFUSED)
  restore()
  scene.resume()
  return f'refused twice ({judge.sentence_of(ended)}); repaired, went on, bit for bit'


LINES: dict[str, Callable[[bytes, random.Random], bytes]] = {
  'garbage': lambda line, rng: rng.randbytes(len(line)).replace(b'\n', b' '),
  'zeros': lambda line, rng: bytes(len(line)),
  'cut': lambda line, rng: line[: rng.randrange(len(line))],
  'bad UTF-8': lambda line, rng: b'\xff\xfe' + line,
  'another JSON value': lambda line, rng: rng.choice((b'7', b'null', b'[]', b'"step"', b'{}', b'{"step": "x"}')),
  'deep JSON': lambda line, rng: b'[' * 100_000,
  'empty': lambda line, rng: b'',
  'two run together': lambda line, rng: line + line,
}


@kind('damage/metrics of the job or of an eval', share=8)
def damage_metrics(scene: Scene) -> str:
  """Damaged records must neither block a restart nor change what is trained."""
  begin(scene)
  path = scene.job_log_dir / scene.rng.choice(('metrics.jsonl', 'eval/valid/metrics.jsonl'))
  lines = path.read_bytes().splitlines()
  number = scene.rng.randrange(len(lines))
  name = scene.rng.choice(sorted(LINES))
  scene.where = f'line {number + 1} of {len(lines)} of {path.name}: {name}'
  lines[number] = LINES[name](lines[number], scene.rng)
  path.write_bytes(b''.join(line + b'\n' for line in lines))
  whole = [line for at, line in enumerate(lines) if at != number]
  ended = scene.run()
  was_refused = ended.returncode != exit_codes.OK
  if was_refused:
    judge.check_refusal(ended, REFUSED)
    check(path.name in ended.stderr, 'the refusal does not name the file')
    path.write_bytes(b''.join(line + b'\n' for line in whole))
    ended = scene.run()
  judge.check_no_traceback(ended.stderr)
  # All other lines stay as they were; the damaged one stays too, or is set aside.
  aside = path.with_name(f'{path.name}.bad_lines')
  content = path.read_bytes() + (aside.read_bytes() if aside.exists() else b'')
  check(was_refused or lines[number] in content, 'the damaged line is lost')
  after = [line for line in path.read_bytes().split(b'\n')[:-1] if line != lines[number] or line in whole]
  check(after[: len(whole)] == whole, 'the restart has changed whole lines')
  path.write_bytes(b''.join(line + b'\n' for line in after))
  scene.check_as_undisturbed(may_lack=path)
  return 'went on, bit for bit'


@kind('damage/config, lock and records', share=4)
def damage_small_files(scene: Scene) -> str:
  begin(scene)
  names = ('config.json', 'job.lock', 'startup.json', 'parameters.txt', 'goodput.json')
  path = scene.job_log_dir / scene.rng.choice(names)
  name = scene.rng.choice(sorted(DAMAGES))
  scene.where = f'{name}: {path.name}'
  before = path.read_bytes()
  if before:
    DAMAGES[name](path, scene.rng)
  return scene.accept(scene.run(), lambda: path.write_bytes(before), codes=REFUSED)


@kind('damage/a checkpoint asked for by its step', share=2)
def damage_step_asked_for(scene: Scene) -> str:
  """`--mode eval --checkpoint_step N` with a damaged N never evaluates another step, and changes nothing."""
  step = begin(scene)
  path = scene.rng.choice(files_of(scene, step))
  name = scene.rng.choice(('one bit', 'emptied', 'deleted', 'truncated', 'garbage'))
  DAMAGES[name](path, scene.rng)
  scene.where = f'{name}: {path.relative_to(scene.checkpoints)}'
  before = sorted(path.name for path in scene.checkpoints.iterdir())
  flags = scene.command('eval')
  ended = scene.run(*flags, '--checkpoint_step', step)
  judge.check_refusal(ended, REFUSED)
  check('is damaged' in ended.stderr, f'it does not say that the checkpoint is damaged: {judge.sentence_of(ended)}')
  check(sorted(path.name for path in scene.checkpoints.iterdir()) == before, 'a reader has renamed something')
  ended = scene.run(*flags)
  check(ended.returncode == exit_codes.OK, f'eval of the newest whole one: {judge.sentence_of(ended)}')
  check(f'step {step - SAVE_INTERVAL}  eval' in ended.stderr, 'eval did not take the newest whole checkpoint')
  judge.keep_steps(scene.job_log_dir / 'eval/valid/metrics.jsonl', scene.reference.evals['valid'])
  return go_on_without_the_newest(scene, step)


@kind('damage/a manifest leads out of its directory', share=2)
def manifest_leads_out(scene: Scene) -> str:
  """A manifest with a valid digest, which a stranger can write: its files must be in the checkpoint."""
  saved = 10
  scene.begun(saved, saved + 1)
  newest = scene.checkpoints / f'checkpoint_{saved:08d}'
  path = newest / 'manifest.json'
  body = json.loads(path.read_text())['body']
  secret = scene.path / 'secret'
  secret.write_text('a secret')
  name = scene.rng.choice(
    (f'../../../{secret.name}', str(secret), '/etc/passwd', '../../../../../etc/passwd', '/dev/zero')
  )
  body['files'].append([name, 8, hashlib.sha256(b'a secret').hexdigest()])
  path.write_text(judge.sealed(body))
  scene.where = name
  ended = scene.run()
  check(secret.read_text() == 'a secret', 'a file outside was changed')
  check(
    'a secret' not in ended.stdout + ended.stderr and 'root:' not in ended.stderr, 'the content of a file was shown'
  )
  return scene.accept(ended, codes=REFUSED)
