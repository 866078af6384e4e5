"""The binary: `spmd-tasks`, or `python -m spmd_tasks`.

    spmd-tasks --list
    spmd-tasks --exp lm.StdlibTiny --mode train --job_log_dir runs/tiny --num_fake_devices 8 --set seq_len=64
    spmd-tasks --mode decode_once --job_log_dir runs/tiny --decode_input prompts.jsonl --num_fake_devices 8

--exp takes a registered name or any importable package.module.Class. Without --exp, a job continues with the config in
its directory; your own experiment may then need --experiment_path, the directory of its module. A mistake of the user
ends the command with one sentence and exit code 2, and nothing is written.
"""

if __name__ == '__main__':  # python -m spmd_tasks.main; otherwise __main__.py has done it
  from spmd_tasks.interrupt import leave_on_sigint

  leave_on_sigint()

import atexit
from collections.abc import Sequence
import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from spmd_tasks import exit_codes
from spmd_tasks.activity import print_line, set_activity, silence
from spmd_tasks.errors import UserError, refuse_exit, user_error_code
from spmd_tasks.interrupt import SENTENCE
from spmd_tasks.sigterm import leave_on_signals
from spmd_tasks.streams import escaped_output, stdout_error, tolerate_write_errors

if TYPE_CHECKING:
  import argparse

_THREADS_LIMIT_S = 5.0


class _LogLines(logging.Handler):
  """Prints log records as other lines of a job are printed: `12:00:05 warning: ...`."""

  def emit(self, record: logging.LogRecord) -> None:
    logger = '' if record.name == 'absl' else f'{record.name}: '
    print_line(f'{record.levelname.lower()}: {logger}{self.format(record)}')


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command of the console and exits with one of exit_codes.py."""
  leave_on_signals()  # first: other imports are inside functions, so that this line runs within milliseconds
  # While Python exits, nothing is left to save, so Ctrl-C must not change the exit code.
  atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
  tolerate_write_errors()
  if not logging.root.handlers:
    logging.root.addHandler(_LogLines())
  with escaped_output():  # also around the traceback of a bug
    try:
      code = _run(argv, called=None)
    except Exception:
      traceback.print_exc()
      code = exit_codes.FAILED
  sys.stdout.flush()
  # Python's exit would wait for threads in native code, such as a compilation, and for a save that hangs.
  if code != exit_codes.OK and _threads_remain(_THREADS_LIMIT_S):
    sys.stderr.flush()
    os._exit(code)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  sys.exit(code)


def _threads_remain(limit_s: float) -> bool:
  """Waits for all threads that are not daemons; returns whether some still run after `limit_s` seconds."""
  end = time.monotonic() + limit_s
  while any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
    if time.monotonic() > end:
      return True
    time.sleep(0.02)
  return False


def run(argv: Sequence[str] | None = None) -> int:
  """Runs one command from Python, such as in a sweep or a notebook; returns the exit code."""
  with escaped_output():
    return _run(argv, called=time.monotonic())


def _run(argv: Sequence[str] | None, *, called: float | None) -> int:
  """Runs one command; `called` is when `run` was called, None in a process that was started for the command."""
  from spmd_tasks.flags import all_modes, make_parser

  return run_flags(make_parser(all_modes()).parse_args(argv), called=called)


def run_flags(args: 'argparse.Namespace', *, called: float | None) -> int:
  """Runs one command whose flags are parsed; returns the exit code."""
  try:
    with refuse_exit():
      if args.version:
        return _print_version()
      if args.list:
        return _print_list()
      return _run_experiment(args, called)
  except Exception as error:
    code = user_error_code(error)
    if code is not None:
      print(f'spmd-tasks: {error}', file=sys.stderr)
      return code
    from spmd_tasks.user_code import describe_raised

    sentence = describe_raised(error)
    if sentence is None:
      raise
    print(f'spmd-tasks: {sentence}', file=sys.stderr)
    traceback.print_exception(error)
    return exit_codes.FAILED
  except KeyboardInterrupt:  # raised by sigterm.py in a process that was connected to others
    print(SENTENCE.decode().strip(), file=sys.stderr)
    return exit_codes.INTERRUPTED
  finally:
    set_activity(None)


def _print_version() -> int:
  """Prints the versions for bug reports, without importing the packages."""
  from importlib import metadata
  import platform

  def version(package: str) -> str:
    try:
      return f'{package} {metadata.version(package)}'
    except metadata.PackageNotFoundError:
      return f'{package} (not installed)'

  print(', '.join([*map(version, ('spmd-tasks', 'jax', 'jaxlib')), f'Python {platform.python_version()}']))
  return _flush_stdout()


def _print_list() -> int:
  """Prints the registered experiments."""
  from spmd_tasks.config.listing import list_experiments

  experiments = list_experiments()
  width = max(len(name) for name, _ in experiments) + 2
  print('\n'.join(f'{name:{width}}{line}' for name, line in experiments))
  return _flush_stdout()


def _run_experiment(args: 'argparse.Namespace', called: float | None) -> int:
  """Runs --print_config or a mode, after the checks that need no experiment."""
  from spmd_tasks import extensions
  from spmd_tasks.flags import NO_DIRECTORY, all_modes, check_flags_of_mode

  if (code := extensions.expand(args)) is not None:  # an extension's flags may end the command
    return code
  modes = {mode.name: mode for mode in all_modes()}
  if args.print_config:
    return _print_config(args)
  if args.mode is None:
    raise UserError(f'nothing to run yet: give --mode ({", ".join(modes)}).')
  mode = modes[args.mode]
  if mode.needs_directory and not args.job_log_dir:
    raise UserError(NO_DIRECTORY)
  check_flags_of_mode(args, mode, all_modes())
  if mode.extra is not None:
    extensions.require(mode.extra, *mode.packages, wants=f'--mode {mode.name}')
  if args.process_id:
    silence()
  set_activity('importing', say_now=True)
  _import_jax()
  from spmd_tasks.command import Command

  code = extensions.call(mode.run, Command(flags=args, mode=mode.name, called=called))
  return _flush_stdout() if mode.prints_result and code == exit_codes.OK else code


def _flush_stdout() -> int:
  """Flushes stdout; returns the command's exit code: FAILED if any output could not be written."""
  sys.stdout.flush()
  if (error := stdout_error()) is None:
    return exit_codes.OK
  print(f'spmd-tasks: output was lost, because stdout cannot be written: {error.strerror}', file=sys.stderr)
  return exit_codes.FAILED


def _import_jax() -> None:
  """Imports JAX and checks its environment variables."""
  try:
    import jax  # noqa: F401
  except ValueError as error:
    raise UserError(f'JAX does not accept the value of an environment variable: {error}.') from error
  from spmd_tasks.distributed.environment import refuse_unusable_environment

  refuse_unusable_environment()


def _print_config(args: 'argparse.Namespace') -> int:
  """Prints every field of an experiment."""
  _import_jax()
  from spmd_tasks.command import Command
  from spmd_tasks.config import to_json
  from spmd_tasks.config.saved_config import format_config

  command = Command(flags=args)
  command.use_fake_devices()
  print(format_config(to_json(command.resolve())))
  return _flush_stdout()


if __name__ == '__main__':
  main()
