"""Decoding jobs: outputs by prompt that follow from checkpoint, prompt and seed, whatever interrupts the job."""

import json
import os
from pathlib import Path
import re
import shutil
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

from etils import epath
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.distributed import EmergencyExit
from spmd_tasks.errors import UserError
from spmd_tasks.programs import decode
from spmd_tasks.programs.decoded_file import DecodedFile
from tests import binary
from tests.programs.small_jobs import SMALL
from tests.programs.small_runs import only_checkpoints

SETTINGS = (
  'task.decode.max_len=24',
  'task.decode.min_bucket=24',
  'task.decode.num_slots=2',
  'task.decode.prefill_rows=2',
)
PROMPTS = [
  {'prompt': 'def f', 'max_tokens': 5},
  {'prompt': 'ñ', 'temperature': 1.0, 'seed': 3, 'n': 3, 'id': {'mine': 1}},
  {'prompt_ids': [5, 6, 7], 'max_tokens': 1, 'logit_bias': {'40': 2}},
  {'prompt': 'x' * 20, 'max_tokens': 2, 'top_k': 4, 'temperature': 2, 'repetition_penalty': 1.5},
  {'prompt': '', 'max_tokens': 3},
]


def write_prompts(directory: Path, prompts=PROMPTS, name='prompts') -> Path:
  path = directory / f'{name}.jsonl'
  path.write_text(''.join(json.dumps(prompt) + '\n' for prompt in prompts), encoding='utf-8')
  return path


def flags_of(directory: Path, *flags: object, mode='decode_once', settings=SETTINGS) -> list[object]:
  overrides = [part for setting in settings for part in ('--set', setting)]
  return ['--exp', SMALL, '--mode', mode, '--job_log_dir', directory, *overrides, *flags]


