"""Defines the binary's flags: the common ones, and the flags that modes declare (extensions.py)."""

import argparse
from collections.abc import Sequence
import functools
import sys
from typing import Any, NoReturn

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import Flag, Mode, call, extensions
from spmd_tasks.modes import CORE

NO_DIRECTORY = 'nothing to run yet: give --job_log_dir, the directory for checkpoints and metrics.'  # an error message
_SHORTCUTS = ('num_train_steps', 'ici_mesh_shape', 'dcn_mesh_shape', 'seed')
_FDL = '--fdl.'
# Flags of every mode that may differ between processes: addresses, and flags that are recorded in the config.
_MAY_DIFFER = {
  *('coordinator_address', 'num_processes', 'process_id', 'local_device_ids', 'coordinator_bind_address', 'cluster'),
  *('initialization_timeout_s', 'exp', 'config', 'experiment_path', 'overrides', *_SHORTCUTS),
}


class _Parser(argparse.ArgumentParser):
  """A parser whose errors suggest what to write instead."""

  modes: Sequence[Mode] = ()
  _argv: Sequence[str] = ()

  def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
    """Parses a command; exits with a hint for unknown words."""
    parsed, unknown = self.parse_known_args(args, namespace)
    mode = next((mode for mode in self.modes if mode.name == parsed.mode), None)
    parsed.words = []
    if mode is not None and mode.words and not any(word.startswith('-') for word in unknown):
      parsed.words, unknown = unknown, []
    if unknown:
      self._refuse(' Also: '.join(self._hints(parsed).unknown(unknown)))
    return parsed

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    """Parses `--fdl.PATH=VALUE`, Paxml's form, as `--set PATH=VALUE`, and likewise the flags of extensions."""
    prefixes = {_FDL: '--set'} | {
      f'--{flag.name}.': f'--{flag.name}' for flag in _flags_of_extensions() if flag.repeats
    }
    words = list(sys.argv[1:] if args is None else args)
    for prefix, name in prefixes.items():
      words = [f'{name}={word.removeprefix(prefix)}' if word.startswith(prefix) else word for word in words]
    self._argv = [part for word in words for part in _without_bool(word)]
    return super().parse_known_args(self._argv, namespace)

  def error(self, message: str) -> NoReturn:
    self._refuse(f'{message.rstrip(".")}. {self._hints(argparse.Namespace()).wrong(message)}'.rstrip())

  def _refuse(self, sentences: str) -> NoReturn:
    self.exit(2, f'{self.prog}: {sentences} --help lists the flags.\n')

  def _hints(self, parsed: argparse.Namespace) -> Any:
    from spmd_tasks.flag_hints import Hints

    actions = {flag[2:]: action for action in self._actions for flag in action.option_strings if flag.startswith('--')}
    others = [mode.name for mode in self.modes if getattr(parsed, 'mode', None) not in (None, mode.name)]
    mode_flags = {flag.name for mode in self.modes if mode.name not in others for flag in mode.flags}
    return Hints(
      argv=self._argv,
      parsed=parsed,
      actions=actions,
      mode_flags={*actions} - {flag.name for mode in self.modes for flag in mode.flags} | mode_flags,
      modes=[mode.name for mode in self.modes],
      others={name: text for extension in (CORE, *extensions()) for name, text in extension.foreign_flags.items()},
    )


@functools.cache
def all_modes() -> tuple[Mode, ...]:
  """Returns the modes of the core and of all extensions."""
  return tuple(mode for extension in (CORE, *extensions()) for mode in extension.modes)


