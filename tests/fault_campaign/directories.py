"""Directories that were removed, emptied, replaced by something else, or hold the user's own files."""

from collections.abc import Callable
import os
from pathlib import Path
import random
import shutil
import signal

from spmd_tasks import exit_codes
from tests import binary
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.experiments import SAVE_INTERVAL
from tests.fault_campaign.judge import check
from tests.fault_campaign.scene import Scene


def begin(scene: Scene) -> int:
  saved = scene.rng.choice((10, 15))
  scene.begun(saved, saved + scene.rng.randrange(SAVE_INTERVAL))
  return saved


@kind('directory/no checkpoints where there were some', share=4)
def checkpoints_gone(scene: Scene) -> str:
  """As if the disk were not mounted: metrics exist, so a start at step 0 must be refused."""
  begin(scene)
  restore = scene.backup(scene.checkpoints)
  what = scene.rng.choice(('gone', 'emptied', 'all partial', 'all deleting', 'a dangling link', 'other names'))
  scene.where = what
  if what in ('gone', 'emptied', 'a dangling link'):
    shutil.rmtree(scene.checkpoints)
    if what == 'emptied':
      scene.checkpoints.mkdir()
    elif what == 'a dangling link':
      scene.checkpoints.symlink_to(scene.path / 'unmounted')
  else:
    suffix = {'all partial': '.partial', 'all deleting': '.deleting', 'other names': '.old'}[what]
    for path in scene.checkpoints.iterdir():
      path.rename(path.with_name(path.name + suffix))
  lines = (scene.job_log_dir / 'metrics.jsonl').read_bytes()
  for _ in range(2):
    ended = scene.run()
    check(ended.returncode != exit_codes.OK, 'it started again at step 0')
    judge.check_refusal(ended)
    check((scene.job_log_dir / 'metrics.jsonl').read_bytes() == lines, 'the refused start has written metrics')
  restore()
  scene.resume()
  return f'refused twice ({judge.sentence_of(ended)}); with them back it went on, bit for bit'


OTHER_TYPES: dict[str, Callable[[Path, random.Random], object]] = {
  'a directory': lambda path, _: path.mkdir(),
  'a full directory': lambda path, _: ((path / 'own').mkdir(parents=True), (path / 'own/notes.txt').write_text('mine')),
  'a FIFO': lambda path, _: os.mkfifo(path),
  'a dangling link': lambda path, _: path.symlink_to(path.parent / 'nowhere'),
  'a link to itself': lambda path, _: path.symlink_to(path),
  'a link to /dev/full': lambda path, _: path.symlink_to('/dev/full'),
}
FILES = (
  *('metrics.jsonl', 'eval/valid/metrics.jsonl', 'config.json', 'job.lock'),
  *('parameters.txt', 'startup.json', 'goodput.json'),
)
DIRECTORIES = ('.', 'checkpoints', 'eval', 'eval/valid', 'ranks', 'checkpoints/newest', 'checkpoints/next.partial')


@kind('directory/something else in place of a file', share=5)
def other_type_for_file(scene: Scene) -> str:
  begin(scene)
  path = scene.job_log_dir / scene.rng.choice(FILES)
  name = scene.rng.choice(sorted(OTHER_TYPES))
  scene.where = f'{name} for {path.relative_to(scene.job_log_dir)}'
  content = path.read_bytes() if path.is_file() else None
  return _in_place(scene, path, name, content)


def _in_place(scene: Scene, path: Path, name: str, content: bytes | None) -> str:
  if content is not None:
    path.unlink()
  path.parent.mkdir(parents=True, exist_ok=True)
  OTHER_TYPES[name](path, scene.rng)

  def repair() -> None:
    notes = path / 'own/notes.txt'
    check(name != 'a full directory' or notes.read_text() == 'mine', "the user's own files are gone")
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    else:
      path.unlink(missing_ok=True)
    if content is not None:
      path.write_bytes(content)

  ended = scene.run()
  if ended.returncode == exit_codes.OK and path.name == 'metrics.jsonl':
    check(path.is_file(), 'it ended well, but there is no metrics file')
    path.write_bytes((content or b'') + path.read_bytes())  # what was there before the fault
  return scene.accept(ended, repair)


@kind('directory/something else in place of a directory', share=5)
def other_type_for_directory(scene: Scene) -> str:
  saved = begin(scene)
  places = {
    'checkpoints/newest': f'checkpoints/checkpoint_{saved:08d}',
    'checkpoints/next.partial': f'checkpoints/checkpoint_{saved + SAVE_INTERVAL:08d}.partial',
  }
  place = scene.rng.choice(DIRECTORIES)
  path = scene.job_log_dir / places.get(place, place)
  names = ['a file', *sorted(name for name in OTHER_TYPES if 'directory' not in name)]
  name = scene.rng.choice(names)
  scene.where = f'{name} for {place}'
  aside = scene.path / 'aside'
  existed = path.is_dir()
  if existed:
    path.rename(aside)
  if name == 'a file':
    path.write_text('a file')
  else:
    OTHER_TYPES[name](path, scene.rng)

  def repair() -> None:
    for existing in path.parent.glob(f'{path.name}*'):  # also where it was set aside
      if existing.is_symlink() or not existing.is_dir():
        existing.unlink()
    if existed:
      aside.rename(path)

  ended = scene.run()
  if ended.returncode == exit_codes.OK and place in ('eval', 'eval/valid') and existed:
    for old in aside.rglob('metrics.jsonl'):  # what was there before the fault
      new = path / old.relative_to(aside)
      new.write_bytes(old.read_bytes() + (new.read_bytes() if new.exists() else b''))
  return scene.accept(ended, repair)


