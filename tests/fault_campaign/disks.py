"""Disks that are full, or that answer with errors: at any operation, at any number of bytes left.

A full disk is a file system in memory, mounted for the scene; errors take the place of operations (injected.py).
"""

import errno
import subprocess

from spmd_tasks import exit_codes
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.injected import Point
from tests.fault_campaign.judge import check
from tests.fault_campaign.kills import CHANGES
from tests.fault_campaign.scene import Scene, SkippedError, matching

# A job that was running fails; one that had nothing begun yet is refused.
REFUSED = (exit_codes.FAILED, exit_codes.USAGE)
OPERATIONS = (*CHANGES, 'read')


def mount(scene: Scene, options: str) -> None:
  """Mounts a file system in memory as the scene's disk, with job_log_dir on it."""
  scene.disk.mkdir()
  mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', scene.disk], capture_output=True, text=True)
  if mounted.returncode:
    raise SkippedError(f'no file system can be mounted here: {mounted.stderr.strip()}')
  scene.at_end(subprocess.run, ['umount', '-l', scene.disk])
  scene.job_log_dir = scene.disk / 'job'


def make_room(scene: Scene) -> None:
  (scene.disk / 'filler').unlink(missing_ok=True)
  for path in (scene.disk / 'fillers').glob('*'):
    path.unlink()


def go_on(scene: Scene, point: Point) -> str:
  """The faulty run ends well or with a sentence; then there is room again, and it goes on."""
  ended = scene.run(points=[point])
  if ended.returncode != exit_codes.OK:
    check('No space left' in ended.stderr, f'the sentence does not name the reason: {judge.sentence_of(ended)}')
  else:
    make_room(scene)
  return scene.accept(ended, REFUSED, repair=lambda: make_room(scene))


@kind('disk/full', share=5)
def full_disk(scene: Scene) -> str:
  scene.choose_job(('Plain', 'Plain', 'Padded', 'Text'))
  operations = scene.reference.operations
  mount(scene, 'size=16m')
  count = scene.rng.randrange(matching(operations, CHANGES, '^job/'))
  bytes_left = scene.rng.choice((0, 0, 4096, 8192, 20_000, 50_000, 100_000))
  scene.where = f'{bytes_left} bytes left at operation {count}'
  return go_on(
    scene, Point(operations=CHANGES, path='job/', count=count, action='fill', value=[str(scene.disk), bytes_left])
  )


@kind('disk/no inodes', share=3)
def no_inodes(scene: Scene) -> str:
  operations = scene.reference.operations
  mount(scene, 'size=16m,nr_inodes=400')
  count = scene.rng.randrange(matching(operations, CHANGES, '^job/'))
  num_left = scene.rng.choice((0, 0, 1, 2, 5, 10, 20))
  scene.where = f'{num_left} inodes left at operation {count}'
  return go_on(
    scene, Point(operations=CHANGES, path='job/', count=count, action='inodes', value=[str(scene.disk), num_left])
  )


@kind('disk/too small from the beginning', share=1)
def small_disk(scene: Scene) -> str:
  kilobytes = scene.rng.choice((4, 16, 40, 64, 100, 160))
  scene.where = f'{kilobytes} KiB'
  mount(scene, f'size={kilobytes}k')
  ended = scene.run()
  if ended.returncode != exit_codes.OK:
    check('No space left' in ended.stderr, f'the sentence does not name the reason: {judge.sentence_of(ended)}')
  grow = ['mount', '-o', 'remount,size=16m', scene.disk]
  return scene.accept(ended, REFUSED, repair=lambda: subprocess.run(grow, check=True))


@kind('disk/one error', share=5)
def one_error(scene: Scene) -> str:
  """EIO and its like at one operation, reads included: a job may go on, or say a sentence."""
  return _error(scene, lasting=False)


@kind('disk/errors from some operation on', share=4)
def lasting_errors(scene: Scene) -> str:
  return _error(scene, lasting=True)


def _error(scene: Scene, *, lasting: bool) -> str:
  scene.choose_job(('Plain', 'Plain', 'Text'))
  code = scene.rng.choice((errno.EIO, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE))
  count = scene.rng.randrange(matching(scene.reference.operations, OPERATIONS, '^job/'))
  kinds = [kind for kind, path in scene.reference.operations if path.startswith('job/')]
  place = [path for _, path in scene.reference.operations if path.startswith('job/')][count]
  scene.where = f'{errno.errorcode[code]} at operation {count} ({kinds[count]} {place})'
  point = Point(operations=OPERATIONS, path='^job/', count=count, lasting=lasting, action='error', value=code)
  return scene.accept(scene.run(points=[point]), REFUSED)


@kind('disk/no permission', share=2)
def no_permission(scene: Scene) -> str:
  """A part of the job's directory that the job may not change, from the start."""
  part = scene.rng.choice(('job', 'job/checkpoints', 'job/eval', 'job/metrics.jsonl', 'job/config.json'))
  saved = scene.rng.choice((0, 10))
  if saved:
    scene.begun(saved, saved + 2)
  scene.where = f'{part}, after step {saved}'
  point = Point(operations=CHANGES, path=f'^{part}', lasting=True, action='error', value=errno.EACCES)
  ended = scene.run(points=[point])
  check(ended.returncode != exit_codes.OK, 'it ended well, although it could not write')
  return scene.accept(ended, REFUSED)