def make_parser(modes: Sequence[Mode]) -> argparse.ArgumentParser:
  """Returns the parser of all flags."""
  parser = _Parser(
    prog='spmd-tasks',
    allow_abbrev=False,
    description='Train, evaluate, decode and serve large JAX models over a device mesh.',
    epilog='Modes: ' + '; '.join(f'{mode.name} {mode.words}'.rstrip() + f': {mode.help}' for mode in modes) + '.',
  )
  parser.modes = modes
  parser.add_argument(
    '--exp', metavar='NAME', help='registered experiment, such as lm.StdlibTiny, or package.module.Class'
  )
  parser.add_argument('--config', metavar='FILE', help='a saved config.json, instead of --exp')
  parser.add_argument(
    '--experiment_path',
    metavar='DIR',
    action='append',
    default=[],
    help="a directory of your own modules: a saved config's experiment may be imported from it; repeatable",
  )
  parser.add_argument('--mode', choices=[mode.name for mode in modes], help='what to run')
  parser.add_argument(
    '--job_log_dir',
    metavar='DIR',
    help='where checkpoints, metrics and events go; without --exp, the config is its config.json',
  )
  parser.add_argument(
    '--set',
    metavar='PATH=VALUE',
    action='append',
    default=[],
    dest='overrides',
    help='set any field of the config; repeatable; --print_config shows the paths',
  )
  parser.add_argument('--list', action='store_true', help='list the registered experiments')
  parser.add_argument('--version', action='store_true', help='print the versions of spmd-tasks, JAX and Python')
  parser.add_argument('--print_config', action='store_true', help='print every field of the config and exit')
  shortcuts = parser.add_argument_group('shortcuts for --set')
  shortcuts.add_argument('--num_train_steps', metavar='N')
  shortcuts.add_argument('--ici_mesh_shape', metavar='1,2,4')
  shortcuts.add_argument('--dcn_mesh_shape', metavar='2,1,1')
  shortcuts.add_argument('--seed', metavar='N')
  running = parser.add_argument_group('how it runs')
  running.add_argument('--num_fake_devices', type=int, metavar='N', help='run on N fake CPU devices')
  running.add_argument(
    '--compilation_cache',
    metavar='DIR',
    help='where compiled programs are kept for the next start; none: nowhere; default: JAX_COMPILATION_CACHE_DIR, or '
    'on accelerators JOB_LOG_DIR/compiled',
  )
  groups: dict[str, Any] = {}
  for flag_of_mode in _flags_of(modes).values():
    helps: dict[str, list[str]] = {}
    for mode, flag in flag_of_mode.items():
      helps.setdefault(flag.help, []).append(mode)
    text = '; '.join(f'{", ".join(names)}: {text}' for text, names in helps.items())
    title = 'of several modes'
    if len(flag_of_mode) == 1:
      title, text = f'--mode {mode}', flag.help
    if title not in groups:
      groups[title] = parser.add_argument_group(title)
    _add_flag(groups[title], flag, text)
  for extension in extensions():
    group = parser.add_argument_group(f'of the extension {extension.name}') if extension.flags else None
    for flag in extension.flags:
      _add_flag(group, flag, flag.help)
  processes = parser.add_argument_group('several processes without a known launcher')
  processes.add_argument('--coordinator_address', metavar='HOST:PORT', help='the address of process 0 for all others')
  processes.add_argument('--num_processes', type=int, metavar='N')
  processes.add_argument('--process_id', type=int, metavar='I')
  processes.add_argument(
    '--local_device_ids', type=_numbers, metavar='0,1', help='the accelerators of this process; default: all'
  )
  processes.add_argument('--coordinator_bind_address', metavar='HOST:PORT', help='what address process 0 listens on')
  processes.add_argument(
    '--cluster', metavar='NAME', default='auto', help='the launcher to use; none: a single process'
  )
  for name, default, text in (
    ('initialization_timeout_s', 300, 'for all processes to connect'),
    ('heartbeat_timeout_s', 30, 'without a heartbeat after which a process counts as dead'),
    ('shutdown_timeout_s', 10, 'to wait for the other processes at the end'),
  ):
    processes.add_argument(f'--{name}', type=int, default=default, metavar='S', help=text)
  return parser


def _numbers(text: str) -> tuple[int, ...]:
  try:
    return tuple(int(part) for part in text.split(','))
  except ValueError:
    raise argparse.ArgumentTypeError(f'{text!r} must be numbers with commas between them, such as 0,1') from None


def _without_bool(word: str) -> list[str]:
  """Translates a switch from absl's forms (`--NAME=true`, `--NAME=false`, `--noNAME`) to `--NAME` or nothing."""
  switches = {f'--{flag.name}' for flag in _flags_of_extensions() if flag.is_switch}
  name, _, value = word.partition('=')
  if name in switches and value.lower() in ('true', '1', 'false', '0'):
    return [name] if value.lower() in ('true', '1') else []
  return [] if word.startswith('--no') and f'--{word.removeprefix("--no")}' in switches else [word]


def _flags_of_extensions() -> list[Flag]:
  return [flag for extension in extensions() for flag in extension.flags]


def _add_flag(group: Any, flag: Flag, text: str) -> None:
  if flag.is_switch:
    group.add_argument(f'--{flag.name}', action='store_true', help=text)
  elif flag.repeats:
    group.add_argument(f'--{flag.name}', metavar=flag.metavar, action='append', default=[], help=text)
  else:
    bare = {} if flag.bare is None else {'nargs': '?', 'const': flag.bare}
    group.add_argument(f'--{flag.name}', metavar=flag.metavar, type=flag.type, choices=flag.choices, help=text, **bare)


def _flags_of(modes: Sequence[Mode]) -> dict[str, dict[str, Flag]]:
  """Returns the flags of modes, by flag name, then by mode name."""
  flags: dict[str, dict[str, Flag]] = {}
  for mode in modes:
    for flag in mode.flags:
      flags.setdefault(flag.name, {})[mode.name] = flag
  return flags


def check_flags_of_mode(args: argparse.Namespace, mode: Mode, modes: Sequence[Mode]) -> None:
  """Raises a UserError if a given flag belongs to other modes, or flags contradict each other."""
  for name, flag_of_mode in _flags_of(modes).items():
    value = getattr(args, name)
    if value is not None and value is not False and mode.name not in flag_of_mode:
      remedy = mode.remedies.get(name, 'leave it out')
      raise UserError(f'--{name} is for --mode {", ".join(flag_of_mode)}: {remedy}.')
  if mode.check is not None:
    call(mode.check, args)


def overrides_of(args: argparse.Namespace) -> list[str]:
  """Returns the overrides, as `path=value`: the shortcuts, then every --set."""
  shortcuts = [f'{name}={getattr(args, name)}' for name in _SHORTCUTS if getattr(args, name) is not None]
  return shortcuts + args.overrides


def common_flags(args: argparse.Namespace, modes: Sequence[Mode]) -> dict[str, Any]:
  """Returns the flags that must be equal on all processes, without flags that are recorded in the config."""
  flags = [*_flags_of_extensions(), *(flag for mode in modes for flag in mode.flags)]
  differing = _MAY_DIFFER | {flag.name for flag in flags if flag.may_differ}
  return {f'--{name}': value for name, value in vars(args).items() if name not in differing}
