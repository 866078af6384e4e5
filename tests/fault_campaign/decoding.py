"""Decode and eval jobs are killed, signalled or find damage, alone or next to a training job."""

import json
from pathlib import Path
import signal

from spmd_tasks import exit_codes
from tests.fault_campaign import damage, judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.injected import Point
from tests.fault_campaign.judge import check
from tests.fault_campaign.kills import CHANGES
from tests.fault_campaign.scene import Scene

SIZES = ('--set', 'task.decode.max_len=24', '--set', 'task.decode.num_slots=2', '--set', 'task.decode.prefill_chunk=16')
APPEND = 'spmd_tasks.programs.decoded_file:DecodedFile.append'
PROMPTS = [
  {'prompt': f'{number}: the {number}th', 'max_tokens': 6, 'temperature': number % 2, 'n': 1 + number % 3 // 2}
  for number in range(10)
]


def begin(scene: Scene) -> list[object]:
  """Prepares a trained job and a file of prompts; returns the flags that decode them."""
  scene.job = 'Text'
  scene.begun(20, 20)
  prompts = scene.path / 'prompts.jsonl'
  prompts.write_text(''.join(json.dumps(prompt) + '\n' for prompt in PROMPTS))
  return [*scene.command('decode_once'), *SIZES, '--decode_input', prompts]


def outputs_of(path: Path) -> list[object]:
  """Returns the outputs, without fields that depend on time."""
  check(path.is_file(), f'there is no {path.name}')
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  return [[line['index'], line['step'], line['outputs']] for line in lines]


def undisturbed(scene: Scene, flags: list[object]) -> list[object]:
  path = scene.path / 'undisturbed.jsonl'
  ended = scene.run(*flags, '--decode_output', path)
  check(ended.returncode == exit_codes.OK, f'an undisturbed decode ended with {ended.returncode}')
  return outputs_of(path)


def go_on(scene: Scene, flags: list[object]) -> str:
  """Checks that the same command succeeds with the outputs of an undisturbed run."""
  path = scene.job_log_dir / 'decode' / 'prompts' / 'step_20.jsonl'
  partial = path.with_name(f'{path.name}.partial')
  num_done = partial.read_bytes().count(b'\n') if partial.exists() else 0
  ended = scene.run(*flags)
  check(ended.returncode == exit_codes.OK, f'the restart ended with {ended.returncode}: {judge.sentence_of(ended)}')
  check(outputs_of(path) == undisturbed(scene, flags), 'the outputs differ from the undisturbed ones')
  check(not partial.exists(), 'a partial file is left')
  return f'{num_done} prompts were done; went on, the outputs are equal'


@kind('decode/killed', share=3)
def killed(scene: Scene) -> str:
  flags = begin(scene)
  signum = scene.rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
  place = scene.rng.choice(('line', 'operation'))
  number = scene.rng.randrange(10)
  scene.where = f'{signum.name} at {place} {number}'
  if place == 'line':
    point = Point(call=APPEND, after=scene.rng.random() < 0.5, count=number, action='signal', value=signum)
  else:
    point = Point(operations=CHANGES, path='^job/decode', count=number, action='signal', value=signum)
  ended = scene.run(*flags, points=[point])
  judge.check_no_traceback(ended.stderr)
  check(ended.returncode in judge.CODES_AFTER[signum], f'exit code {ended.returncode} after {signum.name}')
  return go_on(scene, flags)


@kind('decode/damage of its outputs', share=2)
def damaged_outputs(scene: Scene) -> str:
  """A truncated last line is decoded again; other damage is refused with the file's name."""
  flags = begin(scene)
  scene.run(*flags, points=[Point(call=APPEND, after=True, count=6, action='signal', value=signal.SIGKILL)])
  path = scene.job_log_dir / 'decode' / 'prompts' / 'step_20.jsonl.partial'
  content = path.read_bytes()
  name = scene.rng.choice(('cut', 'one bit', 'garbage', 'emptied', 'deep JSON'))
  scene.where = name
  if name == 'cut':
    path.write_bytes(content[: len(content) - scene.rng.randrange(1, 40)])
  elif name == 'deep JSON':
    path.write_bytes(b'[' * 100_000 + b'\n' + content)
  else:
    damage.DAMAGES[name](path, scene.rng)
  ended = scene.run(*flags)
  if ended.returncode == exit_codes.OK:
    if name == 'one bit':  # of a text rather than of the request, which nobody can tell
      return 'went on'
    check(outputs_of(path.with_suffix('')) == undisturbed(scene, flags), 'the outputs differ from the undisturbed ones')
    return 'went on, the outputs are equal'
  judge.check_refusal(ended, (exit_codes.USAGE,))
  path.write_bytes(content)
  return f'refused ({judge.sentence_of(ended)}); ' + go_on(scene, flags)


@kind('eval/beside a training job', share=2)
def eval_beside(scene: Scene) -> str:
  """An eval job watches a training job that is killed and resumes: both must be as undisturbed."""
  train = scene.start()
  watch = scene.start(*scene.command('eval'), '--watch')
  wanted = scene.rng.randrange(1, 18)
  scene.where = f'the training job is killed after step {wanted}'
  scene.wait_until(train, lambda: scene.num_steps() >= wanted)
  train.send(signal.SIGKILL)
  scene.finish(train)
  restarted = scene.run()
  check(restarted.returncode == exit_codes.OK, f'the restart ended with {restarted.returncode}')
  ended = scene.finish(watch)
  check(ended.returncode == exit_codes.OK, f'the eval job ended with {ended.returncode}: {judge.sentence_of(ended)}')
  judge.keep_steps(scene.job_log_dir / 'eval/valid/metrics.jsonl', scene.reference.evals['valid'])
  scene.check_as_undisturbed()
  return 'both came to their end, bit for bit'


@kind('eval/killed', share=2)
def eval_killed(scene: Scene) -> str:
  scene.begun(20, 20)
  for path in scene.job_log_dir.glob('eval/*/metrics.jsonl'):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(''.join(lines[:-1]))
  flags = scene.command('eval')
  signum = scene.rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
  delay = scene.rng.uniform(0, scene.reference.seconds / 2)
  scene.where = f'{signum.name} after {delay:.3f} s'
  process = scene.start(*flags)
  scene.send_after(process, signum, delay)
  ended = scene.finish(process)
  judge.check_no_traceback(ended.stderr)
  check(ended.returncode in judge.CODES_AFTER[signum], f'exit code {ended.returncode} after {signum.name}')
  again = scene.run(*flags)
  check(again.returncode == exit_codes.OK, f'the restart ended with {again.returncode}: {judge.sentence_of(again)}')
  scene.check_as_undisturbed()
  return f'exit code {ended.returncode}; then evaluated, bit for bit'
