"""Two processes with copies of their state in memory: lost, killed while they copy, with copies that are damaged."""

from pathlib import Path
import signal

from tests.fault_campaign import damage
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.injected import Point
from tests.fault_campaign.judge import check
from tests.fault_campaign.processes import Pair, check_ends, finished, go_on
from tests.fault_campaign.scene import Scene

COPY_INTERVAL = 2


def begin(scene: Scene) -> list[object]:
  """The flags of a job that copies its state every two steps to a directory of the scene's."""
  scene.job = 'Pair'
  memory = scene.path / 'memory'
  memory.mkdir(mode=0o700)
  return ['--set', f'peer_copy_every_steps={COPY_INTERVAL}', '--set', f'peer_copy_directory={memory}']


def copies(scene: Scene) -> list[Path]:
  return sorted(path for path in (scene.path / 'memory').rglob('*') if path.is_file() and path.stat().st_size)


def end(scene: Scene, flags: list[object], max_lost: int) -> None:
  """The restart goes on bit for bit, and a good end leaves no copy behind."""
  go_on(scene, *flags, max_lost=max_lost)
  check(not copies(scene), f'copies are left in memory: {[path.name for path in copies(scene)][:5]}')


@kind('processes/one is lost, with copies in memory', share=2)
def lost(scene: Scene) -> str:
  flags = begin(scene)
  wanted, rank = scene.rng.randrange(4, 19), scene.rng.randrange(2)
  scene.where = f'process {rank} after step {wanted}'
  pair = Pair(scene, *flags)
  check(pair.wait_for_steps(wanted), f'ended before step {wanted}')
  pair.ranks[rank].send(signal.SIGKILL)
  ended = pair.finish()
  if finished(scene, ended):
    return 'the job was faster'
  codes = check_ends(ended, signalled={rank: signal.SIGKILL})
  # A copy is sent in the background, and the next one waits for it.
  end(scene, flags, max_lost=2 * COPY_INTERVAL)
  return f'exit codes {codes}; went on from the copies or a checkpoint, bit for bit'


@kind('processes/killed while it copies to memory', share=2)
def killed_while_copying(scene: Scene) -> str:
  flags = begin(scene)
  rank, count = scene.rng.randrange(2), scene.rng.randrange(0, 40)
  scene.where = f'process {rank}, operation {count} of the copies'
  point = Point(operations=('write', 'rename', 'remove', 'mkdir'), path='^memory', count=count, action='signal',
                value=signal.SIGKILL)  # fmt: skip
  ended = Pair(scene, *flags, points={rank: [point]}).finish()
  if finished(scene, ended):
    return 'fewer operations than that'
  codes = check_ends(ended, signalled={rank: signal.SIGKILL})
  end(scene, flags, max_lost=5)
  return f'exit codes {codes}; went on, bit for bit'


@kind('processes/damaged copies in memory', share=2)
def damaged(scene: Scene) -> str:
  flags = begin(scene)
  wanted = scene.rng.randrange(5, 17)
  pair = Pair(scene, *flags)
  check(pair.wait_for_steps(wanted), f'ended before step {wanted}')
  for rank in pair.ranks:
    rank.send(signal.SIGKILL)
  pair.finish()
  found = copies(scene)
  check(found, 'there are no copies in memory')
  name = scene.rng.choice(sorted(damage.DAMAGES))
  chosen = scene.rng.sample(found, scene.rng.randrange(1, len(found) + 1))
  scene.where = f'after step {wanted}, {name}: {len(chosen)} of {len(found)} files'
  for path in chosen:
    damage.DAMAGES[name](path, scene.rng)
  end(scene, flags, max_lost=7)
  return 'went on, bit for bit'
