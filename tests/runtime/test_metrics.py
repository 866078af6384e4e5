"""Scalars and vectors are read from metrics.jsonl and event files as they were written; bad lines are moved aside."""

import json
import math
import os

from etils import epath
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spmd_tasks.runtime.metrics import TensorBoardWriter, make_writer, read_jsonl

LOAD = [0.1, 0.7, 0.15, 0.05]
STEPS = {
  1: {'loss': 1 / 3, 'expert_load': LOAD, 'num_skipped_steps': 0},
  2: {'loss': 2 / 3, 'expert_load': [0.25] * 4, 'num_skipped_steps': 1},
}


@pytest.fixture
def directory(tmp_path):
  directory = epath.Path(tmp_path)
  writer = make_writer(directory, trackers=('tensorboard',), primary=True)
  for step, metrics in STEPS.items():
    writer.write(step, metrics)
  writer.close()
  return directory


def test_a_copy_with_hard_links_does_not_write_to_the_original(directory, tmp_path):
  copy = epath.Path(tmp_path / 'copy')
  copy.mkdir()
  before = (directory / 'metrics.jsonl').read_bytes()
  os.link(directory / 'metrics.jsonl', copy / 'metrics.jsonl')
  writer = make_writer(copy, trackers=(), primary=True)
  writer.write(3, {'loss': 1.0})
  writer.close()
  assert (directory / 'metrics.jsonl').read_bytes() == before
  assert [*read_jsonl(copy)] == [1, 2, 3]


def test_jsonl_is_exact(directory):
  records = read_jsonl(directory)
  for record in records.values():
    del record['time']
  assert records == STEPS
  line = json.loads((directory / 'metrics.jsonl').read_text().splitlines()[0])
  assert line['expert_load'] == LOAD


def test_events_have_a_scalar_per_expert_and_a_histogram(directory):
  events = EventAccumulator(str(directory), size_guidance={'scalars': 0, 'histograms': 0, 'tensors': 0}).Reload()
  tags = events.Tags()
  assert set(tags['scalars']) == {'loss', 'num_skipped_steps', *(f'expert_load/00{e}' for e in range(4))}
  for e in range(4):
    written = {event.step: event.value for event in events.Scalars(f'expert_load/00{e}')}
    assert written == {step: np.float32(metrics['expert_load'][e]) for step, metrics in STEPS.items()}
  assert [event.value for event in events.Scalars('loss')] == [np.float32(1 / 3), np.float32(2 / 3)]

  # TensorBoard's histogram plugin reads rows of (left, right, number of experts in between).
  assert tags['tensors'] == ['expert_load']
  assert events.SummaryMetadata('expert_load').plugin_data.plugin_name == 'histograms'
  uneven, even = (
    np.frombuffer(event.tensor_proto.tensor_content, np.float64).reshape(-1, 3)
    for event in events.Tensors('expert_load')
  )
  assert uneven[0, 0] == min(LOAD)
  assert uneven[-1, 1] == max(LOAD)
  for value in LOAD:
    holds_value = (uneven[:, 0] <= value + 1e-12) & (value <= uneven[:, 1] + 1e-12)
    assert uneven[holds_value, 2].max() == 1
  assert uneven[:, 2].sum() == even[:, 2].sum() == 4
  assert set(even[:, :2].ravel()) == {0.25}


def test_non_finite_values_are_written(tmp_path):
  directory = epath.Path(tmp_path)
  writer = make_writer(directory, trackers=('tensorboard',), primary=True)
  writer.write(3, {'loss': math.inf, 'expert_load': [math.nan, -math.inf, 1.0]})
  writer.close()
  assert json.loads((directory / 'metrics.jsonl').read_text())['expert_load'] == ['nan', '-inf', 1.0]
  np.testing.assert_array_equal(read_jsonl(directory)[3]['expert_load'], [math.nan, -math.inf, 1.0])
  events = EventAccumulator(str(directory)).Reload()
  assert math.isnan(events.Scalars('expert_load/000')[0].value)
  assert events.Tags()['tensors'] == []


