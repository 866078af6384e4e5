"""The binary: `spmd-tasks`, or `python -m spmd_tasks.main`.

    spmd-tasks --list
    spmd-tasks --exp lm.StdlibTiny --mode train --job_log_dir runs/tiny --num_fake_devices 8 --set seq_len=64
    spmd-tasks --mode decode_once --job_log_dir runs/tiny --decode_input prompts.jsonl --num_fake_devices 8

--exp takes a registered name or any importable package.module.Class. Without --exp, a job goes on with the settings
that its directory holds; an experiment of one's own then needs --experiment_path, where its module lies. A mistake of
the user is answered in one sentence and exit code 2; nothing is written then.
"""

from collections.abc import Sequence
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from spmd_tasks import exit_codes
from spmd_tasks.activity import set_activity, silence
from spmd_tasks.errors import UserError, user_error_code
from spmd_tasks.sigterm import interrupt_on_sigint, leave_on_sigterm
from spmd_tasks.streams import lose_output, lost_output

if TYPE_CHECKING:
  import argparse

_THREADS_LIMIT_S = 5.0


def main(argv: Sequence[str] | None = None) -> None:
  """The console entry point; exits with one of exit_codes.py."""
  leave_on_sigterm()  # first of all: every other import is in a function, so that this line is reached in milliseconds
  interrupt_on_sigint()
  lose_output()
  code = run(argv)
  sys.stdout.flush()
  if code == exit_codes.OK and (lost := lost_output()):
    print(f'spmd-tasks: output was lost, because stdout cannot be written: {lost.strerror}', file=sys.stderr)
    code = exit_codes.FAILED
  # Python's own end would wait for threads in native code, such as the compiler's, and for threads of Orbax, which wait
  # for minutes for a save that has failed.
  is_alone = code == exit_codes.INTERRUPTED and not _has_peers()  # several processes end together, as if preempted
  if is_alone or (code != exit_codes.OK and _threads_remain(_THREADS_LIMIT_S)):
    sys.stderr.flush()
    os._exit(code)
  # Nothing is left to save or to interrupt: Python's own end neither changes the exit code nor prints a traceback.
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  sys.exit(code)


def _has_peers() -> bool:
  """Whether this process is connected to others; does not import JAX, which Ctrl-C may just have interrupted."""
  jax = sys.modules.get('jax')
  return jax is not None and jax.distributed.is_initialized()


def _threads_remain(limit_s: float) -> bool:
  """Waits for the threads that keep a process alive; returns whether some run on after `limit_s` seconds."""
  end = time.monotonic() + limit_s
  while any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
    if time.monotonic() > end:
      return True
    time.sleep(0.02)
  return False


