"""Flags that a mode does not read are refused; tests/test_main.py has what a command answers."""

import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.flags import all_modes, check_flags_of_mode, make_parser

REFUSED = {
  'prompts for training': (
    'train --decode_input prompts.jsonl',
    '--decode_input is for --mode decode, decode_once: leave',
  ),
  'a step to train from': ('train --checkpoint_step 4', 'move the later ones out of <job_log_dir>/checkpoints'),
  'one of many checkpoints': (
    'decode --checkpoint_step 5',
    '--mode decode follows every new .*; take --mode decode_once',
  ),
  'many checkpoints, one file': ('decode --decode_output out', 'outputs of --mode decode go to <job_log_dir>/decode'),
  'changes of a plan': ('plan --accept_config_changes', '--accept_config_changes is for --mode train, eval'),
  'export to nowhere': ('export', '--mode export needs --out DIR'),
  'fake devices of a plan': ('plan --num_fake_devices 8', 'give --target cpu:8'),
}


def check(flags):
  args = make_parser(all_modes()).parse_args(['--mode', *flags.split()])
  check_flags_of_mode(args, {mode.name: mode for mode in all_modes()}[args.mode], all_modes())


@pytest.mark.parametrize('name', REFUSED)
def test_a_flag_that_the_mode_would_ignore_is_refused(name):
  flags, message = REFUSED[name]
  with pytest.raises(UserError, match=message):
    check(flags)


@pytest.mark.parametrize(
  'flags',
  [
    'eval --watch',
    'decode_once --decode_input prompts.jsonl --decode_output out.jsonl --checkpoint_step 3',
    'export --out model --format hf --checkpoint_step 3',
    'plan --target v5p:4x4x2 --plan_steps train',
  ],
)
def test_a_flag_that_the_mode_reads_is_taken(flags):
  check(flags)
