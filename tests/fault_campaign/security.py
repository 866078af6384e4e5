"""Files that a stranger may have written: they name code, or lead out of their directory."""

import hashlib
import json
from pathlib import Path

from spmd_tasks import exit_codes
from tests.binary import REPOSITORY
from tests.fault_campaign import judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.judge import check
from tests.fault_campaign.scene import Scene

REFUSED = (exit_codes.USAGE,)


def plant(scene: Scene, directory: Path) -> Path:
  """A package `evil` in a directory, whose import leaves a mark; returns the mark."""
  mark = scene.path / 'mark'
  (directory / 'evil').mkdir(parents=True, exist_ok=True)
  (directory / 'evil/__init__.py').write_text(f'open({str(mark)!r}, "w").write("imported")\n')
  (directory / 'evil/job.py').write_text(f'open({str(mark)!r}, "w").write("imported")\nclass Job: pass\n')
  return mark


@kind('security/a config names a module', share=3)
def config_names_module(scene: Scene) -> str:
  """A saved config may name what is registered; nothing else is imported for it, wherever it lies."""
  scene.begun(10, 12)
  where = scene.rng.choice(('current directory', 'PYTHONPATH', 'job_log_dir'))
  place = {
    'current directory': scene.path / 'here',
    'PYTHONPATH': scene.path / 'path',
    'job_log_dir': scene.job_log_dir,
  }
  mark = plant(scene, place[where])
  (scene.path / 'here').mkdir(exist_ok=True)
  saved = json.loads((scene.job_log_dir / 'config.json').read_text())
  saved['experiment'] = scene.rng.choice(
    ('evil.job.Job', 'evil.Job', 'evil.job.os.system', 'evil', 'this.s', 'antigravity.x')
  )
  name = scene.rng.choice(('--config', '--job_log_dir'))
  path = scene.path / 'stranger.json' if name == '--config' else scene.job_log_dir / 'config.json'
  path.write_text(json.dumps(saved))
  scene.where = f'{saved["experiment"]} by {name}, in {where}'
  flags = ['--mode', 'eval', '--job_log_dir', scene.job_log_dir, *(['--config', path] if name == '--config' else [])]
  flags += scene.rng.choice(([], ['--experiment_path', REPOSITORY]))  # which holds the job, and no `evil`
  python_path = f'{scene.path / "path"}:{REPOSITORY}'
  process = scene.start_injected(flags, cwd=scene.path / 'here', env={'PYTHONPATH': python_path})
  ended = scene.finish(process)
  check(not mark.exists(), 'the module was imported')
  judge.check_refusal(ended, REFUSED)
  check('Zen of Python' not in ended.stdout, 'a module of the standard library was imported')
  return f'refused ({judge.sentence_of(ended)})'


VALUES = (
  {'symbol': 'os:system'},
  {'symbol': 'evil.job:Job'},
  {'object': 'evil:Job', 'repr': 'Job()'},
  {'enum': 'evil:Job', 'name': 'a'},
  {'symbol': 'builtins:eval', 'partial': {'a': 1}},
  {'float': 'nan'},
  {'dict': {'__class__': 1}},
  '$(touch mark)',
  '../../../../etc/passwd',
  None,
)


@kind('security/a config holds values of its own', share=3)
def config_values(scene: Scene) -> str:
  """Changed values in the job's config.json: refused by their path, or taken as plain data."""
  scene.begun(10, 12)
  mark = plant(scene, scene.path / 'here')
  path = scene.job_log_dir / 'config.json'
  before = path.read_bytes()
  saved = json.loads(before)
  part = scene.rng.choice(('config', 'overrides'))
  field = scene.rng.choice(sorted(saved['config']))
  value = scene.rng.choice(VALUES)
  saved[part] = dict(saved[part]) | {field: value}
  path.write_text(json.dumps(saved))
  scene.where = f'{part}.{field} = {value!r}'
  flags = ['--mode', 'eval', '--job_log_dir', scene.job_log_dir, '--num_fake_devices', 1]
  flags += ['--experiment_path', REPOSITORY]
  ended = scene.finish(scene.start_injected(flags, cwd=scene.path / 'here'))
  check(not mark.exists(), 'a module was imported')
  judge.check_no_traceback(ended.stderr)
  check(ended.returncode in (exit_codes.OK, *judge.REFUSED), f'exit code {ended.returncode}')
  if ended.returncode:
    judge.check_refusal(ended)
  path.write_bytes(before)
  scene.resume()
  return 'refused or harmless; with the old config it went on, bit for bit'


@kind('security/a manifest leads out of its directory', share=2)
def manifest_leads_out(scene: Scene) -> str:
  """A manifest whose digest is right, as a stranger can make it: its files must lie in the checkpoint."""
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
