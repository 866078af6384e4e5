"""tf.data inputs: the same protocol, exact positions, and a dataset that is not deterministic is refused."""

import dataclasses
import glob
import itertools
import os
import shutil

import numpy as np
import pytest

from spmd_tasks.errors import JobError
from spmd_tasks.inputs import TfDataFunction, TfDataInput, TfRecords, base
from spmd_tasks.inputs.tfdata_input import complete_example, import_tensorflow
from tests.inputs.batches import take

ROWS = [list(range(3 + i, 3 + i + 1 + i % 6)) for i in range(22)]


def test_an_example_with_ids_alone_is_completed():
  batch = base.empty_batch(2, 5, pad_id=9)
  complete_example({'ids': np.array([4, 5, 6])}, batch, 1)
  assert batch['ids'].tolist() == [[9] * 5, [4, 5, 6, 9, 9]]
  assert batch['labels'][1].tolist() == [5, 6, 9, 9, 9]
  assert batch['weights'][1].tolist() == [1, 1, 0, 0, 0]
  assert batch['segment_ids'][1].tolist() == [1, 1, 1, 0, 0]
  assert batch['segment_pos'][1].tolist() == [0, 1, 2, 0, 0]


def test_features_that_are_there_are_kept():
  batch = base.empty_batch(1, 4)
  example = {'ids': [1, 2], 'labels': [7, 8], 'weights': [0.5, 2], 'segment_ids': [1, 2], 'segment_pos': [3, 0]}
  complete_example({name: np.array(value) for name, value in example.items()}, batch, 0)
  assert {name: rows[0].tolist() for name, rows in batch.items()} == {k: v + [0, 0] for k, v in example.items()}


@pytest.mark.parametrize(
  'example, message',
  [
    ({'labels': [1]}, "no feature 'ids'"),
    ({'ids': [1], 'image': [2]}, r"features \['image'\]"),
    ({'ids': [[1]]}, r"'ids' has shape \(1, 1\)"),
    ({'ids': [1] * 5}, r'at most seq_len = 4'),
    ({'ids': [1], 'labels': [1, 2]}, r"'labels' has shape \(2,\), ids \(1,\)"),
    ({'ids': [1, -1]}, r'ids have -1, which is outside the vocabulary, \[0, 9\)'),
    ({'ids': [8, 9]}, r'ids have 9, '),
    ({'ids': [8], 'labels': [-100]}, r'labels have -100, .*the weight 0'),
    ({'ids': [8], 'labels': [2**32 + 1]}, r'labels have 4294967297, '),
  ],
)
def test_bad_examples_are_refused(example, message):
  with pytest.raises(ValueError, match=message):
    complete_example({name: np.array(value) for name, value in example.items()}, base.empty_batch(1, 4), 0, 9)


def test_no_vocabulary_has_these_ids():
  for wrong in (-1, 2**31, 2**32 + 1):  # the last one would be 1 in int32
    with pytest.raises(ValueError, match=f'ids have {wrong}, '):
      complete_example({'ids': np.array([wrong])}, base.empty_batch(1, 4), 0)


def test_a_label_of_weight_0_may_be_anything():
  batch = base.empty_batch(1, 2)
  example = {'ids': np.array([1, 2]), 'labels': np.array([-100, 3]), 'weights': np.array([0.0, 1.0])}
  complete_example(example, batch, 0, vocab_size=9)
  assert batch['labels'].tolist() == [[-100, 3]]


@pytest.fixture(scope='module')
def tf():
  import warnings

  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # TensorFlow's own imports warn
    return import_tensorflow()


@pytest.fixture(scope='module')
def records(tf, tmp_path_factory) -> str:
  directory = tmp_path_factory.mktemp('tfrecord')
  for file, rows in enumerate((ROWS[:10], ROWS[10:])):
    with tf.io.TFRecordWriter(str(directory / f'{file}.tfrecord')) as writer:
      for row in rows:
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=row))
        example = tf.train.Example(features=tf.train.Features(feature={'tokens': feature}))
        writer.write(example.SerializeToString())
  return f'{directory}/*.tfrecord'


@pytest.fixture
def training(records) -> TfDataInput:
  source = TfRecords(pattern=records, features={'tokens': 'ids'}, shuffle_buffer=8, seed=5)
  return TfDataInput(source=source, batch_size=4, seq_len=6)


@pytest.fixture
def evaluation(records) -> TfDataInput:
  source = TfRecords(pattern=records, features={'tokens': 'ids'})
  return TfDataInput(source=source, batch_size=4, seq_len=6, num_epochs=1)


def assert_same(batches, others):
  assert len(batches) == len(others)
  for batch, other in zip(batches, others):
    for name in base.BATCH_DTYPES:
      assert batch[name].dtype == base.BATCH_DTYPES[name]
      np.testing.assert_array_equal(batch[name], other[name], err_msg=name)