def lines_of(path: Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


@pytest.fixture(scope='module')
def decoded(finished_job, tmp_path_factory):
  """The directory of a job that has decoded PROMPTS, and its lines."""
  directory = only_checkpoints(finished_job, tmp_path_factory.mktemp('decoded') / 'job')
  prompts = write_prompts(directory)
  assert binary.run_in_process(*flags_of(directory, '--decode_input', prompts)) == 0
  return directory, lines_of(directory / 'decode' / 'prompts' / 'step_20.jsonl')


def test_continuations_have_the_forms_that_their_prompts_give(decoded, finished_job, tmp_path):
  directory = only_checkpoints(finished_job, tmp_path / 'job')
  enum = {'type': 'json_schema', 'json_schema': {'schema': {'enum': ['ab', 7]}}}
  prompts = [
    {'prompt': 'x', 'structured_outputs': {'regex': '[0-9]{3}'}, 'temperature': 1.0, 'n': 3},
    PROMPTS[0],
    {'prompt': 'x', 'response_format': enum},
  ]
  path = write_prompts(tmp_path, prompts)
  assert binary.run_in_process(*flags_of(directory, '--decode_input', path)) == 0
  formed, free, chosen = lines_of(directory / 'decode' / 'prompts' / 'step_20.jsonl')
  assert all(re.fullmatch('[0-9]{3}', output['text']) for output in formed['outputs'])
  assert formed['request']['structured_outputs'] == {'regex': '[0-9]{3}'}
  assert free['outputs'][0]['ids'] == decoded[1][0]['outputs'][0]['ids']
  assert json.loads(chosen['outputs'][0]['text']) in ('ab', 7)


def test_one_line_per_prompt_in_order(decoded):
  directory, lines = decoded
  assert [line['index'] for line in lines] == list(range(len(PROMPTS)))
  assert {line['step'] for line in lines} == {20}
  assert [len(line['outputs']) for line in lines] == [1, 3, 1, 1, 1]
  assert lines[1]['id'] == {'mine': 1}
  assert lines[0]['request']['prompt_ids'] == [1, *(byte + 3 for byte in b'def f')]  # begins with the token for that
  assert lines[4]['request']['prompt_ids'] == [1]
  for line in lines:
    for output in line['outputs']:
      ended = output['ids'][-1] in line['request']['stop_ids']
      assert output['finish_reason'] == ('stop' if ended else 'length')
      assert ended or len(output['ids']) == line['request']['max_tokens']
      assert len(output['logprobs']) == len(output['ids'])
      assert output['logprob'] == pytest.approx(sum(output['logprobs']))
  samples = [tuple(output['ids']) for output in lines[1]['outputs']]
  assert len(set(samples)) == 3
  (metrics,) = binary.metric_lines(directory / 'decode' / 'prompts')
  num_tokens = sum(len(output['ids']) for line in lines for output in line['outputs'])
  assert (metrics['step'], metrics['num_prompts'], metrics['num_tokens']) == (20, 5, num_tokens)
  assert metrics['mean_length'] == pytest.approx(num_tokens / 7)


@pytest.mark.parametrize('num_whole', [2, 5])
def test_it_goes_on_behind_the_last_whole_line(decoded, finished_job, tmp_path, num_whole):
  """As after a kill in the middle of a write."""
  directory, lines = decoded
  whole = (directory / 'decode' / 'prompts' / 'step_20.jsonl').read_bytes().splitlines(keepends=True)
  job = only_checkpoints(finished_job, tmp_path / 'job')
  path = job / 'decode' / 'prompts' / 'step_20.jsonl'
  path.parent.mkdir(parents=True)
  partial = path.with_name('step_20.jsonl.partial')
  partial.write_bytes(b''.join(whole[:num_whole]) + b'{"index": 2, "outp\xc3')
  assert binary.run_in_process(*flags_of(job, '--decode_input', write_prompts(tmp_path))) == 0
  assert not partial.exists()
  assert [line | {'outputs': _ids(line)} for line in lines_of(path)] == [
    line | {'outputs': _ids(line)} for line in lines
  ]
  numbers = [line['num_prompts'] for line in binary.metric_lines(path.parent)]
  assert numbers == ([5 - num_whole] if num_whole < 5 else [])


def _ids(line):
  return [(output['ids'], output['text']) for output in line['outputs']]


def test_decode_follows_every_new_checkpoint_to_the_last(finished_job, tmp_path, monkeypatch):
  monkeypatch.setitem(decode.decode.__kwdefaults__, 'poll_s', 0.05)
  job = only_checkpoints(finished_job, tmp_path / 'job', steps=(18, 20))
  shutil.move(job / 'checkpoints' / 'checkpoint_00000020', tmp_path)

  def go_on():
    while not (job / 'decode' / 'prompts' / 'step_18.jsonl').exists():
      time.sleep(0.01)
    shutil.move(tmp_path / 'checkpoint_00000020', job / 'checkpoints')

  threading.Thread(target=go_on, daemon=True).start()
  prompts = write_prompts(tmp_path, PROMPTS[:1])
  assert binary.run_in_process(*flags_of(job, '--decode_input', prompts, mode='decode')) == 0
  assert sorted(path.name for path in (job / 'decode' / 'prompts').glob('*.jsonl')) == [
    'metrics.jsonl',
    'step_18.jsonl',
    'step_20.jsonl',
  ]


@pytest.mark.exhaustive  # a real kill; above is what it leaves
def test_a_killed_job_loses_and_repeats_nothing(finished_job, tmp_path):
  prompts = [{'prompt': f'{i}', 'temperature': 1.0, 'seed': i, 'max_tokens': 12} for i in range(60)]
  flags = ('--decode_input', write_prompts(tmp_path, prompts))
  job = only_checkpoints(finished_job, tmp_path / 'job')
  partial = job / 'decode' / 'prompts' / 'step_20.jsonl.partial'
  decoding = binary.start_binary(*flags_of(job, *flags, '--num_fake_devices', 8))
  try:
    _wait_for(partial, decoding, num_lines=8)
    decoding.kill()
    returncode = binary.finish(decoding).returncode
  finally:
    decoding.kill()
  assert returncode == -signal.SIGKILL
  kept = partial.read_bytes()
  kept = kept[: kept.rfind(b'\n') + 1]
  num_kept = kept.count(b'\n')
  assert 8 <= num_kept < 60
  assert binary.run_in_process(*flags_of(job, *flags)) == 0
  final = partial.with_suffix('')
  assert final.read_bytes().startswith(kept)
  lines = lines_of(final)
  assert [line['index'] for line in lines] == list(range(60))
  (metrics,) = binary.metric_lines(final.parent)
  assert metrics['num_prompts'] == 60 - num_kept
  whole = only_checkpoints(finished_job, tmp_path / 'whole')
  assert binary.run_in_process(*flags_of(whole, *flags)) == 0
  assert [_ids(line) for line in lines] == [_ids(line) for line in lines_of(whole / final.relative_to(job))]


def _wait_for(path: Path, process: subprocess.Popen, num_lines: int = 1, limit_s: float = 150) -> None:
  deadline = time.monotonic() + limit_s
  while not path.exists() or path.read_bytes().count(b'\n') < num_lines:
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline, f'{path} does not come'
    time.sleep(0.002)


@pytest.mark.parametrize(
  'prompts, flags, message',
  [
    (None, (), 'has no decode inputs: give --decode_input FILE'),
    ([{'prompt': 'a'}, {'promt': 'b'}], (), "line 2: there is no field 'promt'; nearest: 'prompt'"),
    ([{'prompt': 'a', 'temperature': -1}], (), 'prompt 1: temperature=-1 must be'),
    ([{'prompt': 'a'}], ('--watch',), '--watch is for --mode eval'),
  ],
)
def test_what_cannot_be_decoded_is_said_in_a_sentence(finished_job, tmp_path, capfd, prompts, flags, message):
  if prompts is not None:
    flags = (*flags, '--decode_input', write_prompts(tmp_path, prompts))
  assert binary.run_in_process(*flags_of(finished_job, *flags)) in (exit_codes.USAGE, exit_codes.FAILED)
  error = capfd.readouterr().err
  assert message in error
  assert 'Traceback' not in error


def test_a_task_that_continues_no_prompts_is_refused(tmp_path):
  job = SimpleNamespace(task=SimpleNamespace(decode=None))
  with pytest.raises(UserError, match=r'task\.decode is None.* set task\.decode'):
    decode.decode(job, epath.Path(tmp_path), emergency=EmergencyExit())


def test_outputs_of_other_prompts_are_not_overwritten(decoded, tmp_path, capfd):
  directory, _ = decoded
  before = binary.snapshot(directory)
  other = write_prompts(tmp_path, [*PROMPTS[:-1], {'prompt': 'other'}])
  assert binary.run_in_process(*flags_of(directory, '--decode_input', other)) == exit_codes.USAGE
  assert 'holds outputs of other prompts or another config' in capfd.readouterr().err
  assert binary.snapshot(directory) == before


@pytest.mark.parametrize('content', [b'[' * 100_000, b'\xff', b'[]', b'{"step": 2}'])
def test_lines_that_are_no_outputs_are_not_overwritten(tmp_path, content):
  (tmp_path / 'outputs.jsonl.partial').write_bytes(content + b'\n')
  with pytest.raises(UserError, match='holds outputs of other prompts or another config'):
    DecodedFile(epath.Path(tmp_path / 'outputs.jsonl'), 1, lambda: [{'step': 1}]).num_done()


def test_a_copy_by_hard_links_goes_on_in_a_file_of_its_own(tmp_path):
  original = tmp_path / 'original'
  original.write_text('{"request": {}}\n')
  os.link(original, tmp_path / 'outputs.jsonl.partial')
  file = DecodedFile(epath.Path(tmp_path / 'outputs.jsonl'), 2, lambda: [{}, {}])
  assert file.num_done() == 1
  file.append({'request': {}})
  file.finish()
  file.close()
  assert (tmp_path / 'outputs.jsonl').read_text() == '{"request": {}}\n' * 2
  assert original.read_text() == '{"request": {}}\n'


def test_a_second_job_does_not_write_the_same_file(tmp_path):
  first, second = (DecodedFile(epath.Path(tmp_path / 'outputs.jsonl'), 1, lambda: [{}]) for _ in range(2))
  (tmp_path / 'outputs.jsonl.partial').write_text('{"request": {}}\n{"requ')  # of a job that was killed
  assert first.num_done() == 1
  with pytest.raises(UserError, match='is being written by another job'):
    second.num_done()
  first.close()
  assert second.num_done() == 1
  second.close()


def test_a_decode_job_of_its_own_reads_another_jobs_weights(decoded, finished_job, tmp_path, capfd):
  """`decode` ends, too, as no training job has begun here. Outputs of another place are not taken for its own."""
  _, expected = decoded
  own, prompts = tmp_path / 'own', write_prompts(tmp_path)
  flags = ('--decode_input', prompts, '--set', f'init_from={finished_job}')
  assert binary.run_in_process(*flags_of(own, *flags, mode='decode')) == 0
  lines = lines_of(own / 'decode' / 'prompts' / 'step_20.jsonl')
  place = f'{finished_job}/checkpoints/checkpoint_00000020'
  assert [line.pop('weights_from') for line in lines] == [place] * len(PROMPTS)
  assert lines == expected
  assert binary.run_in_process(*flags_of(own, *flags)) == 0
  assert f'all {len(PROMPTS)} prompts are done already' in capfd.readouterr().err
  other = only_checkpoints(finished_job, tmp_path / 'other')
  assert binary.run_in_process(*flags_of(own, *flags, '--set', f'init_from={other}')) == exit_codes.USAGE
  assert 'or place of the weights: move it away' in capfd.readouterr().err