@kind("directory/the user's own things beside", share=4)
def own_things(scene: Scene) -> str:
  """A job does not touch files of others, whatever their names."""
  saved = begin(scene)
  newest = f'checkpoints/checkpoint_{saved:08d}'
  suffixes = ('.partial-backup', '.partial.tar', '.deleting.me', '-backup', '.old')
  names = [f'{newest}{suffix}' for suffix in suffixes] + ['notes', 'eval/other', 'ranks_of_mine']
  names += [f'checkpoints/{name}' for name in ('checkpoint_latest', 'best', '.hidden', 'checkpoint_00000003x')]
  chosen = scene.rng.sample(names, 4)
  scene.where = ', '.join(Path(name).name for name in chosen)
  for name in chosen:
    own = scene.job_log_dir / name
    if scene.rng.random() < 0.3:
      own.parent.mkdir(exist_ok=True)
      own.write_text('mine')
    else:
      (own / 'deep').mkdir(parents=True)
      (own / 'deep/notes.txt').write_text('mine')
  before = {name: binary.snapshot(scene.job_log_dir / name) for name in chosen}
  scene.resume(check_left=False)
  for name in chosen:
    check(binary.snapshot(scene.job_log_dir / name) == before[name], f"the user's {name} was changed or deleted")
  return 'went on, bit for bit; nothing was touched'


@kind('directory/links', share=2)
def links(scene: Scene) -> str:
  """job_log_dir, checkpoints or one checkpoint are links to another disk."""
  saved = begin(scene)
  place = scene.rng.choice(('.', 'checkpoints', f'checkpoints/checkpoint_{saved:08d}', 'eval', 'metrics.jsonl'))
  path = scene.job_log_dir / place
  if not path.exists():
    path = scene.checkpoints
  scene.where = str(path.relative_to(scene.path))
  moved = scene.path / 'elsewhere'
  path.rename(moved)
  path.symlink_to(moved)
  return scene.accept(scene.run(), lambda: (path.unlink(), moved.rename(path)))


@kind('directory/a second job in it', share=2)
def second_job(scene: Scene) -> str:
  process = scene.start()
  wanted = scene.rng.randrange(1, 12)
  scene.where = f'after step {wanted}'
  scene.wait_until(process, lambda: scene.num_steps() >= wanted)
  process.send(signal.SIGSTOP)  # whatever changes meanwhile, the second one did
  before = binary.snapshot(scene.job_log_dir)
  second = scene.run()
  changed = binary.snapshot(scene.job_log_dir) != before
  process.send(signal.SIGCONT)
  ended = scene.finish(process)
  judge.check_refusal(second, (exit_codes.USAGE,))
  check('in use by another running job' in second.stderr, judge.sentence_of(second))
  check(not changed, 'the refused job has changed something')
  check(ended.returncode == exit_codes.OK, f'the first job ended with {ended.returncode}')
  scene.check_as_undisturbed()
  return 'refused; the first one was not disturbed'


@kind('directory/gone while the job runs', share=2)
def gone_while_running(scene: Scene) -> str:
  """The directory or a checkpoint of a running job is removed or renamed."""
  process = scene.start()
  wanted = scene.rng.randrange(1, 18)
  what = scene.rng.choice(('checkpoints', 'the newest checkpoint'))
  scene.where = f'{what} after step {wanted}'
  scene.wait_until(process, lambda: scene.num_steps() >= wanted)
  process.send(signal.SIGSTOP)
  aside = scene.path / 'aside'
  aside.mkdir()
  steps = judge.complete_steps(scene.job_log_dir)
  is_one = what != 'checkpoints' and steps
  path = scene.checkpoints / f'checkpoint_{steps[-1]:08d}' if is_one else scene.checkpoints
  if path.exists():
    path.rename(aside / path.name)
  process.send(signal.SIGCONT)
  ended = scene.finish(process)
  judge.check_no_traceback(ended.stderr)

  if ended.returncode == exit_codes.OK:
    judge.check_digests(scene.job_log_dir, scene.reference)
    return 'ended well; what is there has the right bits'
  judge.check_refusal(ended)
  shutil.copytree(aside, path.parent, dirs_exist_ok=True)
  scene.run()
  judge.compare_with_reference(scene.job_log_dir, scene.reference)
  return f'said so ({judge.sentence_of(ended)}); with it back it went on, bit for bit'
