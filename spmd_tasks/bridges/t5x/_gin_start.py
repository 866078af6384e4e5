"""Translates a command with a gin setup to --exp and --set, or writes the setup as a Python file (--translate)."""

import argparse
from collections.abc import Sequence
from pathlib import Path
import re
import sys

from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.bridges.t5x._gin import read_setup
from spmd_tasks.bridges.t5x._gin_translation import Translation, source_file, translate
from spmd_tasks.config.from_saved import may_be_imported
from spmd_tasks.config.registry import add_to_search_path
from spmd_tasks.errors import UserError
from spmd_tasks.files import is_remote, storage_errors, write_durably
from spmd_tasks.references import remedy

EXPERIMENTS = 'spmd_tasks.bridges.t5x.experiments'


def start(flags: argparse.Namespace) -> int | None:
  """Replaces the flags of a gin setup by --exp and --set; returns an exit code after --translate.

  Raises a UserError if the setup cannot be read, or a setting that affects numbers is not supported.
  """
  files = ([flags.exp] if (flags.exp or '').endswith('.gin') else []) + flags.gin_file
  if not files:
    raise UserError(f'--{"translate" if flags.translate else "gin.NAME"} requires a gin file: add --gin_file FILE.')
  if (flags.exp and flags.exp not in files) or flags.config:
    raise UserError('--gin_file and --exp or --config are both set: use one of them.')
  setup = read_setup(files, flags.gin, flags.gin_search_paths)
  translation = translate(setup)
  _use_model_dir(translation, files, flags)
  if flags.translate:
    return _write_source(translation, flags.translate, files)
  for title, notes in (('Not translated', translation.missing), ('Done differently', translation.notes)):
    if notes:
      print('\n'.join([f'{title}:', *(f'  {note}' for note in dict.fromkeys(notes))]), file=sys.stderr, flush=True)
  if translation.missing:
    number = len(translation.missing)
    settings = f'{number} settings of {files[0]} (see above) are' if number > 1 else f'1 setting of {files[0]} is'
    raise UserError(
      f'{settings} not supported, so that numbers would differ: change {"them" if number > 1 else "it"}, or write the '
      'setup as a Python file with --translate FILE, and change that.'
    )
  flags.exp = f'{EXPERIMENTS}.{translation.experiment}'
  flags.overrides = [f'{name}={value}' for name, value in translation.fields.items()] + flags.overrides
  _allow_modules(translation.fields.get('task_modules', ()), flags)
  return None


def _allow_modules(modules: Sequence[str], flags: argparse.Namespace) -> None:
  """Allows the import of task modules: those that --gin names may be in the current directory, like --exp's.

  Raises a UserError if only a gin file, which may come from anyone, names a module, and it is neither below
  --experiment_path nor in a package that configs may import.
  """
  is_typed = {name: any(re.search(rf'[\'"]{re.escape(name)}[\'"]', text) for text in flags.gin) for name in modules}
  directories = add_to_search_path(flags.experiment_path)
  for name in modules:
    if not is_typed[name] and not may_be_imported(name, (), directories):
      raise UserError(
        f'the gin setup names the module {name}, but a file alone may not import modules: '
        f'{remedy(name.partition(".")[0])}, or name it in the command, as in '
        f'--gin.MIXTURE_OR_TASK_MODULE="\'{name}\'".'
      )
  if any(is_typed.values()):
    flags.experiment_path = flags.experiment_path + ['.']


def _use_model_dir(translation: Translation, files: list[str], flags: argparse.Namespace) -> None:
  """Makes a training run continue from T5X's checkpoints in its MODEL_DIR, or write to a MODEL_DIR without any."""
  if translation.mode != 'train' or translation.model_dir is None:
    return
  places = [Path(translation.model_dir), *([Path(files[0]).parent] if Path(files[0]).name == 'config.gin' else [])]
  for place in places:
    matches = (re.fullmatch(r'checkpoint_(\d+)', path.name) for path in place.glob('checkpoint_*'))
    if steps := [int(match[1]) for match in matches if match]:
      if not flags.job_log_dir and not flags.translate and flags.mode:
        raise UserError(
          f'{place} has checkpoints of T5X, from which this job continues: set --job_log_dir to another directory.'
        )
      translation.fields |= {'init_from': f't5x:{place}', 'skips_trained_batches': True}
      translation.fields['init_from_step'] = max(steps) or None
      if translation.relative_steps:
        translation.fields['num_train_steps'] = translation.relative_steps + max(steps)
      return
  flags.job_log_dir = flags.job_log_dir or str(translation.model_dir)


def _write_source(translation: Translation, target: str, files: list[str]) -> int:
  path = epath.Path(target)
  if path.exists():
    raise UserError(f'{path} exists: choose another file for --translate, or delete it.')
  name = ''.join(part.title() for part in re.split(r'\W|_', path.stem) if part)
  if not name.isidentifier():
    raise UserError(f'--translate {target} must have a name that a class can have, such as my_setup.py.')

  if not is_remote(path) and not path.parent.is_dir():
    raise UserError(f'--translate {target} is in {path.parent}, which does not exist: create it, or use another file.')
  with storage_errors(path):
    write_durably(path, source_file(name, translation, files))
  missing = [f'  {text}' for text in translation.missing]
  print('\n'.join([f'wrote {path}: --exp {path.stem}.{name}', *(['Not translated:', *missing] if missing else [])]))
  return exit_codes.OK
