"""Defines the binary's flags, and refuses those that do not go together."""

import argparse
from collections.abc import Mapping
import difflib
import math
import sys
from typing import Any, NoReturn

from spmd_tasks.errors import UserError

MODES = ('train', 'eval', 'decode', 'decode_once', 'serve', 'plan', 'verify', 'export', 'preview')
_SHORTCUTS = ('num_train_steps', 'ici_mesh_shape', 'dcn_mesh_shape', 'seed')
_FDL = '--fdl.'
PLAN_FLAGS = ('target', 'plan_out', 'plan_steps', 'plan_search', 'plan_trials')
SERVE_FLAGS = ('host', 'port', 'api_key_file', 'max_queued', 'max_connections', 'drain_s')
# The modes that read a flag. Every mode reads the flags that are not listed here.
_MODES_OF_FLAG = {
  'begin_anew': ('train',),
  'watch': ('eval',),
  'checkpoint_step': ('eval', 'decode_once', 'serve', 'export'),
  'decode_input': ('decode', 'decode_once'),
  'decode_output': ('decode_once',),
  'export_to': ('export',),
  'format': ('export',),
  'num_examples': ('preview',),
  'claims': ('verify',),
  'cases': ('verify',),
  'accept_config_changes': ('train', 'eval', 'decode', 'decode_once', 'serve', 'export'),
  **dict.fromkeys(SERVE_FLAGS, ('serve',)),
  **dict.fromkeys(PLAN_FLAGS, ('plan',)),
}
# Flags that may differ between processes: how one is reached, what process 0 alone reads, what becomes settings.
_OWN_FLAGS = (
  *('coordinator_address', 'num_processes', 'process_id', 'local_device_ids', 'coordinator_bind_address', 'cluster'),
  *('initialization_timeout_s', *SERVE_FLAGS),
  *('exp', 'config', 'experiment_path', 'overrides', *_SHORTCUTS),
)
# What to do instead, by mode and flag; everywhere else: leave the flag out.
_REMEDIES = {
  ('train', 'checkpoint_step'): 'training continues from the newest checkpoint. To go back to an earlier one, move the '
  'later ones out of <job_log_dir>/checkpoints',
  ('decode', 'checkpoint_step'): '--mode decode follows every new checkpoint; take --mode decode_once',
  ('decode', 'watch'): '--mode decode follows every new checkpoint without it',
  ('decode', 'decode_output'): 'outputs of --mode decode go to <job_log_dir>/decode',
}


class _Parser(argparse.ArgumentParser):
  """Answers a wrong flag in one sentence, as the binary answers every mistake of the user."""

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    """Reads `--fdl.PATH=VALUE`, as Paxml has it, as `--set PATH=VALUE`."""
    given = sys.argv[1:] if args is None else args
    return super().parse_known_args(
      [f'--set={flag.removeprefix(_FDL)}' if flag.startswith(_FDL) else flag for flag in given], namespace
    )

  def error(self, message: str) -> NoReturn:
    flags = [flag for action in self._actions for flag in action.option_strings]
    wrong = [word.partition('=')[0].strip(':,') for word in message.split() if word.startswith('--')]
    near = difflib.get_close_matches(wrong[0], flags, n=1, cutoff=0.7) if wrong and wrong[0] not in flags else []
    nearest = f' Nearest: {near[0]}.' if near else ''
    if not near and message.startswith('unrecognized arguments: '):
      word, _, value = message.removeprefix('unrecognized arguments: ').split()[0].partition('=')
      nearest = f' A field of the experiment is set by --set {word.lstrip("-")}={value or "VALUE"}.'
      if word in MODES or ('.' in word and not value):
        nearest = f' Write --{"mode" if word in MODES else "exp"} {word}.'
    self.exit(2, f'{self.prog}: {message}.{nearest} --help lists the flags.\n')


