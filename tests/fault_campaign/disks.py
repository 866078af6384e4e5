"""Disks that are full or return errors, at any operation, with any number of free bytes or inodes.

A full disk is a file system in memory, mounted for the scene; errors take the place of operations (injected.py).
"""

from collections.abc import Sequence
import errno
import subprocess

from spmd_tasks import exit_codes
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.injected import Point
from tests.fault_campaign.judge import check
from tests.fault_campaign.kills import CHANGES
from tests.fault_campaign.scene import Ended, Scene, SkippedError, matching

OPERATIONS = (*CHANGES, 'read')


def mount(scene: Scene, options: str) -> None:
  """Mounts a tmpfs as the scene's disk, with job_log_dir on it."""
  scene.disk.mkdir()
  mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', scene.disk], capture_output=True, text=True)
  if mounted.returncode:
    raise SkippedError(f'no file system can be mounted here: {mounted.stderr.strip()}')
  scene.at_end(subprocess.run, ['umount', '-l', scene.disk])
  scene.job_log_dir = scene.disk / 'job'


def make_room(scene: Scene) -> None:
  for path in (scene.disk / 'fillers').glob('*'):
    path.unlink()


def check_reason(ended: Ended) -> None:
  named = ended.returncode == exit_codes.OK or 'No space left' in ended.stderr
  check(named, f'the sentence does not name the reason: {judge.sentence_of(ended)}')


def _fill(scene: Scene, options: str, action: str, lefts: Sequence[int], what: str) -> str:
  """Fills the disk during the run, which must succeed or refuse; then frees it, and the run must resume."""
  operations = scene.reference.operations
  mount(scene, options)
  count = scene.rng.randrange(matching(operations, CHANGES, '^job/'))
  left = scene.rng.choice(lefts)
  scene.where = f'{left} {what} left at operation {count}'
  point = Point(operations=CHANGES, path='job/', count=count, action=action, value=[str(scene.disk), left])
  ended = scene.run(points=[point])
  check_reason(ended)
  make_room(scene)
  return scene.accept(ended)


@kind('disk/full', share=5)
def full_disk(scene: Scene) -> str:
  scene.choose_job(('Plain', 'Plain', 'Padded', 'Text'))
  return _fill(scene, 'size=16m', 'fill', (0, 0, 4096, 8192, 20_000, 50_000, 100_000), 'bytes')


@kind('disk/no inodes', share=3)
def no_inodes(scene: Scene) -> str:
  return _fill(scene, 'size=16m,nr_inodes=2000', 'inodes', (0, 0, 1, 2, 5, 10, 20), 'inodes')


@kind('disk/errors at some operation, or from there on', share=9)
def errors(scene: Scene) -> str:
  """EIO and similar errors, also of reads: the job may continue or refuse."""
  lasting = scene.rng.random() < 0.4
  scene.choose_job(('Plain', 'Plain', 'Text'))
  code = scene.rng.choice((errno.EIO, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE))
  seen = [
    operation
    for operation in scene.reference.operations
    if operation[0] in OPERATIONS and operation[1].startswith('job/')
  ]
  count = scene.rng.randrange(len(seen))
  scene.where = f'{errno.errorcode[code]} at operation {count} ({" ".join(seen[count])})' + ' and on' * lasting
  point = Point(operations=OPERATIONS, path='^job/', count=count, lasting=lasting, action='error', value=code)
  return scene.accept(scene.run(points=[point]))
