"""Sampled texts while a job trains: they cost the training nothing, and a resumed job has each of them once."""

import json
import re
import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import binary
from tests.programs.small_jobs import SMALL
from tests.programs.small_runs import assert_same_arrays, saved_arrays

FLAGS = (
  '--set', 'sample_every_steps=3', '--set', 'sample_prompts="é\\n", "ab"', '--set', 'sample_max_tokens=3',
  '--set', 'task.decode.temperature=1.0', '--set', 'task.decode.min_bucket=8', '--set', 'task.decode.prefill_chunk=8',
  # As many slots as prompts: a decode job compiles the same programs.
  '--set', 'task.decode.num_slots=2', '--set', 'task.decode.prefill_rows=2',
  '--set', 'trackers=tensorboard',
)  # fmt: skip
STEPS = [3, 6, 9, 12, 15, 18]


def train(directory, *flags):
  return binary.run_in_process('--exp', SMALL, '--mode', 'train', '--job_log_dir', directory, *FLAGS, *flags)


def blocks(directory) -> dict[int, str]:
  """Step -> its samples in the file; each step once, and nothing else in the file."""
  text = (directory / 'samples' / 'samples.txt').read_text()
  found = re.findall(r'(--- step (\d+), [\d-]+ [\d:]+\n((?:[>|] .*\n)*)--- end of step \2\n)', text)
  assert ''.join(whole for whole, *_ in found) == text
  assert len({step for _, step, _ in found}) == len(found)
  return {int(step): body for _, step, body in found}


@pytest.fixture(scope='module')
def sampled_job(finished_job, tmp_path_factory):
  """A job of Small with samples, on another directory."""
  directory = tmp_path_factory.mktemp('sampled') / 'job'
  assert train(directory) == 0
  return directory


def test_the_training_is_the_same_bit_for_bit(sampled_job, finished_job):
  assert not (finished_job / 'samples').exists()
  for name in ('loss', 'grad_norm', 'weight_norm', 'accuracy'):
    assert binary.column(sampled_job, name) == binary.column(finished_job, name)
  assert_same_arrays(saved_arrays(sampled_job, 20), saved_arrays(finished_job, 20))
  assert set(binary.column(sampled_job, 'num_compilations').values()) == {0.0}


def test_the_texts_are_those_of_a_decoding_job(sampled_job, tmp_path):
  """With the weights of the checkpoint of the same step, on another mesh."""
  found = blocks(sampled_job)
  assert list(found) == STEPS
  prompts = tmp_path / 'prompts.jsonl'
  prompts.write_text('{"prompt": "é\\n", "max_tokens": 3}\n{"prompt": "ab", "max_tokens": 3}\n')
  output = tmp_path / 'output.jsonl'
  flags = ('--decode_input', prompts, '--decode_output', output, '--checkpoint_step', 12)
  assert binary.run_in_process('--mode', 'decode_once', '--job_log_dir', sampled_job, *flags) == 0
  texts = [json.loads(line)['outputs'][0]['text'] for line in output.read_text().splitlines()]
  shown = ['\n'.join(f'| {line}' for line in text.split('\n')) for text in texts]
  assert found[12] == f'> é\n> \n{shown[0]}\n> ab\n{shown[1]}\n'


def test_tensorboard_has_them_and_the_losses(sampled_job):
  for place in (sampled_job, sampled_job / 'eval' / 'valid'):
    scalars = EventAccumulator(str(place), size_guidance={'scalars': 0}).Reload().Scalars('loss')
    written = {event.step: event.value for event in scalars}
    assert written == {line['step']: np.float32(line['loss']) for line in binary.metric_lines(place)}
  events = EventAccumulator(str(sampled_job / 'samples')).Reload()
  assert events.Tags()['tensors'] == ['sample_01', 'sample_02']
  assert [event.step for event in events.Tensors('sample_02')] == STEPS
  text = events.Tensors('sample_02')[0].tensor_proto.string_val[0].decode()
  assert text.startswith('prompt\n\n    ab\n\nsample\n\n    ')
  assert events.SummaryMetadata('sample_01').plugin_data.plugin_name == 'text'


@pytest.mark.parametrize('step, left', [(12, '--- step 15, 2026-01-01 00:00:00\n> é\n| x')])
def test_a_job_that_was_killed_has_each_sample_once(sampled_job, tmp_path, step, left):
  """Killed after the checkpoint of `step` and some steps more; before the sample of 12, or in the middle of one."""
  directory = tmp_path / 'job'
  shutil.copytree(sampled_job, directory)
  for path in (directory / 'checkpoints').iterdir():
    if path.name > f'checkpoint_{step:08d}':
      shutil.rmtree(path)
  file = directory / 'samples' / 'samples.txt'
  if step == 12:
    text = file.read_text()
    file.write_text(text[: text.index('--- step 12' if not left else '--- step 15')] + left)
  assert train(directory) == 0
  assert blocks(directory) == blocks(sampled_job)


def test_what_cannot_be_sampled_is_refused_before_anything_is_written(tmp_path, capsys):
  for flags, sentence in (
    (('--set', 'sample_prompts=()'), 'sample_every_steps = 3 needs prompts'),
    (('--set', 'sample_prompts="a longer text"'), 'sample_prompts, text 1: the prompt has 14 tokens and max_len is 8'),
  ):
    assert train(tmp_path / 'job', *flags) == 2
    assert sentence in capsys.readouterr().err
  assert not (tmp_path / 'job').exists()
