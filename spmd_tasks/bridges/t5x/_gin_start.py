"""Starts a gin setup of T5X: says it by --exp and --set, or writes it as a Python file (--translate)."""

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
  """Changes the flags of a command that names a gin setup; returns an exit code where --translate is all.

  Raises a UserError if the setup cannot be read, or has something that changes numbers and has no counterpart here.
  """
  files = ([flags.exp] if (flags.exp or '').endswith('.gin') else []) + flags.gin_file
  if not files:
    raise UserError(f'--{"translate" if flags.translate else "gin.NAME"} needs a gin file: give --gin_file FILE.')
  if (flags.exp and flags.exp not in files) or flags.config:
    raise UserError('--gin_file and --exp, or --config, both name an experiment: give one of them.')
  setup = read_setup(files, [_binding(each) for each in flags.gin], flags.gin_search_paths)
  made = translate(setup)
  _continue_model_dir(made, files, flags)
  if flags.translate:
    return _write(made, flags.translate, files)
  for title, notes in (('Not translated', made.missing), ('Done differently', made.notes)):
    if notes:
      print('\n'.join([f'{title}:', *(f'  {note}' for note in dict.fromkeys(notes))]), file=sys.stderr, flush=True)
  if made.missing:
    raise UserError(
      f'{len(made.missing)} settings of {files[0]} have no counterpart, see above, so that numbers would differ: '
      'change them, or write the setup as a Python file by --translate FILE, and change that.'
    )
  flags.exp = f'{EXPERIMENTS}.{made.experiment}'
  flags.overrides = [f'{name}={value}' for name, value in made.fields.items()] + flags.overrides
  _allow_modules(made.fields.get('task_modules', ()), flags)
  return None


def _allow_modules(modules: Sequence[str], flags: argparse.Namespace) -> None:
  """Lets the modules that --gin names be found in the current directory, as those of --exp are.

  Raises a UserError for one that only a file names, which anybody may have written, and that is neither below
  --experiment_path nor of a package that configs may name.
  """
  is_typed = {name: any(re.search(rf'[\'"]{re.escape(name)}[\'"]', text) for text in flags.gin) for name in modules}
  directories = add_to_search_path(flags.experiment_path)
  for name in modules:
    if not is_typed[name] and not may_be_imported(name, (), directories):
      raise UserError(
        f'the gin setup names the module {name}, and a file alone never decides what is imported: '
        f'{remedy(name.partition(".")[0])}, or name it in the command, as in '
        f'--gin.MIXTURE_OR_TASK_MODULE="\'{name}\'".'
      )
  if any(is_typed.values()):
    flags.experiment_path = flags.experiment_path + ['.']


def _binding(text: str) -> str:
  """Returns `NAME=VALUE` of --gin.NAME=VALUE as a line of gin."""
  name, equals, value = text.partition('=')
  if not equals:
    raise UserError(f'--gin.{text} is no binding: write --gin.NAME=VALUE, a text in quotes within quotes.')
  return f'{name} = {value}'


def _continue_model_dir(made: Translation, files: list[str], flags: argparse.Namespace) -> None:
  """Lets a training run go on from the checkpoints of its MODEL_DIR, or write into a MODEL_DIR that has none of T5X."""
  if made.mode != 'train' or made.model_dir is None:
    return
  places = [Path(made.model_dir), *([Path(files[0]).parent] if Path(files[0]).name == 'config.gin' else [])]
  for place in places:
    found = (re.fullmatch(r'checkpoint_(\d+)', path.name) for path in place.glob('checkpoint_*'))
    steps = [int(each[1]) for each in found if each]
    if steps:
      if not flags.job_log_dir and not flags.translate and flags.mode:
        raise UserError(
          f'{place} holds checkpoints of T5X, from which this job goes on: give --job_log_dir, another directory.'
        )
      made.fields |= {'init_from': f't5x:{place}', 'skips_trained_batches': True}
      made.fields['init_from_step'] = max(steps) or None
      if made.relative_steps:
        made.fields['num_train_steps'] = made.relative_steps + max(steps)
      return
  flags.job_log_dir = flags.job_log_dir or str(made.model_dir)


def _write(made: Translation, target: str, files: list[str]) -> int:
  path = epath.Path(target)
  if path.exists():
    raise UserError(f'{path} exists: choose another file by --translate, or delete it.')
  name = ''.join(part.title() for part in re.split(r'\W|_', path.stem) if part)
  if not name.isidentifier():
    raise UserError(f'--translate {target} must be a file whose name can be that of a class, such as my_setup.py.')
  if not is_remote(path) and not path.parent.is_dir():
    raise UserError(f'--translate {target}: there is no directory {path.parent}: make it, or name another file.')
  with storage_errors(path):
    write_durably(path, source_file(name, made, files))
  listed = [f'  {each}' for each in made.missing]
  print('\n'.join([f'wrote {path}: --exp {path.stem}.{name}', *(['Not translated:', *listed] if listed else [])]))
  return exit_codes.OK
