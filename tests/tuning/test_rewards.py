"""Learning from rewards: one loss curve on every mesh, and a job that learns, resumes exactly, and refuses mistakes."""

import json

import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ByteTokenizer
from spmd_tasks.tuning.rollout_input import RewardPrompts, RolloutInput, record_of
from tests import binary
from tests.runtime.loss_curves import assert_same_run, reference, runner, table
from tests.tuning.reward_experiments import (
  ExpertsPolicy,
  LowRankPolicy,
  LowRankValuePolicy,
  PipelinedValuePolicy,
  ValuePolicy,
  write_prompts,
)

IN_PARTS = ('task.learner.num_microbatches=4',)
# The job below agrees with the sampler on a mesh by default; tests/tuning/test_policy_loss.py has the loss in parts.
ONE_BY_ONE = [
  ('a value head, adapters, data 2 x mdl 4, 4 parts', LowRankValuePolicy, LowRankValuePolicy, (1, 2, 4), IN_PARTS),
  ('a value head, stage 4 x data 2', ValuePolicy, PipelinedValuePolicy, (1, 4, 2, 1), ()),
  ('mean over tokens, held to the base, data 2 x mdl 4, 4 parts', LowRankPolicy, LowRankPolicy, (1, 2, 4), IN_PARTS),
  ('a value head, data 4 x mdl 2, 4 parts', ValuePolicy, ValuePolicy, (1, 4, 2), IN_PARTS),
  ('ratios of sequences, experts, data 8', ExpertsPolicy, ExpertsPolicy, (1, 8, 1), ()),
]
JOB = ('--exp', 'tests.tuning.reward_experiments.Job', '--mode', 'train')
MINIBATCHES = ('num_minibatches=2', 'batch_size=16', 'kl_weight=0.1')


@pytest.mark.parametrize('name, plain, experiment, shape, overrides', table((), ONE_BY_ONE))
def test_one_loss_curve_and_one_state(name, plain, experiment, shape, overrides):
  assert_same_run(runner(experiment, shape, overrides=overrides), reference(plain))


def train(directory, data, *flags):
  return binary.run_in_process(*JOB, '--set', f'data={data}', '--job_log_dir', directory, *flags)


def metrics_by_step(directory):
  """Returns the metrics of each step, without its times."""
  names = ('loss', 'grad_norm', 'weight_norm', 'entropy', 'sampler_mismatch_max', 'reward', 'completion_tokens')
  return {line['step']: {name: line.get(name) for name in names} for line in binary.metric_lines(directory)}


def resume(whole, step, data, *flags):
  """Resumes a copy of a job from its checkpoint of `step`; returns the metrics of each step."""
  parts = binary.copy_at(whole, step, whole.with_name('parts'))
  assert train(parts, data, *flags) == exit_codes.OK
  metrics = metrics_by_step(parts)
  assert len(metrics) == len(binary.metric_lines(parts))  # no step is repeated
  return metrics


