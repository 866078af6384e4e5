"""A file that cannot be written ends the job with one sentence; when it can, the same command goes on bit for bit."""

import errno
import os

import pytest

from spmd_tasks import exit_codes, files
from tests import binary
from tests.programs.small_runs import assert_same_arrays, saved_arrays, train


@pytest.mark.parametrize(
  'name, num_good, code',
  [
    ('config.json', 2, errno.ENOSPC),  # after both looks whose directory it is
    ('metrics.jsonl', 5, errno.EDQUOT),  # in the middle of the run
    pytest.param('eval/ragged/metrics.jsonl', 0, errno.EACCES, marks=pytest.mark.exhaustive),
  ],
)
def test_the_sentence_names_the_file_and_the_reason_and_recovery_is_exact(
  finished_job, tmp_path, monkeypatch, capfd, name, num_good, code
):
  directory, opened, num_opened = tmp_path / 'job', files._open, 0

  def fail(path, *args):
    nonlocal num_opened
    parent, file_name = os.path.split(path)
    if name.rpartition('/')[2] in file_name and name.rpartition('/')[0] in parent:
      num_opened += 1
      if num_opened > num_good:
        raise OSError(code, os.strerror(code))
    return opened(path, *args)

  with monkeypatch.context() as patch:
    patch.setattr(files, '_open', fail)
    assert train(directory, '--num_train_steps', 4) == exit_codes.FAILED
  shown = capfd.readouterr().err
  sentence = shown.splitlines()[-1]
  assert sentence.startswith('spmd-tasks: ')
  assert os.strerror(code) in sentence
  assert str(directory) in sentence
  assert 'start the same command again' in sentence
  assert 'Traceback' not in shown

  assert train(directory, '--num_train_steps', 4) == exit_codes.OK
  expected = binary.column(finished_job, 'loss')
  losses = {line['step']: line['loss'] for line in binary.metric_lines(directory)}
  assert losses == {step: expected[step] for step in range(1, 5)}
  assert_same_arrays(saved_arrays(directory, 4), saved_arrays(finished_job, 4))
