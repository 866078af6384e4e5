"""Inputs that change while they are read, have bad records, or whose readers hang or raise."""

from collections.abc import Callable
import errno
import json
import os
from pathlib import Path
import random
import shutil
import signal

from spmd_tasks import exit_codes
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.injected import Point
from tests.fault_campaign.judge import check
from tests.fault_campaign.scene import Ended, Scene


def accept(scene: Scene, ended: Ended, repair: Callable[[], object] = lambda: None) -> str:
  """A job never trains on changed data: it continues bit for bit, or refuses until the data are restored."""
  judge.compare_lines(judge.metric_lines(scene.job_log_dir / 'metrics.jsonl'), scene.reference.metrics, 'metrics.jsonl')
  return scene.accept(ended, repair)


def shrink(path: Path, rng: random.Random) -> None:
  os.truncate(path, rng.randrange(1, path.stat().st_size))


def grow(path: Path, rng: random.Random) -> None:
  data = path.read_bytes()
  with path.open('ab') as file:
    file.write(data[: data.find(b'\n') + 1] * rng.randrange(1, 20))


def become_directory(path: Path, _: random.Random) -> None:
  path.unlink()
  path.mkdir()


def become_fifo(path: Path, _: random.Random) -> None:
  path.unlink()
  os.mkfifo(path)


CHANGES: dict[str, Callable[[Path, random.Random], object]] = {
  'shrunk': shrink,
  'truncated to 0': lambda path, _: os.truncate(path, 0),
  'deleted': lambda path, _: path.unlink(),
  'grown': grow,
  'a directory': become_directory,
  'a FIFO': become_fifo,
}


@kind('input/a file changes while it is read, or between two runs', share=10)
def file_changes(scene: Scene) -> str:
  scene.choose_job(('Text', 'Json'))
  data = scene.write_data()
  restore = scene.backup(data)
  is_between = scene.rng.random() < 0.3
  # Between two runs, any other size is noticed before anything is read; a deletion too.
  names = [name for name in sorted(CHANGES) if not (is_between and name.startswith('a '))]
  name, wanted = scene.rng.choice(names), scene.rng.randrange(6, 16)
  path = scene.rng.choice(sorted(data.iterdir()))
  scene.where = f'{path.name} {name} after step {wanted}' + (', between two runs' if is_between else '')
  process = scene.start()
  scene.wait_until(process, lambda: scene.num_steps() >= wanted)
  process.send(signal.SIGKILL if is_between else signal.SIGSTOP)
  if is_between:
    scene.finish(process)
  CHANGES[name](path, scene.rng)
  process.send(signal.SIGCONT)
  ended = scene.run() if is_between else scene.finish(process)
  check(not is_between or ended.returncode != exit_codes.OK, 'it went on although the data are others')
  if name == 'grown' and ended.returncode != exit_codes.OK:
    named = (str(data),) if is_between else ('grown', path.name)  # between two runs, the digest of all files differs
    check(any(name in ended.stderr for name in named), 'the sentence does not name the file')
  return accept(scene, ended, restore)


RECORDS: dict[str, bytes] = {
  'not JSON': b'{"text": ',
  'no object': b'[1, 2]',
  'no text': b'{"texts": "a"}',
  'a number': b'{"text": 7}',
  'bad UTF-8': b'{"text": "\xff\xfe"}',
  'deep JSON': b'[' * 200_000,
  'NULs': bytes(50),
  'garbage': bytes(range(128, 256)),
}


@kind('input/a bad record', share=4)
def bad_record(scene: Scene) -> str:
  """The error names the file (and the line of JSON lines); without the record the job continues."""
  scene.choose_job(('Text', 'Json', 'Json'))
  data = scene.write_data()
  restore = scene.backup(data)
  name = scene.rng.choice(sorted(RECORDS)) if scene.job == 'Json' else 'garbage'
  for path in sorted(data.iterdir()):  # in many places, as the job does not read all of them
    content = path.read_bytes()
    if scene.job == 'Json':
      lines = content.splitlines(keepends=True)
      lines[::3] = [RECORDS[name] + b'\n'] * len(lines[::3])
      path.write_bytes(b''.join(lines))
    else:
      pieces = [content[at : at + 100] for at in range(0, len(content), 100)]
      path.write_bytes(b''.join(piece[:50] + bytes(range(200, 230)) + piece[80:] for piece in pieces)[: len(content)])
  scene.where = f'{name}, {scene.flags}'
  ended = scene.run()
  judge.check_refusal(ended)
  check(str(data) in ended.stderr, f'the sentence does not name the file: {judge.sentence_of(ended)}')
  restore()
  # Other sizes, other data: whatever was trained was of another data set.
  shutil.rmtree(scene.job_log_dir, ignore_errors=True)  # there is none if the first batch was refused
  scene.resume()
  return f'refused ({judge.sentence_of(ended)})'