def make_parser() -> argparse.ArgumentParser:
  """All flags, with the names that Pax users know."""
  parser = _Parser(
    prog='spmd-tasks',
    allow_abbrev=False,
    description='Train, evaluate, decode and serve large JAX models over a device mesh.',
  )
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
  parser.add_argument('--mode', choices=MODES, help='what to run')
  parser.add_argument(
    '--job_log_dir',
    metavar='DIR',
    help='where checkpoints, metrics and events go; without --exp, settings come from its config.json',
  )
  parser.add_argument(
    '--set',
    metavar='PATH=VALUE',
    action='append',
    default=[],
    dest='overrides',
    help='set any field of the config; repeatable; --print_config shows the paths',
  )
  parser.add_argument(
    '--translate',
    metavar='NAME',
    help='write the Pax experiment package.module.Class as an experiment of ours, and exit',
  )
  parser.add_argument(
    '--translate_output',
    metavar='FILE',
    help='--translate: the file to write; default: <class>_native.py, in small letters',
  )
  parser.add_argument('--list', action='store_true', help='list the registered experiments')
  parser.add_argument('--print_config', action='store_true', help='print every field of the config and exit')
  shortcuts = parser.add_argument_group('shortcuts for --set')
  shortcuts.add_argument('--num_train_steps', metavar='N')
  shortcuts.add_argument('--ici_mesh_shape', metavar='1,2,4')
  shortcuts.add_argument('--dcn_mesh_shape', metavar='2,1,1')
  shortcuts.add_argument('--seed', metavar='N')
  running = parser.add_argument_group('how it runs')
  running.add_argument('--num_fake_devices', type=int, metavar='N', help='run on N fake CPU devices')
  running.add_argument('--checkpoint_step', type=int, metavar='N', help='a step; default: the newest')
  running.add_argument('--watch', action='store_true', help='eval: evaluate every new checkpoint of a running job')
  running.add_argument('--decode_input', metavar='FILE', help="decode: a file of prompts, in place of the experiment's")
  running.add_argument('--decode_output', metavar='FILE', help='decode_once: file for the outputs of --decode_input')
  running.add_argument(
    '--out', '--export_to', dest='export_to', metavar='DIR', help="export: a new folder, or a Pax job's directory"
  )
  running.add_argument(
    '--format',
    choices=('hf', 'peft', 'pax'),
    help="export: a folder of Hugging Face's format, one of peft with the adapters alone, or a checkpoint of Paxml",
  )
  running.add_argument(
    '--accept_config_changes',
    action='store_true',
    help='resume with a changed config; its numbers will differ',
  )
  running.add_argument(
    '--begin_anew',
    action='store_true',
    help="train: if the job's checkpoints are lost, begin at step 0; what is left of it moves to earlier_1",
  )
  running.add_argument(
    '--num_examples',
    type=int,
    metavar='N',
    help='preview: how many examples of the training input; default: 4',
  )
  serving = parser.add_argument_group('--mode serve')
  serving.add_argument('--host', metavar='HOST', help='default: 127.0.0.1, which only this machine reaches')
  serving.add_argument('--port', type=int, metavar='N', help='default: 8000; 0 takes any free port')
  serving.add_argument('--api_key_file', metavar='FILE', help='a file with the key that every request must carry')
  serving.add_argument('--max_queued', type=int, metavar='N', help='sequences that may wait for a slot; default: 64')
  serving.add_argument(
    '--max_connections', type=int, metavar='N', help='open connections, half of them from one host; default: 1000'
  )
  serving.add_argument(
    '--drain_s', type=float, metavar='S', help='seconds for running requests after SIGTERM; default: 30'
  )
  planning = parser.add_argument_group('--mode plan')
  planning.add_argument(
    '--target',
    metavar='CHIPS',
    help="v5p:4x4x2, v6e:16x16, '2x v5p:8x8x4' (slices), h200:8, h100:8x4 (nodes), cpu:N; default: the experiment's",
  )
  planning.add_argument('--plan_out', metavar='DIR', help='also write the plan as plan.json and plan.html')
  planning.add_argument('--plan_steps', metavar='A,B', help='of train, eval, prefill, decode; default: train')
  planning.add_argument(
    '--plan_search', action='store_true', help='search for the best mesh, microbatches and remat policies'
  )
  planning.add_argument(
    '--plan_trials', type=int, metavar='N', help='settings to compile, to find some that fit (8) or the best (12)'
  )
  verifying = parser.add_argument_group('--mode verify')
  verifying.add_argument('--claims', metavar='A,B', help='only these claims; default: all')
  verifying.add_argument('--cases', type=int, metavar='N', help='N random meshes more; default: 0')
  processes = parser.add_argument_group('several processes without a known launcher')
  processes.add_argument('--coordinator_address', metavar='HOST:PORT', help='the address of process 0 for all others')
  processes.add_argument('--num_processes', type=int, metavar='N')
  processes.add_argument('--process_id', type=int, metavar='I')
  processes.add_argument('--local_device_ids', metavar='0,1', help='the accelerators of this process; default: all')
  processes.add_argument('--coordinator_bind_address', metavar='HOST:PORT', help='what address process 0 listens on')
  processes.add_argument(
    '--cluster', metavar='NAME', default='auto', help='the launcher to use; none: a single process'
  )
  processes.add_argument(
    '--initialization_timeout_s', type=int, default=300, metavar='S', help='for all processes to connect'
  )
  return parser