@pytest.mark.slow
@pytest.mark.parametrize(
  'setting, times, num_steps',
  [pytest.param('method=ppo', 2, 6, marks=pytest.mark.exhaustive), ('staleness=1', 1, 24)],
)
def test_a_job_learns_and_resumes_in_the_middle_of_a_rollout_bit_for_bit(tmp_path, setting, times, num_steps):
  """A rollout has two updates, or four; the job resumes three steps before its end.

  With staleness, the third rollout, from step 5 on, is sampled with the weights before the updates of the second
  rollout, with which the sampler agrees. The first rollout has no rewards and changes nothing.
  """
  data = write_prompts(tmp_path)
  settings = (*MINIBATCHES, f'num_iterations={times}', setting, f'checkpoint_every={num_steps - 3}')
  flags = [flag for setting in settings for flag in ('--set', setting)] + ['--num_train_steps', num_steps]
  if num_steps > 6:
    flags += ['--set', f'eval_data={data}', '--set', 'eval_every_steps=8']
  assert train(tmp_path / 'whole', data, *flags) == exit_codes.OK
  whole = metrics_by_step(tmp_path / 'whole')
  assert sorted(whole) == list(range(1, num_steps + 1))
  assert resume(tmp_path / 'whole', num_steps - 3, data, *flags) == whole
  lines = {line['step']: line for line in binary.metric_lines(tmp_path / 'whole')}
  assert max(line.get('sampler_mismatch_max', 0) for line in lines.values()) < 1e-4
  assert lines[1]['sampler_mismatch'] < 1e-5
  assert (lines[5]['sampler_mismatch'] > 1e-3) == (setting == 'staleness=1')
  if num_steps > 6:
    evals = [json.loads(line) for line in (tmp_path / 'whole/eval_rewards/metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in evals] == [0, 8, 16, 24]
    assert evals[-1]['reward'] > evals[0]['reward'] + 0.15


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--set', 'reward='), 'needs prompts and a reward'),
    (('--set', 'reward=tests.nothing:score'), "reward 'tests.nothing:score' cannot be imported"),
    (('--set', 'method=a2c'), "method = 'a2c' must be one of grpo"),
    (('--set', 'batch_size=30'), 'must be divisible by group_size 4'),
    (('--set', 'max_tokens=24'), 'must be less than seq_len 24'),
    (('--set', 'temperature=0'), 'temperature=0.0 must be positive'),
    (('--set', 'top_p=1.5'), 'top_p=1.5 must be from 0 to 1'),
    (('--set', 'top_p=0'), 'make all completions of a prompt equal'),
    (('--set', 'reference=base', '--set', 'kl_weight=0.1'), "reference='base' is the model without its adapters"),
  ],
  ids=lambda value: value if isinstance(value, str) else None,
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path, capfd, flags, message):
  data = write_prompts(tmp_path)
  assert train(tmp_path / 'job', data, *flags) == exit_codes.USAGE
  assert message in capfd.readouterr().err
  assert not (tmp_path / 'job').exists()


@pytest.mark.parametrize('num_prompts', [4, 6, 40])
def test_the_prompts_of_a_rollout_differ(tmp_path, num_prompts):
  """A rollout has 4 prompts, and may span two epochs, which have as many prompts or more."""
  path = tmp_path / 'prompts.jsonl'
  path.write_text(''.join(json.dumps({'prompt': f'{i}?'}) + '\n' for i in range(num_prompts)))
  settings = RolloutInput(
    source=RewardPrompts(pattern=str(path)),
    tokenizer=ByteTokenizer(),
    rewards={'made:up': 1.0},
    batch_size=8,
    seq_len=64,
    group_size=2,
    max_tokens=8,
  )
  prompts = settings.make_iterator()
  rollouts = [[index for _, index, _ in prompts.take(4)] for _ in range(30 * num_prompts // 4)]
  assert all(len({*indices}) == 4 for indices in rollouts)
  assert {*np.bincount(np.concatenate(rollouts))} == {30}


def test_fewer_prompts_than_a_rollout_takes_are_logged(tmp_path, caplog):
  path = tmp_path / 'prompts.jsonl'
  path.write_text(json.dumps({'prompt': '1?'}) + '\n')
  sizes = {'batch_size': 8, 'seq_len': 64, 'group_size': 2, 'max_tokens': 8}
  source, rewards = RewardPrompts(pattern=str(path)), {'made:up': 1.0}
  RolloutInput(source=source, tokenizer=ByteTokenizer(), rewards=rewards, **sizes).make_iterator()
  assert 'A rollout takes 4 prompts, but the data have only 1' in caplog.text


def test_the_error_names_the_line_of_an_invalid_prompt(tmp_path):
  path = tmp_path / 'prompts.jsonl'
  for line, message in (
    ('{"x": 1}', "the record has no 'prompt'"),
    ('{"prompt": 5}', "'prompt' must be a"),
    ('{', 'the line is not JS'),
  ):
    path.write_text(f'\n{line}')
    with pytest.raises(UserError, match=f'prompts.jsonl:2: {message}'):
      record_of(RewardPrompts(pattern=str(path)).open(), 0)