@pytest.mark.slow
class TestWithTensorFlow:
  """Apart, as importing TensorFlow takes several seconds."""

  def test_one_epoch_has_every_example_and_ends_padded(self, evaluation):
    batches, _ = take(evaluation)
    assert len(batches) == 6
    rows = [ids[segments > 0].tolist() for b in batches for ids, segments in zip(b['ids'], b['segment_ids'])]
    assert rows == [*ROWS, [], []]

  def test_shards_are_disjoint_and_complete(self, training, evaluation):
    shards = [take(training, 5, shard=(i, 2))[0] for i in range(2)]
    seen = [{tuple(i[s > 0].tolist()) for b in shard for i, s in zip(b['ids'], b['segment_ids'])} for shard in shards]
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == 20
    halves = [take(evaluation, shard=(i, 2))[0] for i in range(2)]
    whole = [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in zip(*halves)]
    assert_same(whole, take(evaluation)[0])

  @pytest.mark.parametrize('position', [0, 1, 6, 11])
  def test_resumes_exactly_over_epochs(self, training, position):
    whole, _ = take(training, 12)
    _, state = take(training, position)
    assert_same(take(training, 12 - position, state)[0], whole[position:])

  def test_hosts_may_change_for_a_finite_input_only(self, training, evaluation):
    states = [take(evaluation, 2, shard=(i, 2))[1] for i in range(2)]
    (state,) = evaluation.reshard_states(states, 1)
    assert_same(take(evaluation, None, state)[0], take(evaluation)[0][2:])
    states = [take(training, 2, shard=(i, 2))[1] for i in range(2)]
    with pytest.raises(ValueError, match='saved by 2 hosts cannot be continued exactly by 1'):
      training.reshard_states(states, 1)
    with pytest.raises(ValueError, match='shard_count = 2'):
      training.make_iterator(0, 1).set_state(states[0])

  def test_any_dataset_and_nondeterminism_is_refused(self, tf):
    def numbers(shard_index, shard_count):
      examples = tf.data.Dataset.range(1000).shard(shard_count, shard_index)
      return examples.map(lambda i: {'ids': tf.stack([i, i + 1])})

    ordered = TfDataInput(source=TfDataFunction(function=numbers, name='numbers'), batch_size=2, seq_len=2)
    batches, state = take(ordered, 2)
    assert batches[1]['ids'].tolist() == [[2, 3], [3, 4]]
    assert take(ordered, 1, state)[0][0]['ids'].tolist() == [[4, 5], [5, 6]]
    shuffled = dataclasses.replace(
      ordered, source=TfDataFunction(function=lambda *shard: numbers(*shard).shuffle(1000), name='shuffled')
    )
    _, state = take(shuffled, 3)
    with pytest.raises(ValueError, match='not deterministic'):
      shuffled.make_iterator().set_state(state)

  def test_other_settings_and_files_refuse_the_state(self, training):
    _, state = take(training, 1)
    for change in ({'seq_len': 8}, {'source': dataclasses.replace(training.source, seed=6)}):
      with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(training, **change).make_iterator().set_state(state)

  @pytest.mark.parametrize('num_kept', [0, 5, 5.5])
  def test_a_file_that_is_cut_while_it_is_read_is_named(self, tf, tmp_path, num_kept):
    path = tmp_path / 'a.tfrecord'
    with tf.io.TFRecordWriter(str(path)) as writer:
      for _ in range(10):
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[1, 2]))
        example = tf.train.Example(features=tf.train.Features(feature={'ids': feature}))
        writer.write(example.SerializeToString())
    batches = TfDataInput(source=TfRecords(pattern=str(path)), batch_size=5, seq_len=2).make_iterator()
    next(batches)
    os.truncate(path, int(path.stat().st_size / 10 * num_kept))
    with pytest.raises(JobError, match=rf'reading example \d+ of .*{path}'):
      list(itertools.islice(batches, 20))

  def test_a_position_belongs_to_the_files_that_were_read(self, training, records, tmp_path):
    """A file that is deleted meanwhile, and put back later, does not make the state one of other data."""
    for path in glob.glob(records):
      shutil.copy(path, tmp_path)
    pattern = f'{tmp_path}/*.tfrecord'
    settings = dataclasses.replace(training, source=dataclasses.replace(training.source, pattern=pattern))
    batches = settings.make_iterator()
    next(batches)
    before = batches.get_state()
    next(iter(tmp_path.iterdir())).unlink()
    assert batches.get_state() == before

  def test_a_bad_example_is_named(self, records):
    source = TfRecords(pattern=records, features={'tokens': 'ids'})
    with pytest.raises(ValueError, match=r'example 2 of TfRecords.*at most seq_len = 2'):
      take(TfDataInput(source=source, batch_size=4, seq_len=2), 1)


def test_num_epochs_must_be_positive():
  with pytest.raises(ValueError, match='num_epochs 0'):
    TfDataInput(source=TfRecords(pattern='x'), batch_size=4, seq_len=2, num_epochs=0)