def test_texts(tmp_path):
  writer = TensorBoardWriter(epath.Path(tmp_path))
  writer.write_texts(3, {'sample_01': '    a', 'sample_02': 'é'})
  writer.write_texts(6, {'sample_01': '    b'})
  writer.close()
  events = EventAccumulator(str(tmp_path)).Reload()
  texts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors('sample_01')]
  assert texts == [(3, '    a'), (6, '    b')]
  assert events.SummaryMetadata('sample_02').plugin_data.plugin_name == 'text'


def test_settings_are_hparams(tmp_path):
  """As TensorBoard's own plugin reads them."""
  from tensorboard.plugins.hparams import metadata

  writer = make_writer(epath.Path(tmp_path), trackers=('tensorboard',), primary=True)
  writer.write_settings({'learning_rate': 0.1, 'seed': 3, 'shape': [1, 2], 'init_from': None})
  writer.close()
  events = EventAccumulator(str(tmp_path)).Reload()
  content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
  values = metadata.parse_session_start_info_plugin_data(content).hparams
  assert (values['learning_rate'].number_value, values['seed'].number_value) == (0.1, 3)
  assert (values['shape'].string_value, values['init_from'].string_value) == ('[1, 2]', 'None')


def test_an_interrupted_line_is_dropped_and_the_last_line_of_a_step_counts(directory):
  with (directory / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 3, "expert_l')
  writer = make_writer(directory, trackers=(), primary=True)
  writer.write(2, {'loss': 5.0, 'expert_load': [1.0]})
  writer.close()
  records = read_jsonl(directory)
  assert sorted(records) == [1, 2]
  assert (records[2]['loss'], records[2]['expert_load']) == (5.0, [1.0])


def test_only_the_primary_process_writes(tmp_path):
  writer = make_writer(epath.Path(tmp_path / 'job'), trackers=('tensorboard',), primary=False)
  writer.write(1, STEPS[1])
  writer.close()
  assert not (tmp_path / 'job').exists()


BAD_LINES = {
  'garbage': b'garbage\n',
  'two without a newline': b'{"step": 1, "loss": 9}{"step": 2, "loss": 9}\n',
  'no step': b'{"loss": 9}\n',
  'a value that is not a number': b'{"step": 1, "loss": {"x": 9}}\n',
  'a number too large': b'{"step": 1, "loss": 1' + b'0' * 400 + b'}\n',
  'deep': b'{"step": 1, "loss": ' + b'[' * 100_000 + b'\n',
}


@pytest.mark.parametrize('place', ['middle', 'last'])
@pytest.mark.parametrize('kind', BAD_LINES)
def test_readers_skip_a_bad_line_and_the_next_writer_moves_it_aside(directory, kind, place, caplog):
  path = directory / 'metrics.jsonl'
  lines = path.read_bytes().splitlines(keepends=True)
  bad = BAD_LINES[kind]
  path.write_bytes(b''.join([lines[0], bad, lines[1]] if place == 'middle' else [*lines, bad]))
  assert list(read_jsonl(directory)) == [1, 2]
  assert [record['loss'] for record in read_jsonl(directory).values()] == [1 / 3, 2 / 3]
  for _ in range(2):
    make_writer(directory, trackers=(), primary=True).close()
  assert path.read_bytes() == b''.join(lines)
  assert (directory / 'metrics.jsonl.bad_lines').read_bytes() == bad
  assert caplog.text.count('moved to metrics.jsonl.bad_lines') == 1


@pytest.mark.parametrize('end, last_step', [(b'{"step": 3, "lo', 2), (b'\0\0\0', 2), (b'{"step": 3, "loss": 1.0}', 3)])
def test_an_unfinished_last_line_is_dropped_unless_only_its_newline_is_missing(directory, end, last_step):
  path = directory / 'metrics.jsonl'
  path.write_bytes(path.read_bytes() + end)
  writer = make_writer(directory, trackers=(), primary=True)
  writer.write(9, {'loss': 1})
  writer.close()
  assert list(read_jsonl(directory)) == [*range(1, last_step + 1), 9]
  assert not (directory / 'metrics.jsonl.bad_lines').exists()
