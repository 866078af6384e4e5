"""Hints for wrong flags name flags that exist and that the mode reads, or fields of the experiment."""

import re

import pytest

from spmd_tasks import exit_codes, main
from spmd_tasks.extensions import extensions
from spmd_tasks.flags import all_modes, make_parser
from spmd_tasks.modes import CORE

TINY = '--exp lm.StdlibTiny '
TRAIN = TINY + '--mode train '

# A command, and the hint for it.
MISTAKES = [
  # flags with another spelling
  ('-exp lm.StdlibTiny --mode train', 'Write --exp lm.StdlibTiny.'),
  ('—exp lm.StdlibTiny', 'Write --exp lm.StdlibTiny.'),
  (TINY + '--job-log-dir runs/x', 'Write --job_log_dir runs/x.'),
  (TINY + '--Mode=train', 'Write --mode train.'),
  (TINY + '--logdir runs/x', 'Nearest: --job_log_dir.'),
  (TINY + '--fake_devices 8', 'Nearest: --num_fake_devices.'),
  (TINY + '--mode serve --prot 80', 'Nearest: --port.'),
  # flags that other modes read are not named
  (TINY + '--num_step 3', 'Write --num_train_steps N.'),
  (TRAIN + '--num_train_step 3', 'Nearest: --num_train_steps.'),
  (TINY + '--mode eval --checkpoint 3', 'Nearest: --checkpoint_step.'),
  (TRAIN + '--checkpoint 3', '--set checkpoint_every=3.'),
  (TRAIN + '--load_checkpoint runs/x', '--set init_from=DIR.'),
  # fields
  (TINY + '--batch_size 3', '--set batch_size=3.'),
  (TINY + '--batch 3', '--set batch_size=3.'),
  (TINY + '--model_dim=3', '--set model_dims=3.'),
  (TINY + '--lr 3e-4', '--set learning_rate=3e-4.'),
  (TINY + '--log_every 5', '--set log_every_steps=5.'),
  (TINY + '--warmup_steps=10', '--set task.learner.optimizer.learning_rate.warmup_steps=10.'),
  (TINY + '--zzz 3', 'The experiment has no such field either'),
  ('--learning_rate 3e-4', '--set PATH=VALUE'),
  # flags of other programs
  (TRAIN + '--steps 3', 'Write --num_train_steps N.'),
  (TRAIN + '--output_dir runs/x', 'Write --job_log_dir DIR.'),
  (TRAIN + '--resume', 'A job continues from its newest checkpoint'),
  (TRAIN + '--process_count=2', 'Write --num_processes N.'),
  ('--experiment lm.StdlibTiny', 'Write --exp NAME.'),
  # modes
  (TINY + '--mode trian', 'Nearest: train.'),
  (TINY + '--mode Decode-Once', 'Nearest: decode_once.'),
  (TINY + '--mode generate', 'Write --mode decode_once.'),
  (TINY + '--train', 'Write --mode train.'),
  (TINY + 'trian', 'Write --mode train.'),
  # arguments without a flag
  ('lm.StdlibTiny --mode train', 'Write --exp lm.StdlibTiny.'),
  (TRAIN + 'runs/x', 'Write --job_log_dir runs/x.'),
  (TRAIN + 'seed=3', 'Write --set seed=3.'),
  (TRAIN + '--job_log_dir runs/x y', 'Every argument belongs to a flag'),
  # lists and assignments with spaces
  (TINY + '--set model_dims 3', 'Write --set model_dims=3.'),
  (TINY + '--set model_dims = 3', 'Write --set model_dims=3.'),
  (TINY + '--set model_dims=3 num_layers=2', 'Write --set num_layers=2.'),
  (TINY + '--ici_mesh_shape 1 4 2', 'write --ici_mesh_shape 1,4,2.'),
  (TINY + '--set ici_mesh_shape=1, 4, 2', 'write --set ici_mesh_shape=1,4,2.'),
  # values
  (TINY + '--mode eval --watch True', '--watch takes no value: leave True out.'),
  (TINY + '--mode eval --watch=True', 'It takes no value: write --watch.'),
  (TINY + '--mode eval --checkpoint_step last', 'Write --checkpoint_step N.'),
  ('--mode train --exp', 'Write --exp NAME.'),
]


@pytest.mark.parametrize('command, hint', MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_gets_a_hint(command, hint, capsys):
  with pytest.raises(SystemExit) as left:
    main.run(command.split())
  message = capsys.readouterr().err
  assert left.value.code == exit_codes.USAGE
  assert hint in message
  assert message.count('\n') == 1


def test_each_of_several_mistakes_gets_a_hint(capsys):
  with pytest.raises(SystemExit):
    main.run(['-exp', 'lm.StdlibTiny', '--workdir', 'runs/x', '--epochs', '3'])
  message = capsys.readouterr().err
  for hint in (
    'Write --exp lm.StdlibTiny.',
    'Write --job_log_dir DIR.',
    'steps, not epochs. Write --num_train_steps N.',
  ):
    assert hint in message


def test_hints_for_flags_of_other_programs_name_flags_that_exist():
  known = {flag for action in make_parser(all_modes())._actions for flag in action.option_strings}
  foreign = {name: text for extension in (CORE, *extensions()) for name, text in extension.foreign_flags.items()}
  assert not known & {f'--{name}' for name in foreign}
  wrong = {name: text for name, text in foreign.items() if not set(re.findall(r'--\w+', text)) <= known}
  assert not wrong


def test_version(capsys):
  assert main.run(['--version']) == 0
  assert re.fullmatch(r'spmd-tasks \S+, jax [\d.]+, jaxlib [\d.]+, Python [\d.]+\n', capsys.readouterr().out)
