"""Declares the modes of the core (train, eval, decode, export, preview) in the same way as an extension."""

import argparse
import json
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import (
  ACCEPT_CONFIG_CHANGES,
  CHECKPOINT_STEP,
  Extension,
  Flag,
  Mode,
  formats,
)

_DECODE_INPUT = Flag(name='decode_input', metavar='FILE', help="a file of prompts, in place of the experiment's")
_TO_DIRECTORY = 'outputs of --mode decode go to <job_log_dir>/decode'


def _train(command: Any) -> int:
  from spmd_tasks.programs import train

  with command.open_job() as opened:
    return train.train(
      opened.job,
      opened.directory,
      emergency=opened.emergency,
      begun=opened.begun,
      config_json=json.dumps(opened.config, indent=1) + '\n',
    )


def _eval(command: Any) -> int:
  from spmd_tasks.programs import eval as evaluation

  flags = command.flags
  with command.open_job() as opened:
    return evaluation.evaluate(
      opened.job,
      opened.directory,
      emergency=opened.emergency,
      step=flags.checkpoint_step,
      watch=flags.watch,
      writes_examples=flags.write_examples,
    )


def _check_decode_once(flags: argparse.Namespace) -> None:
  if flags.decode_output is not None and flags.decode_input is None:
    raise UserError(
      '--decode_output is the file for the outputs of --decode_input: give both, or leave it out to write to '
      '<job_log_dir>/decode.'
    )


def _check_export(flags: argparse.Namespace) -> None:
  if flags.out is None:
    raise UserError('--mode export needs --out DIR, the folder to write.')


def _check_preview(flags: argparse.Namespace) -> None:
  if flags.num_examples is not None and flags.num_examples < 1:
    raise UserError(f'--num_examples {flags.num_examples} must be at least 1.')


_STEPS = 'Write --num_train_steps N.'
_DIRECTORY = 'Write --job_log_dir DIR.'
_CONTINUES = 'A job continues from its newest checkpoint whenever --job_log_dir has one: leave it out.'
_DEVICES = 'A job uses all devices that JAX sees; --num_fake_devices N makes a CPU act as N devices.'
_CONTINUES_FROM = 'To start from the weights of another job, write --set init_from=DIR.'
_DECODE = 'Write --mode decode_once.'

CORE = Extension(
  name='core',
  foreign_flags={  # of other training scripts, and of earlier versions
    'supervise': 'The launcher restarts the job: see Launch files in docs/multi_host.md.',
    'supervisor_address': 'The launcher restarts the job: see Launch files in docs/multi_host.md.',
    **dict.fromkeys(('experiment', 'experiment_name', 'exp_name'), 'Write --exp NAME.'),
    **dict.fromkeys(('steps', 'max_steps', 'num_steps', 'train_steps', 'total_steps'), _STEPS),
    **dict.fromkeys(('epochs', 'num_epochs', 'num_train_epochs'), f'A job counts steps, not epochs. {_STEPS}'),
    **dict.fromkeys(('workdir', 'work_dir', 'output_dir', 'model_dir', 'save_dir', 'run_dir'), _DIRECTORY),
    **dict.fromkeys(('resume', 'resume_from_checkpoint', 'continue'), _CONTINUES),
    **dict.fromkeys(('init_checkpoint', 'load_checkpoint', 'pretrained'), _CONTINUES_FROM),
    **dict.fromkeys(('gpus', 'num_gpus', 'devices', 'num_devices', 'device'), _DEVICES),
    **dict.fromkeys(('mode=infer', 'mode=inference', 'mode=predict', 'mode=generate', 'mode=sample'), _DECODE),
    **dict.fromkeys(('mode=test', 'mode=validate'), 'Write --mode eval.'),
  },
  modes=(
    Mode(
      name='train',
      help='trains, and evaluates and saves at intervals',
      run=_train,
      needs_directory=True,
      flags=(ACCEPT_CONFIG_CHANGES,),
      remedies={
        'checkpoint_step': 'training continues from the newest checkpoint. To continue from an earlier one, move the '
        'later ones out of <job_log_dir>/checkpoints'
      },
    ),
    Mode(
      name='eval',
      help='evaluates a checkpoint',
      run=_eval,
      needs_directory=True,
      flags=(
        Flag(name='watch', is_switch=True, help='evaluate every new checkpoint of a running job'),
        Flag(
          name='write_examples', is_switch=True, help="write the loss's per-example outputs to eval/NAME/step_N.jsonl"
        ),
        CHECKPOINT_STEP,
        ACCEPT_CONFIG_CHANGES,
      ),
    ),
    Mode(
      name='decode',
      help='decodes prompts with every new checkpoint of a job',
      run='spmd_tasks.programs.decode:run',
      needs_directory=True,
      flags=(_DECODE_INPUT, ACCEPT_CONFIG_CHANGES),
      remedies={
        'checkpoint_step': '--mode decode decodes with every new checkpoint; use --mode decode_once',
        'watch': '--mode decode always decodes with every new checkpoint',
        'decode_output': _TO_DIRECTORY,
      },
    ),
    Mode(
      name='decode_once',
      help='decodes prompts with one checkpoint',
      run='spmd_tasks.programs.decode:run',
      needs_directory=True,
      flags=(
        _DECODE_INPUT,
        Flag(name='decode_output', metavar='FILE', help='file for the outputs of --decode_input'),
        CHECKPOINT_STEP,
        ACCEPT_CONFIG_CHANGES,
      ),
      check=_check_decode_once,
    ),
    Mode(
      name='export',
      help='writes the model in the format of another program',
      run='spmd_tasks.programs.export:run',
      flags=(
        Flag(name='out', metavar='PATH', help='a new folder; with --format t5x, a MODEL_DIR'),
        Flag(
          name='format',
          choices=tuple(fmt.name for fmt in formats() if fmt.export is not None),
          help='; '.join(f'{fmt.name}: {fmt.help}' for fmt in formats() if fmt.export is not None),
        ),
        CHECKPOINT_STEP,
        ACCEPT_CONFIG_CHANGES,
      ),
      check=_check_export,
    ),
    Mode(
      name='preview',
      help='shows examples of the training input',
      run='spmd_tasks.programs.preview:run',
      prints_result=True,
      flags=(
        Flag(name='num_examples', type=int, metavar='N', help='how many examples of the training input; default: 4'),
      ),
      check=_check_preview,
    ),
  ),
)