def run(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit code."""
  from spmd_tasks.config import list_experiments
  from spmd_tasks.flags import make_parser

  args = make_parser().parse_args(argv)
  if args.list:
    experiments = list_experiments()
    width = max(len(name) for name, _ in experiments) + 2
    print('\n'.join(f'{name:{width}}{line}' for name, line in experiments), flush=True)
    return exit_codes.OK
  try:
    return _translate(args) if args.translate else _run_experiment(args)
  except Exception as error:
    code = user_error_code(error)
    if code is None:
      raise
    print(f'spmd-tasks: {error}', file=sys.stderr)
    return code
  except KeyboardInterrupt:
    print('spmd-tasks: interrupted with nothing to save; the same command goes on from here.', file=sys.stderr)
    return exit_codes.INTERRUPTED
  finally:
    set_activity(None)


def _run_experiment(args: 'argparse.Namespace') -> int:
  """Runs --print_config or a mode, after the checks that need no experiment."""
  from spmd_tasks.flags import MODES, check_flags_of_mode

  if args.print_config:
    _import_jax()
    return _print_config(args)
  if args.mode is None:
    raise UserError(f'nothing to run yet: give --mode ({", ".join(MODES)}).')
  if not args.job_log_dir and args.mode not in ('verify', 'export', 'serve', 'plan', 'preview'):
    raise _no_directory()
  check_flags_of_mode(args)
  if args.mode == 'serve':
    from spmd_tasks.wings import require

    require('serve', 'starlette', 'uvicorn', 'uvloop', 'prometheus_client', 'llguidance', wants='--mode serve')
  if args.process_id:
    silence()
  set_activity('importing', say_now=True)
  _import_jax()
  run_mode = {'verify': _verify, 'plan': _plan, 'preview': _preview}.get(args.mode, _run_on_job)
  return run_mode(args)


def _import_jax() -> None:
  """Imports JAX, which reads its environment variables, and refuses those with which nothing would run."""
  try:
    import jax  # noqa: F401
  except ValueError as error:
    raise UserError(f'an environment variable of JAX has a value that JAX does not take: {error}.') from error
  from spmd_tasks.distributed import refuse_unusable_environment

  refuse_unusable_environment()


def _print_config(args: 'argparse.Namespace') -> int:
  """Shows every field of an experiment."""
  from spmd_tasks.config import format_config, to_json

  _use_fake_devices(args.num_fake_devices)
  print(format_config(to_json(_resolve(args))), flush=True)
  return exit_codes.OK


def _run_on_job(args: 'argparse.Namespace') -> int:
  """Runs a mode that trains a job or reads its checkpoints: connects the processes, builds the experiment."""
  import contextlib

  from spmd_tasks.config import refuse_changed_config, to_json
  from spmd_tasks.distributed import (
    EmergencyExit,
    backend_errors,
    code_digests,
    initialize,
    is_primary,
    numeric_settings,
    process_environment,
    refuse_differences,
    report_absence,
  )
  from spmd_tasks.flags import common_flags, distributed_settings, settings_to_compare
  from spmd_tasks.programs import StartupClock
  from spmd_tasks.tuning.adapter_stacks import refuse_adapters

  limit_s = args.initialization_timeout_s

  def prepare(experiment: Any) -> None:
    if not _has_peers() and initialize(distributed_settings(args, experiment)):
      if not is_primary():
        silence()
      emergency.watch_departures()
      refuse_differences('flags and environment', common_flags(args) | process_environment(), limit_s=limit_s)

  _use_fake_devices(args.num_fake_devices)
  clock = StartupClock()
  emergency = EmergencyExit()
  with emergency.on_failure(), backend_errors(), contextlib.ExitStack() as stack:
    # The experiment's inputs may ask JAX for its devices, so the processes find each other first.
    try:
      resolved = _resolve(args, prepare=prepare)
    except Exception as error:
      report_absence(distributed_settings(args), str(error))
      raise
    job_log_dir = _directory_of(args, resolved.experiment, stack)
    config = to_json(resolved) | {'environment': numeric_settings()}
    set_activity(f'preparing --mode {args.mode}')
    refuse_differences('code', code_digests() if _has_peers() else {}, limit_s=limit_s, must_have_all=False)
    refuse_differences('settings', settings_to_compare(args, config), limit_s=limit_s)
    job = resolved.build()
    if args.mode in ('train', 'eval', 'export'):
      refuse_adapters(job.experiment, f'--mode {args.mode}')
    if not args.accept_config_changes:
      refuse_changed_config(job_log_dir, config, mode='train' if args.mode == 'train' else 'eval')
    if args.mode == 'train':
      import json

      from spmd_tasks.programs import train

      return train.train(
        job,
        job_log_dir,
        emergency=emergency,
        clock=clock,
        config_json=json.dumps(config, indent=1) + '\n',
        begin_anew=args.begin_anew,
      )
    return _use_checkpoints(args, job, job_log_dir, emergency)


def _directory_of(args: 'argparse.Namespace', experiment: Any, stack: Any) -> Any:
  """The job's directory; of a model without a job, a temporary one for reports, which `stack` removes."""
  from spmd_tasks.files import absolute_path
  from spmd_tasks.programs.pretrained import pretrained_folder

  if args.job_log_dir:
    return absolute_path(args.job_log_dir)
  if not pretrained_folder(experiment):
    raise _no_directory()
  import secrets
  import shutil
  import tempfile

  directory = absolute_path(tempfile.gettempdir()) / f'spmd_tasks_{secrets.token_hex(8)}'
  stack.callback(shutil.rmtree, directory, ignore_errors=True)
  return directory


def _no_directory() -> UserError:
  return UserError('nothing to run yet: give --job_log_dir, the directory for checkpoints and metrics.')


def _use_checkpoints(args: 'argparse.Namespace', job: Any, job_log_dir: Any, emergency: Any) -> int:
  """Runs a mode that reads a job's checkpoints: eval, decode, export or serve."""
  if args.mode == 'eval':
    from spmd_tasks.programs import eval as evaluation

    return evaluation.evaluate(job, job_log_dir, emergency=emergency, step=args.checkpoint_step, watch=args.watch)
  if args.mode in ('decode', 'decode_once'):
    from spmd_tasks.programs import decode

    return decode.decode(
      job,
      job_log_dir,
      emergency=emergency,
      input_path=args.decode_input,
      output_path=args.decode_output,
      step=args.checkpoint_step,
      watch=args.mode == 'decode',
    )
  if args.mode == 'export':
    from spmd_tasks.experiment import mesh_of_all_devices
    from spmd_tasks.files import absolute_path
    from spmd_tasks.flags import overrides_of
    from spmd_tasks.programs import export

    return export.export(
      job,
      job_log_dir,
      absolute_path(args.export_to),
      emergency=emergency,
      step=args.checkpoint_step,
      format=args.format,
      mesh=mesh_of_all_devices(job.experiment, overrides_of(args)),
    )
  from spmd_tasks.flags import SERVE_FLAGS
  from spmd_tasks.serving import mode as serving

  return serving.serve(
    job,
    job_log_dir,
    serving.server_settings(**{name: getattr(args, name) for name in SERVE_FLAGS}),
    emergency=emergency,
    step=args.checkpoint_step,
    bind_address=args.coordinator_bind_address,
  )


def _translate(args: 'argparse.Namespace') -> int:
  """Writes a Pax experiment as one of ours, and shows what it lacks and that both compute the same."""
  if extra := [f'--{name}' for name in ('exp', 'config', 'mode', 'job_log_dir') if getattr(args, name) is not None]:
    raise UserError(f'--translate names the experiment and writes a file, nothing runs: leave out {", ".join(extra)}.')

  from pathlib import Path

  from spmd_tasks.bridges.pax import translate_experiment

  args.exp = args.translate
  path = Path(args.translate_output or f'{args.exp.rpartition(".")[2].lower()}_native.py')
  if path.exists():
    raise UserError(f'{path} exists: choose another file by --translate_output, or delete it.')
  _use_fake_devices(args.num_fake_devices)
  translated = translate_experiment(_resolve(args).build())
  path.write_text(translated.text)
  lists = {
    'Not translated, so the outputs differ': translated.missing,
    'Not translated, so training differs': translated.training_only,
  }
  shown = [line for title, notes in lists.items() if notes for line in (f'{title}:', *(f'  {note}' for note in notes))]
  print('\n'.join([f'wrote {path}', *shown, str(translated.comparison)]), flush=True)
  return exit_codes.OK


def _verify(args: 'argparse.Namespace') -> int:
  """Runs --mode verify, which builds the experiment again and again, with overrides of its own."""
  from spmd_tasks.config import to_json
  from spmd_tasks.distributed import compile_quickly
  from spmd_tasks.flags import identity_flags
  from spmd_tasks.verification import mode as verify

  set_activity('preparing --mode verify')
  compile_quickly()
  num_devices = verify.DEFAULT_NUM_DEVICES if args.num_fake_devices is None else args.num_fake_devices
  _use_fake_devices(num_devices)

  def resolve(before: Sequence[str], after: Sequence[str]) -> Any:
    resolved = _resolve(args, before, after)
    return resolved.build(), to_json(resolved)['config']

  return verify.verify(
    resolve,
    identity_flags(args),
    num_devices=num_devices,
    claims=None if args.claims is None else args.claims.split(','),
    num_cases=args.cases or 0,
    directory=args.job_log_dir,
  )


def _plan(args: 'argparse.Namespace') -> int:
  """Runs --mode plan, which builds the experiment for devices that are not there."""
  from spmd_tasks.config import to_json
  from spmd_tasks.files import absolute_path
  from spmd_tasks.planning import mode as plan

  set_activity('planning')

  def resolve(after: Sequence[str], prepare: Any) -> Any:
    resolved = _resolve(args, after=after, prepare=prepare)
    return resolved.build(), to_json(resolved)['config']

  settings = plan.PlanSettings(
    target=args.target,
    steps=tuple((args.plan_steps or 'train').split(',')),
    directory=absolute_path(args.plan_out) if args.plan_out else None,
    search=args.plan_search,
    num_trials=args.plan_trials,
  )
  return plan.plan(resolve, settings)


def _preview(args: 'argparse.Namespace') -> int:
  """Runs --mode preview, which reads the training input only."""
  from spmd_tasks.programs import preview

  set_activity('reading the training input')
  _use_fake_devices(args.num_fake_devices)
  job = _resolve(args).build()
  return preview.preview(job, args.num_examples or preview.DEFAULT_NUM_EXAMPLES)


def _resolve(
  args: 'argparse.Namespace', before: Sequence[str] = (), after: Sequence[str] = (), prepare: Any = None
) -> Any:
  """The resolved config that the flags name: an experiment, a saved config, or that of the job in --job_log_dir.

  `before` and `after` are overrides before and after the user's; `prepare` is called with the experiment before its
  parts are made.
  """
  from spmd_tasks.config import add_to_search_path, from_json, read_saved_config, resolve
  from spmd_tasks.files import absolute_path
  from spmd_tasks.flags import overrides_of

  overrides = [*before, *overrides_of(args), *after]
  if args.exp is not None and args.config is None:
    add_to_search_path(args.experiment_path)
    return resolve(args.exp, overrides, prepare)
  if args.exp is not None:
    raise UserError('--exp and --config both name an experiment: give one of them.')
  if args.config is not None:
    return from_json(read_saved_config(args.config), overrides, args.experiment_path, prepare)
  if not args.job_log_dir:
    raise UserError(
      'no experiment is named: give --exp NAME (--list shows the registered names), --config FILE, or the '
      '--job_log_dir of a job that has begun.'
    )
  own = absolute_path(args.job_log_dir) / 'config.json'
  if not own.exists():
    raise UserError(
      f'{own} does not exist, so no job has begun there: correct --job_log_dir, or start a job with --exp NAME (--list '
      'shows the registered names).'
    )
  return from_json(read_saved_config(own), overrides, args.experiment_path, prepare)


def _use_fake_devices(num_devices: int | None) -> None:
  if num_devices is None:
    return
  if num_devices < 1:
    raise UserError(f'--num_fake_devices {num_devices} must be at least 1.')
  from spmd_tasks.distributed import use_fake_devices

  use_fake_devices(num_devices)


if __name__ == '__main__':
  main()