@kind('input/a read raises or hangs', share=4)
def read_raises(scene: Scene) -> str:
  scene.choose_job(('Text', 'Json'))
  scene.flags = ['--set', 'read_timeout_s=3', '--set', 'input_timeout_s=10']
  name = scene.rng.choice(('EIO', 'RuntimeError', 'hangs', 'slow'))
  action = {
    'EIO': {'action': 'error', 'value': errno.EIO},
    'RuntimeError': {'action': 'raise', 'value': 'this reader is broken'},
    'hangs': {'action': 'sleep', 'value': 300},
    'slow': {'action': 'sleep', 'value': 0.5},
  }[name]
  count = scene.rng.randrange(4, 40)
  scene.where = f'{name} at read {count}'
  ended = scene.run(points=[Point(operations=('read',), path='^data/', count=count, **action)])
  check(name != 'slow' or ended.returncode == exit_codes.OK, f'a slow read ended it: {judge.sentence_of(ended)}')
  if name == 'RuntimeError' and ended.returncode == exit_codes.FAILED:  # a bug of a user's code keeps its traceback
    check('this reader is broken' in ended.stderr, 'the error is not shown')
    judge.check_digests(scene.job_log_dir, scene.reference)
    scene.resume()
    return 'shown with its traceback; then went on, bit for bit'
  return accept(scene, ended)


@kind('input/NaN or inf in data', share=4)
def not_finite(scene: Scene) -> str:
  """Nonfinite batches before good ones are skipped and counted; too many in a row end the job."""
  scene.choose_job(('Plain', 'Padded', 'Experts', 'Pipelined'))
  values = ('nan', 'inf', '-inf', '1e38')
  spikes = {str(scene.rng.randrange(22)): scene.rng.choice(values) for _ in range(scene.rng.randrange(1, 6))}
  limit = 3
  in_a_row = scene.rng.random() < 0.3
  if in_a_row:
    first = scene.rng.randrange(1, 15)
    spikes |= {str(first + i): scene.rng.choice(values) for i in range(limit)}
  scene.where = json.dumps(spikes)
  flags = ['--set', f'train_input.spikes={json.dumps(spikes)}']
  flags += ['--set', f'task.learner.max_consecutive_skips={limit if in_a_row else 10}']
  ended = scene.run(*scene.command(), *flags)
  judge.compare_lines(
    [without(line, 'num_skipped_steps') for line in judge.metric_lines(scene.job_log_dir / 'metrics.jsonl')],
    {step: without(line, 'num_skipped_steps') for step, line in scene.reference.metrics.items()},
    'metrics.jsonl',
  )
  if ended.returncode == exit_codes.OK:
    judge.compare_evals(scene.job_log_dir, scene.reference)
    counted = judge.metric_lines(scene.job_log_dir / 'metrics.jsonl')[-1]['num_skipped_steps']
    used = 0
    for position in sorted(map(int, spikes)):
      used += position < 20 + used  # a job takes 20 batches besides the broken ones
    is_right = counted <= used and bool(counted) == bool(used)
    check(is_right, f'{counted} steps were counted as skipped, of {used} broken batches')
    return f'{counted:g} updates skipped; the rest is bit-equal'
  judge.check_refusal(ended, (exit_codes.FAILED,))
  check('in a row' in ended.stderr, judge.sentence_of(ended))
  return judge.sentence_of(ended)


def without(line: dict, name: str) -> dict:
  return {key: value for key, value in line.items() if key != name}
