"""What jobs have recorded, read as runs and as a DataFrame, whatever state their directories are in."""

import json
import math
from pathlib import Path

import pytest

import spmd_tasks
from spmd_tasks.errors import UserError
from spmd_tasks.programs.recorded_runs import find_runs, settings_that_differ
from tests import binary


def write_run(directory: Path, lines=(), *, experiment='mine.Small', evals=(), newest=None, overrides=None, **config):
  directory.mkdir(parents=True)
  overrides = {} if overrides is None else overrides
  config = {'num_train_steps': 20, 'seed': 0} | config | overrides
  (directory / 'config.json').write_text(
    json.dumps({'experiment': experiment, 'overrides': overrides, 'config': config})
  )
  for place, written in ((directory, lines), (directory / 'eval' / 'valid', evals)):
    if written:
      place.mkdir(parents=True, exist_ok=True)
      (place / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in written))
  if newest is not None:
    (directory / 'newest_checkpoint.json').write_text(json.dumps(newest))
  return directory


def line(step, loss, **metrics):
  return {'step': step, 'time': 1000.0 + step, 'loss': loss} | metrics


RATES = {'steps_per_second': 2.0, 'tokens_per_second': 256.0, 'flops_per_second': 6e3}


def test_a_frame_has_a_row_for_each_run_and_step(tmp_path):
  lines = [line(1, 3.0), line(10, 2.0, **RATES), line(10, 2.5, **RATES), line(20, math.nan, load=[0.25, 0.75], **RATES)]
  evals = [line(10, 2.2), line(20, 2.1), line(20, 9.0, weights_from='elsewhere')]
  write_run(tmp_path / 'a', lines, evals=evals, overrides={'rate': 0.1}, shape=[1, 2])
  write_run(tmp_path / 'b', [line(5, 1.0)], overrides={'rate': 0.2}, shape=[2, 2])
  frame = spmd_tasks.read_metrics(str(tmp_path / '*'))
  assert frame.columns.tolist()[:5] == ['run', 'step', 'tokens', 'flops', 'time']
  a, b = frame[frame.run == 'a'], frame[frame.run == 'b']
  assert a.step.tolist() == [1, 10, 20]
  assert a.loss.tolist()[:2] == [3.0, 2.5]  # the last line of a step counts
  assert math.isnan(a.loss.tolist()[2])
  assert a['eval/valid/loss'].tolist()[1:] == [2.2, 2.1]  # not that of other weights
  assert a.tokens.tolist() == [128, 1280, 2560]
  assert a.flops.tolist() == [3e3, 3e4, 6e4]
  assert a.load.tolist()[-1] == [0.25, 0.75]
  assert a.time.tolist()[0].timestamp() == 1001
  assert set(a['config.rate']) == {0.1}
  assert set(b['config.shape']) == {'[2, 2]'}
  assert 'config.seed' not in frame
  assert b.tokens.isna().all()


def test_totals_follow_the_rates_of_each_interval_and_go_on_with_the_last(tmp_path):
  """The batch is doubled after step 10."""
  twice = RATES | {'tokens_per_second': 512.0}
  write_run(tmp_path / 'a', [line(1, 1.0), line(10, 1.0, **RATES), line(20, 1.0, **twice)])
  (run,) = find_runs([tmp_path / 'a'])
  assert run.totals('tokens', [0, 5, 10, 15, 20, 30]) == [0, 640, 1280, 2560, 3840, 6400]
  assert run.totals('examples', [10]) is None
  assert run.name == 'a'


def test_runs_are_found_in_directories_and_below_them(tmp_path):
  for name in ('sweep/x', 'sweep/y', 'alone'):
    write_run(tmp_path / 'runs' / name)
  write_run(tmp_path / 'folder', experiment='x').joinpath('config.json').write_text('{"model_type": "llama"}')
  runs = tmp_path / 'runs'
  assert [run.name for run in find_runs([runs / '*'])] == ['alone', 'sweep/x', 'sweep/y']
  assert [run.name for run in find_runs([runs / 'sweep'])] == ['x', 'y']
  assert [run.name for run in find_runs([runs / 'sweep', runs / 'sweep' / 'x'])] == ['x', 'y']
  assert [run.name for run in find_runs([runs / 'alone', runs / 'sweep' / '[x]'])] == ['alone', 'sweep/x']
  assert [run.name for run in find_runs([runs])] == ['alone', 'sweep/x', 'sweep/y']
  with pytest.raises(UserError, match=r'folder has no config.json of a job, nor have the directories below it'):
    find_runs([tmp_path / 'folder'])
  with pytest.raises(UserError, match='nothing is no directory: name directories of jobs'):
    find_runs([tmp_path / 'nothing'])


def test_a_directory_in_any_state_is_read(tmp_path):
  write_run(tmp_path / 'empty')
  running = write_run(tmp_path / 'running', [line(1, 2.0), line(2, 1.5)]) / 'metrics.jsonl'
  running.write_text(running.read_text() + '{"step": 3')
  write_run(tmp_path / 'complete', newest={'step': 20})
  write_run(tmp_path / 'early', newest={'step': 7, 'is_last': True})
  write_run(tmp_path / 'damaged', newest={'step': 7}).joinpath('newest_checkpoint.json').write_text('[')
  runs = {run.name: run for run in find_runs([tmp_path])}
  assert [name for name, run in runs.items() if run.has_ended] == ['complete', 'early']
  assert {name: list(run.lines) for name, run in runs.items() if run.lines} == {'running': [1, 2]}
  assert len(spmd_tasks.read_metrics(tmp_path)) == 2


def test_settings_differ_if_they_are_fields_or_overridden(tmp_path):
  """`task.rate` follows from the field `rate`; `task.clip` was overridden."""
  for name, rate, clip in (('a', 0.1, 1.0), ('b', 0.2, None)):
    write_run(tmp_path / name, overrides={'task.clip': clip}, rate=rate, **{'task.rate': rate, 'same': 3})
  write_run(tmp_path / 'c', experiment='mine.Large', rate=0.1, width=64)
  runs = find_runs([tmp_path])
  assert settings_that_differ(runs[:2]) == {'task.clip': [1.0, None], 'rate': [0.1, 0.2]}
  differing = settings_that_differ(runs)
  assert differing['experiment'] == ['mine.Small', 'mine.Small', 'mine.Large']
  assert differing['width'] == ['', '', 64]


def test_a_job_records_what_a_frame_needs(finished_job):
  """The FLOPs of 20 steps: six per weight of a kernel and token, and attention's."""
  frame = spmd_tasks.read_metrics(finished_job)
  assert frame.loss.tolist() == list(binary.column(finished_job, 'loss').values())
  assert frame.tokens.tolist() == [64 * step for step in range(1, 21)]
  layer = 4 * 6 * 6 + 3 * 6 * 9 + 259 * 6  # attention of width 6, a gated feed-forward network of 9, the logits
  attention = 2 * 8 * 6  # scores and weighted values of 8 positions
  assert frame.flops.tolist()[-1] == 20 * 64 * 3 * 2 * (layer + attention)
  assert frame['eval/valid/loss'].notna().sum() == 3