def check_flags_of_mode(args: argparse.Namespace) -> None:
  """Raises a UserError if a flag is given that the mode does not read, or flags do not go together."""
  for name, modes in _MODES_OF_FLAG.items():
    value = getattr(args, name)
    if value is not None and value is not False and args.mode not in modes:
      flag = '--out' if name == 'export_to' else f'--{name}'
      remedy = _REMEDIES.get((args.mode, name), 'leave it out')
      raise UserError(f'{flag} is for --mode {", ".join(modes)}: {remedy}.')
  if args.translate_output is not None:
    raise UserError('--translate_output is for --translate NAME: give both, or leave it out.')
  if args.mode == 'export' and args.export_to is None:
    raise UserError('--mode export needs --out DIR, the folder to write.')
  if (args.plan_trials or 0) < 0 or (args.plan_search and args.plan_trials == 0):
    raise UserError(f'--plan_trials {args.plan_trials} must be at least 1; without --plan_search 0 means none.')
  if args.mode == 'plan' and args.num_fake_devices is not None:
    raise UserError(
      f'--num_fake_devices is for running; --mode plan compiles only: give --target cpu:{args.num_fake_devices}.'
    )
  if args.num_examples is not None and args.num_examples < 1:
    raise UserError(f'--num_examples {args.num_examples} must be at least 1.')
  if args.decode_output is not None and args.decode_input is None:
    raise UserError(
      '--decode_output takes the outputs of one --decode_input: give both, or leave it out, and outputs go to '
      '<job_log_dir>/decode.'
    )


def overrides_of(args: argparse.Namespace) -> list[str]:
  """`path=value` of the shortcuts and of every --set, in this order."""
  shortcuts = [f'{name}={getattr(args, name)}' for name in _SHORTCUTS if getattr(args, name) is not None]
  return shortcuts + args.overrides


def identity_flags(args: argparse.Namespace) -> list[str]:
  """The flags that name the experiment and the user's overrides, for another command about the same experiment."""
  if args.exp is not None:
    named = ['--exp', args.exp]
  else:
    named = ['--config', args.config or f'{args.job_log_dir}/config.json']
  named += [flag for directory in args.experiment_path for flag in ('--experiment_path', directory)]
  return named + [flag for override in overrides_of(args) for flag in ('--set', override)]


def common_flags(args: argparse.Namespace) -> dict[str, Any]:
  """The flags that all processes of a job must give alike, apart from those that become settings."""
  return {f'--{name}': value for name, value in vars(args).items() if name not in _OWN_FLAGS}


def settings_to_compare(args: argparse.Namespace, config: Mapping[str, Any]) -> dict[str, Any]:
  """The settings that all processes of a job must have alike.

  An input whose settings the experiment's own code chose, and no flag, may differ: each process can read files of its
  own. So may the place of its copies in memory, and the index that Pax gives each process.
  """
  given = tuple(config['overrides'])

  def is_common(path: str) -> bool:
    is_input = path.startswith(('train_input', 'eval_inputs', 'decode_inputs'))
    is_chosen = is_input and args.exp is not None and not any(f'{path}.'.startswith(f'{name}.') for name in given)
    return not is_chosen and path != 'peer_copy_directory' and not path.endswith('.infeed_host_index')

  return {'experiment': config['experiment']} | {
    path: value for path, value in config['config'].items() if is_common(path)
  }


def distributed_settings(args: argparse.Namespace, experiment: Any = None) -> Any:
  """The `DistributedSettings` of the flags and of the experiment's timeouts, if there is one."""
  from spmd_tasks.distributed import DistributedSettings

  timeouts = (
    {}
    if experiment is None
    else {
      'heartbeat_timeout_s': experiment.heartbeat_timeout_s,
      'shutdown_timeout_s': experiment.shutdown_timeout_s,
      'collective_timeout_s': math.ceil(experiment.first_step_timeout_s),
    }
  )
  return DistributedSettings(
    coordinator_address=args.coordinator_address,
    num_processes=args.num_processes,
    process_id=args.process_id,
    local_device_ids=_local_device_ids(args.local_device_ids),
    coordinator_bind_address=args.coordinator_bind_address,
    cluster=args.cluster,
    initialization_timeout_s=args.initialization_timeout_s,
    **timeouts,
  )


def _local_device_ids(text: str | None) -> tuple[int, ...] | None:
  if text is None:
    return None
  try:
    return tuple(int(part) for part in text.split(','))
  except ValueError:
    raise UserError(
      f'--local_device_ids {text!r} must be numbers with commas between them, such as 0,1: the accelerators of this '
      'process as its machine counts them.'
    ) from None
